"""The status document is versioned, and its text is safe to print."""

from __future__ import annotations

import json

from dflash_ops.show import status as render
from dflash_ops.verbs.status import status
from tests.ops.container import HOSTILE, Container, alive, shown


def test_the_json_document_is_versioned_and_writes_unknown_as_null(container: Container) -> None:
    container.run("r1", alive(), steps=0)
    document = json.loads(status(container.session(), "r1").model_dump_json())
    assert (document["schema"], document["kind"]) == (1, "status")
    assert document["progress"] is None
    assert document["unit"]["memory"] is None
    assert document["now"]["utc"].endswith("Z")


def test_no_record_of_a_run_can_steer_the_terminal(container: Container) -> None:
    folder = container.run("r1", alive())
    spec = json.loads((folder / "spec.json").read_text())
    words = ("job", "container", "launched_by", "release", "environment", "python", "resumed_from")
    (folder / "spec.json").write_text(json.dumps({**spec, **dict.fromkeys(words, HOSTILE)}))
    text = shown(render.status_view(status(container.session(), "r1")))
    assert "\\x1b]0;title" in text
    assert not {"\x1b", "\x07"} & set(text)
