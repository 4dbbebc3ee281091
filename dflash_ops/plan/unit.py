"""Writes the unit's properties and the two scripts that systemd runs, as pure functions.

Nothing that a user wrote is in the argument list: systemd expands `$` there and keeps it where everybody can read it.
Paths are of plain characters (the root folder is checked, the run's name too), so no quoting rule applies to them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from dflash_ops.remote.protocol import STOP_SECONDS, unit_name
from dflash_ops.run.record import RunPaths


def systemd_run_argv(run: str, paths: RunPaths, watchdog: int | None, gpus: Sequence[int] = ()) -> list[str]:
    """The transient unit. Its description names its GPUs: the unit is what holds them, wherever its files are.

    Plain on purpose: with --collect a failed unit reads as a success that never was, and RemainAfterExit would put the
    recorder off until somebody stops the unit.
    """
    properties = [
        f"ExecStopPost=-+{paths.on_exit}",  # -: a failing recorder does not make the run fail; +: as root
        "KillMode=mixed",  # SIGTERM to the trainer alone; what is left over is killed
        f"TimeoutStopSec={STOP_SECONDS}",
        "NotifyAccess=all",
        f"StandardOutput=append:{paths.log}",
        "StandardError=inherit",
        "LimitNOFILE=1048576",  # clamped silently to what the container may have
        "LimitMEMLOCK=infinity",
        "LimitCORE=0",  # an aborted trainer would dump all its memory
        "OOMPolicy=stop",
    ]
    if watchdog is not None:
        properties += [f"WatchdogSec={watchdog}", "TimeoutAbortSec=30"]
    return [
        "systemd-run",
        "--quiet",
        f"--unit={unit_name(run)}",
        f"--description=dflash run {run}" + (f" on GPU {','.join(map(str, sorted(gpus)))}" if gpus else ""),
        "--service-type=exec",
        *(word for value in properties for word in ("-p", value)),
        str(paths.entry),
    ]


def entry_script(paths: RunPaths, release: str, python: str, resume_from: str | None = None) -> str:
    """Becomes the trainer: `exec`, so that systemd's signals and watchdog meet the trainer itself."""
    words = [python, "-u", "-m", "trainer", "run", str(paths.config), "--run-dir", str(paths.directory)]
    if resume_from is not None:
        words += ["--resume-from", resume_from]
    return (
        "#!/bin/sh\n"
        "# Written by dflash: becomes the trainer.\n"
        "umask 022\n"
        f"cd {shlex.quote(release)} || exit 120\n"
        "set -a\n"
        f". {shlex.quote(str(paths.env))}\n"
        "set +a\n"
        f"exec {shlex.join(words)}\n"
    )


def env_file(base: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Shell assignments; the job's variables come last and win."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in {**base, **variables}.items())


def base_environment(run: str, paths: RunPaths, compile_cache: str, cache: str) -> dict[str, str]:
    """What every trainer gets: a root service has no HOME and no locale."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPYCACHEPREFIX": f"{cache}/pycache",  # releases stay as they were verified
        "DFLASH_RUN": run,
        "DFLASH_RUN_DIR": str(paths.directory),
        "DFLASH_COMPILE_CACHE": compile_cache,
    }


def on_exit_script(run: str, paths: RunPaths) -> str:
    """The recorder: writes exit.json from what systemd tells ExecStopPost. POSIX sh and coreutils only.

    Whether a stop was asked for shows in the unit's pending job: without it a shut-down container, whose trainer
    saved and left with status 0, would read as a success.
    """
    directory = shlex.quote(str(paths.directory))
    return f"""#!/bin/sh
# Written by dflash: records how the unit ended.
cd {directory} || exit 1
text() {{ if [ -n "$1" ]; then printf '"%s"' "$(printf %s "$1" | tr -cd 'A-Za-z0-9._-')"; else printf null; fi; }}
job=$(timeout 5 systemctl show -p Job {unit_name(run)} 2>/dev/null)
case $job in Job=[1-9]*) asked=true ;; *) asked=false ;; esac
group=$(sed -n 's/^0:://p' /proc/self/cgroup)
now=$(date +%s.%N)
case $now in *[!0-9.]*) now=$(date +%s) ;; esac
kills=$(sed -n 's/^oom_kill //p' "/sys/fs/cgroup$group/memory.events" 2>/dev/null)
record() {{
  printf '{{"time": %s, "result": %s, "exit_code": %s, "exit_status": %s, "invocation_id": %s, "boot_id": %s, ' \\
    "$now" "$(text "$SERVICE_RESULT")" "$(text "$EXIT_CODE")" "$(text "$EXIT_STATUS")" \\
    "$(text "$INVOCATION_ID")" "$(text "$(cat /proc/sys/kernel/random/boot_id)")"
  printf '"oom_kills": %s, "stop_requested": %s}}\\n' "${{kills:-null}}" "$asked"
}}
if record > exit.json.tmp && sync exit.json.tmp && mv exit.json.tmp exit.json; then
  sync .
else
  rm -f exit.json.tmp
  record | logger -t dflash-{run}
fi
"""
