"""Collects what is installed and true in the container, from files, within seconds, without importing torch.

Values of environment variables never leave the container: only their names do.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import glob
import hashlib
import io
import json
import os
import platform
import re
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from dflash_ops.remote import gpu, process, systemd
from dflash_ops.remote.protocol import FactsRequest

# Whoever "repairs" the tracing race by editing torch edits here (or in a hook that runs at start-up).
_TORCH_WATCHED = (
    "torch/__init__.py",
    "torch/_compile.py",
    "torch/_dynamo/",
    "torch/_functorch/",
    "torch/_higher_order_ops/",
    "torch/_inductor/",
    "torch/compiler/",
    "torch/fx/",
    "torch/nn/attention/",
)
_ABOUT_PYTHON = (
    "import json,platform,sys,sysconfig;"
    "print(json.dumps({'version':platform.python_version(),'implementation':platform.python_implementation(),"
    "'executable':sys.executable,'prefix':sys.prefix,'base_prefix':sys.base_prefix,'path':sys.path,"
    "'stdlib':sysconfig.get_paths()['stdlib']}))"
)
# Functions that torch's tracing rests on, by module, name and file: each must be the one that torch ships.
_ABOUT_TORCH = """
import importlib, json, os, sys
import torch
home = os.path.dirname(os.path.abspath(torch.__file__))
foreign = []
for module, name, file in (
    ("torch.fx._symbolic_trace", "is_fx_symbolic_tracing", "fx/_symbolic_trace.py"),
    ("torch.fx._symbolic_trace", "is_fx_tracing", "fx/_symbolic_trace.py"),
    ("torch._dynamo.eval_frame", "optimize", "_dynamo/eval_frame.py"),
    ("torch._dynamo.eval_frame", "set_eval_frame", ""),
    ("torch.nn.attention.flex_attention", "flex_attention", "nn/attention/flex_attention.py"),
    ("torch.nn.attention.flex_attention", "create_block_mask", "nn/attention/flex_attention.py"),
    ("torch", "compile", "__init__.py"),
):
    found = getattr(importlib.import_module(module), name, None)
    code = getattr(found, "__code__", None)
    if code is not None and file and os.path.abspath(code.co_filename) != os.path.join(home, file):
        foreign.append("%s.%s is defined in %s" % (module, name, code.co_filename))
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "cuda_available": cuda,
    "devices": torch.cuda.device_count() if cuda else 0, "foreign": foreign,
}))
"""


def collect(request: FactsRequest) -> Dict[str, Any]:
    """The facts, as `dflash_ops.run.facts.Facts` describes them. Never raises for what it finds or cannot find.

    request: `root`; optional `python` (the interpreter's path), `release` (a release's folder), `variables` (names
    of variables the run will have), `seconds` (limit for all parts together, default 20), `gpu` (default true),
    `import_torch` (default false: it takes seconds).
    """
    end = time.monotonic() + float(request.get("seconds", 20))
    given = request.get("python")
    python = _part(lambda: _python(str(given), end)) if given else None
    folders = _site_folders(python)
    packages = _part(lambda: _packages(folders)) if folders else {}
    facts: Dict[str, Any] = {
        "time": time.time(),
        "boot_id": _part(systemd.boot_id),
        "system": _part(_system),
        "python": python,
        "packages": packages,
        "torch": _part(lambda: _torch(folders, end)) if folders else None,
        "hooks": _part(lambda: _hooks(folders, python)) if folders else [],
        "driver": {"kernel": gpu.kernel_driver(), "library": _part(_nvml_version)},
        "gpu": gpu.ask(request["root"], min(10.0, max(1.0, end - time.monotonic())))
        if request.get("gpu", True)
        else None,
        "limits": _part(_limits),
        "disk": _part(lambda: _disks(request["root"])),
        "compile_cache": _part(lambda: _cache(os.path.join(request["root"], "cache", "compile"), end)),
        "release": _part(lambda: _tree_hash(request["release"], end)) if request.get("release") else None,
        "variables": sorted(set(request.get("variables") or [])),
        "manager_variables": _part(_manager_variables),
    }
    if request.get("import_torch") and given:
        facts["imported"] = _part(lambda: _imported(str(given), max(5.0, end - time.monotonic())))
    return facts


def _part(read: Callable[[], Any]) -> Any:
    """A part's value, or {"error": why} where it cannot be read: one bad file must not hide the rest."""
    try:
        return read()
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, error)}


def _read(path: str, limit: int = 1 << 20) -> str:
    with open(path, "rb") as stream:
        return stream.read(limit).decode("utf-8", "replace")


def _maybe(path: str) -> Optional[str]:
    with contextlib.suppress(OSError):
        return _read(path)
    return None


def _system() -> Dict[str, Any]:
    os_release = dict(re.findall(r'^(\w+)="?(.*?)"?$', _maybe("/etc/os-release") or "", re.M))
    version = process.call(["systemctl", "--version"], 5)
    found = re.match(r"systemd (\d+) \(([^)]*)\)|systemd (\d+)", version.stdout)
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _maybe("/proc/meminfo") or "", re.M))
    return {
        "hostname": platform.node(),
        "os": os_release.get("PRETTY_NAME"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "systemd": int(found.group(1) or found.group(3)) if found else None,
        "systemd_build": found.group(2) if found else None,
        "pid1": (_maybe("/proc/1/comm") or "").strip() or None,
        "cpus": len(os.sched_getaffinity(0)),
        "memory": int(memory["MemTotal"]) * 1024 if "MemTotal" in memory else None,
        "memory_available": int(memory["MemAvailable"]) * 1024 if "MemAvailable" in memory else None,
        "timezone": time.strftime("%Z"),
    }


def _python(path: str, end: float) -> Dict[str, Any]:
    done = process.call([path, "-I", "-c", _ABOUT_PYTHON], min(15.0, max(1.0, end - time.monotonic())))
    if done.status != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"error": done.error or "%s ended with status %s: %s" % (path, done.status, last[0])}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    found["path_given"] = path
    return dict(found)


def _site_folders(python: Any) -> List[str]:
    if not isinstance(python, dict) or "path" not in python:
        return []
    return [folder for folder in python["path"] if os.path.isdir(folder)]


def _packages(folders: List[str]) -> Dict[str, str]:
    """Normalised name to version; of two copies the one that an import finds first."""
    found: Dict[str, str] = {}
    for folder in folders:
        for entry in sorted(os.listdir(folder)):
            match = re.match(r"(.+?)-([^-]+)\.(?:dist-info|egg-info)$", entry)
            if match:
                name = re.sub(r"[-_.]+", "-", match.group(1)).lower()
                found.setdefault(name, match.group(2))
    return found


def _torch(folders: List[str], end: float) -> Optional[Dict[str, Any]]:
    """The watched files of torch against the hashes that its wheel came with."""
    for folder in folders:
        for info in glob.glob(os.path.join(glob.escape(folder), "torch-*.dist-info")):
            about = _maybe(os.path.join(folder, "torch", "version.py")) or ""
            build = dict(re.findall(r"^(\w+)(?:: [^=]+)? = ['\"]([^'\"]*)['\"]", about, re.M))
            return {
                "version": os.path.basename(info)[len("torch-") : -len(".dist-info")],
                "cuda": build.get("cuda"),
                "git": build.get("git_version"),
                "folder": os.path.join(folder, "torch"),
                "files": _compare(folder, os.path.join(info, "RECORD"), end),
            }
    return None


def _compare(folder: str, record: str, end: float) -> Dict[str, Any]:
    """`state`: intact, changed, or unknown; how many files were checked; which differ, are gone or were added."""
    text = _maybe_whole(record)
    if text is None:
        return {"state": "unknown", "reason": "torch has no RECORD", "checked": 0, "changed": [], "added": []}
    expected = {
        row[0]: row[1][len("sha256=") :]
        for row in csv.reader(io.StringIO(text))
        if len(row) == 3
        and row[1].startswith("sha256=")
        and row[0].endswith(".py")
        and row[0].startswith(_TORCH_WATCHED)
    }
    changed: List[Dict[str, str]] = []
    checked = 0
    for name, digest in sorted(expected.items()):
        if time.monotonic() > end:
            reason = "time was up after %d of %d files" % (checked, len(expected))
            return {"state": "unknown", "reason": reason, "checked": checked, "changed": changed, "added": []}
        checked += 1
        try:
            with open(os.path.join(folder, name), "rb") as stream:
                actual = base64.urlsafe_b64encode(hashlib.sha256(stream.read()).digest()).rstrip(b"=").decode()
        except OSError:
            actual = "gone"
        if actual != digest:
            changed.append({"file": name, "sha256": actual})
    added = []
    for prefix in _TORCH_WATCHED:
        if prefix.endswith("/"):
            for path in glob.iglob(os.path.join(glob.escape(folder), prefix, "**", "*.py"), recursive=True):
                name = os.path.relpath(path, folder)
                if name not in expected:
                    added.append(name)
    state = "changed" if changed or added else "intact" if checked else "unknown"
    reason = "" if checked else "RECORD lists no hashes"
    return {"state": state, "reason": reason, "checked": checked, "changed": changed[:50], "added": sorted(added)[:50]}


def _maybe_whole(path: str) -> Optional[str]:
    with contextlib.suppress(OSError):
        return _read(path, 64 << 20)
    return None


def _hooks(folders: List[str], python: Any) -> List[Dict[str, str]]:
    """Code that runs at the interpreter's start: sitecustomize, usercustomize, import lines of .pth files."""
    found = []
    for folder in folders:
        for name in ("sitecustomize.py", "usercustomize.py"):
            path = os.path.join(folder, name)
            if os.path.exists(path):
                found.append({"file": os.path.realpath(path), "what": name, "sha256": _sha256(path)})
        if "-packages" not in os.path.basename(folder):
            continue
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.pth"))):
            lines = [line for line in (_maybe(path) or "").splitlines() if line.startswith(("import ", "import\t"))]
            if lines:
                found.append({"file": path, "what": "pth", "sha256": _sha256(path)})
    return found


def _sha256(path: str) -> str:
    with open(path, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def _nvml_version() -> Optional[str]:
    """Version of the container's libnvidia-ml, from the name of the file that the loader finds."""
    cached = process.call(["/sbin/ldconfig", "-p"], 5).stdout
    paths = re.findall(r"libnvidia-ml\.so\.1 .*=> (\S+)", cached)
    paths += glob.glob("/usr/lib/*/libnvidia-ml.so.1") + glob.glob("/usr/lib64/libnvidia-ml.so.1")
    for path in paths:
        match = re.search(r"\.so\.(\d+\.[\d.]+)$", os.path.realpath(path))
        if match:
            return match.group(1)
    return None


def _limits() -> Dict[str, Any]:
    """What systemd itself may have: no unit gets more. [soft, hard], as text because of `unlimited`."""
    found = {}
    for line in _read("/proc/1/limits").splitlines()[1:]:
        match = re.match(r"Max (open files|locked memory|processes|address space)\s+(\S+)\s+(\S+)", line)
        if match:
            found[match.group(1)] = [match.group(2), match.group(3)]
    return found


def _disks(root: str) -> Dict[str, Any]:
    found = {}
    for name, path in (("root", root), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        while not os.path.isdir(path):  # the root folder is made by the first launch
            path = os.path.dirname(path)
        usage = os.statvfs(path)
        found[name] = {
            "path": path,
            "free": usage.f_bavail * usage.f_frsize,
            "total": usage.f_blocks * usage.f_frsize,
            "inodes_free": usage.f_favail,
            "inodes_total": usage.f_files,
        }
    return found


def _files(folder: str, end: float) -> Iterator[Tuple[str, os.stat_result]]:
    """Regular files below a folder, links not followed, while time is left."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if time.monotonic() > end:
                return
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                yield path, os.lstat(path)


def _cache(folder: str, end: float) -> Dict[str, Any]:
    """Size of the compile cache, in all and by key (its first level)."""
    keys: Dict[str, Dict[str, float]] = {}
    for path, found in _files(folder, min(end, time.monotonic() + 3)):
        key = os.path.relpath(path, folder).split(os.sep)[0]
        entry = keys.setdefault(key, {"bytes": 0, "files": 0, "newest": 0})
        entry["bytes"] += found.st_size
        entry["files"] += 1
        entry["newest"] = max(entry["newest"], found.st_mtime)
    newest = sorted(keys.items(), key=lambda item: -item[1]["newest"])
    return {
        "path": folder,
        "bytes": sum(entry["bytes"] for entry in keys.values()),
        "files": sum(entry["files"] for entry in keys.values()),
        "keys": dict(newest[:20]),
    }


def _tree_hash(folder: str, end: float) -> Dict[str, Any]:
    """sha256 of every file of a release, so that two runs' code can be compared file by file."""
    found = {}
    for path, status in _files(folder, end):
        name = os.path.relpath(path, folder)
        if "__pycache__" not in name and status.st_size < 16 << 20:
            found[name] = _sha256(path)
    return {"path": folder, "files": found}


def _manager_variables() -> List[str]:
    """Names of what systemd hands to every unit."""
    done = process.call(["systemctl", "show-environment"], 5)
    return sorted(line.split("=", 1)[0] for line in done.stdout.splitlines() if "=" in line)


def _imported(python: str, limit: float) -> Dict[str, Any]:
    done = process.call([python, "-c", _ABOUT_TORCH], limit)
    if done.status != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"error": done.error or last[0]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
