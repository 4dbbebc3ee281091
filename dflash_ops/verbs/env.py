"""Lists and builds locked environments, and tells which runs use one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from dflash_ops.document import Document
from dflash_ops.errors import ConfigurationError, UsageError
from dflash_ops.plan.interpreter import Interpreter, interpreter
from dflash_ops.plan.release import pack_wheels
from dflash_ops.progress import progress_bar
from dflash_ops.remote.protocol import EnvRequest, StoreRequest
from dflash_ops.run.record import RunName
from dflash_ops.text import counted, size, visible
from dflash_ops.transport.base import result_of
from dflash_ops.verbs.session import Session, parsed

UPLOAD_SECONDS = 6 * 3600.0  # gigabytes of wheels over a slow line; a dead peer is noticed long before


class Platform(BaseModel):
    """What wheels must be made for."""

    machine: str = Field(pattern=r"^[A-Za-z0-9_]{1,40}$")
    glibc: str | None
    python: str = Field(pattern=r"^3\.\d{1,2}$")
    uv: str | None  # its path in the container


class _State(BaseModel):
    state: Literal["built", "present"]


class BuildReport(Document):
    """What became of a build."""

    kind: Literal["env-build"] = "env-build"
    environment: str
    container: str
    lock: str
    path: str
    state: Literal["built", "present"]


def build(session: Session, name: str | None, *, offline: bool = False) -> BuildReport:
    """Build a locked environment where it is missing. Raises DflashError; a failed build leaves nothing behind."""
    wanted = interpreter(session.inventory, name, session.paths)
    if wanted.lock is None:
        raise UsageError(
            f"the environment {wanted.environment} names an interpreter: there is nothing to build",
            f"give it a `lock` in {session.inventory.path}",
        )
    return BuildReport(
        environment=wanted.environment,
        container=session.container_name,
        lock=wanted.lock,
        path=wanted.path,
        state=build_locked(session, wanted, offline=offline),
    )


def build_locked(session: Session, wanted: Interpreter, *, offline: bool = False) -> Literal["built", "present"]:
    """`built` or `present`."""
    session.say(f"building environment {wanted.environment} ({str(wanted.lock)[:12]}) in {session.container_name}")
    session.so_far = "the build ends with the connection and leaves nothing behind"
    wheels = _send_wheels(session, wanted) if offline else None
    request: EnvRequest = {
        "root": session.root,
        "do": "build",
        "name": wanted.environment,
        "lock": str(wanted.lock),
        "text": wanted.lock_text,
        "python": wanted.python,
        "wheels": wheels,
    }
    frames = session.stream("env", request, deadline_between_frames=60)
    value = result_of(frames, lambda frame: session.say("  " + visible(str(frame.value.get("line", "")), 200)))
    return parsed(_State, value).state


def _send_wheels(session: Session, wanted: Interpreter) -> str:
    """Resolve the lock's wheels on this machine, for the container's platform, and store them there."""
    ask: EnvRequest = {"root": session.root, "do": "platform", "python": wanted.python}
    about = parsed(Platform, session.call("env", ask).value)
    with tempfile.TemporaryDirectory(prefix="dflash-wheels-") as folder:
        lock = Path(folder, "lock.txt")
        lock.write_text(wanted.lock_text, encoding="utf-8")
        wheels = Path(folder, "wheels")
        session.say(f"  resolving wheels here for Python {about.python} on {about.machine}")
        _download(["--requirement", str(lock)], about, wheels)
        if about.uv is None:
            _download([_uv_requirement()], about, wheels)
        packed = pack_wheels(wheels)
        session.say(f"  sending {counted(len(packed.files), 'wheel')} ({size(packed.total_bytes)})")
        request: StoreRequest = {
            "root": session.root,
            "shelf": "wheels",
            "name": packed.name,
            "files": packed.manifest(),
        }
        with progress_bar("wheels", quiet=session.quiet) as progress:
            progress.total(packed.total_bytes, 0)
            session.call("store", request, packed.contents(progress.advance), deadline=UPLOAD_SECONDS)
        return packed.name


def _uv_requirement() -> str:
    try:
        return f"uv=={importlib.metadata.version('uv')}"
    except importlib.metadata.PackageNotFoundError:
        return "uv"


def _download(what: list[str], about: Platform, folder: Path) -> None:
    """`pip download` for another machine. Raises ConfigurationError with pip's reason."""
    argv = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), "--progress-bar=off"]
    argv += ["--implementation=cp", f"--python-version={about.python}"]
    for tag in platform_tags(about.machine, about.glibc):
        argv.append(f"--platform={tag}")
    done = subprocess.run([*argv, *what], capture_output=True, text=True, errors="backslashreplace", check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ConfigurationError(
            f"the wheels cannot be had here: {visible(' '.join(errors[-2:]))[:500]}",
            "every package of the lock file needs a wheel for the container's platform",
            detail=done.stderr,
        )


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise ConfigurationError("there is no pip on this machine to fetch wheels with", "install pip beside dflash")
    return [found, "--disable-pip-version-check", "--no-input"]


def platform_tags(machine: str, glibc: str | None) -> list[str]:
    """Tags of wheels that run there, the newest first (PEP 600, and the older aliases)."""
    if glibc is None:
        return [f"musllinux_1_{minor}_{machine}" for minor in range(2, 0, -1)] + [f"linux_{machine}"]
    minor = int(glibc.split(".")[1]) if glibc.count(".") >= 1 and glibc.split(".")[1].isdigit() else 17
    tags = [f"manylinux_2_{each}_{machine}" for each in range(min(minor, 60), 4, -1)]
    return [*tags, f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]


class Built(BaseModel):
    """A locked environment in the container."""

    lock: str = Field(pattern=r"^[0-9a-f]{32}$")
    environments: list[str] = Field(
        default_factory=list, description="Entries of this inventory whose lock file has this hash"
    )
    name: str | None = Field(description="What it was called when it was built")
    python: str | None
    packages: int | None
    built: float | None = Field(description="Unix seconds by the container's clock")
    bytes: int
    runs: list[RunName] = Field(description="Runs that were launched with it, the newest first")


class _Listed(BaseModel):
    environments: list[Built]
    interpreters: dict[str, list[RunName]]


class EnvironmentList(Document):
    """The environments of a container."""

    kind: Literal["env-list"] = "env-list"
    container: str
    built: list[Built]
    not_built: list[str] = Field(description="Locked environments of the inventory that are not there")
    interpreters: dict[str, str] = Field(description="Environments that name an interpreter")
    interpreter_runs: dict[str, list[str]] = Field(description="Runs that were launched with these, the newest first")


def listing(session: Session) -> EnvironmentList:
    """What is built, and who uses it. Raises DflashError."""
    wanted: dict[str, str | None] = {}
    interpreters = {}
    for name in session.inventory.environments:
        found = interpreter(session.inventory, name, session.paths)
        if found.lock is None:
            interpreters[name] = found.path
        else:
            wanted[name] = found.lock
    request: EnvRequest = {"root": session.root, "do": "list"}
    answer = parsed(_Listed, session.call("env", request).value)
    there = answer.environments
    built = [
        entry.model_copy(update={"environments": [name for name, lock in wanted.items() if lock == entry.lock]})
        for entry in there
    ]
    locks = {entry.lock for entry in built}
    missing = [name for name, lock in wanted.items() if lock not in locks]
    return EnvironmentList(
        container=session.container_name,
        built=built,
        not_built=missing,
        interpreters=interpreters,
        interpreter_runs={name: answer.interpreters.get(path, []) for name, path in interpreters.items()},
    )


class EnvironmentUses(Document):
    """Who uses an environment."""

    kind: Literal["env-uses"] = "env-uses"
    container: str
    environment: str
    runs: list[str] = Field(description="The newest first")


def uses(listed: EnvironmentList, name: str) -> EnvironmentUses:
    """Runs launched with an environment, by its name here or the beginning of its hash. Raises DflashError."""
    for entry in listed.built:
        if name in entry.environments or (len(name) >= 4 and entry.lock.startswith(name)):
            return EnvironmentUses(container=listed.container, environment=name, runs=entry.runs)
    if name in listed.not_built:
        return EnvironmentUses(container=listed.container, environment=name, runs=[])
    if name in listed.interpreter_runs:
        return EnvironmentUses(container=listed.container, environment=name, runs=listed.interpreter_runs[name])
    known = [
        *listed.interpreter_runs,
        *listed.not_built,
        *(one for entry in listed.built for one in entry.environments),
    ]
    raise UsageError(f"there is no environment {name!r}", f"known: {', '.join(sorted(known)) or 'none'}")
