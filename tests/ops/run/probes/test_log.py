"""The log's age is the container's business, and only error messages name a failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.remote.lines import last_segment
from dflash_ops.run.probes.log import (
    Disk,
    LogFresh,
    LogGone,
    LogSilent,
    LogUnknown,
    RawError,
    RawFile,
    RawMissing,
    last_error,
    named_failure,
    read_log,
)

NOW = 1_000_000.0


def file(age: float, lines: list[str] | None = None, size: int = 10) -> RawFile:
    return RawFile(size=size, inode=7, mtime=NOW - age, lines=lines or [])


def test_a_log_written_lately_is_fresh() -> None:
    reading = read_log(file(3), NOW, quiet_after=120)
    assert isinstance(reading, LogFresh)
    assert (reading.answer, reading.age) == ("yes", 3.0)


def test_a_log_silent_for_longer_than_normal_is_silent() -> None:
    assert isinstance(read_log(file(121), NOW, quiet_after=120), LogSilent)


def test_a_deleted_log_is_gone_and_not_unknown() -> None:
    assert isinstance(read_log(RawMissing(), NOW, 120), LogGone)


def test_a_log_that_cannot_be_read_is_unknown() -> None:
    reading = read_log(RawError(message="[Errno 5] Input/output error"), NOW, 120)
    assert isinstance(reading, LogUnknown)
    assert "Input/output error" in reading.reason


def test_a_clock_that_jumped_forward_makes_the_age_unknown_and_not_long() -> None:
    # The process has lived for 300 s by the monotonic clock, and its log seems to be an hour old.
    assert isinstance(read_log(file(3601), NOW, 120, lifetime=300), LogUnknown)


def test_a_clock_that_jumped_back_makes_the_age_unknown_and_not_short() -> None:
    assert isinstance(read_log(file(-3599), NOW, 120, lifetime=300), LogUnknown)


def test_a_small_disagreement_of_clocks_is_age_zero() -> None:
    reading = read_log(file(-0.4), NOW, 120)
    assert isinstance(reading, LogFresh)
    assert reading.age == 0.0


def test_lines_are_safe_and_progress_bars_folded() -> None:
    reading = read_log(file(1, ["10%\r50%\r100%\r", "\x1b[2Jgone \x1b[31mred\x1b[0m"]), NOW, 120)
    assert isinstance(reading, LogFresh)
    assert reading.lines == ("100%", "\\x1b[2Jgone red")


@given(st.text(alphabet="ab\r", max_size=30))
def test_folding_keeps_the_last_thing_that_was_drawn(line: str) -> None:
    drawn = [part for part in line.split("\r") if part]
    assert last_segment(line) == (drawn[-1] if drawn else "")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. "
            "This is not supported at the moment.",
            "FX tracing error",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has 139 GiB",
            "CUDA out of memory",
        ),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB", "CUDA out of memory"),
        (
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, "
            "unhandled cuda error",
            "NCCL error",
        ),
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=112) ran for 600 s",
            "NCCL error",
        ),
        ("OSError: [Errno 28] No space left on device: '/var/lib/dflash/runs/r7/checkpoints'", "disk full"),
        (
            "RuntimeError: [enforce fail at inline_container.cc:659] PytorchStreamWriter: No space left on device",
            "disk full",
        ),
        ("ModuleNotFoundError: No module named 'transformers'", "import error"),
        ("ImportError: cannot import name 'flex_attention' from 'torch.nn.attention'", "import error"),
        (
            "python: error while loading shared libraries: libcudart.so.13: cannot open shared object file",
            "import error",
        ),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "GPU fault"),
        ("RuntimeError: CUDA error: device-side assert triggered", "GPU fault"),
        ("RuntimeError: No CUDA GPUs are available", "no GPU"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no GPU"),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12020).",
            "GPU driver mismatch",
        ),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "GPU driver mismatch"),
        ("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.", "out of host memory"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory",
            "out of host memory",
        ),
        ("OSError: [Errno 24] Too many open files", "too many open files"),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory: insufficient shared memory (shm)",
            "shared memory full",
        ),
        ("W torch/_dynamo/convert_frame.py:1016] torch._dynamo hit config.recompile_limit (8)", "recompile limit"),
        ("FloatingPointError: loss is nan at step 42", "loss is not a number"),
    ],
)
def test_the_error_messages_of_common_failures_are_named(line: str, name: str) -> None:
    failure = named_failure(["2026-11-30T07:20:00.123Z INFO main starting", line, "something else"])
    assert failure is not None
    assert failure.name == name


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-30T07:20:00.123Z INFO main NCCL version 2.27.5",
        "2026-11-30T07:20:00.123Z INFO main watchdog every 900 s",
        "2026-11-30T07:20:00.123Z INFO main disk has 12 GiB free",
        "2026-11-30T07:20:00.123Z INFO main step 12/200 loss 3.21 accept 1.8",
        "2026-11-30T07:20:00.123Z WARNING main optional package wandb: ImportError was caught",
        "NCCL_DEBUG=WARN",
        "out of 500 documents 3 yield no anchor",
    ],
)
def test_ordinary_lines_name_no_failure(line: str) -> None:
    assert named_failure([line]) is None


def test_the_first_named_failure_wins_because_later_ones_follow_from_it() -> None:
    lines = ["torch.OutOfMemoryError: CUDA out of memory.", "torch.distributed.DistBackendError: NCCL error in: x"]
    failure = named_failure(lines)
    assert failure is not None
    assert failure.name == "CUDA out of memory"


def test_the_last_exception_line_is_found_when_nothing_has_a_name() -> None:
    lines = ["Traceback (most recent call last):", '  File "x.py", line 3', "ValueError: 17 rows, 16 wanted", "bye"]
    assert last_error(lines) == "ValueError: 17 rows, 16 wanted"


def test_an_error_record_of_the_log_is_shown_without_its_time_and_thread() -> None:
    lines = ["2026-11-30T08:12:58.584Z ERROR main source /srv/chats.jsonl does not exist"]
    assert last_error(lines) == "source /srv/chats.jsonl does not exist"


def test_no_error_line_is_invented() -> None:
    assert last_error(["2026-11-30T07:20:00.123Z INFO main done", ""]) is None


@given(st.lists(st.text(max_size=200), max_size=20))
def test_any_lines_can_be_searched(lines: list[str]) -> None:
    named_failure(lines)
    last_error(lines)


@pytest.mark.parametrize(
    ("free", "inodes_free", "inodes_total", "full"),
    [(1 << 30, 5, 10, False), (100, 5, 10, True), (1 << 30, 0, 10, True), (1 << 30, 0, 0, False)],
)
def test_a_disk_is_full_without_bytes_or_without_inodes(
    free: int, inodes_free: int, inodes_total: int, full: bool
) -> None:
    assert Disk(free=free, total=1 << 40, inodes_free=inodes_free, inodes_total=inodes_total).full is full
