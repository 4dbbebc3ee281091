"""What do tests in the lab stand on? One lab for the test process, `dflash` as a subprocess, and a clean container."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.lab import REPOSITORY, STOPPED_VMID, VMID, Lab, why_not

PYTHON = REPOSITORY / ".venv/bin/python"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab of this test process. Where it cannot stand the tests fail with the cure: they are not optional."""
    reason = why_not()
    if reason:
        pytest.fail(reason)
    lab = Lab(tmp_path_factory.mktemp("lab") / "state")
    lab.up()
    yield lab
    lab.down()


def inventory_for(lab: Lab, **changes: Any) -> dict[str, Any]:
    """An inventory whose default target is the lab's container. `changes` replace whole entries by dotted name."""
    inventory: dict[str, Any] = {
        "default_target": "ct200",
        "hosts": {
            "node": {
                "address": "127.0.0.1",
                "port": lab.port,
                "user": "root",
                "identity": str(lab.key),
                "known_hosts": str(lab.known_hosts),
                "ssh_config": "/dev/null",
            }
        },
        "targets": {
            "ct200": {"host": "node", "container": VMID},
            "ct201": {"host": "node", "container": STOPPED_VMID},
            "ct999": {"host": "node", "container": 999},
        },
        "environments": {"venv": {"python": str(PYTHON)}},
        "jobs": {},
    }
    for dotted, value in changes.items():
        *sections, last = dotted.split(".")
        place = inventory
        for section in sections:
            place = place[section]
        place[last] = value
    return inventory
