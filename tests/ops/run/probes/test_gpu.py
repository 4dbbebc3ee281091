"""Each file of fixtures/gpu holds what nvidia-smi did and the reading that must come of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.remote.gpu import FIELDS
from dflash_ops.run.probes.gpu import (
    Device,
    GpuDevices,
    GpuReading,
    Ran,
    RawGpu,
    _cells,
    read_gpu,
    role_of,
    roles_of,
    work_by_role,
)
from dflash_ops.run.record import GpuRoles

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures" / "gpu").glob("*.json"))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_what_nvidia_smi_did_gives_the_reading(path: Path) -> None:
    case = json.loads(path.read_text())
    reading = read_gpu(RawGpu.model_validate(case["raw"]))
    assert reading.model_dump(mode="json") == case["reading"], case["about"]


@given(
    st.lists(
        st.one_of(
            st.text(max_size=80),
            st.lists(
                st.sampled_from(["0", "7", "-1", "1e9", "[N/A]", "ERR!", "12 %", "3,5", "NaN", "inf", "", "x"]),
                min_size=len(FIELDS),
                max_size=len(FIELDS),
            ).map(", ".join),
        ),
        max_size=12,
    ),
    st.integers(-255, 255),
)
def test_any_output_gives_some_reading_whose_numbers_are_plausible(lines: list[str], status: int) -> None:
    raw = RawGpu(fields=FIELDS, command=Ran(rc=status, stdout="\n".join(lines), stderr=""), nodes=[], driver=None)
    reading: GpuReading = read_gpu(raw)
    assert reading.answer in ("yes", "no", "unknown", "none")
    if isinstance(reading, GpuDevices):
        assert len({device.index for device in reading.devices}) == len(reading.devices)
        for device in reading.devices:
            assert device.utilization is None or 0 <= device.utilization <= 100


def gpu(index: int, utilization: int | None, power: float | None = 500.0) -> Device:
    return Device(
        index=index, name="NVIDIA H200", utilization=utilization, memory_used=90000, power=power, power_limit=700.0
    )


def test_a_gpu_that_reports_neither_use_nor_power_is_not_called_idle() -> None:
    assert gpu(0, None, None).works is None


def test_full_use_at_idle_power_is_spinning_and_no_work() -> None:
    assert gpu(0, 100, 130.0).spins
    assert gpu(0, 100, 130.0).works is False
    assert gpu(0, 100, 600.0).works is True


def test_roles_are_the_jobs_own_list() -> None:
    roles = GpuRoles(target=[0, 1], drafters=[5])
    assert roles_of(roles, {"pipeline": {"targets": ["cuda:9"]}}) == roles


def test_roles_come_from_the_pipeline_devices_when_the_job_lists_no_gpus() -> None:
    config = {"pipeline": {"targets": ["cuda:0", "cuda:1"], "drafters": ["cuda:2"]}}
    assert roles_of(GpuRoles(), config) == GpuRoles(target=[0, 1], drafters=[2])


def test_a_run_on_cpu_has_no_gpus() -> None:
    assert roles_of(GpuRoles(), {"pipeline": {"targets": ["cpu"], "drafters": ["cpu", "cpu"]}}).all == []


@pytest.mark.parametrize("config", [{}, {"pipeline": None}, {"pipeline": {"targets": None}}, {"pipeline": [1]}])
def test_a_config_without_devices_never_breaks_the_roles(config: dict[str, object]) -> None:
    roles_of(GpuRoles(), config)


def test_a_colocated_gpu_has_both_roles() -> None:
    assert role_of(0, GpuRoles(target=[0], drafters=[0])) == "target+drafter"
    assert role_of(3, GpuRoles(target=[0], drafters=[0])) == ""


def test_targets_busy_and_drafters_idle_is_said() -> None:
    roles = GpuRoles(target=[0, 1], drafters=[2])
    assert work_by_role([gpu(0, 90), gpu(1, 80), gpu(2, 0, 120.0)], roles) == "targets busy, drafters idle"
    assert work_by_role([gpu(0, 90), gpu(1, 0, 120.0), gpu(2, 50)], roles) == "targets partly busy, drafters busy"


def test_roles_on_the_same_gpus_are_not_compared() -> None:
    assert work_by_role([gpu(0, 90)], GpuRoles(target=[0], drafters=[0])) is None


def test_a_role_whose_gpus_do_not_say_is_not_called_idle() -> None:
    assert work_by_role([gpu(0, 90), gpu(1, None, None)], GpuRoles(target=[0], drafters=[1])) is None


def test_commas_in_a_gpu_s_name_are_the_name_s() -> None:
    fields = ["index", "uuid", "name", "utilization.gpu"]
    for name in ("NVIDIA H200", "NVIDIA H200, 141GB, SXM"):
        assert _cells(f"0, GPU-1, {name}, 12", fields) == ["0", "GPU-1", name, "12"]
