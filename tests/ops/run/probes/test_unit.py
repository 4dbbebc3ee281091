"""`systemctl show` is read property by property; texts are as systemd 252 printed them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.run.probes.unit import (
    Ending,
    NotShown,
    Shown,
    UnitAbsent,
    UnitEnded,
    UnitReading,
    UnitRunning,
    UnitStarting,
    UnitStopping,
    UnitUnknown,
    read_unit,
)
from dflash_ops.run.record import ExitRecord

RUNNING = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "Result": "success",
    "ExecMainCode": "0",
    "ExecMainStatus": "0",
    "ExecMainStartTimestampMonotonic": "100000000",
    "MainPID": "292",
    "InvocationID": "0123456789abcdef0123456789abcdef",
    "StatusText": "step 12/200 loss 3.21",
    "WatchdogTimestampMonotonic": "0",
    "MemoryCurrent": "[not set]",
    "TasksCurrent": "18446744073709551615",
}


def read(changes: dict[str, str], monotonic: float = 160.0) -> UnitReading:
    return read_unit(Shown(properties={**RUNNING, **changes}), monotonic)


def test_a_running_unit_tells_its_age_pid_and_status_text() -> None:
    reading = read({})
    assert isinstance(reading, UnitRunning)
    assert (reading.answer, reading.seconds, reading.main_pid) == ("yes", 60.0, 292)
    assert reading.status_text == "step 12/200 loss 3.21"


def test_what_systemd_does_not_count_is_none_and_not_zero() -> None:
    reading = read({})
    assert isinstance(reading, UnitRunning)
    assert reading.memory is None
    assert reading.tasks is None
    assert reading.watchdog_age is None


def test_the_watchdogs_age_is_by_the_monotonic_clock() -> None:
    reading = read({"WatchdogTimestampMonotonic": "158500000"})
    assert isinstance(reading, UnitRunning)
    assert reading.watchdog_age == 1.5


def test_a_unit_that_systemd_does_not_know_is_absent_though_its_result_says_success() -> None:
    # What systemd 252 prints for a unit that never was, for one that ended well, and for a collected failed one.
    shown = {"LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead", "Result": "success"}
    assert isinstance(read(shown), UnitAbsent)


@pytest.mark.parametrize(
    ("active", "sub", "kind"),
    [("activating", "start", UnitStarting), ("deactivating", "stop-sigterm", UnitStopping)],
)
def test_a_unit_on_its_way_is_alive(active: str, sub: str, kind: type) -> None:
    reading = read({"ActiveState": active, "SubState": sub})
    assert isinstance(reading, kind)
    assert reading.answer == "yes"


def test_a_failed_unit_says_how_its_process_ended() -> None:
    reading = read({"ActiveState": "failed", "Result": "exit-code", "ExecMainCode": "1", "ExecMainStatus": "1"})
    assert isinstance(reading, UnitEnded)
    assert reading.ending.describe() == "exit 1"


def test_a_signal_is_named() -> None:
    reading = read({"ActiveState": "failed", "Result": "watchdog", "ExecMainCode": "3", "ExecMainStatus": "6"})
    assert isinstance(reading, UnitEnded)
    assert reading.ending.describe() == "watchdog (SIGABRT)"


def test_a_unit_kept_after_its_exit_is_not_called_running() -> None:
    assert isinstance(read({"SubState": "exited"}), UnitUnknown)


def test_a_systemctl_that_gave_no_answer_is_unknown() -> None:
    reading = read_unit(NotShown(message="systemctl did not end within 10 s"), 1.0)
    assert isinstance(reading, UnitUnknown)
    assert "10 s" in reading.reason


def test_an_answer_without_load_state_is_unknown() -> None:
    assert isinstance(read_unit(Shown(properties={"Result": "success"}), 1.0), UnitUnknown)


def test_a_masked_unit_is_unknown() -> None:
    assert isinstance(read({"LoadState": "masked"}), UnitUnknown)


def test_terminal_escapes_in_a_status_text_are_spelled_out() -> None:
    reading = read({"StatusText": "step\x1b]0;owned\x07"})
    assert isinstance(reading, UnitRunning)
    assert reading.status_text == "step\\x1b]0;owned\\x07"


WORDS = st.sampled_from(
    ["", "0", "1", "-1", "active", "failed", "inactive", "loaded", "not-found", "[not set]", "é\x1b"]
)


@given(st.dictionaries(st.sampled_from(sorted(RUNNING)), WORDS | st.text(max_size=20)), st.floats(0, 1e9))
def test_any_properties_give_a_reading(properties: dict[str, str], monotonic: float) -> None:
    assert read_unit(Shown(properties=properties), monotonic).answer in ("yes", "no", "unknown")


def record(result: str, code: str | None, status: str | None) -> ExitRecord:
    return ExitRecord(time=1, result=result, exit_code=code, exit_status=status, invocation_id="i", boot_id="b")


@pytest.mark.parametrize(
    ("result", "code", "status", "clean", "words"),
    [
        ("success", "exited", "0", True, "exit 0"),
        ("success", "killed", "TERM", False, "SIGTERM"),
        ("exit-code", "exited", "1", False, "exit 1"),
        ("signal", "killed", "KILL", False, "SIGKILL"),
        ("timeout", "killed", "KILL", False, "timeout (SIGKILL)"),
        ("oom-kill", "killed", "KILL", False, "oom-kill (SIGKILL)"),
        ("exit-code", None, None, False, "did not start (exit-code)"),
    ],
)
def test_the_recorders_words_become_an_ending(
    result: str, code: str | None, status: str | None, clean: bool, words: str
) -> None:
    ending = Ending.of_record(record(result, code, status))
    assert (ending.clean, ending.describe()) == (clean, words)
