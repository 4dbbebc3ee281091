"""The compile cache: its key, its folder, and the processes that fill it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor.async_compile import AsyncCompile

from tests.trainer.compilation.test_phase import CPU
from trainer.compilation import cache
from trainer.compilation.cache import CompileCache, start_compiler_processes
from trainer.compilation.errors import CompilationError


def test_the_cache_is_kept_by_shapes_and_software_and_survives_a_change_of_other_trainer_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CompileCache.open(tmp_path, CPU, {"S": 64})
    (first.directory / "kernel").write_bytes(b"12345")
    assert CompileCache.open(tmp_path, CPU, {"S": 64}).directory == first.directory
    assert CompileCache.open(tmp_path, CPU, {"S": 128}).directory != first.directory
    assert first.size() == 5 + (first.directory / "key.json").stat().st_size
    # The sources that compiled code is made of, and no others, change the key.
    trainer = tmp_path / "trainer"
    for name in (*cache.COMPILED_SOURCES, "run/telemetry.py", "drafter/released.py"):
        (trainer / name).parent.mkdir(parents=True, exist_ok=True)
        (trainer / name).write_text(name)
    monkeypatch.setattr(cache, "__file__", str(trainer / "compilation" / "cache.py"))
    before = cache.compiled_source_hash()
    (trainer / "run" / "telemetry.py").write_text("changed")
    (trainer / "drafter" / "released.py").write_text("changed")
    assert cache.compiled_source_hash() == before
    (trainer / "drafter" / "model.py").write_text("changed")
    assert cache.compiled_source_hash() != before


def test_a_cache_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CompilationError, match=r"can't be written: .*; set pipeline.compile_cache"):
        CompileCache.open(tmp_path / "file", CPU, {})


def test_inductor_s_processes_start_early_only_if_there_is_something_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: started.append(True))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    start_compiler_processes()
    assert started == [True]
    (tmp_path / "fxgraph" / "ab").mkdir(parents=True)
    start_compiler_processes()
    assert started == [True]
