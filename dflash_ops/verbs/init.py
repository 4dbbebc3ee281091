"""Makes the first inventory: looks at a host's containers, writes the chosen ones down, and ends with `doctor`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from dflash_ops.errors import DflashError, Exit, UsageError
from dflash_ops.inventory.load import inventory_path, load_inventory
from dflash_ops.inventory.models import ContainerEntry, HostEntry, Inventory
from dflash_ops.inventory.write import Addition, extended, new_text, write
from dflash_ops.remote.protocol import InitRequest
from dflash_ops.transport.base import Misconfigured, NoPython, NotPermitted, Program, result_of
from dflash_ops.transport.framed import FramedTransport
from dflash_ops.transport.hosts import RemoteHost, ssh_host
from dflash_ops.transport.known_hosts import UnknownKey
from dflash_ops.transport.pct import PCT, enter_command, explain
from dflash_ops.transport.program import BOOTSTRAP
from dflash_ops.verbs.candidates import Candidate, Initialized, Inside, NodeList, PythonFound, Row, candidate
from dflash_ops.verbs.doctor import doctor
from dflash_ops.verbs.session import open_session, parsed
from dflash_ops.verbs.trust import trust

HEAD = """\
# What `dflash` knows: machines, containers, interpreters, jobs. docs/inventory.md lists every key.
# `dflash init` wrote it; it is yours to change.
"""
TAIL = """
# What to launch, once model and data are in the container (`dflash push` brings them):
# jobs:
#   train:
#     config: trainer/configs/qwen3-8b.yaml
#     gpus: {target: 0-3, drafters: 4-7}
"""


@dataclass(frozen=True)
class InitOptions:
    host: str  # of the inventory, or [user@]address[:port]
    containers: tuple[str, ...] = ()  # numbers or names
    python: str | None = None
    identity: Path | None = None
    jump: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """What stands in the inventory now, and why."""

    host: str
    path: Path
    added: tuple[str, ...]
    containers: tuple[str, ...]  # the chosen ones' names in the inventory
    pythons: tuple[PythonFound | None, ...]  # of each of them
    found: tuple[Candidate, ...]


class Ask(Protocol):
    """Who decides: a person at a terminal, or the options alone."""

    def key(self, key: UnknownKey) -> bool:
        """Whether the unknown host key is the host's."""
        ...

    def containers(self, host: str, found: list[Candidate]) -> list[Candidate]:
        """Those to write down; at least one."""
        ...

    def python(self, chosen: Candidate) -> PythonFound | None:
        """The interpreter for the container's runs; None: none of them."""
        ...


class ByOptions:
    """Takes what is the only possibility; raises UsageError, which lists them, where there are more."""

    def __init__(self, key: Callable[[UnknownKey], bool]) -> None:
        self._key = key

    def key(self, key: UnknownKey) -> bool:
        """See Ask."""
        return self._key(key)

    def containers(self, host: str, found: list[Candidate]) -> list[Candidate]:
        """The only one that can be entered."""
        usable = [each for each in found if each.inside]
        if len(usable) == 1:
            return usable
        if not found:
            raise UsageError(f"there is no container on {host}", "make one first, with systemd and python3 in it")
        names = ", ".join(f"{each.vmid} ({each.name}, {each.about()})" for each in found)
        raise UsageError(f"{host} has {len(found)} containers: {names}", "say which by --container NUMBER")

    def python(self, chosen: Candidate) -> PythonFound | None:
        """The only one that has torch; None when none has."""
        fit = chosen.fitting()
        if len(fit) > 1:
            listed = ", ".join(f"{each.path} ({each.about()})" for each in fit)
            raise UsageError(
                f"container {chosen.vmid} has {len(fit)} pythons with torch: {listed}", "add --python PATH"
            )
        return fit[0] if fit else None


def init(given: Path | None, options: InitOptions, ask: Ask, say: Callable[[str], None]) -> Written:
    """Write entries for a host and its chosen containers.

    Raises DflashError for what cannot be reached or chosen; then nothing is written but a host key that was accepted.

    Args:
        given: the inventory's path, as --inventory names it; a new file is made where there is none.
    """
    path = inventory_path(given)
    if options.python is not None and not options.python.startswith("/"):
        raise UsageError(f"{options.python!r} is no path of a container", "give the interpreter's whole path")
    old = load_inventory(path) if path.exists() else Inventory(path=path.absolute(), containers={})
    name, entry = _host(old, options)
    with_host = old.model_copy(update={"hosts": {**old.hosts, name: entry}})
    trust(with_host, name, ask.key)
    connection = ssh_host(name, with_host)
    try:
        listed = _list(connection, name, entry, options.containers, say)
        if name not in old.hosts and listed.user != 0:
            entry = entry.model_copy(update={"sudo": True})
        found = [_look_into(connection, name, entry, row, options.python, say) for row in listed.containers]
    finally:
        connection.close()
    chosen = found if options.containers else ask.containers(name, found)
    pythons = [_python(each, options.python, ask) for each in chosen]
    additions = _additions(old, name, entry, list(zip(chosen, pythons, strict=True)))
    names = _names(old, name, chosen, additions)
    _write(path, old, additions, names[0])
    for each in additions:
        if each.commented_out:
            say(f"{path}: environments.{each.name} is a comment: jobs that name no environment take the only one")
    if old.containers and old.default_container not in names:
        say(f"the default container stays; `-c {names[0]}` names this one, or `default_container: {names[0]}`")
    added = tuple(f"{each.section}.{each.name}" for each in additions if not each.commented_out)
    return Written(name, path, added, tuple(names), tuple(pythons), tuple(found))


# ---- the host ---------------------------------------------------------------------------------------------------


def _host(old: Inventory, options: InitOptions) -> tuple[str, HostEntry]:
    """Name and entry: one of the inventory, or a new one."""
    user, _, rest = options.host.rpartition("@")
    match = re.fullmatch(r"\[([^\]]+)\](?::(\d{1,5}))?|([^:]+)(?::(\d{1,5}))?|([^:]*:[^:]*:.*)", rest)
    address, port = (match[1] or match[3] or match[5], match[2] or match[4]) if match else ("", None)
    for name, entry in old.hosts.items():
        same = entry.address == address and user in ("", entry.user) and port in (None, str(entry.port))
        if options.host == name or same:
            if options.identity is not None or options.jump:
                raise UsageError(f"the inventory has the host {name} already", f"correct `hosts.{name}` in {old.path}")
            return name, entry
    keys = {
        "address": address,
        "user": user or None,
        "port": port,
        "identity": options.identity.absolute() if options.identity is not None else None,
        "jump": list(options.jump),
    }
    try:
        entry = HostEntry.model_validate({key: value for key, value in keys.items() if value})
    except ValidationError as error:
        message = f"{options.host!r} is no host: {error.errors()[0]['msg']}"
        raise UsageError(message, "give a name that ssh knows, or user@address:port") from error
    label = address if re.fullmatch(r"[\d.]+", address) else address.split(".")[0]
    return _free(label, old.hosts), entry


def _free(wanted: str, taken: Iterable[str]) -> str:
    """A name that the inventory does not have, from one that may be anything."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("._-")[:56] or "host"
    names = set(taken)
    return next(name for number in range(1, 1000) if (name := base if number == 1 else f"{base}-{number}") not in names)


def _list(
    connection: RemoteHost, name: str, entry: HostEntry, wanted: tuple[str, ...], say: Callable[[str], None]
) -> NodeList:
    """The containers that are wanted, or all. Raises DflashError, unless numbers say which one wants."""
    say(f"listing the containers of {name}")
    request: InitRequest = {"do": "node", "containers": list(wanted) or None}
    by_number = [Row(vmid=int(each), status="unknown", lock="", name="", config=None) for each in wanted if _vmid(each)]
    numbered = bool(wanted) and len(by_number) == len(wanted)
    try:
        transport = FramedTransport(connection, BOOTSTRAP, lambda text, status: None)
        listed = parsed(NodeList, result_of(transport.stream(Program("init"), request), lambda event: None))
    except NoPython as error:
        if numbered:
            return NodeList(user=1 if entry.sudo else 0, pct=True, error="", containers=by_number)
        raise Misconfigured(
            f"{name} has no python3 to list its containers with", "name one by --container NUMBER"
        ) from error
    if not listed.pct:
        raise Misconfigured(f"there is no {PCT} on {name}", "is this host a Proxmox VE node, and the right one?")
    if listed.error:
        if numbered:
            return listed.model_copy(update={"containers": by_number})
        said = listed.error.splitlines()[-1]
        if "sudo" in listed.error:
            raise NotPermitted(
                f"this user may not list the containers of {name}: {said}",
                "name one by --container NUMBER, or log in as root (root@ADDRESS)",
            )
        raise Misconfigured(f"`pct list` on {name} said: {said}", "try it there; --container NUMBER needs no list")
    for each in wanted:
        if not any(each in (str(row.vmid), row.name) for row in listed.containers):
            raise UsageError(f"there is no container {each} on {name}", f"`pct list` on {name} lists them")
    return listed


def _vmid(text: str) -> bool:
    return re.fullmatch(r"[1-9]\d{2,8}", text) is not None


def _look_into(
    connection: RemoteHost, name: str, host: HostEntry, row: Row, python: str | None, say: Callable[[str], None]
) -> Candidate:
    """What a container has; why not, when it cannot be entered."""
    if row.status not in ("running", "unknown"):
        return candidate(row, None, f"it is {row.status}")
    say(f"looking into container {row.vmid}{f' ({row.name})' if row.name else ''}")
    entry = ContainerEntry(host=name, container=row.vmid)
    command = enter_command(entry, sudo=host.sudo)
    request: InitRequest = {"do": "container", "root": entry.root, "python": python}
    transport = FramedTransport(connection, command, partial(explain, entry=entry, host=name))
    try:
        answer = result_of(transport.stream(Program("init"), request), lambda event: None)
        return candidate(row, parsed(Inside, answer), "")
    except DflashError as error:
        return candidate(row, None, error.message)


def _python(chosen: Candidate, given: str | None, ask: Ask) -> PythonFound | None:
    if given is not None:
        known = {each.path: each for each in chosen.inside.pythons} if chosen.inside else {}
        return known.get(given) or PythonFound(path=given, version="", torch=None, cuda=None)
    return ask.python(chosen) if chosen.inside else None


# ---- the entries ------------------------------------------------------------------------------------------------


def _additions(
    old: Inventory, host: str, entry: HostEntry, chosen: list[tuple[Candidate, PythonFound | None]]
) -> list[Addition]:
    found: list[Addition] = []
    if host not in old.hosts:
        keys = entry.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        comments = {"address": "a name that ssh knows; ~/.ssh/config is read", "sudo": "not root: through `sudo -n`"}
        found.append(Addition("hosts", host, keys, comments))
    taken = {*old.containers}
    pythons = {environment.python for environment in old.environments.values() if environment.lock is None}
    environments = {*old.environments}
    # A second environment would make jobs ambiguous that take the only one.
    hides = len(old.environments) == 1 and any(job.environment is None for job in old.jobs.values())
    for each, python in chosen:
        name = _existing(old, host, each) or _free(each.name or f"ct{each.vmid}", taken)
        if _existing(old, host, each) is None:
            taken.add(name)
            keys = {"host": host, "container": each.vmid, "root": "/var/lib/dflash"}
            room = f"holds runs, releases and caches; {each.room()}"
            found.append(Addition("containers", name, keys, {"container": each.about(), "root": room}))
        if python is not None and python.path not in pythons:
            pythons.add(python.path)
            environment = _free(name, environments)
            environments.add(environment)
            why = {"": "name it by `environment:` in each job, then take the # away"} if hides else {}
            comments = {**why, "python": python.about()}
            addition = Addition("environments", environment, {"python": python.path}, comments, hides)
            if not (hides and addition.stands_in(old.path.read_text(encoding="utf-8"))):
                found.append(addition)
    return found


def _existing(old: Inventory, host: str, each: Candidate) -> str | None:
    """The inventory's name of a container."""
    same = (name for name, entry in old.containers.items() if (entry.host, entry.container) == (host, each.vmid))
    return next(same, None)


def _names(old: Inventory, host: str, chosen: list[Candidate], additions: list[Addition]) -> list[str]:
    """What each chosen container is called."""
    new = {each.values["container"]: each.name for each in additions if each.section == "containers"}
    return [_existing(old, host, each) or new[each.vmid] for each in chosen]


def _write(path: Path, old: Inventory, additions: list[Addition], first: str) -> None:
    if not additions:
        return
    if not path.exists():
        write(path, new_text(additions, first, HEAD, TAIL), additions)
        return
    top = []
    if old.default_container is None and len(old.containers) == 1:
        top.append(f"default_container: {next(iter(old.containers))}  # as before, when it was the only one")
    with path.open(encoding="utf-8", newline="") as stream:  # line ends stay as they are
        text = stream.read()
    write(path, extended(text, additions, top), additions)


def diagnosed(written: Written, say: Callable[[str], None]) -> Initialized:
    """The answer, with `doctor` of each container and the environment that has its interpreter."""
    inventory = load_inventory(written.path)
    diagnoses = []
    for name, python in zip(written.containers, written.pythons, strict=True):
        same = (key for key, entry in inventory.environments.items() if python and entry.python == python.path)
        say(f"asking doctor about {name}")
        with open_session(inventory, name) as session:
            diagnoses.append(doctor(session, next(same, None)))
    return Initialized(
        host=written.host,
        inventory=str(written.path),
        added=written.added,
        containers=written.containers,
        found=written.found,
        doctor=tuple(diagnoses),
    )


def exit_code(answer: Initialized) -> Exit:
    """That of the worst diagnosis."""
    return max((each.exit_code for each in answer.doctor), default=Exit.OK)
