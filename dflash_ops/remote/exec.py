"""How does a command run as the trainer of a run does? In its release, with its interpreter and variables."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from typing import Any, Dict

from dflash_ops.remote import files
from dflash_ops.remote.channel import CONFIGURATION, USAGE, Channel, Refusal

_CHUNK = 1 << 16


def main(request: Dict[str, Any], channel: Channel) -> Dict[str, Any]:
    """Run a command.

    request: `root`, `run` or null for the newest; `argv`. Events: {to: out or err} with data. Result: `status`, as a
    shell gives it.
    """
    paths = files.find_run(request["root"], request.get("run"))
    spec = files.read_json(paths.spec)
    if spec is None:
        raise Refusal(CONFIGURATION, "the run %s has no readable spec.json" % paths.run)
    release = os.path.join(request["root"], "releases", str(spec["release"]))
    if not os.path.isdir(release):
        raise Refusal(CONFIGURATION, "the release of %s is gone" % paths.run, "`dflash gc` removed it after its run")
    # The variables' file is shell, so a shell reads it; the command comes as arguments, never as text of a script.
    script = 'set -a; . "$1"; PATH=$2:$PATH; set +a; shift 2; exec "$@"'
    binaries = os.path.dirname(str(spec["python"]))
    argv = ["/bin/sh", "-c", script, "sh", paths.env, binaries, *request["argv"]]
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=release,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
    except ValueError as error:
        raise Refusal(USAGE, "the command cannot be run: %s" % error) from error
    try:
        return {"run": paths.run, "status": _pass_on(child, channel)}
    finally:
        if child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)


def _pass_on(child: "subprocess.Popen[bytes]", channel: Channel) -> int:
    """Send both outputs as they come, until both end."""
    with selectors.DefaultSelector() as selector:
        for name, stream in (("out", child.stdout), ("err", child.stderr)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, name)
        while selector.get_map():
            channel.pause(0)
            for key, _ in selector.select(1):
                data = os.read(key.fd, _CHUNK)
                if data:
                    channel.event(data, to=key.data)
                else:
                    selector.unregister(key.fileobj)
    while True:
        try:
            status = child.wait(1)
        except subprocess.TimeoutExpired:
            channel.pause(0)
            continue
        return status if status >= 0 else 128 - status
