"""Starts a program in the container from memory; writes nothing to disk.

This file is executed by the constant one-liner in `dflash_ops.transport.program`; a call of `start` is appended
to it. It makes the shipped modules importable under their usual names and calls `main(request, channel)` of one.
"""

import importlib
import importlib.machinery
import json
import os
import sys
import types


class _Shipped:
    """Imports the shipped sources: a finder and loader, whose base classes would cost a quarter of the start."""

    def __init__(self, sources: "dict[str, str]") -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "importlib.machinery.ModuleSpec | None":
        if name in self.sources:
            package = name in ("dflash_ops", "dflash_ops.remote")
            return importlib.machinery.ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: "importlib.machinery.ModuleSpec") -> None:
        """Let Python make the module."""

    def get_source(self, name: str) -> str:
        """For tracebacks."""
        return self.sources[name]

    def exec_module(self, module: types.ModuleType) -> None:
        text = self.sources[module.__name__]
        origin = "<shipped>/" + module.__name__.replace(".", "/") + ".py"
        exec(compile(text, origin, "exec"), module.__dict__)


def start(sources: "dict[str, str]", request: bytes) -> None:
    """Run the program that `request` names; `request` is the JSON text as bytes."""
    if sys.version_info < (3, 8):
        sys.stdout.write("\n@@DFLASH no-python3\n")
        return
    sys.stdout.write("\n@@DFLASH started\n")
    sys.stdout.flush()
    sys.meta_path.insert(0, _Shipped(sources))
    os.umask(0o022)  # pct hands on the caller's umask and directory
    os.chdir("/")
    channel = importlib.import_module("dflash_ops.remote.channel")
    channel.serve(json.loads(request.decode("utf-8")))
