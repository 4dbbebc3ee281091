"""Files are stored whole and verified, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigurationError
from dflash_ops.plan.release import Release, ReleaseFile, pack, release_name
from dflash_ops.transport.base import Program, RemoteRefusal
from dflash_ops.transport.local import local_transport
from tests.ops.packages import make_package


def store(root: Path, release: Release, payload: Iterator[bytes] | None = None, **changes: Any) -> dict[str, Any]:
    request = {"root": str(root), "shelf": "releases", "name": release.name, "files": release.manifest(), **changes}
    sent = payload if payload is not None else release.contents()
    return local_transport().run(Program("store"), request, sent).value


def stored(root: Path) -> list[str]:
    base = root / "releases"
    return sorted(entry.name for entry in base.iterdir() if not entry.name.startswith(".")) if base.exists() else []


def test_a_stored_release_is_the_source_and_is_stored_once(tmp_path: Path) -> None:
    source = make_package(tmp_path)
    (source / "tool.sh").write_text("#!/bin/sh\n")
    (source / "tool.sh").chmod(0o755)
    release = pack(source)
    assert store(tmp_path / "root", release)["state"] == "stored"
    package = tmp_path / "root/releases" / release.name / "trainer"
    for file in release.files:
        assert (package / file.path).read_bytes() == (source / file.path).read_bytes()
    assert os.access(package / "tool.sh", os.X_OK)
    assert not os.access(package / "__main__.py", os.X_OK)
    assert store(tmp_path / "root", release)["state"] == "present"
    assert stored(tmp_path / "root") == [release.name]


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o600, 0o700])
def test_a_stored_file_has_the_mode_of_its_source(tmp_path: Path, mode: int) -> None:
    source = make_package(tmp_path)
    (source / "empty.txt").chmod(mode)
    release = pack(source)
    store(tmp_path / "root", release)
    assert store(tmp_path / "root", release)["state"] == "present"
    found = tmp_path / "root/releases" / release.name / "trainer/empty.txt"
    assert found.stat().st_mode & 0o7777 == mode


def test_a_release_that_was_stored_before_manifests_told_who_may_read_is_still_known(tmp_path: Path) -> None:
    release = pack(make_package(tmp_path))
    older = [{key: value for key, value in entry.items() if key != "private"} for entry in release.manifest()]
    store(tmp_path / "root", release, files=older)
    assert store(tmp_path / "root", release)["state"] == "present"


def test_a_truncated_upload_never_becomes_a_release(tmp_path: Path) -> None:
    release = pack(make_package(tmp_path))
    whole = b"".join(release.contents())
    for length in (*range(8), len(whole) // 2, len(whole) - 1):
        with pytest.raises(RemoteRefusal, match="cut off"):
            store(tmp_path / "root", release, iter([whole[:length]]))
        assert stored(tmp_path / "root") == []


def test_changed_contents_never_become_a_release(tmp_path: Path) -> None:
    release = pack(make_package(tmp_path))
    whole = bytearray(b"".join(release.contents()))
    whole[3] ^= 1
    with pytest.raises(RemoteRefusal, match="arrived changed"):
        store(tmp_path / "root", release, iter([bytes(whole)]))
    assert stored(tmp_path / "root") == []


def test_a_damaged_release_is_replaced_and_kept_aside(tmp_path: Path) -> None:
    release = pack(make_package(tmp_path))
    store(tmp_path / "root", release)
    package = tmp_path / "root/releases" / release.name / "trainer"
    (package / "__main__.py").write_text("tampered")
    assert store(tmp_path / "root", release)["state"] == "stored"
    assert "hello" in (package / "__main__.py").read_text()
    aside = [name for name in stored(tmp_path / "root") if name != release.name]
    assert len(aside) == 1
    assert aside[0].startswith(f"{release.name}.damaged-")


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "", ".", "a//b", "a/\0b"])
def test_a_manifest_cannot_write_elsewhere(tmp_path: Path, path: str) -> None:
    file = ReleaseFile(path, 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", False)
    release = Release(tmp_path, (file,), release_name([file]))
    with pytest.raises(RemoteRefusal, match="nothing can be stored at"):
        store(tmp_path / "root", release, iter([]))
    assert stored(tmp_path / "root") == []


def test_a_manifest_must_have_the_name_it_claims(tmp_path: Path) -> None:
    release = pack(make_package(tmp_path))
    with pytest.raises(RemoteRefusal, match="manifest"):
        store(tmp_path / "root", release, name="0" * 32)


def test_old_leavings_of_cut_off_uploads_are_swept(tmp_path: Path) -> None:
    release = pack(make_package(tmp_path))
    old, young = (tmp_path / "root/releases" / f"{'0' * 32}.tmp-{name}" for name in ("old", "young"))
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (0, 0))
    store(tmp_path / "root", release)
    assert stored(tmp_path / "root") == sorted([release.name, young.name])


def test_a_file_that_changes_while_it_is_sent_is_noticed(tmp_path: Path) -> None:
    source = make_package(tmp_path)
    release = pack(source)
    (source / "__main__.py").write_text("print('changed')\n")
    with pytest.raises(ConfigurationError, match="changed while it was sent"):
        store(tmp_path / "root", release)
    assert stored(tmp_path / "root") == []
