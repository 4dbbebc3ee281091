"""Judges what doctor's looks at node, container and interpreter found: one line each, with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dflash_ops.document import Printable
from dflash_ops.inventory.models import ContainerEntry
from dflash_ops.plan.release import Release
from dflash_ops.remote.protocol import MIN_SYSTEMD
from dflash_ops.run.facts import Cache, DiskFacts, Facts, Imported, Python, System, Torch, Tree, Unread
from dflash_ops.run.probes.gpu import GpuDevices, GpuNone, GpuUnknown
from dflash_ops.text import age, counted, size, visible
from dflash_ops.transport.pct import lock_cure

Level = Literal["ok", "warn", "fail", "unknown"]
_SKEW = 5.0  # seconds that nobody notices
_LOW_DISK = 20 << 30  # a few checkpoints of an 8B target's drafter
_LOW_SHM = 1 << 30
_LOW_FILES = 65536
# .pth files that well-known tools put there, and Debian's own hook.
_KNOWN_HOOKS = ("distutils-precedence.pth", "_virtualenv.pth", "__editable__", "apport_python_hook")


class Line(BaseModel):
    """One statement."""

    model_config = ConfigDict(frozen=True)

    topic: Printable
    level: Level
    text: Printable
    cure: Printable | None = None


class Holder(BaseModel):
    gpu: str
    pid: int
    memory: str
    where: str


class Node(BaseModel):
    """What `dflash_ops.remote.node` finds on the host."""

    user: int
    hostname: str
    kernel: str
    time: float
    pct: bool
    version: str | None
    status: str | None
    status_error: str
    config: dict[str, str] | None
    config_error: str
    other_node: str | None
    driver: str | None
    nodes: list[str]
    holders: list[Holder]


def ok(topic: str, text: str) -> Line:
    return Line(topic=topic, level="ok", text=text)


def warn(topic: str, text: str, cure: str | None = None) -> Line:
    return Line(topic=topic, level="warn", text=text, cure=cure)


def fail(topic: str, text: str, cure: str | None = None) -> Line:
    return Line(topic=topic, level="fail", text=text, cure=cure)


def unknown(topic: str, text: str, cure: str | None = None) -> Line:
    return Line(topic=topic, level="unknown", text=text, cure=cure)


class Elsewhere(BaseModel):
    """A live run whose directory is not in the container's root folder."""

    run: str
    directory: str


class Trial(BaseModel):
    """What `dflash_ops.remote.doctor` tried in the container, as a launch would."""

    unit: str | None
    """Why a transient unit that speaks by sd_notify did not run; None: it did"""
    refused: dict[str, str]
    """Device files that are there and cannot be opened, and why (EPERM, ENXIO, …)"""
    noexec: bool
    """Programs in the root folder may not be run"""
    elsewhere: list[Elsewhere]


def trial_lines(trial: Trial) -> Iterator[Line]:
    """What a launch would meet."""
    if trial.unit is None:
        yield ok("launch", "a transient unit starts and reaches systemd by sd_notify")
    else:
        cure = "`features: nesting=1` for an unprivileged container; `systemctl --failed` in it says more"
        yield fail("launch", f"a transient unit did not run: {visible(trial.unit, 200)}", cure)
    if trial.noexec:
        cure = "mount it with exec, or choose another `root` for the container in the inventory"
        yield fail("root", "programs in the root folder may not be run (noexec), so no run can start", cure)
    for path, why in trial.refused.items():
        if why == "EPERM":
            cure = "give the container the device: `devN: PATH` in its configuration, or its major in devices.allow"
        elif why == "ENXIO":
            cure = "its number is not the driver's (a wrong major): remove the file, and add `devN: PATH` anew"
        else:
            cure = "look at the file's owner and mode"
        yield fail("device", f"{visible(path)} is there, but opening it is refused ({why})", cure.replace("PATH", path))
    for one in trial.elsewhere:
        yield warn(
            "runs",
            f"the run {visible(one.run, 80)} runs outside the root folder (its unit began in {visible(one.directory)})",
            "it holds its GPUs; give a container of the inventory that `root` to see it",
        )


def node_lines(node: Node, entry: ContainerEntry) -> Iterator[Line]:
    """What the host says of itself and of the container."""
    vmid = entry.container
    if not node.pct:
        yield fail("node", f"there is no pct on {visible(node.hostname)}", "is it a Proxmox VE node?")
    else:
        yield ok(
            "node", f"{visible(node.hostname)}, {visible(node.version or 'Proxmox VE')}, kernel {visible(node.kernel)}"
        )
    if node.other_node:
        where = visible(node.other_node)
        yield fail("state", f"container {vmid} is on node {where}", f"point the container's host at {where}")
    elif node.status is None:
        said = visible(node.status_error.splitlines()[-1] if node.status_error else "nothing", 200)
        yield unknown("state", f"`pct status {vmid}` said: {said}", _config_cure(said))
    elif "running" not in node.status:
        yield fail("state", f"container {vmid}: {visible(node.status)}", f"`pct start {vmid}` on the node")
    else:
        yield ok("state", f"container {vmid} is running")
    if node.config is None:
        said = visible(node.config_error.splitlines()[-1] if node.config_error else "nothing", 200)
        yield unknown("config", f"`pct config {vmid} --current` said: {said}", _config_cure(said))
    else:
        yield from _config_lines(node.config, vmid)
    if node.driver is not None and "/dev/nvidia-uvm" not in node.nodes:
        yield fail(
            "uvm", "the node has no /dev/nvidia-uvm, so no container can use CUDA", "`nvidia-modprobe -u -c0` there"
        )
    for holder in node.holders:
        who = f"PID {holder.pid} ({visible(holder.where, 80)}) holds {visible(holder.memory, 20)} MiB"
        yield ok("held", f"{visible(holder.gpu, 60)}: {who}")


def _config_cure(said: str) -> str:
    """What to do where the configuration could not be read."""
    if "Connection refused" in said:
        return "the node boots, or pve-cluster failed: `systemctl status pve-cluster` there"
    if "does not exist" in said:
        return "correct the container's number; `pct list` on the node shows them"
    return "it needs root; dflash itself only enters" if "ipcc_send_rec" in said or "access control" in said else ""


def _config_lines(config: dict[str, str], vmid: object) -> Iterator[Line]:
    lock = config.get("lock")
    if lock:
        why, cure = lock_cure(lock, vmid)
        yield warn("lock", f"the container is locked ({visible(lock)}): {why}", cure)
    if "nesting=1" not in config.get("features", ""):
        yield warn(
            "nesting",
            "features: nesting=1 is not set",
            "without it systemd cannot make namespaces: some services fail with 226/NAMESPACE or 243/CREDENTIALS",
        )
    else:
        yield ok("nesting", "features: nesting=1")


def system_lines(facts: Facts, now: float, uncertain: float) -> Iterator[Line]:
    """systemd, clock, memory, disks, limits. `now` is this machine's time when the facts were read, ± `uncertain`."""
    system = facts.system
    if isinstance(system, Unread):
        yield unknown("system", system.error)
    else:
        yield from _systemd_lines(system)
    skew = facts.time - now
    if abs(skew) > _SKEW + uncertain:
        ahead = "ahead of" if skew > 0 else "behind"
        text = f"the container's clock is {age(abs(skew))} {ahead} this machine's"
        yield warn(
            "clock", text, "ages are by the container's clock, so nothing breaks; set one of the two right (NTP)"
        )
    else:
        yield ok("clock", "agrees with this machine's")
    if isinstance(facts.disk, Unread):
        yield unknown("disk", facts.disk.error)
    else:
        for name, disk in facts.disk.items():
            yield _disk_line(name, disk)
    if isinstance(facts.limits, Unread):
        yield unknown("limits", facts.limits.error)
    else:
        yield _files_line(facts.limits.get("open files", ("?", "?"))[1])


def _systemd_lines(system: System) -> Iterator[Line]:
    yield ok(
        "system", f"{system.os or 'Linux'}, {system.machine}, {system.cpus} CPUs, {size(system.memory or 0)} memory"
    )
    if system.pid1 != "systemd":
        cure = "use a container template with systemd (Debian, Ubuntu)"
        yield fail("systemd", f"PID 1 is {visible(system.pid1 or 'unknown')}, not systemd", cure)
    elif system.systemd is None or system.systemd < MIN_SYSTEMD:
        yield fail("systemd", f"systemd {system.systemd} is too old", f"{MIN_SYSTEMD} or newer is needed")
    else:
        yield ok("systemd", f"systemd {system.systemd} is PID 1")


def _disk_line(name: str, disk: DiskFacts) -> Line:
    what = f"{visible(disk.path, 80)}: {size(disk.free)} of {size(disk.total)} free"
    topic = {"root": "disk", "tmp": "/tmp", "shm": "/dev/shm"}.get(name, visible(name, 20))
    if disk.inodes_total and disk.inodes_free < 1000:
        return fail(topic, f"{what}, and only {disk.inodes_free} inodes", "delete small files; `dflash gc` helps")
    if name == "root" and disk.free < 1 << 30:
        return fail(topic, what, "free space, `dflash gc` helps")
    if name == "tmp" and disk.free < 64 << 20:
        return fail(topic, what, "free space there: Python and torch write to it before a run begins")
    if name == "root" and disk.free < _LOW_DISK:
        return warn(topic, what, "checkpoints of a large drafter take several GiB; `dflash gc` helps")
    if name == "shm" and disk.free < _LOW_SHM:
        return warn(topic, what, "enlarge /dev/shm of the container")
    return ok(topic, what)


def _files_line(hard: str) -> Line:
    if hard.isdigit() and int(hard) < _LOW_FILES:
        cure = (
            "raise `lxc.prlimit.nofile` in the container's configuration, but not above the node's own hard limit "
            "(`prlimit --nofile --pid 1` there): with a higher one the container does not start"
        )
        return warn("limits", f"at most {hard} open files", cure)
    return ok("limits", f"up to {hard} open files")


def python_lines(facts: Facts, cure: str) -> Iterator[Line]:
    """The interpreter, its packages, and whether torch is as it was shipped. `cure`: where it does not run."""
    python = facts.python
    if python is None:
        return
    if isinstance(python, Unread):
        yield fail("python", visible(python.error, 300), cure)
        return
    yield _python_line(python)
    wanted = ("torch", "triton", "transformers", "safetensors", "numpy")
    versions = [f"{name} {facts.packages[name]}" for name in wanted if name in facts.packages]
    # torch compiles for GPUs by triton; for the CPU it takes the C++ compiler.
    needed = ("torch", "transformers", *(["triton"] if isinstance(facts.gpus(), GpuDevices) else []))
    missing = [name for name in needed if name not in facts.packages]
    if missing:
        how = "install it there, or let dflash build the environment from a lock file"
        yield fail("packages", f"{' and '.join(missing)} not installed", how)
    else:
        yield ok("packages", visible(", ".join(versions), 200))
    yield from _torch_lines(facts)
    if isinstance(facts.hooks, Unread):
        yield unknown("hooks", facts.hooks.error)
    else:
        for hook in facts.hooks:
            if not any(known in hook.file for known in _KNOWN_HOOKS):
                yield warn(
                    "hooks",
                    f"{visible(hook.file, 160)} runs code at every start of the interpreter",
                    "look into it: such files change torch unseen",
                )


def _python_line(python: Python) -> Line:
    parts = [int(part) for part in python.version.split(".")[:2] if part.isdigit()]
    text = f"{visible(python.path_given, 100)}: {python.implementation} {python.version}"
    return ok("python", text) if parts >= [3, 11] else fail("python", text, "the trainer needs 3.11 or newer")


def _torch_lines(facts: Facts) -> Iterator[Line]:
    torch = facts.torch
    cure = "reinstall torch in the environment; the trainer handles the tracing race without editing torch"
    if isinstance(torch, Torch):
        files = torch.files
        if files.state == "changed":
            names = [one.file for one in files.changed] + [f"{name} (added)" for name in files.added]
            yield fail("torch", f"changed by hand: {visible(', '.join(names[:5]), 300)}", cure)
        elif files.state == "intact":
            yield ok(
                "torch",
                f"{counted(files.checked, 'file')} of its tracing and compiling code are as the wheel brought them",
            )
        else:
            yield unknown("torch", visible(files.reason, 200))
    elif isinstance(torch, Unread):
        yield unknown("torch", visible(torch.error, 200))
    match facts.imported:
        case Unread(error=error):
            yield fail(
                "import",
                f"`import torch` failed: {visible(error, 300)}",
                "see the message; reinstall torch in the environment",
            )
        case Imported(foreign=[]):
            yield ok("import", "torch imports, and its tracing functions are its own")
        case Imported(foreign=foreign):
            yield fail("import", f"replaced at start: {visible('; '.join(foreign), 300)}", cure)


def gpu_lines(facts: Facts, node: Node | None) -> Iterator[Line]:
    """Driver, devices, and whether torch sees them."""
    kernel, library = facts.driver.kernel, facts.driver.library
    if kernel is not None:
        match library:
            case Unread(error=error):
                yield unknown("driver", f"libnvidia-ml: {visible(error, 200)}")
            case None:
                cure = f"install the NVIDIA user libraries of {visible(kernel)} in the container (no kernel module)"
                yield fail("driver", f"the node's driver is {visible(kernel)}, the container has no libnvidia-ml", cure)
            case str() if library != kernel:
                cure = "install the same version in the container; after an upgrade on the node both must follow"
                text = f"the node's driver is {visible(kernel)}, the container's library {visible(library)}"
                yield fail("driver", text, cure)
            case str():
                yield ok("driver", f"{visible(kernel)} on both sides")
    reading = facts.gpus()
    match reading:
        case GpuNone(reason=""):
            yield ok("gpu", "none in the container: runs use the CPU")
        case GpuNone(reason=reason):
            cure = "a job that wants GPUs needs `dev0: /dev/nvidia0` and so on in the container's configuration"
            yield warn("gpu", f"{reason}: runs use the CPU", cure)
        case GpuUnknown(reason=reason, cure=cure_):
            yield unknown("gpu", reason, cure_)
        case GpuDevices(devices=devices):
            names = sorted({device.name for device in devices})
            yield ok("gpu", f"{len(devices)} × {', '.join(names)}")
            for device in devices:
                if device.utilization and device.utilization >= 50:
                    used = [f"{device.utilization} %"]
                    used += [f"{device.power:.0f} W"] if device.power is not None else []
                    used += [f"{device.memory_used} MiB"] if device.memory_used is not None else []
                    who = [holder for holder in (node.holders if node is not None else []) if holder.gpu == device.uuid]
                    by = ", ".join(f"PID {one.pid} ({visible(one.where, 80)})" for one in who)
                    yield warn(
                        "gpu",
                        f"GPU {device.index} is at work: {', '.join(used)}" + (f", held by {by}" if by else ""),
                        "a run that shares it gets slower; `nvidia-smi` on the node shows whose it is",
                    )
                if device.fault:
                    yield warn("gpu", f"GPU {device.index}: {device.fault}", "see `dmesg | grep Xid` on the node")
            for row in reading.absent:
                yield fail("gpu", row, "see `dmesg | grep Xid` on the node")
            yield from _cuda_lines(facts, len(devices))


def _cuda_lines(facts: Facts, devices: int) -> Iterator[Line]:
    nodes = facts.gpu.nodes if facts.gpu is not None else []
    if "/dev/nvidia-uvm" in nodes:
        yield ok("uvm", "/dev/nvidia-uvm is there")
    else:
        cure = "`nvidia-modprobe -u -c0` on the node, and `dev1: /dev/nvidia-uvm` in the container's configuration"
        yield fail("uvm", "no /dev/nvidia-uvm in the container: CUDA cannot start", cure)
    if isinstance(facts.imported, Imported):
        seen = facts.imported
        if not seen.cuda_available:
            cure = "a CUDA build of torch, a driver that is new enough for it, /dev/nvidia-uvm: see the lines above"
            yield fail("cuda", f"torch {visible(seen.version)} (CUDA {seen.cuda}) sees no GPU", cure)
        elif seen.devices != devices:
            yield warn(
                "cuda",
                f"torch sees {counted(seen.devices, 'GPU')}, nvidia-smi {devices}",
                "is CUDA_VISIBLE_DEVICES set?",
            )
        else:
            yield ok("cuda", f"torch {visible(seen.version)} (CUDA {seen.cuda}) sees {seen.devices}")


def release_line(facts: Facts, release: Release) -> Line:
    """Whether the container has this machine's trainer, file by file."""
    kept = facts.release
    if not isinstance(kept, Tree) or not kept.files:
        return ok("release", f"the trainer here ({release.name[:12]}) is not in the container yet; a launch sends it")
    here = {f"trainer/{file.path}": file.sha256 for file in release.files}
    there = {name: digest for name, digest in kept.files.items() if name.startswith("trainer/")}
    if here == there:
        return ok("release", f"{release.name[:12]}: {counted(len(here), 'file')} in the container as here")
    wrong = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    cure = "somebody edited it in the container: launch again, a damaged release is sent anew"
    return fail("release", f"{release.name[:12]} in the container differs: {visible(', '.join(wrong[:5]), 300)}", cure)


def cache_line(facts: Facts) -> Line:
    """How full the compile cache is."""
    cache = facts.compile_cache
    if not isinstance(cache, Cache):
        return unknown("cache", visible(cache.error, 200))
    if not cache.files:
        return ok("cache", f"{visible(cache.path, 80)} is empty: the first run on GPUs compiles anew")
    keys = ", ".join(visible(key, 40) for key in list(cache.keys)[:3])
    return ok("cache", f"{size(cache.bytes)} in {counted(cache.files, 'file')}; newest keys {keys}")
