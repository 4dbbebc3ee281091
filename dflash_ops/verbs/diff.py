"""Compares two runs and reports only where they differ."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_ops.document import Document
from dflash_ops.errors import ConfigurationError
from dflash_ops.remote.protocol import DiffRequest
from dflash_ops.run.facts import Cache, Facts, Torch, Unread, read_facts
from dflash_ops.run.probes.gpu import GpuDevices
from dflash_ops.run.record import RunSpec, check_run_name
from dflash_ops.text import visible
from dflash_ops.verbs.session import Session

Section = Literal["packages", "torch", "driver", "gpus", "code", "config", "data", "cache", "environment", "system"]


class Difference(BaseModel):
    """One thing that is not the same; None: not there."""

    model_config = ConfigDict(frozen=True)

    section: Section
    key: str
    a: str | None
    b: str | None


class CodeDifference(BaseModel):
    """A file of the trainer that is not the same, as a unified diff."""

    model_config = ConfigDict(frozen=True)

    path: str
    diff: str


class Comparison(Document):
    """The answer of `dflash diff`."""

    kind: Literal["diff"] = "diff"
    a: str
    b: str
    differences: tuple[Difference, ...]
    code: tuple[CodeDifference, ...]
    incomplete: tuple[str, ...] = Field(description="What could not be compared, and why")

    @property
    def same(self) -> bool:
        return not (self.differences or self.code)


def diff(session: Session, a: str, b: str) -> Comparison:
    """Compare two runs of a container. Raises RemoteRefusal when one does not exist, ConfigurationError for damage."""
    request: DiffRequest = {"root": session.root, "runs": [check_run_name(a), check_run_name(b)]}
    reply = session.call("diff", request, deadline=60)
    try:
        first, second = reply.value["runs"]
        specs = RunSpec.model_validate(first["spec"]), RunSpec.model_validate(second["spec"])
        files = dict(reply.value["files"])
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise ConfigurationError(
            "the records of a run are damaged", "--debug shows where", detail=str(error)
        ) from error
    facts, incomplete = [], []
    for one, name in ((first, a), (second, b)):
        if isinstance(one.get("facts"), dict):
            facts.append(read_facts(one["facts"], f"run {name}"))
        else:
            incomplete.append(f"run {name} has no facts.json")
    found = list(compare_specs(*specs))
    if len(facts) == 2:
        found += compare_facts(*facts)
    if first.get("data") is None or second.get("data") is None:
        missing = " and ".join(name for one, name in ((first, a), (second, b)) if one.get("data") is None)
        incomplete.append(f"data: {missing} came to no data hash")
    else:
        found += _pair("data", "rows", str(first["data"]), str(second["data"]))
    return Comparison(
        a=a,
        b=b,
        differences=tuple(found),
        code=tuple(compare_code(files, a, b)),
        incomplete=tuple(incomplete),
    )


def compare_specs(a: RunSpec, b: RunSpec) -> Iterator[Difference]:
    """What was asked for."""
    yield from _mappings("config", flat(a.config), flat(b.config))
    yield from _pair("code", "release", a.release, b.release)
    yield from _pair("environment", "environment", a.environment, b.environment)
    yield from _pair("environment", "python", a.python, b.python)
    yield from _pair("environment", "lock", a.lock, b.lock)
    yield from _pair("environment", "variables", ", ".join(sorted(a.variables)), ", ".join(sorted(b.variables)))
    yield from _pair("environment", "watchdog", _text(a.watchdog), _text(b.watchdog))
    yield from _pair("gpus", "target", _text(a.gpus.target), _text(b.gpus.target))
    yield from _pair("gpus", "drafters", _text(a.gpus.drafters), _text(b.gpus.drafters))


def compare_facts(a: Facts, b: Facts) -> Iterator[Difference]:
    """What was true. Readings of the moment (free memory, GPU load, times) are no differences."""
    yield from _mappings("packages", a.packages, b.packages)
    yield from _mappings("torch", _torch(a), _torch(b))
    yield from _mappings("environment", _interpreter(a), _interpreter(b))
    yield from _pair("driver", "kernel module", a.driver.kernel, b.driver.kernel)
    yield from _pair("driver", "libnvidia-ml", _read(a.driver.library), _read(b.driver.library))
    yield from _mappings("gpus", _gpus(a), _gpus(b))
    yield from _mappings("cache", _cache(a), _cache(b))
    yield from _mappings("system", _system(a), _system(b))


def _torch(facts: Facts) -> dict[str, str]:
    """The build, and every hand-made change to it."""
    if not isinstance(facts.torch, Torch):
        return {"torch": facts.torch.error if isinstance(facts.torch, Unread) else "not installed"}
    torch = facts.torch
    found = {"version": torch.version, "CUDA": torch.cuda or "none", "git": torch.git or "unknown"}
    found["files"] = torch.files.state
    found.update({f"changed {one.file}": one.sha256 for one in torch.files.changed})
    found.update({f"added {name}": "there" for name in torch.files.added})
    return found


def _interpreter(facts: Facts) -> dict[str, str]:
    found = {}
    if isinstance(facts.python, Unread):
        found["interpreter"] = facts.python.error
    elif facts.python is not None:
        found = {"interpreter": facts.python.version, "prefix": facts.python.prefix}
    if not isinstance(facts.hooks, Unread):
        found.update({f"start-up hook {hook.file}": hook.sha256[:16] for hook in facts.hooks})
    if not isinstance(facts.manager_variables, Unread):
        found["systemd's variables"] = ", ".join(facts.manager_variables)
    return found


def _gpus(facts: Facts) -> dict[str, str]:
    reading = facts.gpus()
    if not isinstance(reading, GpuDevices):
        return {} if reading is None else {"GPUs": getattr(reading, "reason", "none")}
    return {f"GPU {one.index}": f"{one.name} {one.uuid or ''}".strip() for one in reading.devices}


def _cache(facts: Facts) -> dict[str, str]:
    """By key, not by size: a warm cache grows in every run."""
    if not isinstance(facts.compile_cache, Cache):
        return {"compile cache": facts.compile_cache.error}
    cache = facts.compile_cache
    found = {"state": "warm" if cache.files else "empty"}
    found.update({f"key {key}": "there" for key in cache.keys})
    return found


def _system(facts: Facts) -> dict[str, str]:
    if isinstance(facts.system, Unread):
        return {"system": facts.system.error}
    volatile = {"memory_available"}
    found = {name: _text(value) or "unknown" for name, value in facts.system if name not in volatile}
    if isinstance(facts.limits, dict):
        found.update({f"limit {name}": f"{soft} / {hard}" for name, (soft, hard) in facts.limits.items()})
    return found


def compare_code(files: Mapping[str, Any], a: str, b: str) -> Iterator[CodeDifference]:
    """Unified diffs of the files that differ."""
    for path, pair in sorted(files.items()):
        match pair:
            case [str() | None as old, str() | None as new]:
                lines = difflib.unified_diff(
                    (old or "").splitlines(), (new or "").splitlines(), f"{a}/{path}", f"{b}/{path}", lineterm=""
                )
                text = "\n".join(visible(line) for line in lines)
                yield CodeDifference(path=visible(path, 200), diff=text)


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """A nested mapping as dotted keys: `optimizer.lr` to `0.0006`."""
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, item in value.items():
            found.update(flat(item, f"{prefix}.{key}" if prefix else str(key)))
        return found
    return {prefix: _text(value) or "null"}


def _mappings(section: Section, a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for key in sorted({*a, *b}):
        yield from _pair(section, key, a.get(key), b.get(key))


def _pair(section: Section, key: str, a: str | None, b: str | None) -> Iterator[Difference]:
    if a != b:
        shown = [None if value is None else visible(value, 500) for value in (a, b)]
        yield Difference(section=section, key=visible(key, 200), a=shown[0], b=shown[1])


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _read(value: str | Unread | None) -> str | None:
    return value.error if isinstance(value, Unread) else value
