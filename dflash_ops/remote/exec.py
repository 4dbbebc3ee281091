"""Runs a command as a run's trainer is run: in its release, with its interpreter and variables."""

from __future__ import annotations

import os
import subprocess

from dflash_ops.remote import files, process, which
from dflash_ops.remote.channel import Channel, Refusal
from dflash_ops.remote.protocol import CONFIGURATION, USAGE, ExecAnswer, ExecRequest


def main(request: ExecRequest, channel: Channel) -> ExecAnswer:
    """Run a command.

    Events: {to: out or err} with data.
    """
    paths = which.find_run(request["root"], request.get("run"))
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
    status = process.pass_on(child, lambda: channel.pause(0), lambda name, data: channel.event(data, to=name), grace=5)
    return {"run": paths.run, "status": status if status >= 0 else 128 - status}
