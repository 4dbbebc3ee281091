"""Types what crosses between laptop and container, and holds the names that both sides know.

Imported by the laptop, and shipped with the program: Python 3.8 and its standard library. `root` is the folder of runs
and releases in the container; null stands for None. What comes from the container is checked by the laptop's models.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, TypedDict

MARK = b"@@DFLASH "  # begins each frame
RUN_NAME = r"[a-z0-9][a-z0-9-]{0,62}"
# TimeoutStopSec of a unit. A container that is shut down gives its units about a minute (pct shutdown), so a longer
# one would be cut off.
STOP_SECONDS = 45
MIN_SYSTEMD = 240  # Type=exec and StandardOutput=append:
# Files of a run directory, by what they are called in the code.
RUN_FILES = {
    "spec": "spec.json",
    "facts": "facts.json",
    "started": "started.json",
    "exit": "exit.json",
    "kill_requested": "kill-requested.json",
    "config": "config.yaml",
    "entry": "entry",
    "on_exit": "on-exit",
    "env": "env",
    "log": "log",
    "metrics": "metrics.jsonl",
    "compile": "compile.json",
    "checkpoints": "checkpoints",
}

# Exit codes of the laptop's command, as dflash_ops.errors.Exit names them.
USAGE = 2
TEMPORARY = 75
CONFIGURATION = 78
RUN_FAILED = 100
RUN_NOT_FOUND = 102


def unit_name(run: str) -> str:
    """The systemd unit of a run."""
    return "dflash-%s.service" % run


class Frame(TypedDict):
    """One answer: an event, a beat (life without news), and at the end a result or an error (see `Failure`)."""

    kind: str
    value: Dict[str, Any]


class Failure(TypedDict, total=False):
    """The value of an error frame. `reason` is a stable word for code; `detail` is for --debug."""

    code: int
    message: str
    hint: str
    reason: str
    detail: str


class Gpus(TypedDict):
    """GPU indices by role."""

    target: List[int]
    drafters: List[int]


class Spec(TypedDict):
    """spec.json, which the container completes by `created` and `boot_id`."""

    schema: int
    run: str
    job: str
    container: str
    launched_by: str
    release: str
    environment: str
    python: str
    lock: Optional[str]
    config: Dict[str, Any]
    gpus: Gpus
    variables: List[str]
    watchdog: Optional[int]
    resumed_from: Optional[str]


class Rooted(TypedDict):
    """What every request holds."""

    root: str


class StoredFile(TypedDict):
    """A line of a manifest."""

    path: str
    size: int
    sha256: str
    executable: bool
    private: bool


class PreflightRequest(Rooted):
    """`gpus`: indices that must be there; `locked`: dflash builds the interpreter `python`."""

    run: str
    gpus: List[int]
    release: str
    python: str
    locked: bool


class StoreRequest(Rooted):
    """`name` is the hash of `files`, whose contents follow as payload in that order."""

    shelf: str
    name: str
    files: List[StoredFile]


class FactsRequest(TypedDict, total=False):
    """`python`: the interpreter's path; `release`: a release's folder; `variables`: names that the run will have;
    `seconds`: limit for all parts together (20); `gpu` (true); `import_torch` (false: it takes seconds).
    """

    do: str
    root: str
    python: Optional[str]
    release: str
    variables: Optional[List[str]]
    seconds: float
    gpu: bool
    import_torch: bool


class NodeRequest(TypedDict):
    """`container`: its number; `sudo`: go through `sudo -n`."""

    do: str
    container: int
    sudo: bool


class LaunchRequest(Rooted):
    """`files`: name to text; `argv` of systemd-run; `wait`: none, started or step, for `timeout` seconds."""

    run: str
    spec: Spec
    files: Dict[str, str]
    argv: List[str]
    facts: FactsRequest
    wait: str
    timeout: float


class OneRun(Rooted):
    """`run` null: the newest."""

    run: Optional[str]


class Wanted(Rooted, total=False):
    """What of a run: `lines` of its log, `steps` of its metrics; `gpu`: ask nvidia-smi (true)."""

    lines: int
    steps: int
    gpu: bool


class StatusRequest(OneRun, Wanted, total=False):
    """`every`: seconds between answers, until the unit is gone (null: one answer)."""

    every: Optional[float]


class Cursor(TypedDict):
    """A place in a log; `before`: the hash of the bytes before it (see `remote.logs`), null: not known."""

    inode: int
    offset: int
    before: Optional[str]


class LogsRequest(OneRun):
    """`cursor`: go on from there, null: begin at the last `lines` (null: all) and at `since` (unix seconds; negative:
    seconds ago; null); `follow` until the run's end.
    """

    cursor: Optional[Cursor]
    lines: Optional[int]
    since: Optional[float]
    follow: bool


class KillRequest(OneRun):
    """`grace`: seconds before SIGKILL; `force`: at once; `by`: who asks."""

    grace: float
    force: bool
    by: str


class RunsRequest(Rooted):
    """`count` of the newest runs."""

    count: int


class DiffRequest(Rooted):
    """Two runs."""

    runs: List[str]


class CheckpointRequest(OneRun):
    """`timeout`: seconds to wait for the checkpoint."""

    timeout: float


class PullRequest(OneRun):
    """`what`: checkpoints, metrics, log, all or report; `have`: bytes that are already there, by path; `kept`: sha256
    of the manifests of the checkpoints that are there in whole.
    """

    what: str
    have: Dict[str, int]
    kept: Dict[str, str]


class PushedFile(TypedDict):
    """`path` is empty for a file that is a unit by itself; `mode`: its permissions, null: as its folder's use asks."""

    path: str
    size: int
    sha256: str
    executable: bool
    mode: Optional[int]


class PushedUnit(TypedDict):
    """A file or folder, put in place at once; `sha256` is over the hashes, sizes and paths of its files."""

    name: str
    folder: bool
    sha256: str
    files: List[PushedFile]


class PushRequest(Rooted, total=False):
    """`to`: a folder; `do`: look, or take with `plan`: [state, bytes that came before] of each file, as look said. The
    payload of take is what is missing of each file whose state is not `same`.
    """

    do: str
    to: str
    units: List[PushedUnit]
    plan: List[Tuple[str, int]]


class InitRequest(TypedDict, total=False):
    """`do`: node, with `containers`, numbers or names (null: all); or container, with `root` and `python`, the only
    interpreter to look at (null: those that are found).
    """

    do: str
    containers: Optional[List[str]]
    root: str
    python: Optional[str]


class ExecRequest(OneRun):
    """`argv`: the command and its arguments."""

    argv: List[str]


class EnvRequest(Rooted, total=False):
    """`do`: list, platform (with `python`) or build; `name` in the inventory; `lock`: the hash of `text`, the lock
    file; `python`: a version or a path; `wheels`: the name of a stored folder of wheels, null: use the network.
    """

    do: str
    name: str
    lock: str
    text: str
    python: str
    wheels: Optional[str]


class GcRequest(Rooted):
    """`keep`: how many of the newest ended runs stay; `older_than`: seconds since a run's end or a cache's last use;
    `caches`: all caches, whatever their age; `remove`: null (list), or the paths that were agreed to.
    """

    keep: int
    older_than: float
    caches: bool
    remove: Optional[List[str]]


class Snapshot(TypedDict, total=False):
    """One reading of a run: what systemd, its files and nvidia-smi say, by the container's clock."""

    run: str
    unit: Dict[str, Any]
    records: Dict[str, Any]
    age: float
    log: Dict[str, Any]
    disk: Optional[Dict[str, int]]
    metrics: Dict[str, Any]
    compiled: Optional[List[Dict[str, Any]]]
    checkpoints: List["SavedCheckpoint"]
    gpu: Optional[Dict[str, Any]]
    cpu: Optional[Dict[str, float]]
    boot_id: str
    time: float
    monotonic: float


class LaunchAnswer(TypedDict):
    """`reached`: none, started, step, ended or timeout."""

    reached: str
    snapshot: Snapshot


class KillAnswer(TypedDict):
    """`outcome`: stopped, killed or already-ended; `gpu`: nvidia-smi's raw answer from before, null when not asked."""

    outcome: str
    gpu: Optional[Dict[str, Any]]
    snapshot: Snapshot


class PreflightAnswer(TypedDict):
    """`release`: present, missing or damaged; `python`: its version, null when the environment is missing."""

    release: str
    python: Optional[str]
    environment_missing: bool
    systemd: int
    free_bytes: int
    time: float


class RunsAnswer(TypedDict):
    """A snapshot of each run came before, as events."""

    total: int


class KeptRun(TypedDict):
    """What is kept of a run; `data`: the hash of its rows, null before there is one."""

    run: str
    spec: Dict[str, Any]
    facts: Optional[Dict[str, Any]]
    data: Optional[str]


class DiffAnswer(TypedDict):
    """`files`: texts of a and of b, by path, where they differ; null: not there."""

    runs: List[KeptRun]
    files: Dict[str, List[Optional[str]]]


class SavedCheckpoint(TypedDict):
    """A checkpoint that is whole; `time` in unix seconds."""

    name: str
    step: int
    time: float


class CheckpointAnswer(TypedDict):
    """`seconds` from the request to the manifest, which is written last."""

    run: str
    checkpoint: SavedCheckpoint
    seconds: float


class ResumeAnswer(TypedDict):
    """`total` steps of the run (null: it did not say); its facts `then` (or null) and those of `now`."""

    spec: Dict[str, Any]
    checkpoint: str
    step: int
    total: Optional[int]
    then: Optional[Dict[str, Any]]
    now: Dict[str, Any]


class ExecAnswer(TypedDict):
    """`status` as a shell gives it."""

    run: str
    status: int


class LookedAnswer(TypedDict):
    """Of push. `files`: (same, differs or missing; bytes that came before) of all units in order; `free` bytes in the
    folder `where`.
    """

    files: List[Tuple[str, int]]
    free: int
    where: str


class TakenAnswer(TypedDict):
    """Of push. `wrong`: paths of files that came and do not match their hash."""

    wrong: List[str]


class GcItem(TypedDict):
    """A folder that nothing uses."""

    path: str
    kind: str
    bytes: int
    why: str


class GcAnswer(TypedDict):
    """`removed`: paths."""

    items: List[GcItem]
    removed: List[str]
