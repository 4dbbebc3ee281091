"""What does every remote program need? Frames, bounded subprocesses, crash-safe files, the names in a run directory."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Sequence

MARK = b"@@DFLASH "
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
ROOT = re.compile(r"(/[A-Za-z0-9._-]+)+\Z")

# Exit codes of the laptop's command, as dflash_ops.errors.Exit names them.
USAGE = 2
TEMPORARY = 75
CONFIGURATION = 78
RUN_FAILED = 100
RUN_NOT_FOUND = 102


class Refusal(Exception):
    """The program cannot do what was asked: one sentence, its cure, an exit code, a stable word."""

    def __init__(self, code: int, message: str, hint: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.reason = reason


class PeerGone(Exception):
    """Nobody listens any more: the program ends without a word."""


class Channel:
    """Frames out, payload in."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.payload = source
        self._sink = sink
        self._last = time.monotonic()

    def _write(self, frame: Dict[str, Any], data: Optional[bytes] = None) -> None:
        tail = [] if data is None else [data, b"\n"]
        if data is not None:
            frame["bytes"] = len(data)
        line = json.dumps(frame, ensure_ascii=True, separators=(",", ":"))
        try:
            self._sink.write(b"".join([b"\n", MARK, line.encode("ascii"), b"\n", *tail]))
            self._sink.flush()
        except OSError as error:
            raise PeerGone() from error
        self._last = time.monotonic()

    def event(self, data: Optional[bytes] = None, **value: Any) -> None:
        """Tell the laptop something before the result; `data` goes as it is, after the frame. Raises PeerGone."""
        self._write({"kind": "event", "value": value}, data)

    def beat(self) -> None:
        """Show life when nothing was said for five seconds. Raises PeerGone."""
        if time.monotonic() - self._last >= 5:
            self._write({"kind": "beat", "value": {}})

    def pause(self, seconds: float) -> None:
        """Sleep, showing life. In a stream, stdin stays open as long as the laptop listens: its end ends the program.

        Raises PeerGone.
        """
        self.beat()
        ready, _, _ = select.select([self.payload], [], [], seconds)
        if ready and not os.read(self.payload.fileno(), 4096):
            raise PeerGone()

    def result(self, value: Dict[str, Any]) -> None:
        """The last frame."""
        self._write({"kind": "result", "value": value})

    def error(self, value: Dict[str, Any]) -> None:
        """The last frame, when there is no result."""
        self._write({"kind": "error", "value": value})


def serve(request: Dict[str, Any]) -> None:
    """Run the verb that the request names, within the seconds that it grants."""
    channel = Channel(sys.stdin.buffer, sys.stdout.buffer)

    def out_of_time(signum: int, frame: Any) -> NoReturn:
        with contextlib.suppress(PeerGone):
            message = "the container did not finish `%s` within %d s" % (request["verb"], request["limit"])
            channel.error({"code": TEMPORARY, "message": message, "hint": "try again", "reason": "limit"})
        os._exit(1)

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(int(request["limit"]))
    try:
        module = importlib.import_module("dflash_ops.remote." + request["verb"])
        channel.result(module.main(request["request"], channel))
    except Refusal as refusal:
        with contextlib.suppress(PeerGone):
            channel.error(
                {"code": refusal.code, "message": refusal.message, "hint": refusal.hint, "reason": refusal.reason}
            )
    except PeerGone:
        pass
    except OSError as error:
        with contextlib.suppress(PeerGone):
            channel.error(_disk_error(error))
    except Exception as error:
        with contextlib.suppress(PeerGone):
            message = "%s: %s" % (type(error).__name__, error)
            channel.error({"code": 70, "message": message, "hint": "", "detail": _traceback()})


def _disk_error(error: OSError) -> Dict[str, Any]:
    where = " at %s" % error.filename if error.filename else ""
    message = "the container said: %s%s" % (error.strerror or error, where)
    hint = "free space there (`dflash gc` helps), then try again" if error.errno in (28, 122) else ""
    return {
        "code": CONFIGURATION,
        "message": message,
        "hint": hint,
        "reason": "os-error",
        "detail": _traceback(),
    }


def _traceback() -> str:
    import traceback  # costs milliseconds that only failures shall pay

    return traceback.format_exc()


class Completed(NamedTuple):
    """A subprocess that ended or was ended. `status` is None when it ran out of time or could not start."""

    status: Optional[int]
    stdout: str
    stderr: str
    error: str  # why status is None


def scratch() -> BinaryIO:
    """A file in memory for what a subprocess says: works on a full disk, and needs no `tempfile`, slow to import."""
    return os.fdopen(os.memfd_create("dflash"), "w+b")


def call(argv: Sequence[str], timeout: float, env: Optional[Dict[str, str]] = None) -> Completed:
    """Run a command for at most `timeout` seconds, with no stdin and English messages; never raises for its failure.

    A child that even SIGKILL cannot end (a driver call in D state) is left behind, not waited for.
    """
    environment = dict(os.environ if env is None else env, LC_ALL="C")
    with scratch() as out, scratch() as err:
        try:
            child = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except OSError as error:
            return Completed(None, "", "", "%s: %s" % (argv[0], error.strerror))
        status: Optional[int] = None
        problem = ""
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            problem = "%s did not end within %g s" % (os.path.basename(argv[0]), timeout)
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
        return Completed(status, _read_back(out), _read_back(err), problem)


def _read_back(stream: Any, limit: int = 4 * 1024 * 1024) -> str:
    stream.seek(0)
    data: bytes = stream.read(limit)
    return data.decode("utf-8", "backslashreplace")


def fsync_directory(path: str) -> None:
    """Make renames and new names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Write all or nothing: temporary file, fsync, rename, fsync of the directory."""
    directory = os.path.dirname(path)
    temporary = "%s.tmp-%d" % (path, os.getpid())
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)  # whatever the umask
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(directory)


def write_json(path: str, value: Any, mode: int = 0o644) -> None:
    """`write_file` of a JSON document."""
    write_file(path, (json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode("utf-8"), mode)


def read_json(path: str, limit: int = 16 * 1024 * 1024) -> Optional[Dict[str, Any]]:
    """A JSON object; None when the file is missing, too large, or not one."""
    try:
        with open(path, "rb") as stream:
            value = json.loads(stream.read(limit))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def tree_bytes(path: str) -> int:
    """Disk space of a file or a whole folder, links not followed."""
    total = 0
    with contextlib.suppress(OSError):
        total += os.lstat(path).st_blocks * 512
    for here, folders, names in os.walk(path):
        for name in folders + names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(here, name)).st_blocks * 512
    return total


def tail_lines(path: str, lines: int, limit: int = 64 * 1024) -> List[str]:
    """The last lines of a text file, from at most its last `limit` bytes; empty when there is no file."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - limit))
            text = stream.read(limit).decode("utf-8", "backslashreplace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


class RunPaths:
    """The files of one run in the container. `dflash_ops.run` is the laptop's view of the same names."""

    def __init__(self, root: str, run: str) -> None:
        if not RUN_NAME.match(run):
            raise Refusal(USAGE, "%r is not a run name" % run)
        self.run = run
        self.unit = "dflash-%s.service" % run
        self.directory = os.path.join(checked_root(root), "runs", run)
        self.spec = self._file("spec.json")
        self.facts = self._file("facts.json")
        self.started = self._file("started.json")
        self.exit = self._file("exit.json")
        self.kill_requested = self._file("kill-requested.json")
        self.config = self._file("config.yaml")
        self.entry = self._file("entry")
        self.on_exit = self._file("on-exit")
        self.env = self._file("env")
        self.log = self._file("log")
        self.metrics = self._file("metrics.jsonl")
        self.compile = self._file("compile.json")
        self.checkpoints = self._file("checkpoints")

    def _file(self, name: str) -> str:
        return os.path.join(self.directory, name)


def checked_root(root: str) -> str:
    """The target's root folder, refused unless it is a plain absolute path."""
    if not ROOT.match(root) or ".." in root.split("/"):
        raise Refusal(CONFIGURATION, "%r is not a usable root folder" % root)
    return root


def run_names(root: str) -> List[str]:
    """All runs, the newest first (by the time that spec.json was written, else the directory's)."""
    base = os.path.join(checked_root(root), "runs")
    found = []
    try:
        entries = list(os.scandir(base))
    except OSError:
        return []
    for entry in entries:
        if RUN_NAME.match(entry.name) and entry.is_dir(follow_symlinks=False):
            try:
                made = os.stat(os.path.join(entry.path, "spec.json")).st_mtime_ns
            except OSError:
                try:
                    made = entry.stat(follow_symlinks=False).st_mtime_ns
                except OSError:
                    continue
            found.append((made, entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def newest_run(root: str) -> str:
    """The newest run. Raises Refusal when there is none."""
    names = run_names(root)
    if not names:
        raise Refusal(RUN_NOT_FOUND, "there is no run in %s" % root, "start one with `dflash launch`", "no-run")
    return names[0]


def find_run(root: str, run: Optional[str]) -> RunPaths:
    """The named run, or the newest when `run` is None. Raises Refusal when it does not exist."""
    paths = RunPaths(root, run if run is not None else newest_run(root))
    if not os.path.isdir(paths.directory):
        raise Refusal(RUN_NOT_FOUND, "there is no run %s" % paths.run, "`dflash runs` lists them", "no-run")
    return paths


SHOW_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,ExecMainStartTimestampMonotonic,"
    "ExecMainExitTimestampMonotonic,MainPID,InvocationID,NRestarts,StatusText,WatchdogTimestampMonotonic,"
    "MemoryCurrent,MemoryPeak,TasksCurrent,ControlGroup,NeedDaemonReload,ActiveEnterTimestampMonotonic"
)


def show_units(units: Sequence[str], timeout: float = 10) -> Dict[str, Dict[str, str]]:
    """`systemctl show` of each unit, one call. Raises Refusal(reason="systemd") when systemd does not answer.

    `systemctl show` exits 0 for unknown units; LoadState=not-found must be read before Result.
    """
    if not units:
        return {}
    done = call(["systemctl", "show", "--property=" + SHOW_PROPERTIES, "--"] + list(units), timeout)
    if done.status != 0:
        why = done.error or done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        why = why if isinstance(why, str) else why[0]
        raise Refusal(TEMPORARY, "systemd in the container did not answer: %s" % why, reason="systemd")
    found: Dict[str, Dict[str, str]] = {}
    for block in done.stdout.split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in properties:
            found[properties["Id"]] = properties
    return found


def boot_id() -> str:
    """Changes when the container restarts (LXC mounts a fresh one for each start)."""
    with open("/proc/sys/kernel/random/boot_id") as stream:
        return stream.read().strip()


@contextlib.contextmanager
def locked(path: str, seconds: float) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel lets go of it when the program dies. Raises Refusal."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > end:
                    message = "another dflash command holds %s" % path
                    raise Refusal(TEMPORARY, message, "try again in a moment", "lock") from error
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)
