"""Lists locked environments and builds one beside them; it gets its name only when it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import time
import zipfile
from typing import Any, Dict, List, Optional

from dflash_ops.remote import files, process
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.protocol import CONFIGURATION, TEMPORARY, EnvRequest

DONE = ".dflash-environment.json"  # written last, before the rename
_HASH = re.compile(r"[0-9a-f]{32}\Z")


def main(request: EnvRequest, channel: Channel) -> Dict[str, Any]:
    """request: `root`; `do`: list, platform (with `python`) or build (see `build`)."""
    if request["do"] == "list":
        return {"environments": listing(request["root"]), "interpreters": _interpreters(request["root"])}
    if request["do"] == "platform":
        return _platform(request["python"])
    return build(request, channel)


def listing(root: str) -> List[Dict[str, Any]]:
    """Every finished environment, its size, and the runs that were launched with it."""
    base = os.path.join(files.checked_root(root), "env")
    users: Dict[str, List[str]] = {}
    for run in files.run_names(root):
        spec = files.read_json(files.RunPaths(root, run).spec) or {}
        if spec.get("lock"):
            users.setdefault(str(spec["lock"]), []).append(run)
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if _HASH.match(entry.name):
                done = files.read_json(os.path.join(entry.path, DONE)) or {}
                found.append(
                    {
                        "lock": entry.name,
                        "name": done.get("name"),
                        "python": done.get("python"),
                        "packages": done.get("packages"),
                        "built": done.get("time"),
                        "bytes": files.tree_bytes(entry.path),
                        "runs": users.get(entry.name, []),
                    }
                )
    return sorted(found, key=lambda each: -(each["built"] or 0))


def _interpreters(root: str) -> Dict[str, List[str]]:
    """The runs that were launched with an interpreter that dflash did not build, by its path."""
    users: Dict[str, List[str]] = {}
    for run in files.run_names(root):
        spec = files.read_json(files.RunPaths(root, run).spec) or {}
        if spec.get("python") and not spec.get("lock"):
            users.setdefault(str(spec["python"]), []).append(run)
    return users


def _platform(python: str) -> Dict[str, Any]:
    """What wheels must be made for; whether there is a uv."""
    version = python
    if python.startswith("/"):
        done = process.call([python, "-I", "-S", "-c", "import sys;print('%d.%d'%sys.version_info[:2])"], 20)
        if done.status != 0:
            raise Refusal(CONFIGURATION, "%s in the container does not run" % python, "correct `python`", "no-python")
        version = done.stdout.strip()
    libc, number = platform.libc_ver()
    return {
        "machine": platform.machine(),
        "glibc": number if libc == "glibc" else None,
        "python": ".".join(version.split(".")[:2]),
        "uv": _find_uv(python),
    }


def _find_uv(python: str) -> Optional[str]:
    beside = os.path.join(os.path.dirname(python), "uv") if python.startswith("/") else ""
    for path in (shutil.which("uv"), "/usr/local/bin/uv", "/root/.local/bin/uv", beside):
        if path and os.access(path, os.X_OK):
            return path
    return None


def build(request: EnvRequest, channel: Channel) -> Dict[str, Any]:
    """Build one.

    request: `root`; `name`, the environment's in the inventory; `lock`, its hash; `text`, the lock file; `python`, a
    version or a path; `wheels`, the name of a stored folder of wheels, or null to use the network. Events: {line}.
    """
    root, lock = files.checked_root(request["root"]), request["lock"]
    if not _HASH.match(lock):
        raise Refusal(CONFIGURATION, "%r is not the hash of a lock file" % lock)
    base = os.path.join(root, "env")
    final = os.path.join(base, lock)
    os.makedirs(base, exist_ok=True)
    with _alone(os.path.join(base, "." + lock + ".lock"), channel):
        if os.path.isdir(final):
            return {"state": "present"}
        _sweep(base, lock)
        temporary = os.path.join(base, "%s.tmp-%d" % (lock, time.time_ns()))
        os.mkdir(temporary)
        try:
            _fill(request, root, temporary, channel)
            os.sync()  # tens of thousands of files: one call for all of them
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        files.fsync_directory(base)
    if request["wheels"]:
        shutil.rmtree(os.path.join(root, "wheels", request["wheels"]), ignore_errors=True)
    return {"state": "built"}


@contextlib.contextmanager
def _alone(path: str, channel: Channel) -> Any:
    """One build of a lock at a time; the second waits for the first and finds its work."""
    begin = time.monotonic()
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(files.locked(path, 1))
            except Refusal:
                if time.monotonic() - begin < 2:
                    channel.event(line="another command builds this environment: waiting for it")
                channel.pause(1)
                continue
            yield
            return


def _sweep(base: str, lock: str) -> None:
    """Under the lock nobody else builds this one, so what lies there was left by a build that was killed."""
    for entry in os.scandir(base):
        if entry.name.startswith(lock + ".tmp-"):
            shutil.rmtree(entry.path, ignore_errors=True)


def _fill(request: EnvRequest, root: str, place: str, channel: Channel) -> None:
    wheels = None
    if request["wheels"]:
        wheels = os.path.join(root, "wheels", request["wheels"], "wheels")
    uv = _find_uv(request["python"]) or _shipped_uv(wheels, place)
    if uv is None:
        raise Refusal(
            CONFIGURATION,
            "there is no uv in the container",
            "install it there (https://docs.astral.sh/uv), or use --offline, which brings it along",
            "no-uv",
        )
    text = os.path.join(place, "lock.txt")
    files.write_file(text, request["text"].encode("utf-8"))
    offline = ["--offline", "--no-index", "--find-links", wheels] if wheels else []
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "UV_CACHE_DIR": os.path.join(root, "cache", "uv"),
        "UV_PYTHON_INSTALL_DIR": os.path.join(root, "python"),
        "UV_NO_CONFIG": "1",
        "UV_LINK_MODE": "copy",  # an environment shares no file with a cache that may be cleaned
        "UV_NO_PROGRESS": "1",
    }
    # Relocatable: it is built under another name than it will have.
    venv = [uv, "venv", "--relocatable", "--allow-existing", "--python", request["python"], *offline[:1], place]
    _uv(venv, environment, channel)
    python = os.path.join(place, "bin", "python")
    # sync installs the lock file and nothing beside it; what the lock forgot is missing, not guessed.
    _uv([uv, "pip", "sync", "--python", python, *offline, text], environment, channel)
    listed = process.call([uv, "pip", "list", "--python", python, "--format", "json"], 60, environment)
    version = process.call([python, "-I", "-c", "import platform;print(platform.python_version())"], 60)
    if version.status != 0:
        raise Refusal(CONFIGURATION, "the interpreter that was built does not run: %s" % version.stderr.strip()[-300:])
    done = {"name": request["name"], "python": version.stdout.strip(), "time": time.time()}
    with contextlib.suppress(ValueError):
        done["packages"] = len(json.loads(listed.stdout))
    files.write_json(os.path.join(place, DONE), done)


def _shipped_uv(wheels: Optional[str], place: str) -> Optional[str]:
    """uv out of its own wheel, when that came along."""
    names = [name for name in os.listdir(wheels) if name.startswith("uv-")] if wheels else []
    if not names or wheels is None:
        return None
    with zipfile.ZipFile(os.path.join(wheels, names[0])) as archive:
        for member in archive.namelist():
            if member.endswith(".data/scripts/uv"):
                path = os.path.join(place, ".uv")
                with archive.open(member) as source, open(path, "wb") as sink:
                    shutil.copyfileobj(source, sink)
                os.chmod(path, stat.S_IRWXU)
                return path
    return None


def _uv(argv: List[str], environment: Dict[str, str], channel: Channel) -> None:
    """Run uv, passing on what it says line by line. Raises Refusal with its last words."""
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    said: List[str] = []
    rest = b""

    def tell(_: str, data: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            said.append(line.decode("utf-8", "backslashreplace").rstrip())
            channel.event(line=said[-1][:500])

    status = process.pass_on(child, lambda: channel.pause(0), tell)
    if status != 0:
        words = " ".join(line.strip() for line in said[-6:] if line.strip())[:800]
        code = TEMPORARY if "onnect" in words or "timed out" in words else CONFIGURATION
        hint = "correct the lock file" if code == CONFIGURATION else "without network, build with --offline"
        raise Refusal(code, "uv failed, and nothing was kept: %s" % words, hint, "uv")
