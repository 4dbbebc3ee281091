"""Holds what inventory.yaml may say: hosts, containers, environments and jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dflash_ops.errors import ConfigurationError, UsageError
from trainer.core_schema import no_boolean_as_number

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
# Part of unit properties, where quoting is systemd's: kept to characters that need none.
PlainPath = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$")]
# They reach known_hosts, ssh's ProxyCommand and commands that messages offer: no space, quote or leading `-`.
Address = Annotated[str, Field(pattern=r"^[\w:\[][\w.:%\[\]-]*$")]
User = Annotated[str, Field(pattern=r"^\w[\w.@+\\-]*\$?$")]
Kind = TypeVar("Kind")
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _expand_indices(value: object) -> object:
    """`[0, 1]`, `3`, "0-4", "0-2,5" or `[0-2, 5]` as a list of GPU indices, which are written in decimal digits."""
    if isinstance(value, list):
        return [index for item in value for index in _range_of(item)]
    if isinstance(value, str):
        return [index for part in value.split(",") for index in _range_of(part)]
    return _range_of(value)


def _range_of(part: object) -> Sequence[int]:
    if isinstance(part, int) and not isinstance(part, bool):
        return [part]
    match = re.fullmatch(r"\s*([0-9]{1,3})(?:-([0-9]{1,3}))?\s*", part) if isinstance(part, str) else None
    if match is None:
        raise ValueError(f'{part!r} names no GPUs; write them like "0-4" or "0,2,5-7"')
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{match[0].strip()!r} runs backwards; write the smaller number first")
    return range(first, last + 1)


def _decimal(value: object) -> object:
    """A container's number, written in decimal digits."""
    if isinstance(value, str):
        if not re.fullmatch("[0-9]{1,12}", value):
            raise ValueError(f"a container's number is written in decimal digits, like 200 (it is {value!r})")
        return int(value)
    return value


def _each_once(found: list[int]) -> list[int]:
    if len(set(found)) < len(found):
        raise ValueError("a GPU is named twice")
    return found


GpuIndices = Annotated[
    list[Annotated[int, Field(ge=0, le=999)]], BeforeValidator(_expand_indices), AfterValidator(_each_once)
]


class Entry(BaseModel):
    """A part of the inventory: frozen; unknown keys, and numbers that are none, are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: object, info: ValidationInfo) -> object:
        return no_boolean_as_number(value, cls.model_fields[str(info.field_name)].annotation)


class HostEntry(Entry):
    """A machine that is reached by ssh."""

    address: Address = Field(description="Name or address; may be a Host of the ssh configuration")
    user: User | None = Field(None, description="Default: what the ssh configuration says, else your own name")
    port: int | None = Field(None, ge=1, le=65535)
    identity: Path | None = Field(
        None, description="Key file, then the only one; default: ssh configuration, agent, ~/.ssh"
    )
    known_hosts: Path | None = Field(None, description="Default: what the ssh configuration says, ~/.ssh/known_hosts")
    ssh_config: Path | None = Field(None, description="Default: ~/.ssh/config")
    jump: list[str] = Field(default_factory=list, description="Hosts of this inventory, or user@address:port, in order")
    sudo: bool = Field(False, description="Go through `sudo -n`: the user is not root")
    connect_timeout: float = Field(10.0, gt=0, description="Seconds to open the connection")
    via: Literal["paramiko", "openssh"] = Field("paramiko", description="openssh: run the `ssh` client")
    cure: str | None = Field(None, description="Said in place of general advice when the host is down")


class ContainerEntry(Entry):
    """A container on a host."""

    host: str = Field(description="A key of `hosts`, or `local`: this machine itself")
    container: Annotated[int | None, BeforeValidator(_decimal)] = Field(
        None, ge=100, le=999_999_999, description="The container's number (VMID)"
    )
    enter: Literal["pct", "lxc-attach"] = "pct"
    root: PlainPath = Field("/var/lib/dflash", description="Folder in the container that holds runs and releases")

    @model_validator(mode="after")
    def _container_is_named(self) -> ContainerEntry:
        if (self.host == "local") != (self.container is None):
            raise ValueError("a container needs its number, `container: <vmid>`, unless its host is `local`")
        return self


class EnvironmentEntry(Entry):
    """The interpreter that runs the trainer: one that exists, or one built from a lock file."""

    python: str = Field(
        min_length=1,
        description="Without lock: the interpreter's path in the container; a relative one starts at the inventory's "
        "folder, for containers that share it. With lock: a version such as 3.11, or an interpreter's path",
    )
    lock: Path | None = Field(None, description="requirements file with exact versions (uv export, pip freeze)")

    @model_validator(mode="after")
    def _python_is_what_lock_needs(self) -> EnvironmentEntry:
        if "\0" in self.python or "\n" in self.python:
            raise ValueError("`python` must be a path of one line")
        if self.lock is not None and not re.fullmatch(r"(/.+)|(3\.\d{1,2}(\.\d{1,2})?)", self.python):
            raise ValueError("with `lock`, `python` is a version such as 3.11 or an absolute path in the container")
        return self


class GpuEntry(Entry):
    """Which GPUs of the container do what."""

    target: GpuIndices = Field(default_factory=list)
    drafters: GpuIndices = Field(default_factory=list)


class JobEntry(Entry):
    """Something to launch."""

    config: Path | dict[Any, Any] = Field(description="The trainer's configuration: a YAML file, or written here")
    environment: str | None = Field(None, description="A key of `environments`; default: the only one")
    containers: list[str] | None = Field(
        None, min_length=1, description="Keys of `containers`; it may run nowhere else"
    )
    set: dict[str, Any] = Field(default_factory=dict, description="Dotted keys of the configuration and their values")
    source: Path | None = Field(None, description="Folder of Python code to ship; default: the trainer package")
    include: list[str] = Field(
        default_factory=list, description="Files of `source` to ship although git ignores them or they are hidden"
    )
    gpus: GpuEntry | None = Field(None, description="Sets pipeline.targets and pipeline.drafters of the configuration")
    watchdog: int | None = Field(
        3600,
        ge=1,
        description="Most seconds without a step until systemd aborts the run; the trainer shortens them to what its "
        "steps take; null: it is never aborted",
    )
    env: dict[VariableName, str] = Field(
        default_factory=dict, description="Variables of the trainer; `env:NAME` and `file:PATH` are read at launch"
    )
    wait: Literal["none", "started", "step"] = "started"
    timeout: float = Field(120.0, gt=0, description="Seconds that launch waits")

    @field_validator("env", mode="before")
    @classmethod
    def _values_stand_there(cls, value: object) -> object:
        for key, item in value.items() if isinstance(value, dict) else ():
            if item is None:
                raise ValueError(f"{key} has no value; write '' to mean an empty one")
        return value


class Inventory(Entry):
    """The whole file. `path` is where it came from; relative paths in it start at its folder."""

    path: Path = Field(exclude=True)
    default_container: str | None = None
    default_job: str | None = None
    hosts: dict[Name, HostEntry] = Field(default_factory=dict)
    containers: dict[Name, ContainerEntry]
    environments: dict[Name, EnvironmentEntry] = Field(default_factory=dict)
    jobs: dict[Name, JobEntry] = Field(default_factory=dict)

    def resolve(self, path: Path) -> Path:
        """A path of the inventory on this machine."""
        return self.path.parent / home_expanded(path)

    def resolve_python(self, python: str) -> Path:
        """An interpreter's path in the container; a relative one is shared with this machine."""
        return self.path.parent / python

    def container(self, name: str | None) -> tuple[str, ContainerEntry]:
        """The named container, else the default one, else the only one. Raises UsageError."""
        return self._choose("container", self.containers, name or self.default_container, "--container NAME")

    def job(self, name: str | None) -> tuple[str, JobEntry]:
        """The named job, else the default one, else the only one. Raises UsageError."""
        return self._choose("job", self.jobs, name or self.default_job, "its name")

    def environment(self, name: str | None) -> tuple[str, EnvironmentEntry]:
        """The named environment, else the only one. Raises UsageError."""
        return self._choose("environment", self.environments, name, "`environment:` in the job")

    def _choose(self, what: str, known: dict[str, Kind], name: str | None, how: str) -> tuple[str, Kind]:
        if not known:
            raise UsageError(f"the inventory has no {what}s", f"add one under `{what}s:` of {self.path}")
        if name is None:
            if len(known) == 1:
                return next(iter(known.items()))
            hint = f"give {how}; known: {listed(known)}"
            raise UsageError(f"the inventory has {len(known)} {what}s: say which", hint)
        if name not in known:
            hint = "give --set before each change: `--set a=1 --set b=2`" if "=" in name else f"known: {listed(known)}"
            raise UsageError(f"the inventory has no {what} {name!r}", hint)
        return name, known[name]


def listed(known: dict[str, Any]) -> str:
    return ", ".join(known) or "none"


def home_expanded(path: Path) -> Path:
    """`~` and `~user` at the beginning replaced. Raises ConfigurationError when there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"the home folder of {path} is not known", "write the whole path") from error
