"""The container's facts are read from files, and only names of variables leave it."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.remote import facts as remote_facts
from dflash_ops.run.facts import read_facts


def test_the_facts_of_this_interpreter_are_read_in_the_form_that_is_known(tmp_path: Path) -> None:
    facts = read_facts(remote_facts.collect({"root": str(tmp_path), "python": sys.executable, "gpu": False}), "here")
    assert facts.packages["pydantic"]
    assert getattr(facts.python, "version", None) == ".".join(map(str, sys.version_info[:3]))
    assert getattr(facts.torch, "files", None) is not None
    assert facts.torch.files.state == "intact"  # type: ignore[union-attr]


def test_facts_hold_names_of_variables_and_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-7f3a")
    request = {"root": str(tmp_path), "python": sys.executable, "gpu": False, "variables": ["HF_TOKEN"]}
    text = json.dumps(remote_facts.collect(request))
    assert "HF_TOKEN" in text
    assert "canary-7f3a" not in text


def test_an_interpreter_that_is_not_there_is_a_fact_and_not_a_crash(tmp_path: Path) -> None:
    facts = read_facts(remote_facts.collect({"root": str(tmp_path), "python": "/no/python", "gpu": False}), "here")
    assert "No such file" in getattr(facts.python, "error", "")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site folder with a torch of two watched files, as pip would have installed it."""
    folder = tmp_path / "site-packages"
    rows = []
    for name in ("torch/_dynamo/eval_frame.py", "torch/fx/_symbolic_trace.py"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text("shipped\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"shipped\n").digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},8")
    info = folder / "torch-2.11.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("\n".join([*rows, "torch-2.11.0.dist-info/RECORD,,"]) + "\n")
    (folder / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    return folder


def torch_of(site: Path, end: float = float("inf")) -> dict[str, Any]:
    found = remote_facts._torch([str(site)], end)
    assert found is not None
    return found


def test_a_torch_as_it_was_shipped_is_intact(site: Path) -> None:
    found = torch_of(site)
    assert (found["version"], found["cuda"], found["files"]["state"]) == ("2.11.0", "13.0", "intact")


def test_an_edited_torch_file_is_named(site: Path) -> None:
    (site / "torch/fx/_symbolic_trace.py").write_text("is_fx_symbolic_tracing = lambda: False\n")
    files = torch_of(site)["files"]
    assert files["state"] == "changed"
    assert [one["file"] for one in files["changed"]] == ["torch/fx/_symbolic_trace.py"]


def test_a_deleted_and_an_added_file_are_changes(site: Path) -> None:
    (site / "torch/fx/_symbolic_trace.py").rename(site / "torch/fx/patch.py")
    files = torch_of(site)["files"]
    assert files["changed"] == [{"file": "torch/fx/_symbolic_trace.py", "sha256": "gone"}]
    assert files["added"] == ["torch/fx/patch.py"]


def test_time_that_is_up_makes_it_unknown_and_not_intact(site: Path) -> None:
    assert torch_of(site, end=0.0)["files"]["state"] == "unknown"


def test_a_torch_without_record_is_unknown(site: Path) -> None:
    (site / "torch-2.11.0.dist-info/RECORD").unlink()
    assert torch_of(site)["files"]["state"] == "unknown"


def test_start_up_hooks_are_found(site: Path) -> None:
    (site / "sitecustomize.py").write_text("import torch\n")
    (site / "patch.pth").write_text("import torch_patch\n")
    (site / "plain.pth").write_text("/some/folder\n")
    found = remote_facts._hooks([str(site)], None)
    assert [Path(hook["file"]).name for hook in found] == ["sitecustomize.py", "patch.pth"]


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(tmp_path: Path) -> None:
    for folder, version in (("a", "2.0"), ("b", "1.0")):
        (tmp_path / folder / f"Some_Pkg-{version}.dist-info").mkdir(parents=True)
    assert remote_facts._packages([str(tmp_path / "a"), str(tmp_path / "b")]) == {"some-pkg": "2.0"}
