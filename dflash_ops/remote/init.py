"""Lists what `dflash init` chooses from: the containers of a node, or the GPUs and interpreters of a container."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from typing import Any, Dict, Iterator, List, Optional

from dflash_ops.remote import gpu, node, process
from dflash_ops.remote.channel import Channel
from dflash_ops.remote.protocol import InitRequest

_MANY = 40  # interpreters; each costs a start
_SECONDS = 60.0  # for all of them
# Where people put environments; a hidden folder matches no asterisk.
_PLACES = ("/opt", "/srv", "/root", "/home/*", "/usr/local", "/workspace", "/data", "/venv", "/var/lib")
_BELOW = ("", "/*", "/*/*", "/.venv", "/*/.venv", "/*/*/.venv", "/*/envs/*", "/.pyenv/versions/*")
# torch is not imported: that takes seconds, and a broken one would say nothing.
_ABOUT = r"""
import json, os, platform, re, sys
found = {"version": platform.python_version(), "torch": None, "cuda": None}
for folder in sys.path:
    path = os.path.join(folder, "torch", "version.py")
    if os.path.isfile(path):
        with open(path) as stream:
            text = stream.read()
        for key, name in (("torch", "__version__"), ("cuda", "cuda")):
            match = re.search(r"^%s(?:: [^=]+)? = ['\"]([^'\"]*)['\"]" % name, text, re.M)
            found[key] = match.group(1) if match else None
        break
print(json.dumps(found))
"""


def main(request: InitRequest, channel: Channel) -> Dict[str, Any]:
    """Look at the host, when it runs there, or at the container.

    The results are `NodeList` and `Inside` of `dflash_ops.verbs.candidates`.
    """
    if request["do"] == "node":
        return _node(request["containers"], channel)
    return _container(request["root"], request["python"], channel)


def _node(wanted: Optional[List[str]], channel: Channel) -> Dict[str, Any]:
    user = os.geteuid()
    prefix = [] if user == 0 else ["sudo", "-n"]
    if not os.path.exists(node.PCT):
        return {"user": user, "pct": False, "error": "", "containers": []}
    listed = process.call([*prefix, node.PCT, "list"], 25)
    if listed.status != 0:
        error = listed.error or listed.stderr.strip()[-1000:]
        return {"user": user, "pct": True, "error": error or "nothing", "containers": []}
    found = []
    for row in _rows(listed.stdout):
        if wanted is None or row["vmid"] in wanted or row["name"] in wanted:
            channel.beat()
            config = process.call([*prefix, node.PCT, "config", row["vmid"], "--current"], 25)
            found.append(dict(row, config=node.configuration(config.stdout) if config.status == 0 else None))
    return {"user": user, "pct": True, "error": "", "containers": found}


def _rows(text: str) -> Iterator[Dict[str, str]]:
    """`pct list` writes columns of fixed width; Lock is empty as a rule."""
    for line in text.splitlines()[1:]:
        vmid, status, lock, name = (line[a:b].strip() for a, b in ((0, 10), (11, 21), (22, 34), (35, None)))
        if vmid.isdigit():
            yield {"vmid": vmid, "status": status, "lock": lock, "name": name}


def _container(root: str, python: Optional[str], channel: Channel) -> Dict[str, Any]:
    asked = gpu.ask(root, 10.0)
    channel.beat()
    disk = root
    while not os.path.isdir(disk):  # the root folder is made by the first launch
        disk = os.path.dirname(disk)
    usage = os.statvfs(disk)
    return {
        "gpu": asked,
        "pythons": _pythons(python, channel),
        "free": usage.f_bavail * usage.f_frsize,
        "cpus": len(os.sched_getaffinity(0)),
    }


def _candidates() -> List[str]:
    """Interpreters, those of environments first, each once."""
    found: Dict[str, str] = {}
    for place in _PLACES:
        for below in _BELOW:
            for marker in ("pyvenv.cfg", "conda-meta", "bin/pip"):
                for path in sorted(glob.glob(place + below + "/" + marker)):
                    prefix = path[: -len(marker) - 1]
                    found.setdefault(os.path.realpath(prefix), prefix + "/bin/python")
    paths = [path for path in found.values() if os.access(path, os.X_OK)]
    for path in ("/usr/local/bin/python3", "/usr/bin/python3"):
        if os.access(path, os.X_OK):
            paths.append(path)
    return paths[:_MANY]


def _pythons(named: Optional[str], channel: Channel) -> List[Dict[str, Any]]:
    end = time.monotonic() + _SECONDS
    found = []
    for path in [named] if named else _candidates():
        if time.monotonic() > end:
            break
        channel.beat()
        done = process.call([path, "-I", "-c", _ABOUT], 10)
        with contextlib.suppress(ValueError, IndexError):
            about = json.loads(done.stdout.strip().splitlines()[-1])
            found.append(dict(about, path=path))
    return found
