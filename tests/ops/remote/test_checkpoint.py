"""The signal is sent only to the run's own trainer that listens."""

from __future__ import annotations

import pytest

from dflash_ops.remote import checkpoint as remote_checkpoint
from dflash_ops.transport.base import RemoteRefusal
from dflash_ops.verbs.checkpoint import checkpoint
from tests.ops.container import Container, alive


def test_another_incarnation_of_the_unit_is_not_sent_the_signal(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    container.run("r1", alive(InvocationID="f" * 32))
    monkeypatch.setattr(remote_checkpoint.os, "kill", lambda pid, number: pytest.fail("a signal was sent"))
    with pytest.raises(RemoteRefusal, match="started again"):
        checkpoint(container.session(), "r1", 20)
