"""The command line: what it answers without torch, and in one sentence."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.launching import python
from tests.trainer.run.test_run import config, source, target  # noqa: F401


def test_help_and_usage_errors_answer_without_importing_torch() -> None:
    probe = (
        "import sys; from trainer.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    for name in ("", "run", "config", "regenerate", "small-target", "evaluate", "export", "warmup", "bench"):
        finished = python("-c", probe, *filter(None, [name, "--help"]))
        assert finished.returncode == 0, finished.stderr
        assert "usage:" in finished.stdout
    assert "one step of a drafter, piece by piece" in finished.stdout
    nonsense = [
        ("evaluate", "x", *words) for words in (("--temperature", "nan"), ("--temperature", "-1"), ("--top-p", "0"))
    ]
    nonsense += [("regenerate", "x.yaml", "--prompts", "a", "--output", "b", "--temperature", "nan")]
    for words in (("run",), ("nonsense",), ("config",), ("run", "x.yaml", "--run-dir", "y", "--lr", "1"), *nonsense):
        finished = python("-c", probe, *words)
        assert finished.returncode == 2, finished.stderr
        assert "usage:" in finished.stderr


def test_config_explains_and_checks(config: Path) -> None:  # noqa: F811
    explained = python("-m", "trainer", "config", "--explain")
    assert explained.returncode == 0
    assert "optimizer" in explained.stdout
    assert python("-m", "trainer", "config", "--check", str(config)).returncode == 0
    wrong = python("-m", "trainer", "config", "--check", str(config), "--set", "optimizer.lr=fast")
    assert wrong.returncode == 78
    assert "Traceback" not in wrong.stderr
    assert "optimizer.lr" in wrong.stderr
    loud = python("-m", "trainer", "--debug", "config", "--check", str(config), "--set", "optimizer.lr=fast")
    assert "Traceback" in loud.stderr
