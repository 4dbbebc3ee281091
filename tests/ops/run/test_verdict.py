"""Each row of the liveness table, and each way to end, gives its verdict; and no snapshot is left without one."""

from __future__ import annotations

import itertools

import pytest

from dflash_ops.errors import Exit
from dflash_ops.run.probes.gpu import GpuNone, GpuReading, GpuUnknown
from dflash_ops.run.probes.log import Disk, LogGone, LogReading, LogUnknown
from dflash_ops.run.probes.snapshot import Checkpoint, Cpu, quiet_after_of
from dflash_ops.run.probes.unit import (
    Ending,
    UnitAbsent,
    UnitEnded,
    UnitReading,
    UnitStarting,
    UnitStopping,
    UnitUnknown,
)
from dflash_ops.run.verdict import Failed, judge
from tests.ops.evidence import (
    BOOT,
    EIGHT,
    INVOCATION,
    KILL,
    NOW,
    exit_record,
    fresh,
    gpus,
    progress,
    record,
    running,
    silent,
    snapshot,
    spec,
    started,
)

STOPPING = UnitStopping(sub_state="stop-sigterm", invocation_id=INVOCATION, main_pid=292)
STARTING = UnitStarting(sub_state="start", invocation_id=INVOCATION, main_pid=292)
ABSENT = UnitAbsent()
HANG = GpuUnknown(reason="nvidia-smi did not answer within 10 s")
BUSY8 = gpus(*[(98, 600.0)] * 8)
IDLE8 = gpus(*[(0, 120.0)] * 8)
SPIN8 = gpus(*[(100, 130.0)] * 8)


def ended(result: str, code: str | None, status: str | None) -> UnitEnded:
    return UnitEnded(
        invocation_id=INVOCATION,
        ending=Ending.model_validate({"result": result, "code": code, "status": status}),
    )


# ---- alive -------------------------------------------------------------------------------------------------


def test_a_unit_that_runs_and_writes_is_running() -> None:
    verdict = judge(snapshot())
    assert (verdict.state, verdict.reason) == ("running", "step 12/200 loss 3.21")


def test_a_run_on_cpu_with_no_gpu_in_the_container_is_running() -> None:
    assert judge(snapshot(gpu=GpuNone())).state == "running"


@pytest.mark.parametrize("gpu", [HANG, IDLE8, BUSY8, GpuNone()])
def test_a_fresh_log_makes_it_running_whatever_the_gpus_say(gpu: GpuReading) -> None:
    assert judge(snapshot(gpu=gpu, roles=EIGHT)).state == "running"


def test_metrics_that_grow_keep_a_run_with_a_deleted_log_running_and_say_so() -> None:
    verdict = judge(snapshot(log=LogGone()))
    assert verdict.state == "running"
    assert "log is gone" in verdict.reason


def test_a_fed_watchdog_keeps_a_silent_run_running() -> None:
    seen = snapshot(log=silent(), progress=progress(age=2460), unit=running(watchdog_age=3.0))
    assert judge(seen).state == "running"


def test_silence_with_gpus_at_work_is_busy_quiet() -> None:
    verdict = judge(snapshot(log=silent(), progress=None, roles=EIGHT, gpu=BUSY8))
    assert verdict.state == "busy-quiet"
    assert "no log line for 41m" in verdict.reason


def test_silence_with_gpus_at_full_use_and_idle_power_is_stalled() -> None:
    verdict = judge(snapshot(log=silent(), progress=progress(age=2460), roles=EIGHT, gpu=SPIN8))
    assert verdict.state == "stalled"
    assert verdict.reason == "no log line for 41m; GPU 100 % at 130 W: a kernel waits for a peer that does not come"


def test_silence_with_idle_gpus_that_hold_memory_is_stalled() -> None:
    verdict = judge(snapshot(log=silent(), progress=progress(age=2460), roles=EIGHT, gpu=IDLE8))
    assert verdict.state == "stalled"
    assert "memory held" in verdict.reason


def test_silence_before_the_first_step_with_busy_cpu_is_busy_quiet_for_it_may_compile() -> None:
    verdict = judge(snapshot(log=silent(), progress=None, roles=EIGHT, gpu=IDLE8, cpu=Cpu(used=3.8, over=1.0)))
    assert verdict.state == "busy-quiet"
    assert "3.8 cores" in verdict.reason


def test_busy_targets_and_idle_drafters_are_told_apart() -> None:
    split = gpus(*[(98, 600.0)] * 5, *[(0, 120.0)] * 3)
    assert "targets busy, drafters idle" in judge(snapshot(roles=EIGHT, gpu=split)).reason
    silent_one = judge(snapshot(log=silent(), progress=None, roles=EIGHT, gpu=split))
    assert silent_one.state == "busy-quiet"
    assert "targets busy, drafters idle" in silent_one.reason


def test_somebody_elses_busy_gpu_does_not_make_a_stalled_run_busy() -> None:
    nine = gpus(*[(0, 120.0)] * 8, (100, 650.0))
    assert judge(snapshot(log=silent(), progress=progress(age=2460), roles=EIGHT, gpu=nine)).state == "stalled"


def test_a_silent_cpu_run_that_computes_is_busy_quiet() -> None:
    assert judge(snapshot(log=silent(), progress=None)).state == "busy-quiet"


def test_a_process_that_sleeps_is_stalled() -> None:
    verdict = judge(snapshot(log=silent(), progress=None, cpu=Cpu(used=0.0, over=1.0)))
    assert verdict.state == "stalled"
    assert "no CPU" in verdict.reason


def test_a_full_disk_is_given_as_the_cause_of_silence() -> None:
    disk = Disk(free=0, total=1 << 30, inodes_free=5, inodes_total=10)
    verdict = judge(snapshot(log=silent(), progress=None, disk=disk, cpu=Cpu(used=0.0, over=1.0)))
    assert verdict.state == "stalled"
    assert "disk is full" in verdict.reason


def test_a_unit_that_has_written_nothing_yet_is_starting() -> None:
    seen = snapshot(log=fresh(size=0), progress=None, unit=running(seconds=1.0, status_text=None))
    assert judge(seen).state == "starting"


def test_activating_is_starting_and_deactivating_is_stopping() -> None:
    assert judge(snapshot(unit=STARTING)).state == "starting"
    assert judge(snapshot(unit=STOPPING)).state == "stopping"


def test_a_stop_that_was_asked_for_names_who_asked() -> None:
    verdict = judge(snapshot(unit=STOPPING, record=record(kill_requested=KILL)))
    assert verdict.reason == "asked to stop 20s ago by ann@laptop"


# ---- unknown -----------------------------------------------------------------------------------------------


def test_a_systemd_that_does_not_answer_makes_it_unknown_and_not_dead() -> None:
    verdict = judge(snapshot(unit=UnitUnknown(reason="systemctl did not end within 10 s"), log=silent()))
    assert (verdict.state, verdict.exit_code) == ("unknown", Exit.TEMPORARY)


def test_silence_with_a_hanging_nvidia_smi_is_unknown_and_not_stalled() -> None:
    verdict = judge(snapshot(log=silent(), progress=progress(age=2460), roles=EIGHT, gpu=HANG))
    assert verdict.state == "unknown"
    assert "nvidia-smi did not answer" in verdict.reason


def test_silence_with_one_gpu_missing_from_nvidia_smi_is_unknown() -> None:
    verdict = judge(snapshot(log=silent(), progress=progress(age=2460), roles=EIGHT, gpu=gpus(*[(0, 120.0)] * 7)))
    assert verdict.state == "unknown"
    assert "GPU 7" in verdict.reason


def test_silence_on_gpus_that_report_nothing_is_unknown() -> None:
    blind = gpus(*[(None, None)] * 8)
    assert judge(snapshot(log=silent(), progress=progress(age=2460), roles=EIGHT, gpu=blind)).state == "unknown"


def test_a_clock_that_jumped_is_unknown_and_not_stalled() -> None:
    jumped = LogUnknown(reason="the container's clock jumped")
    for steps in (None, progress(age=3601)):  # metrics look an hour old as well
        assert judge(snapshot(log=jumped, progress=steps, cpu=Cpu(used=0.0, over=1.0))).state == "unknown"


def test_a_unit_that_somebody_started_again_is_not_taken_for_ours() -> None:
    other = running(invocation_id="f" * 32)
    assert judge(snapshot(unit=other)).state == "unknown"


def test_a_damaged_exit_record_is_unknown_and_not_lost() -> None:
    assert judge(snapshot(unit=ABSENT, unreadable=("exit.json",))).state == "unknown"


# ---- ended -------------------------------------------------------------------------------------------------


def test_status_zero_is_success() -> None:
    verdict = judge(snapshot(unit=ABSENT, record=record(exit=exit_record("success", "exited", "0"))))
    assert (verdict.state, verdict.reason, verdict.exit_code) == ("succeeded", "after 9m", Exit.OK)


def test_the_record_counts_even_while_the_unit_is_still_cleaning_up() -> None:
    verdict = judge(snapshot(unit=STOPPING, record=record(exit=exit_record("success", "exited", "0"))))
    assert verdict.state == "succeeded"


def test_an_exit_status_is_failure_with_the_named_cause() -> None:
    lines = ("Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory. Tried", "bye")
    verdict = judge(
        snapshot(unit=ABSENT, log=silent(lines=lines), record=record(exit=exit_record("exit-code", "exited", "1")))
    )
    assert isinstance(verdict, Failed)
    assert verdict.reason == "exit 1 after 9m (CUDA out of memory)"
    assert (verdict.failure, verdict.exit_code) == ("CUDA out of memory", Exit.RUN_FAILED)


def test_a_failure_without_a_name_shows_its_exception() -> None:
    lines = ("ValueError: 17 rows, 16 wanted",)
    seen = snapshot(log=fresh(lines=lines), record=record(exit=exit_record("exit-code", "exited", "1")))
    assert judge(seen).reason == "exit 1 after 9m (ValueError: 17 rows, 16 wanted)"


@pytest.mark.parametrize(
    ("result", "code", "status", "part"),
    [
        ("watchdog", "dumped", "ABRT", "watchdog"),
        ("oom-kill", "killed", "KILL", "killed by the kernel's OOM killer"),
        ("signal", "killed", "KILL", "the OOM killer is likely"),
        ("signal", "killed", "SEGV", "SIGSEGV"),
        ("core-dump", "dumped", "SEGV", "SIGSEGV"),
        ("exit-code", "exited", "203", "203/EXEC"),
        ("exit-code", "exited", "200", "200/CHDIR"),
        ("resources", None, None, "did not start (resources)"),
        ("protocol", "exited", "0", "protocol"),
    ],
)
def test_bad_ends_are_failures_with_their_reason(result: str, code: str | None, status: str | None, part: str) -> None:
    verdict = judge(snapshot(unit=ABSENT, record=record(exit=exit_record(result, code, status))))
    assert verdict.state == "failed"
    assert part in verdict.reason


def test_a_sigkill_with_an_oom_kill_counted_in_the_units_cgroup_is_surely_that() -> None:
    exit_ = exit_record("signal", "killed", "KILL", oom_kills=1)
    assert "killed by the kernel's OOM killer" in judge(snapshot(unit=ABSENT, record=record(exit=exit_))).reason


def test_a_failed_unit_without_a_record_is_judged_by_systemd() -> None:
    # The recorder could not run: 209/STDOUT takes it down with the program.
    verdict = judge(snapshot(unit=ended("exit-code", "exited", "209"), record=record()))
    assert verdict.state == "failed"
    assert "209/STDOUT" in verdict.reason


@pytest.mark.parametrize(
    ("result", "code", "status"),
    [
        ("success", "exited", "0"),
        ("success", "killed", "TERM"),
        ("timeout", "killed", "KILL"),
        ("signal", "killed", "KILL"),
    ],
)
def test_an_end_that_was_asked_for_is_cancelled_however_it_came(result: str, code: str, status: str) -> None:
    verdict = judge(snapshot(unit=ABSENT, record=record(kill_requested=KILL, exit=exit_record(result, code, status))))
    assert (verdict.state, verdict.exit_code) == ("cancelled", Exit.RUN_CANCELLED)
    assert "ann@laptop" in verdict.reason


@pytest.mark.parametrize(
    ("result", "code", "status"),
    [("success", "killed", "TERM"), ("exit-code", "exited", "143"), ("timeout", "killed", "KILL")],
)
def test_an_end_that_nobody_asked_dflash_for_is_never_cancelled(result: str, code: str, status: str) -> None:
    verdict = judge(snapshot(unit=ABSENT, record=record(exit=exit_record(result, code, status))))
    assert (verdict.state, verdict.exit_code) == ("lost", Exit.RUN_LOST)


@pytest.mark.parametrize(
    ("end", "after", "grace", "state"),
    [
        (("success", "exited", "0", False), 10, 45, "succeeded"),
        (("exit-code", "exited", "1", False), 10, 45, "failed"),
        (("success", "exited", "0", False), 600, 3600, "succeeded"),
        (("success", "exited", "0", True), 600, 45, "lost"),
        (("signal", "killed", "KILL", False), 600, 45, "failed"),
        (("success", "exited", "0", True), 10, 45, "cancelled"),
        (("success", "killed", "TERM", True), 10, 45, "cancelled"),
        (("signal", "killed", "KILL", False), 10, 45, "cancelled"),
        (("success", "exited", "0", False), 10, 3600, "cancelled"),
    ],
)
def test_a_request_that_may_never_have_come_to_systemd_counts_only_for_a_stop_soon_after(
    end: tuple[str, str, str, bool], after: float, grace: float, state: str
) -> None:
    asked = KILL.model_copy(update={"sent": False, "grace": grace})
    exit_ = exit_record(*end[:3], stop_requested=end[3], time=asked.time + after)
    assert judge(snapshot(unit=ABSENT, record=record(kill_requested=asked, exit=exit_))).state == state


def test_a_request_that_never_came_to_systemd_does_not_explain_a_unit_that_is_gone_or_stopping() -> None:
    asked = KILL.model_copy(update={"sent": False, "time": NOW - 600})
    assert judge(snapshot(unit=ABSENT, record=record(kill_requested=asked))).state == "lost"
    assert "something else" in judge(snapshot(unit=STOPPING, record=record(kill_requested=asked))).reason


def test_a_trainer_that_obeyed_the_containers_shutdown_is_lost_and_not_succeeded() -> None:
    exit_ = exit_record("success", "exited", "0", stop_requested=True)
    verdict = judge(snapshot(unit=ABSENT, record=record(exit=exit_), boot_id="another"))
    assert verdict.state == "lost"
    assert "at step 12/200" in verdict.reason


def test_a_unit_gone_with_its_containers_restart_is_lost_and_says_where_to_go_on() -> None:
    checkpoint = Checkpoint(name="step-00000010", step=10, time=1.0)
    verdict = judge(snapshot(unit=ABSENT, boot_id="another", checkpoint=checkpoint))
    assert verdict.state == "lost"
    assert verdict.reason == ("the container restarted while it ran (at step 12/200, newest checkpoint step-00000010)")


def test_a_unit_gone_without_a_record_in_the_same_boot_is_lost_and_never_succeeded() -> None:
    verdict = judge(snapshot(unit=ABSENT))
    assert verdict.state == "lost"
    assert "no exit record" in verdict.reason


def test_a_launch_in_its_first_moments_is_starting() -> None:
    assert judge(snapshot(unit=ABSENT, record=record(started=None), age=3.0)).state == "starting"


def test_a_launch_whose_container_restarted_is_lost_at_once() -> None:
    before = spec(boot_id="5f1e8f0e-0000-0000-0000-000000000000")
    verdict = judge(snapshot(unit=ABSENT, record=record(spec=before, started=None), age=3.0))
    assert verdict.state == "lost"
    assert "restarted" in verdict.reason


def test_a_launch_that_was_cut_off_is_lost() -> None:
    verdict = judge(snapshot(unit=ABSENT, record=record(started=None), age=500.0))
    assert verdict.state == "lost"
    assert "cut off" in verdict.reason


# ---- all of them -------------------------------------------------------------------------------------------

UNITS: list[UnitReading] = [
    running(),
    running(invocation_id="f" * 32),
    running(watchdog_age=1.0),
    STARTING,
    STOPPING,
    ABSENT,
    ended("success", "exited", "0"),
    ended("exit-code", "exited", "1"),
    ended("resources", None, None),
    UnitUnknown(reason="x"),
]
LOGS: list[LogReading] = [fresh(), fresh(size=0), silent(), LogGone(), LogUnknown(reason="x")]
GPUS: list[GpuReading] = [GpuNone(), HANG, BUSY8, IDLE8, SPIN8, gpus((None, None))]
RECORDS = [
    record(),
    record(spec=None),
    record(spec=None, started=None),
    record(started=started(boot_id="another")),
    record(kill_requested=KILL),
    record(exit=exit_record("success", "exited", "0")),
    record(exit=exit_record("signal", "killed", "KILL"), kill_requested=KILL),
    record(exit=exit_record("odd word", "odd", "odd")),
]


def test_every_combination_has_a_verdict_and_only_evidence_of_an_end_makes_one_finished() -> None:
    for unit, log, gpu, kept, cpu in itertools.product(UNITS, LOGS, GPUS, RECORDS, [None, Cpu(used=0, over=1)]):
        for roles in (EIGHT, type(EIGHT)()):
            seen = snapshot(unit=unit, log=log, gpu=gpu, record=kept, cpu=cpu, roles=roles, progress=None)
            verdict = judge(seen)
            assert verdict == judge(seen)
            evidence = kept.exit is not None or isinstance(unit, UnitAbsent | UnitEnded)
            assert not verdict.finished or evidence, (unit, kept)
            if kept.exit is None and isinstance(unit, UnitUnknown):
                assert verdict.state == "unknown"
            if verdict.state == "cancelled":
                assert kept.kill_requested is not None
            if verdict.state == "succeeded":
                assert kept.exit is not None or isinstance(unit, UnitEnded)


def test_a_run_of_slow_steps_may_be_silent_for_longer() -> None:
    quick = quiet_after_of(progress())
    slow = progress().model_copy(
        update={"history": tuple(progress().last.model_copy(update={"step": i, "time": 300.0 * i}) for i in range(4))}
    )
    assert quick == 120.0
    assert quiet_after_of(slow) == 1500.0
    assert quiet_after_of(None) == 600.0


def test_the_boot_decides_only_for_units_that_are_gone() -> None:
    assert judge(snapshot(boot_id="another")).state == "running"
    assert BOOT != "another"
