"""Defines a run: its name, the paths of its files, and the records kept in them."""

from __future__ import annotations

import getpass
import re
import socket
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from dflash_ops.document import Epoch, Printable
from dflash_ops.errors import UsageError
from dflash_ops.remote import protocol
from dflash_ops.remote.protocol import RUN_FILES
from dflash_ops.text import visible

RUN_NAME = re.compile(rf"{protocol.RUN_NAME}\Z")
RunName = Annotated[str, Field(pattern=f"^{protocol.RUN_NAME}$")]  # the same rule in an answer of the container


def check_run_name(name: str) -> str:
    """The name itself. Raises UsageError when it is not a run name."""
    if not RUN_NAME.match(name):
        raise UsageError(
            f"{name!r} is not a run name",
            "use 1 to 63 of the letters a-z, digits and `-`, beginning with a letter or digit",
        )
    return name


class RootPaths:
    """The folders under a container's root. `dflash_ops.remote.files` is the container's view of the same names."""

    def __init__(self, root: str) -> None:
        self.root = PurePosixPath(root)
        self.runs = self.root / "runs"
        self.releases = self.root / "releases"
        self.environments = self.root / "env"
        self.compile_cache = self.root / "cache" / "compile"

    def run(self, run: str) -> RunPaths:
        """The files of a run. Raises UsageError for what is not a run name."""
        return RunPaths(self.runs / check_run_name(run))


class RunPaths:
    """The files of a run, as paths in the container."""

    def __init__(self, directory: PurePosixPath) -> None:
        self.directory = directory
        self.spec = directory / RUN_FILES["spec"]
        self.facts = directory / RUN_FILES["facts"]
        self.started = directory / RUN_FILES["started"]
        self.exit = directory / RUN_FILES["exit"]
        self.kill_requested = directory / RUN_FILES["kill_requested"]
        self.config = directory / RUN_FILES["config"]
        self.entry = directory / RUN_FILES["entry"]
        self.on_exit = directory / RUN_FILES["on_exit"]
        self.env = directory / RUN_FILES["env"]
        self.log = directory / RUN_FILES["log"]
        self.metrics = directory / RUN_FILES["metrics"]
        self.compile = directory / RUN_FILES["compile"]
        self.checkpoints = directory / RUN_FILES["checkpoints"]


class Record(BaseModel):
    """A JSON file of a run. Unknown fields are ignored: newer versions may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class GpuRoles(Record):
    """Indices of the container's GPUs by what they do in the run; both empty on CPU."""

    target: list[int] = Field(default_factory=list)
    drafters: list[int] = Field(default_factory=list)

    @property
    def all(self) -> list[int]:
        """Every GPU of the run, once."""
        return sorted({*self.target, *self.drafters})


class RunSpec(Record):
    """spec.json: what was asked."""

    schema_version: int = Field(1, alias="schema")
    run: Printable
    job: Printable
    container: Printable = Field(validation_alias=AliasChoices("container", "target"))  # runs of 0.1 say `target`
    created: Epoch  # unix seconds, the container's clock
    boot_id: str | None = None  # of the container in which it was made
    launched_by: Printable  # user@machine of the laptop
    release: Printable  # content hash
    environment: Printable
    python: Printable  # the interpreter's path
    lock: Printable | None = None  # hash of the lock file when the environment is a locked one
    config: dict[str, Any]
    gpus: GpuRoles
    variables: list[str] = Field(default_factory=list)  # names only: values may be secrets
    watchdog: int | None = None  # seconds
    resumed_from: Printable | None = None  # the run directory whose newest whole checkpoint it began with


class Started(Record):
    """started.json: systemd took the unit."""

    time: Epoch
    unit: str
    invocation_id: str
    boot_id: str
    main_pid: int
    systemd_version: str
    limits: dict[str, str] = Field(default_factory=dict)  # what the container really granted


class ExitRecord(Record):
    """exit.json, written by the unit's ExecStopPost with the words that systemd gives it."""

    time: Epoch
    result: str  # success, exit-code, signal, timeout, watchdog, oom-kill, ...
    exit_code: str | None  # exited, killed, dumped
    exit_status: str | None  # a number or a signal's name
    invocation_id: str
    boot_id: str
    oom_kills: int | None = None  # of the unit's cgroup, where the kernel counts them
    # Whether systemd had a stop job for the unit (`systemctl show -p Job` is not empty or 0): a trainer that obeys
    # SIGTERM exits with status 0 like one that is done, and only this tells a container's shutdown from success.
    stop_requested: bool | None = None


class KillRequest(Record):
    """kill-requested.json: somebody asked for the end."""

    time: Epoch
    by: str
    grace: float  # seconds
    force: bool = False
    sent: bool = True  # systemd took it; false from the moment before until then. Older records do not say


class RunRecord(Record):
    """The records of a run that exist."""

    run: str
    spec: RunSpec | None = None
    started: Started | None = None
    exit: ExitRecord | None = None
    kill_requested: KillRequest | None = None


def launched_by() -> str:
    """`user@machine`, printable."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "?"
    return visible(f"{user}@{socket.gethostname()}", 100)
