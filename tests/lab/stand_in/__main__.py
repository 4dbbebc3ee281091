"""A trainer for tests of the launcher: keeps the contract of the run directory and does what its configuration says.

Keys of config.yaml, all optional: `steps` (null: for ever), `pause` seconds a step, `save_every` steps and
`checkpoint_bytes`, `slow_start` and `slow_stop` seconds, `die` (import, first-step, exit, kill), `code` of the exit,
`ignore_term`, `hang_at` (a step, after which nothing is said), `busy` (it computes there), `quiet` (no log line after
the first), `text` to log, `lines` to log at once.
"""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import yaml

config_path, run_dir = Path(sys.argv[2]), Path(sys.argv[sys.argv.index("--run-dir") + 1])
config = yaml.safe_load(config_path.read_text()) or {}
logging.basicConfig(
    level=logging.INFO,
    stream=sys.stderr,
    format="%(asctime)s.%(msecs)03dZ %(levelname)s %(threadName)s %(message)s",
    datefmt="%Y-%m-%dT%H:%M:%S",
)
logging.Formatter.converter = time.gmtime
log = logging.getLogger()
stop = False


def notify(text: str) -> None:
    if "NOTIFY_SOCKET" in os.environ:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.connect(os.environ["NOTIFY_SOCKET"])
            connection.send(text.encode())


def checkpoint(step: int) -> None:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    if folder.exists():
        return
    growing = folder.with_name(folder.name + ".tmp")
    growing.mkdir(parents=True, exist_ok=True)
    (growing / "weights.bin").write_bytes(os.urandom(config.get("checkpoint_bytes", 100_000)))
    (growing / "manifest.json").write_text(json.dumps({"step": step}))
    growing.replace(folder)
    for old in sorted(folder.parent.glob("step-????????"))[:-2]:
        shutil.rmtree(old)


def on_term(*_: object) -> None:
    global stop
    stop = not config.get("ignore_term")


signal.signal(signal.SIGTERM, on_term)
seen = {"argv": sys.argv, "config": config, "environment": dict(os.environ), "cwd": str(Path.cwd()), "pid": os.getpid()}
(run_dir / "seen.json").write_text(json.dumps(seen))
if config.get("die") == "import":
    import no_such_module  # noqa: F401
time.sleep(config.get("slow_start", 0))
log.info("hello from %s", os.environ.get("DFLASH_RUN"))
if "text" in config:
    log.info("%s", config["text"])
for number in range(config.get("lines", 0)):
    print(f"{number:08d} " + "x" * 90, flush=False)
sys.stdout.flush()
step, total = 0, config.get("steps")
while not stop and (total is None or step < total):
    if config.get("die") == "first-step" and step == 0:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    time.sleep(config.get("pause", 0.1))
    step += 1
    record = {"kind": "step", "step": step, "total_steps": total or 0, "epoch": 0, "time": time.time()}
    record |= {"loss": 4.0 / step, "accept_length": 1.5, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 100.0}
    record |= {"anchors_per_second": 10.0, "step_seconds": config.get("pause", 0.1)}
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(record) + "\n")
    notify(f"STATUS=step {step}/{total} loss {4.0 / step:.2f}\nWATCHDOG=1")
    if step % config.get("save_every", 1 << 30) == 0:
        checkpoint(step)
    if not config.get("quiet"):
        log.info("step %d loss %.3f", step, 4.0 / step)
    if step == config.get("hang_at"):
        while not stop:
            if not config.get("busy"):
                time.sleep(0.1)
    if config.get("die") == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if config.get("die") == "exit":
    log.error("this is the end")
    sys.exit(config.get("code", 1))
time.sleep(config.get("slow_stop", 0))
checkpoint(step)
log.info("done at step %d", step)
