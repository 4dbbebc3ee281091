"""Reads what nvidia-smi says about the run's GPUs.

nvidia-smi's output is not a stable interface: cells may hold `[N/A]`, `[Not Supported]`, `ERR!`, `[Unknown Error]`,
whole lines may be missing or extra. A cell that is no number is None, never 0; a row that names no GPU is dropped.
Inside a container nvidia-smi cannot list processes (the driver ignores PID namespaces), so GPUs belong to a run by the
run's own device list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from dflash_ops.run.probes import Reading
from dflash_ops.run.record import GpuRoles
from dflash_ops.text import visible

# A GPU at 100 % below this share of its power limit executes kernels that do nothing: a collective that spins draws
# 70 of 400 W on an A100, while an H200 with no process at all draws 127 of its 700 W.
IDLE_POWER_SHARE = 0.3
# Memory that is in use without any process: driver reservations and ECC tables.
_IDLE_MEMORY_MIB = 600


class Ran(BaseModel):
    """nvidia-smi ended by itself."""

    state: Literal["ran"] = "ran"
    rc: int
    stdout: str
    stderr: str


class Missing(BaseModel):
    """There is no nvidia-smi in the container."""

    state: Literal["missing"] = "missing"


class TimedOut(BaseModel):
    """nvidia-smi was still running at its limit; it may sit in a driver call that nothing can end."""

    state: Literal["timeout"] = "timeout"
    seconds: float


class Busy(BaseModel):
    """The nvidia-smi of an earlier probe has not returned yet, so none was started beside it."""

    state: Literal["busy"] = "busy"
    pid: int
    seconds: float


class Broken(BaseModel):
    """nvidia-smi could not be started."""

    state: Literal["broken"] = "broken"
    message: str


class RawGpu(BaseModel):
    """What the remote program found: its columns, the command's outcome, device nodes, the kernel driver's version."""

    fields: list[str] = Field(default_factory=list)
    command: Annotated[Ran | Missing | TimedOut | Busy | Broken, Field(discriminator="state")]
    nodes: list[str] = Field(default_factory=list)
    driver: str | None = None


class Device(BaseModel):
    """One GPU; None is what the driver does not report (as utilisation under MIG)."""

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    uuid: str | None = None
    utilization: int | None = Field(None, description="Percent of the last interval in which a kernel was running")
    memory_used: int | None = Field(None, description="MiB")
    memory_total: int | None = Field(None, description="MiB")
    power: float | None = Field(None, description="W")
    power_limit: float | None = Field(None, description="W")
    temperature: int | None = Field(None, description="°C")
    mig: bool = False
    fault: str | None = Field(None, description="What nvidia-smi put where a number belongs, when that is an error")

    @property
    def draws_idle_power(self) -> bool | None:
        """Whether the power drawn is what an idle or spinning GPU draws; None when it is not reported."""
        if self.power is None or not self.power_limit:
            return None
        return self.power < IDLE_POWER_SHARE * self.power_limit

    @property
    def works(self) -> bool | None:
        """Whether kernels do work: utilisation above zero, and not at a spinning kernel's power.

        Where utilisation is not reported, power tells, but not under MIG: there it is the whole GPU's.
        """
        if self.utilization is None:
            return None if self.mig or self.draws_idle_power is None else not self.draws_idle_power
        return self.utilization > 0 and not self.spins

    @property
    def spins(self) -> bool:
        """Fully used at idle power: the mark of a collective that waits for a dead peer."""
        return self.utilization is not None and self.utilization >= 99 and self.draws_idle_power is True

    @property
    def holds_memory(self) -> bool:
        """Whether some process has memory on it."""
        return self.memory_used is not None and self.memory_used > _IDLE_MEMORY_MIB


class GpuNone(Reading):
    """The container has no NVIDIA GPU."""

    kind: Literal["none"] = "none"
    answer: Literal["none"] = "none"
    reason: str = Field("", description="Why none is seen although nvidia-smi is installed")


class GpuDevices(Reading):
    """The GPUs that answered, in nvidia-smi's order."""

    kind: Literal["devices"] = "devices"
    devices: tuple[Device, ...]
    driver: str | None = None
    absent: tuple[str, ...] = Field((), description="Rows that nvidia-smi printed but that name no readable GPU")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def answer(self) -> Literal["yes", "no", "unknown"]:
        """Whether any GPU works; unknown when none says."""
        works = [device.works for device in self.devices]
        if any(works):
            return "yes"
        return "unknown" if None in works or not works else "no"


class GpuUnknown(Reading):
    """nvidia-smi gave no answer that can be read."""

    kind: Literal["unknown"] = "unknown"
    reason: str
    cure: str | None = None
    answer: Literal["unknown"] = "unknown"


GpuReading = Annotated[GpuNone | GpuDevices | GpuUnknown, Field(discriminator="kind")]

# (text in nvidia-smi's output, reason, cure); first match wins.
_COMPLAINTS: tuple[tuple[str, str, str], ...] = (
    (
        "Driver/library version mismatch",
        "NVML: driver/library version mismatch",
        "the node's driver was upgraded: install the same libnvidia version in the container, or restart the node",
    ),
    (
        "Failed to initialize NVML: Unknown Error",
        "NVML: Unknown Error, the container lost access to its GPU devices",
        "restart the container; a running trainer may still hold its open devices",
    ),
    (
        "Failed to initialize NVML: Insufficient Permissions",
        "NVML: insufficient permissions",
        "let the container use /dev/nvidia* (dev0: or lxc.cgroup2.devices.allow in its config)",
    ),
    (
        "NVML library not found",
        "libnvidia-ml is missing in the container",
        "install the libnvidia-ml of the node's driver version in the container",
    ),
    (
        "couldn't find libnvidia-ml.so",
        "libnvidia-ml is missing in the container",
        "install the libnvidia-ml of the node's driver version in the container",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "nvidia-smi cannot reach the driver",
        "load the driver on the node and pass /dev/nvidia* into the container",
    ),
    ("GPU is lost", "a GPU is lost (fell off the bus)", "reboot the node; see `dmesg | grep Xid` on it"),
    (
        "Unable to determine the device handle",
        "nvidia-smi cannot open a GPU",
        "see `dmesg | grep Xid` on the node; the GPU may need a reset",
    ),
    ("is not a valid field to query", "this nvidia-smi is too old for the probe", "upgrade the driver to 450 or newer"),
)
_ERROR_CELL = re.compile(r"ERR!|Unknown Error|GPU is lost|requires reset|Insufficient Permissions", re.IGNORECASE)


def read_gpu(raw: RawGpu) -> GpuReading:
    """The raw answer as a reading. Total: whatever nvidia-smi printed, there is a reading for it."""
    match raw.command:
        case Missing():
            if not raw.nodes and raw.driver is None:
                return GpuNone()
            return GpuUnknown(
                reason="the container has GPU devices but no nvidia-smi",
                cure="install the nvidia-utils of the node's driver version in the container",
            )
        case TimedOut(seconds=seconds):
            return GpuUnknown(
                reason=f"nvidia-smi did not answer within {seconds:.0f} s",
                cure="see `dmesg | grep Xid` on the node; a GPU that hangs nvidia-smi needs a reset",
            )
        case Busy(pid=pid, seconds=seconds):
            return GpuUnknown(
                reason=f"an nvidia-smi (PID {pid}) has been hanging for {seconds:.0f} s",
                cure="see `dmesg | grep Xid` on the node; a GPU that hangs nvidia-smi needs a reset",
            )
        case Broken(message=message):
            return GpuUnknown(reason=f"nvidia-smi could not be started: {visible(message, 200)}")
        case Ran():
            return _read_rows(raw, raw.command)


def _read_rows(raw: RawGpu, ran: Ran) -> GpuReading:
    devices: list[Device] = []
    absent: list[str] = []
    driver: str | None = None
    for line in ran.stdout.splitlines():
        cells = _cells(line, raw.fields)
        row = dict(zip(raw.fields, cells, strict=False))
        device = _read_row(row) if len(cells) == len(raw.fields) else None
        if device is not None and all(device.index != other.index for other in devices):
            devices.append(device)
            driver = driver or _plain(row.get("driver_version"))
        elif line.strip():
            absent.append(visible(line.strip(), 200))
    if devices:
        return GpuDevices(devices=tuple(devices), driver=driver, absent=tuple(absent))
    said = f"{ran.stdout}\n{ran.stderr}"
    if "No devices were found" in said and not any(re.fullmatch(r"/dev/nvidia\d+", node) for node in raw.nodes):
        return GpuNone(reason="nvidia-smi is installed and finds no device")
    for text, reason, cure in _COMPLAINTS:
        if text in said:
            return GpuUnknown(reason=reason, cure=cure)
    first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
    return GpuUnknown(reason=f"nvidia-smi answered with status {ran.rc}: {visible(first, 200)}")


def _cells(line: str, fields: Sequence[str]) -> list[str]:
    """The cells of a row; commas that are too many belong to the GPU's name."""
    cells = [cell.strip() for cell in re.split(r",\s", line.strip())]
    more = len(cells) - len(fields)
    if more > 0 and "name" in fields:
        place = list(fields).index("name")
        cells[place : place + more + 1] = [", ".join(cells[place : place + more + 1])]
    return cells


def _read_row(row: Mapping[str, str]) -> Device | None:
    index = _number(row.get("index"))
    name = row.get("name")
    if index is None or index < 0 or index != int(index) or name is None:
        return None
    fault = next((cell for key, cell in row.items() if key != "name" and _ERROR_CELL.search(cell)), None)
    return Device(
        index=int(index),
        name=visible(name, 80),
        uuid=_plain(row.get("uuid")),
        utilization=_whole(row.get("utilization.gpu"), 100),
        memory_used=_whole(row.get("memory.used")),
        memory_total=_whole(row.get("memory.total")),
        power=_number(row.get("power.draw")),
        power_limit=_number(row.get("power.limit")),
        temperature=_whole(row.get("temperature.gpu")),
        mig=row.get("mig.mode.current") == "Enabled",
        fault=visible(fault.strip("[] "), 80) if fault else None,
    )


def _plain(cell: str | None) -> str | None:
    return visible(cell, 80) if cell and not cell.startswith("[") and cell != "N/A" else None


def _number(cell: str | None) -> float | None:
    """A number, with or without a unit and with a point or (localised) a comma; else None."""
    match = re.fullmatch(r"(\d{1,12}(?:[.,]\d{1,6})?)\s*(?:W|MiB|%|MHz|C)?", cell.strip(), re.ASCII) if cell else None
    return float(match.group(1).replace(",", ".")) if match else None


def _whole(cell: str | None, most: int = 1 << 31) -> int | None:
    value = _number(cell)
    return None if value is None or value > most else round(value)


def roles_of(gpus: GpuRoles, config: Mapping[str, Any]) -> GpuRoles:
    """Which GPUs the run uses: the job's own list, else the devices of `pipeline` in its configuration.

    Empty for a run on CPU. Numbers are the container's, as nvidia-smi prints them.
    """
    if gpus.all:
        return gpus
    pipeline = config.get("pipeline")

    def indexes(side: str) -> list[int]:
        # The trainer's own default is one GPU for both roles.
        given = pipeline.get(side) if isinstance(pipeline, Mapping) else None
        names = given if isinstance(given, list) else ["cuda:0"]
        matches = [re.fullmatch(r"cuda(?::(\d{1,4}))?", str(name)) for name in names]
        return sorted({int(match.group(1) or 0) for match in matches if match})

    return GpuRoles(target=indexes("targets"), drafters=indexes("drafters"))


def role_of(index: int, roles: GpuRoles) -> str:
    """`target`, `drafter`, `target+drafter`, or nothing for a GPU of somebody else."""
    held = (("target", roles.target), ("drafter", roles.drafters))
    return "+".join(name for name, indexes in held if index in indexes)


def work_by_role(devices: Sequence[Device], roles: GpuRoles) -> str | None:
    """`targets busy, drafters idle`; None when there are no two roles on different GPUs or some GPU does not say."""
    if not roles.target or not roles.drafters or set(roles.target) == set(roles.drafters):
        return None

    def word(indexes: Sequence[int]) -> str | None:
        works = [device.works for device in devices if device.index in indexes]
        if not works or None in works:
            return None
        return "busy" if all(works) else "partly busy" if any(works) else "idle"

    target, drafters = word(roles.target), word(roles.drafters)
    return f"targets {target}, drafters {drafters}" if target and drafters else None
