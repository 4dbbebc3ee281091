"""Checks everything between the laptop and the GPUs; each line states what is there, and the cure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

from dflash_ops.document import Document
from dflash_ops.errors import DflashError, Exit
from dflash_ops.inventory.models import ContainerEntry
from dflash_ops.plan.interpreter import interpreter
from dflash_ops.plan.release import Release, pack, trainer_source
from dflash_ops.remote.protocol import FactsRequest, NodeRequest
from dflash_ops.run.facts import read_facts
from dflash_ops.transport.base import NoPython, TransportError
from dflash_ops.verbs.doctor_lines import (
    Line,
    Node,
    Trial,
    cache_line,
    fail,
    gpu_lines,
    node_lines,
    ok,
    python_lines,
    release_line,
    system_lines,
    trial_lines,
    unknown,
    warn,
)
from dflash_ops.verbs.session import Session, parsed


class Diagnosis(Document):
    """The answer of `dflash doctor`."""

    kind: Literal["doctor"] = "doctor"
    container: str
    lines: tuple[Line, ...]

    @property
    def exit_code(self) -> Exit:
        """78 when something stands in the way of a run."""
        return Exit.CONFIGURATION if any(line.level == "fail" for line in self.lines) else Exit.OK


def doctor(session: Session, environment: str | None) -> Diagnosis:
    """Look at host, node, container, interpreter and GPUs. Never raises for what it finds: that is a line.

    Raises UsageError for an environment that the inventory does not have.

    Args:
        environment: of the inventory; None: the default job's, or the only one.
    """
    if environment is not None:
        session.inventory.environment(environment)
    return Diagnosis(container=session.container_name, lines=tuple(_lines(session, environment)))


def _lines(session: Session, environment: str | None) -> Iterator[Line]:
    entry = session.inventory.containers[session.container_name]
    node: Node | None = None
    if entry.container is not None:
        begin = time.monotonic()
        try:
            node = _ask_node(session, entry, entry.container)
        except NoPython:  # said by the host's own shell, so ssh is well; all else came before the host answered
            pass
        except DflashError as error:
            yield fail("ssh", error.message, error.hint or None)
            return
        yield ok("ssh", f"{entry.host} answers ({time.monotonic() - begin:.1f} s with its own look-up)")
        if node is not None:
            yield from node_lines(node, entry)
        else:
            yield unknown("node", "it has no python3 to look with", "not needed: only the container needs one")
    yield from _facts_lines(session, environment, node)


def _ask_node(session: Session, entry: ContainerEntry, vmid: int) -> Node:
    """Raises NoPython when the host has none of its own, other DflashErrors when it was not reached."""
    from dflash_ops.transport.base import Program
    from dflash_ops.transport.framed import FramedTransport
    from dflash_ops.transport.hosts import ssh_host
    from dflash_ops.transport.program import BOOTSTRAP

    host = session.inventory.hosts[entry.host]
    transport = FramedTransport(ssh_host(entry.host, session.inventory), BOOTSTRAP, lambda text, status: None)
    try:
        request: NodeRequest = {"do": "node", "container": vmid, "sudo": host.sudo}
        return parsed(Node, transport.run(Program("doctor"), request, deadline=60).value)
    finally:
        transport.close()


def _facts_lines(session: Session, environment: str | None, node: Node | None) -> Iterator[Line]:
    python: str | None = None
    cure = "correct `python` of the environment"
    try:
        name = environment
        if name is None and session.inventory.default_job is not None:
            name = session.inventory.job(None)[1].environment
        chosen = interpreter(session.inventory, name, session.paths)
        python = chosen.path
        if chosen.lock is not None:
            cure = f"`dflash env build {chosen.environment}`"
        else:
            cure = f"correct `python` of environment {chosen.environment} in {session.inventory.path}"
    except DflashError as error:
        yield unknown("environment", error.message, "name one by --environment")
    release: Release | None = None
    try:
        release = pack(trainer_source())
    except DflashError as error:
        yield warn("release", error.message, error.hint or None)
    request: FactsRequest = {
        "do": "facts",
        "root": session.root,
        "python": python,
        "seconds": 40,
        "import_torch": python is not None,
    }
    if release is not None:
        request["release"] = f"{session.paths.releases}/{release.name}"
    try:
        begin = time.time()
        value = session.call("doctor", request, deadline=110).value
        facts = read_facts(value, f"container {session.container_name}")
        middle = (begin + time.time()) / 2
    except TransportError as error:
        yield fail("container", error.message, error.hint or None)
        return
    except DflashError as error:
        yield unknown("container", error.message, error.hint or None)
        return
    entry = session.inventory.containers[session.container_name]
    yield ok("container", f"entered by {entry.enter}" if entry.container is not None else "this machine itself")
    yield from system_lines(facts, middle, (time.time() - begin) / 2)
    yield from python_lines(facts, cure)
    yield from gpu_lines(facts, node)
    if isinstance(value.get("trial"), dict):
        yield from trial_lines(parsed(Trial, value["trial"]))
    if release is not None:
        yield release_line(facts, release)
    yield cache_line(facts)
