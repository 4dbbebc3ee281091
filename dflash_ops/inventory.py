"""Which hosts, targets, environments and jobs are there? inventory.yaml, checked; errors name file, line and cure."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dflash_ops.errors import ConfigurationError, UsageError

MAX_BYTES = 1024 * 1024
MAX_NODES = 100_000  # aliases of aliases multiply: a small file can be a huge tree

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
# Part of unit properties, where quoting is systemd's: kept to characters that need none.
PlainPath = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$")]
# They reach known_hosts, ssh's ProxyCommand and commands that messages offer: no space, quote or leading `-`.
Address = Annotated[str, Field(pattern=r"^[\w:\[][\w.:%\[\]-]*$")]
User = Annotated[str, Field(pattern=r"^\w[\w.@+\\-]*\$?$")]
Kind = TypeVar("Kind")
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _expand_indices(value: object) -> object:
    """`[0, 1]`, `3`, "0-4" or "0-2,5" as a list of GPU indices."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    found: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if match is None:
            raise ValueError(f'{value!r} names no GPUs; write them like "0-4" or "0,2,5-7"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()!r} runs backwards; write the smaller number first")
        found.extend(range(first, last + 1))
    return found


def _each_once(found: list[int]) -> list[int]:
    if len(set(found)) < len(found):
        raise ValueError("a GPU is named twice")
    return found


GpuIndices = Annotated[
    list[Annotated[int, Field(ge=0, le=999)]], BeforeValidator(_expand_indices), AfterValidator(_each_once)
]


class Entry(BaseModel):
    """A part of the inventory: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class HostEntry(Entry):
    """A machine that is reached by ssh."""

    address: Address = Field(description="Name or address; may be a Host of the ssh configuration")
    user: User | None = Field(None, description="Default: what the ssh configuration says, else your own name")
    port: int | None = Field(None, ge=1, le=65535)
    identity: Path | None = Field(None, description="Key file, then the only one; default: ssh configuration, agent, ~/.ssh")
    known_hosts: Path | None = Field(None, description="Default: what the ssh configuration says, ~/.ssh/known_hosts")
    ssh_config: Path | None = Field(None, description="Default: ~/.ssh/config")
    jump: list[str] = Field(default_factory=list, description="Hosts of this inventory, or user@address:port, in order")
    sudo: bool = Field(False, description="Go through `sudo -n`: the user is not root")
    connect_timeout: float = Field(10.0, gt=0, description="Seconds to open the connection")
    via: Literal["paramiko", "openssh"] = Field("paramiko", description="openssh: run the `ssh` client")
    cure: str | None = Field(None, description="Said in place of general advice when the host is down")


class TargetEntry(Entry):
    """A container on a host."""

    host: str = Field(description="A key of `hosts`, or `local`: this machine itself")
    container: int | None = Field(None, ge=100, le=999_999_999, description="The container's number (VMID)")
    enter: Literal["pct", "lxc-attach"] = "pct"
    root: PlainPath = Field("/var/lib/dflash", description="Folder in the container that holds runs and releases")

    @model_validator(mode="after")
    def _container_is_named(self) -> TargetEntry:
        if (self.host == "local") != (self.container is None):
            raise ValueError("a target needs `container: <vmid>`, unless its host is `local`")
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
    targets: list[str] | None = Field(None, min_length=1, description="Keys of `targets`; it may run nowhere else")
    set: dict[str, Any] = Field(default_factory=dict, description="Dotted keys of the configuration and their values")
    source: Path | None = Field(None, description="Folder of Python code to ship; default: the trainer package")
    gpus: GpuEntry | None = Field(None, description="Sets pipeline.targets and pipeline.drafters of the configuration")
    watchdog: int | None = Field(None, ge=1, description="Seconds without a step after which systemd aborts the run")
    env: dict[VariableName, str] = Field(
        default_factory=dict, description="Variables of the trainer; `env:NAME` and `file:PATH` are read at launch"
    )
    wait: Literal["none", "started", "step"] = "started"
    timeout: float = Field(120.0, gt=0, description="Seconds that launch waits")

    @field_validator("env", mode="before")
    @classmethod
    def _scalars_as_text(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {key: str(item) if isinstance(item, int | float) else item for key, item in value.items()}


class Inventory(Entry):
    """The whole file. `path` is where it came from; relative paths in it start at its folder."""

    path: Path = Field(exclude=True)
    default_target: str | None = None
    default_job: str | None = None
    hosts: dict[Name, HostEntry] = Field(default_factory=dict)
    targets: dict[Name, TargetEntry]
    environments: dict[Name, EnvironmentEntry] = Field(default_factory=dict)
    jobs: dict[Name, JobEntry] = Field(default_factory=dict)

    def resolve(self, path: Path) -> Path:
        """A path of the inventory on this machine."""
        return self.path.parent / home_expanded(path)

    def resolve_python(self, python: str) -> Path:
        """An interpreter's path in the container; a relative one is shared with this machine."""
        return self.path.parent / python

    def target(self, name: str | None) -> tuple[str, TargetEntry]:
        """The named target, else the default one, else the only one. Raises UsageError."""
        return self._choose("target", self.targets, name or self.default_target, "--target NAME")

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
            hint = f"give {how}; known: {_listed(known)}"
            raise UsageError(f"the inventory has {len(known)} {what}s: say which", hint)
        if name not in known:
            hint = "give --set before each change: `--set a=1 --set b=2`" if "=" in name else f"known: {_listed(known)}"
            raise UsageError(f"the inventory has no {what} {name!r}", hint)
        return name, known[name]


def _listed(known: dict[str, Any]) -> str:
    return ", ".join(known) or "none"


def home_expanded(path: Path) -> Path:
    """`~` and `~user` at the beginning replaced. Raises ConfigurationError when there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"the home folder of {path} is not known", "write the whole path") from error


def inventory_path(given: Path | None) -> Path:
    """--inventory, else $DFLASH_INVENTORY, else ./inventory.yaml."""
    return given or Path(os.environ.get("DFLASH_INVENTORY") or "inventory.yaml")


def load_inventory(given: Path | None = None) -> Inventory:
    """Raises ConfigurationError naming file and line."""
    path = inventory_path(given)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the inventory {path}: {error.strerror}",
            "run dflash in the folder of inventory.yaml, or name the file by --inventory or DFLASH_INVENTORY",
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigurationError(f"the inventory {path} is larger than {MAX_BYTES >> 20} MiB", "is it the right file?")
    value, lines = read_yaml(data, path)
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}:1: the inventory must be a mapping", "begin with `targets:`")
    if "path" in value:
        raise ConfigurationError(f"{path}:{lines.get(('path',), 1)}: unknown key `path`", "remove it")
    try:
        inventory = Inventory.model_validate({**value, "path": path.absolute()})
    except ValidationError as error:
        raise _explained(error, path, lines) from error
    _check_references(inventory, path, lines)
    return inventory


Lines = dict[tuple[str | int, ...], int]


def read_yaml(data: bytes, path: Path) -> tuple[Any, Lines]:
    """A YAML document and the line of each of its keys and items. Raises ConfigurationError."""
    lines: Lines = {}
    try:
        loader = yaml.SafeLoader(data)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            _mark(node, (), lines, path, [0])
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigurationError(f"{path}:{line}: {error.problem or error.context}", _yaml_cure(error)) from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{path}: it is not YAML: {reason}", "correct the file") from error


def _yaml_cure(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "write spaces instead of the tab, and indent like the line above"
    if problem.startswith("expected <block end>"):
        return "indent with spaces, like the line above"
    if problem.startswith(("mapping values are not allowed", "could not find expected ':'")):
        return "look at the line above too: is a colon missing, or the indent off? (text that holds `: ` needs quotes)"
    return "correct the YAML there"


def _mark(node: yaml.Node, where: tuple[str | int, ...], lines: Lines, path: Path, seen: list[int]) -> None:
    """Note lines; refuse duplicate keys, which YAML readers let win silently."""
    seen[0] += 1
    if seen[0] > MAX_NODES:
        raise ConfigurationError(f"{path}: the document has more than {MAX_NODES} nodes", "write out its aliases")
    lines.setdefault(where, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.value)
            line = key.start_mark.line + 1
            if name in keys and name != "<<":
                raise ConfigurationError(f"{path}:{line}: the key `{name}` stands twice", "remove one of them")
            keys.add(name)
            lines[(*where, name)] = line
            _mark(value, (*where, name), lines, path, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*where, index)] = value.start_mark.line + 1
            _mark(value, (*where, index), lines, path, seen)


def _explained(error: ValidationError, path: Path, lines: Lines) -> ConfigurationError:
    # A misspelt key is also a missing one: the cause is said, not its effect.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    loc = first["loc"]
    where: tuple[str | int, ...] = ()
    while len(where) < len(loc) and (*where, loc[len(where)]) in lines:
        where = (*where, loc[len(where)])
    dotted = ".".join(str(part) for part in where)
    line = lines.get(where, 1)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(loc[-1]), _known_keys(loc[:-1]), 1)
        hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(_known_keys(loc[:-1]))}"
        return ConfigurationError(f"{path}:{line}: unknown key `{dotted}`", hint)
    if first["type"] == "missing":
        place = f" in `{dotted}`" if dotted else ""
        return ConfigurationError(f"{path}:{line}: the key `{loc[-1]}` is missing{place}", "add it")
    message = first["msg"].removeprefix("Value error, ")
    return ConfigurationError(f"{path}:{line}: `{dotted}`: {message}", "correct it there")


_SECTIONS: dict[str, type[Entry]] = {
    "hosts": HostEntry,
    "targets": TargetEntry,
    "environments": EnvironmentEntry,
    "jobs": JobEntry,
}


def _known_keys(where: tuple[str | int, ...]) -> list[str]:
    if not where:
        return [name for name in Inventory.model_fields if name != "path"]
    if "gpus" in where:
        return list(GpuEntry.model_fields)
    return list(_SECTIONS[str(where[0])].model_fields)


def _check_references(inventory: Inventory, path: Path, lines: Lines) -> None:
    """Every name that stands for another entry must exist."""

    def check(what: str, name: str | None, known: dict[str, Any], *where: str | int) -> None:
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {_listed(known)}"
            raise ConfigurationError(f"{path}:{lines.get(where, 1)}: there is no {what} `{name}`", hint)

    check("target", inventory.default_target, inventory.targets, "default_target")
    check("job", inventory.default_job, inventory.jobs, "default_job")
    for key, target in inventory.targets.items():
        if target.host != "local":
            check("host", target.host, inventory.hosts, "targets", key, "host")
    for key, job in inventory.jobs.items():
        check("environment", job.environment, inventory.environments, "jobs", key, "environment")
        for index, target_name in enumerate(job.targets or ()):
            check("target", target_name, inventory.targets, "jobs", key, "targets", index)
