"""Holds the lab's `pct` to Proxmox VE's, row by row, as observed on pve-container 6.1.10.

Where a message holds a line number that differs between versions, only the rest of it is compared.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab import SYSTEM_PATH, Lab, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("pct")]

UTF8 = {"LANG": "C.UTF-8"}
C = {"LC_ALL": "C"}
LOST = "\ufffd"
USAGE = "pct exec <vmid> [<extra-args>] [OPTIONS]\n"


class Pct:
    """Runs the lab's pct on the node with an environment that only the test decides."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def __call__(
        self, *argv: str | bytes, env: dict[str, str] = UTF8, stdin: bytes = b"", cwd: str = "/", timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        inside = self.lab.in_node("env", "-i", "-C", cwd, f"PATH={SYSTEM_PATH}", *(f"{k}={v}" for k, v in env.items()))
        return subprocess.run([*inside, "pct", *argv], input=stdin, capture_output=True, timeout=timeout)

    def script(self, text: str, timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        """A shell script on the node."""
        inside = self.lab.in_node("env", "-i", f"PATH={SYSTEM_PATH}", "LANG=C.UTF-8", "bash", "-c", text)
        return subprocess.run(inside, input=b"", capture_output=True, timeout=timeout)

    def inside(self, script: str) -> str:
        """What a shell script prints in the container."""
        return self.lab.container("sh", "-c", script).stdout


@pytest.fixture(scope="module")
def pct(lab: Lab) -> Pct:
    return Pct(lab)


@pytest.fixture
def folder(lab: Lab) -> Iterator[str]:
    """An empty folder with the same name on the node and in the container."""
    path = f"/tmp/pct-{lab.identity}"
    for on in (lab.node, lab.container):
        on("rm", "-rf", path)
        on("mkdir", path)
    yield path
    lab.container("sh", "-c", f"umount {path}/* 2>/dev/null; rm -rf {path}")
    lab.node("rm", "-rf", path)


# ---- exec: arguments --------------------------------------------------------------------------------------------

TRICKY = [
    "a b", "it's", '"', "$HOME", "`id`", "$(id)", "line\nbreak", "tab\there", "cr\rhere", "*", "", "\\", ";", "|",
    "&&", "-x", "--flag", "--", "~", "#", "!", "{a,b}", "=ls", "%n",
]  # fmt: skip


def printed(*words: str) -> bytes:
    return "".join(f"[{word}]\n" for word in words).encode()


def test_exec_passes_every_argument_unchanged(pct: Pct) -> None:
    done = pct("exec", "200", "--", "printf", "[%s]\\n", *TRICKY)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed(*TRICKY), b"")


@pytest.mark.parametrize("env", [{"LANG": "C.UTF-8"}, {"LC_ALL": "C.UTF-8"}, {"LC_CTYPE": "C.UTF-8"}])
def test_exec_keeps_unicode_in_a_utf8_locale(pct: Pct, env: dict[str, str]) -> None:
    done = pct("exec", "200", "--", "printf", "[%s]\\n", "é", "日本", "🚀", env=env)
    assert (done.returncode, done.stdout) == (0, printed("é", "日本", "🚀"))


@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C"}, {"LANG": "POSIX"}])
def test_exec_loses_each_byte_of_unicode_in_the_c_locale(pct: Pct, env: dict[str, str]) -> None:
    done = pct("exec", "200", "--", "printf", "[%s]\\n", "é", "日", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed(LOST * 2, LOST * 3), b"")


def test_a_locale_that_the_node_lacks_is_the_c_locale_with_perls_six_lines(pct: Pct) -> None:
    done = pct("exec", "200", "--", "printf", "[%s]\\n", "é", env={"LANG": "xx_XX.UTF-8"})
    assert done.stdout == printed(LOST * 2)
    lines = done.stderr.decode().splitlines()
    assert lines[0] == "perl: warning: Setting locale failed."
    assert lines[-1] == 'perl: warning: Falling back to the standard locale ("C").'


def test_exec_replaces_invalid_utf8(pct: Pct) -> None:
    done = pct("exec", "200", "--", "printf", "[%s]\\n", b"\xff\xfe\x80", b"caf\xe9 x")
    assert done.stdout.decode().replace(LOST, "?").replace("???", "?") == "[?]\n[caf? x]\n"


def test_exec_takes_one_argument_of_131071_bytes_and_two_megabytes_in_all(pct: Pct) -> None:
    assert pct("exec", "200", "--", "sh", "-c", "echo ${#1}", "-", "a" * 131071).stdout == b"131071\n"
    many = pct("exec", "200", "--", "sh", "-c", "echo $#", "-", *["b" * 50_000] * 40)
    assert many.stdout == b"40\n"


@pytest.mark.parametrize(
    ("argv", "stdout"),
    [
        (["exec", "200", "echo", "hi"], "hi"),
        (["exec", "200", "--", "echo", "hi"], "hi"),
        (["exec", "200", "echo", "--", "-n", "hi"], "hi"),
        (["exec", "--", "200", "echo", "hi"], "hi"),
        (["exec", "--keep-env", "0", "200", "--", "echo", "hi"], "hi"),
        (["exec", "200", "--keep-env", "0", "--", "echo", "hi"], "hi"),
        (["exec", "200", "--keep-env=0", "--", "echo", "hi"], "hi"),
        (["exec", "200", "-keep-env", "0", "--", "echo", "hi"], "hi"),
        (["exec", "200", "--keep-env", "--", "echo", "hi"], "hi"),
        (["exe", "200", "--", "echo", "hi"], "hi"),
        (["stat", "200"], "status: running"),
    ],
)  # fmt: skip
def test_accepted_command_lines(pct: Pct, argv: list[str], stdout: str) -> None:
    done = pct(*argv)
    assert (done.returncode, done.stdout.decode().strip(), done.stderr) == (0, stdout, b"")


NOT_AN_INTEGER = "400 Parameter verification failed.\nvmid: type check ('integer') failed - got '{}'\n" + USAGE
NOT_A_VMID = (
    "400 Parameter verification failed.\nvmid: invalid format - value does not look like a valid VM ID\n\n" + USAGE
)


@pytest.mark.parametrize(
    ("argv", "stderr", "code"),
    [
        (["exec", "200", "ls", "-la", "/x"], "Unknown option: la\n400 unable to parse option\n" + USAGE, 2),
        (["exec", "200", "sh", "-c", "echo hi"], "Unknown option: c\n400 unable to parse option\n" + USAGE, 2),
        (["exec", "200", "echo", "--foo=bar"], "Unknown option: foo\n400 unable to parse option\n" + USAGE, 2),
        (["exec", "200", "--bogus", "1", "--", "ls"], "Unknown option: bogus\n400 unable to parse option\n" + USAGE, 2),
        (["exec", "-5", "--", "ls"], "Unknown option: 5\n400 unable to parse option\n" + USAGE, 2),
        (["exec", "200", "--keep-env", "maybe", "--", "ls"], "400 unable to parse boolean option\n" + USAGE, 2),
        (["exec"], "400 not enough arguments\n" + USAGE, 2),
        (["exec", "--"], "400 not enough arguments\n" + USAGE, 2),
        *((["exec", vmid, "--", "ls"], NOT_AN_INTEGER.format(vmid), 2) for vmid in ("abc", "", "200x", "200 ")),
        *((["exec", vmid, "--", "ls"], NOT_A_VMID, 2) for vmid in ("0", "1", "99", "0200", "1000000000")),
        (["exec", "999", "--", "ls"], "Configuration file 'nodes/vm/lxc/999.conf' does not exist\n", 2),
        (["status", "999"], "Configuration file 'nodes/vm/lxc/999.conf' does not exist\n", 2),
        (["config", "999"], "Configuration file 'nodes/vm/lxc/999.conf' does not exist\n", 2),
        (["start", "999"], "Configuration file 'nodes/vm/lxc/999.conf' does not exist\n", 255),
        (["exec", "201", "--", "ls"], "container '201' not running!\n", 255),
        (["start", "200"], "CT 200 already running\n", 255),
        (["stop", "201"], "CT 201 not running\n", 255),
        (["stop", "999"], "CT 999 not running\n", 255),
        (["shutdown", "201"], "CT 201 not running\n", 255),
        (["reboot", "201"], "VM 201 not running\n", 255),
        (["push", "201", "a", "b"], "can only push files to a running CT\n", 255),
        (["push", "999", "a", "b"], "can only push files to a running CT\n", 255),
        (["push", "200", "a"], "400 not enough arguments\npct push <vmid> <file> <destination> [OPTIONS]\n", 2),
    ],
)  # fmt: skip
def test_refused_command_lines(pct: Pct, argv: list[str], stderr: str, code: int) -> None:
    done = pct(*argv)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (code, b"", stderr)


@pytest.mark.parametrize("words", [["200"], ["200", "--"]])
def test_exec_without_a_command(pct: Pct, words: list[str]) -> None:
    done = pct("exec", *words)
    assert (done.returncode, done.stdout) == (255, b"")
    assert done.stderr.startswith(b"missing command at /usr/share/perl5/PVE/CLI/pct.pm line ")


@pytest.mark.parametrize("vmid", ["201", "999"])
def test_pull_from_what_does_not_run(pct: Pct, vmid: str) -> None:
    done = pct("pull", vmid, "a", "b")
    assert done.returncode == 255
    assert done.stderr.startswith(b"can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct.pm line ")


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        ([], "ERROR: no command specified"),
        (["frob"], "ERROR: unknown command 'pct frob'"),
        (["--help"], "ERROR: unknown command 'pct --help'"),
        (["--version"], "ERROR: unknown command 'pct --version'"),
    ],
)
def test_what_is_no_command_prints_the_usage_on_stderr(pct: Pct, argv: list[str], first: str) -> None:
    done = pct(*argv)
    assert (done.returncode, done.stdout) == (255, b"")
    assert done.stderr.decode().splitlines()[0] == first
    assert "USAGE" in done.stderr.decode()


def test_help_is_on_stdout(pct: Pct) -> None:
    done = pct("help", "exec")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"pct exec <vmid>" in done.stdout


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (["nosuch"], 127, 'No such file or directory - Failed to exec "nosuch"'),
        (["/no/such"], 127, 'No such file or directory - Failed to exec "/no/such"'),
        ([""], 127, 'No such file or directory - Failed to exec ""'),
        (["/etc/passwd"], 126, 'Permission denied - Failed to exec "/etc/passwd"'),
        (["/etc"], 126, 'Permission denied - Failed to exec "/etc"'),
    ],
)
def test_a_command_that_cannot_start(pct: Pct, argv: list[str], code: int, reason: str) -> None:
    done = pct("exec", "200", "--", *argv)
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.decode().startswith("lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: ")
    assert done.stderr.decode().rstrip().endswith(reason)


def test_a_second_double_dash_is_the_command(pct: Pct) -> None:
    done = pct("exec", "--", "200", "--", "echo", "hi")
    assert done.returncode == 127
    assert b'Failed to exec "--"' in done.stderr


def test_another_user_than_root_gets_nowhere(pct: Pct) -> None:
    done = pct.script("setpriv --reuid 65534 --regid 65534 --clear-groups pct exec 200 -- id")
    lost = "".join(f"ipcc_send_rec[{number}] failed: Unknown error -1\n" for number in (1, 2, 3))
    assert done.returncode == 255
    assert done.stderr.decode() == lost + "Unable to load access control list: Unknown error -1\n"


@pytest.mark.parametrize("code", [0, 1, 2, 42, 125, 126, 127, 128, 129, 254, 255])
def test_exit_codes_pass_through(pct: Pct, code: int) -> None:
    assert pct("exec", "200", "--", "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("KILL", 137), ("SEGV", 139), ("HUP", 129), ("INT", 130)])
def test_death_by_a_signal_is_128_and_its_number(pct: Pct, name: str, code: int) -> None:
    assert pct("exec", "200", "--", "sh", "-c", f"kill -{name} $$").returncode == code


# ---- exec: what the command sees --------------------------------------------------------------------------------


def environment(done: subprocess.CompletedProcess[bytes]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if item)


def test_the_whole_environment_leaks_by_default(pct: Pct) -> None:
    secret = {
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "SSH_CONNECTION": "1 2 3 4",
        "TOKEN": "two\nlines",
        "PATH": "/nowhere:" + SYSTEM_PATH,
    }
    seen = environment(
        pct("exec", "200", "--", "env", "-0", env={**secret, "SSL_CERT_FILE": "/x", "SSL_CERT_DIR": "/y"})
    )
    assert seen.pop("PATH") == "/sbin:/bin:/usr/sbin:/usr/bin"
    assert seen.pop("container") == "lxc"
    assert seen.pop("TERM") == "linux"
    del secret["PATH"]
    assert {key: seen.get(key) for key in secret} == secret
    assert not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & set(seen)


def test_a_cleared_environment_has_three_variables(pct: Pct) -> None:
    done = pct(
        "exec", "200", "--keep-env", "0", "--", "env", "-0", env={"HOME": "/root", "LANG": "C.UTF-8", "TOKEN": "x"}
    )
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert environment(done) == {"PATH": path, "container": "lxc", "TERM": "linux"}


def test_the_working_directory_is_the_callers_where_the_container_has_it(pct: Pct, folder: str) -> None:
    assert pct("exec", "200", "--", "pwd", cwd=folder).stdout.decode().strip() == folder
    pct.lab.container("rmdir", folder)
    assert pct("exec", "200", "--", "pwd", cwd=folder).stdout == b"/\n"
    pct.lab.container("mkdir", folder)


def test_sigpipe_is_ignored_inside(pct: Pct) -> None:
    ignored = pct("exec", "200", "--", "sh", "-c", "grep SigIgn /proc/self/status").stdout.split()[1]
    assert int(ignored, 16) & 1 << 12
    done = pct("exec", "200", "--", "bash", "-c", "set -o pipefail; yes | head -1")
    assert (done.returncode, done.stdout) == (1, b"y\n")
    assert b"Broken pipe" in done.stderr
    raw = pct.script("lxc-attach -n 200 -- bash -c 'set -o pipefail; yes | head -1'")
    assert raw.returncode == 141


def test_umask_limits_and_niceness_are_inherited(pct: Pct) -> None:
    done = pct.script("umask 077; ulimit -n 777; nice -n 5 pct exec 200 -- sh -c 'umask; ulimit -n; nice'")
    assert done.stdout.decode().split() == ["0077", "777", "5"]


def test_the_command_is_root_outside_every_unit(pct: Pct) -> None:
    done = pct("exec", "200", "--", "sh", "-c", "id -u; id -g; tail -n1 /proc/self/cgroup; ps -o ppid= -p $$")
    uid, gid, cgroup, parent = done.stdout.decode().split()
    assert (uid, gid, parent) == ("0", "0", "0")
    assert ".service" not in cgroup


def test_stdin_and_stdout_are_binary_safe(pct: Pct) -> None:
    data = bytes(range(256)) * 80_000
    assert pct("exec", "200", "--", "cat", stdin=data).stdout == data


def test_stderr_stays_apart(pct: Pct) -> None:
    done = pct("exec", "200", "--", "sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


@pytest.mark.parametrize("command", [["true"], ["head", "-c1"]])
def test_a_command_that_does_not_read_its_stdin_ends(pct: Pct, command: list[str]) -> None:
    assert pct("exec", "200", "--", *command, stdin=b"\0" * 20_000_000).returncode == 0


def test_with_a_terminal_the_command_gets_a_pty_of_its_own(pct: Pct) -> None:
    inner = "sh -c 'tty; echo out; echo err >&2; exit 7'"
    done = pct.script(f'script -qec "pct exec 200 -- {inner}" /dev/null', timeout=30)
    assert done.returncode == 7
    lines = done.stdout.split(b"\r\r\n")
    assert lines[0].startswith(b"/dev/pts/")
    assert lines[1:3] == [b"out", b"err"]


# ---- exec: lifetime ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["nohup {} >/dev/null 2>&1 &", "setsid {} >/dev/null 2>&1 &", "{} >/dev/null 2>&1 &"])
def test_background_processes_outlive_exec(pct: Pct, start: str) -> None:
    pid = pct("exec", "200", "--", "sh", "-c", start.format("sleep 60") + " echo $!").stdout.decode().strip()
    assert pct.inside(f"cat /proc/{pid}/comm").strip() == "sleep"
    pct.inside(f"kill -9 {pid}")


def test_a_child_that_keeps_stdout_keeps_the_reader_waiting(pct: Pct) -> None:
    done = pct.script(
        "mkfifo /run/lock/fifo; (cat </run/lock/fifo >/dev/null; echo eof) &"
        "pct exec 200 -- sh -c 'sleep 1 & echo started' >/run/lock/fifo; echo exited; wait; rm /run/lock/fifo"
    )
    assert done.stdout.decode().split() == ["exited", "eof"]


STARTED = "pct exec 200 -- sh -c 'echo $$ >/tmp/inner; exec sleep 61' & outer=$!; {until}; "
UNTIL = "until pct exec 200 -- test -s /tmp/inner; do sleep 0.05; done; inner=$(pct exec 200 -- cat /tmp/inner)"


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("HUP", 129), ("KILL", 137)])
def test_a_signal_to_pct_alone_leaves_the_command_running(pct: Pct, name: str, code: int) -> None:
    pct.inside("rm -f /tmp/inner")
    done = pct.script(
        STARTED.format(until=UNTIL) + f"kill -{name} $outer; wait $outer; echo $?;"
        "pct exec 200 -- cat /proc/$inner/comm; pct exec 200 -- kill -9 $inner"
    )
    assert done.stdout.decode().split() == [str(code), "sleep"]


@pytest.mark.parametrize("name", ["INT", "QUIT", "PIPE"])
def test_pct_itself_ignores_these_signals(pct: Pct, name: str) -> None:
    pct.inside("rm -f /tmp/inner")
    # A shell without job control starts background jobs with INT and QUIT ignored; env takes that back.
    started = STARTED.format(until=UNTIL).replace("pct exec", "env --default-signal=INT,QUIT pct exec", 1)
    done = pct.script(
        started + f"kill -{name} $outer; sleep 0.3; kill -0 $outer && echo alive;"
        "pct exec 200 -- cat /proc/$inner/comm; pct exec 200 -- kill -9 $inner; wait $outer; echo $?"
    )
    assert done.stdout.decode().split() == ["alive", "sleep", "137"]


@pytest.mark.parametrize("name", ["TERM", "HUP", "KILL"])
def test_a_signal_to_the_process_group_reaches_the_command(pct: Pct, name: str) -> None:
    pct.inside("rm -f /tmp/inner")
    done = pct.script(
        "set -m; " + STARTED.format(until=UNTIL) + f"kill -{name} -- -$outer; wait $outer 2>/dev/null;"
        "sleep 0.2; pct exec 200 -- test -e /proc/$inner && echo survived || echo gone"
    )
    assert done.stdout.decode().split() == ["gone"]


def test_a_stopped_container_ends_exec_with_137(lab: Lab, pct: Pct) -> None:
    process = subprocess.Popen(
        lab.in_node("pct", "exec", "200", "--", "sh", "-c", "echo here; sleep 60"), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    lab.stop_container()
    try:
        assert process.wait(20) == 137
        assert pct("status", "200").stdout == b"status: stopped\n"
    finally:
        lab.start_container()


def test_a_frozen_container_is_running_and_exec_hangs_until_it_thaws(lab: Lab, pct: Pct) -> None:
    lab.freeze()
    try:
        process = subprocess.Popen(lab.in_node("pct", "exec", "200", "--", "echo", "hi"), stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        assert pct("status", "200").stdout == b"status: running\n"
    finally:
        lab.thaw()
    assert process.communicate(timeout=20)[0] == b"hi\n"


# ---- push and pull ----------------------------------------------------------------------------------------------


def test_push_makes_a_root_file_of_mode_644(pct: Pct, folder: str) -> None:
    pct.script(f"echo hello >{folder}/a; chmod 700 {folder}/a")
    done = pct("push", "200", f"{folder}/a", f"{folder}/b")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert pct.inside(f"stat -c '%a %u %g' {folder}/b; cat {folder}/b").split() == ["644", "0", "0", "hello"]


def test_push_over_a_file_keeps_its_mode_and_owner_and_follows_links(pct: Pct, folder: str) -> None:
    pct.script(f"echo new >{folder}/a")
    pct.inside(f"cd {folder}; echo older and longer >b; chown 33:33 b; chmod 640 b; ln -s b link")
    assert pct("push", "200", f"{folder}/a", f"{folder}/link").returncode == 0
    assert pct.inside(f"cd {folder}; stat -c '%a %u %g' b; cat b; test -L link && echo link").split() == [
        "640",
        "33",
        "33",
        "new",
        "link",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--perms", "0755"], "755 0 0"),
        (["--perms", "755"], "755 0 0"),
        (["--perms", "4755"], "4755 0 0"),
        (["--user", "www-data", "--group", "33"], "644 33 33"),
        (["-perms", "600", "-user", "1"], "600 1 0"),
    ],
)
def test_push_takes_mode_and_owner(pct: Pct, folder: str, options: list[str], expected: str) -> None:
    pct.script(f"echo x >{folder}/a")
    assert pct("push", "200", f"{folder}/a", f"{folder}/b", *options).returncode == 0
    assert pct.inside(f"stat -c '%a %u %g' {folder}/b").strip() == expected


@pytest.mark.parametrize(
    ("source", "destination", "options", "stderr"),
    [
        ("a", "b", ["--perms", "rwx"], "invalid mode: '0rwx'"),
        ("a", "b", ["--perms", "888"], "invalid mode: '0888'"),
        ("a", "b", ["--user", "nosuch"], "failed to get uid for: nosuch"),
        ("a", "nodir/x", [], "failed to create file: {}/nodir/x: No such file or directory"),
        ("a", "dir", [], "failed to create file: {}/dir: Is a directory"),
        ("a", "dir/", [], "failed to create file: {}/dir/: Is a directory"),
        ("nosuch", "b", [], "failed to open {}/nosuch for reading"),
        ("a", "ro/b", [], "failed to create file: {}/ro/b: Read-only file system"),
    ],
)
def test_a_failed_push_says_so_on_stderr_and_exits_0(
    pct: Pct, folder: str, source: str, destination: str, options: list[str], stderr: str
) -> None:
    pct.script(f"echo x >{folder}/a")
    pct.inside(f"cd {folder}; mkdir dir ro; mount -t tmpfs -o ro none ro")
    done = pct("push", "200", f"{folder}/{source}", f"{folder}/{destination}", *options)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (0, b"", stderr.format(folder) + "\n")
    assert pct.inside(f"ls {folder} | grep -x b || echo none").strip() == "none"


def test_push_truncates_in_silence_on_a_full_disk(pct: Pct, folder: str) -> None:
    pct.script(f"head -c 5000000 /dev/zero >{folder}/a")
    pct.inside(f"mkdir {folder}/full; mount -t tmpfs -o size=1M none {folder}/full")
    done = pct("push", "200", f"{folder}/a", f"{folder}/full/b")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert int(pct.inside(f"stat -c %s {folder}/full/b")) == 1 << 20


def test_push_of_a_directory_makes_an_empty_file(pct: Pct, folder: str) -> None:
    done = pct("push", "200", folder, f"{folder}/b")
    assert (done.returncode, done.stderr) == (0, b"")
    assert pct.inside(f"stat -c %s {folder}/b").strip() == "0"


def test_push_reads_a_pipe_by_its_device_and_takes_relative_destinations_from_the_root(pct: Pct, folder: str) -> None:
    assert pct("push", "200", "/dev/stdin", f"{folder}/b"[1:], stdin=b"piped").stderr == b""
    assert pct.inside(f"cat {folder}/b") == "piped"
    assert pct("push", "200", "-", f"{folder}/c", stdin=b"piped").stderr == b"failed to open - for reading\n"


def test_push_of_a_unicode_path_fails_in_the_c_locale(pct: Pct, folder: str) -> None:
    pct.script(f"echo x >{folder}/über")
    assert pct("push", "200", f"{folder}/über", f"{folder}/b").stderr == b""
    done = pct("push", "200", f"{folder}/über", f"{folder}/b", env=C)
    assert (done.returncode, done.stderr.decode()) == (0, f"failed to open {folder}/{LOST}{LOST}ber for reading\n")


def test_push_and_pull_of_twenty_megabytes_are_exact(pct: Pct, folder: str) -> None:
    pct.script(f"head -c 20000000 /dev/urandom >{folder}/a")
    assert pct("push", "200", f"{folder}/a", f"{folder}/b").returncode == 0
    assert pct("pull", "200", f"{folder}/b", f"{folder}/c").returncode == 0
    assert pct.script(f"cmp {folder}/a {folder}/c").returncode == 0


def test_pull_makes_a_file_of_mode_644_and_keeps_the_mode_of_an_old_one(pct: Pct, folder: str) -> None:
    pct.inside(f"echo data >{folder}/a; chmod 600 {folder}/a")
    pct.script(f"echo longer than that >{folder}/old; chmod 751 {folder}/old")
    for name in ("new", "old"):
        done = pct("pull", "200", f"{folder}/a", f"{folder}/{name}")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert pct.script(f"cd {folder}; stat -c %a new old; cat new old").stdout.split() == [
        b"644",
        b"751",
        b"data",
        b"data",
    ]
    assert pct("pull", "200", f"{folder}/a", "/dev/stdout").stdout == b"data\n"


def test_pull_of_what_is_missing_exits_0_and_empties_the_destination(pct: Pct, folder: str) -> None:
    pct.script(f"echo precious >{folder}/b")
    done = pct("pull", "200", "/no/such", f"{folder}/b")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        b"",
        b"failed to open /no/such: No such file or directory\n",
    )
    assert pct.script(f"stat -c %s {folder}/b").stdout == b"0\n"


def test_pull_of_a_directory_makes_an_empty_file(pct: Pct, folder: str) -> None:
    done = pct("pull", "200", "/etc", f"{folder}/b")
    assert (done.returncode, done.stderr) == (0, b"")
    assert pct.script(f"stat -c %s {folder}/b").stdout == b"0\n"


@pytest.mark.parametrize("destination", ["nodir/x", "."])
def test_pull_to_where_no_file_can_be_exits_0(pct: Pct, folder: str, destination: str) -> None:
    done = pct("pull", "200", "/etc/hostname", f"{folder}/{destination}")
    assert done.returncode == 0
    assert done.stderr.decode().startswith(f"failed to create file: {folder}/{destination}: ")


def test_a_second_push_waits_for_the_lock_and_exec_does_not(pct: Pct, folder: str) -> None:
    done = pct.script(
        f"cd {folder}; mkfifo slow; echo x >a; pct push 200 slow {folder}/b & exec 9>slow; sleep 0.3;"
        f"pct exec 200 -- echo exec; pct push 200 a {folder}/c 9>&- & second=$!; sleep 0.5;"
        "exec 9>&-; wait $second; echo $?"
    )
    assert done.stdout.decode().split() == ["exec", "0"]
    assert done.stderr.decode() == "trying to acquire lock...\n OK\n"


def test_a_push_that_gets_no_lock_in_ten_seconds_exits_4(pct: Pct, folder: str) -> None:
    done = pct.script(f"flock /run/lock/lxc/pve-config-200.lock pct push 200 /etc/hostname {folder}/b")
    assert done.returncode == 4
    said = done.stderr.decode()
    assert said.startswith("trying to acquire lock...")
    assert said.endswith("can't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout\n")


@pytest.mark.parametrize("name", ["KILL", "HUP"])
def test_the_worker_of_a_killed_push_completes(pct: Pct, folder: str, name: str) -> None:
    done = pct.script(
        f"cd {folder}; mkfifo slow; pct push 200 slow {folder}/b & pushing=$!; exec 9>slow; echo -n first >&9;"
        f"sleep 0.3; kill -{name} $pushing; wait $pushing 2>/dev/null; echo -n second >&9; exec 9>&-"
    )
    assert done.returncode == 0
    wait_for("the worker has copied all", lambda: pct.inside(f"cat {folder}/b") == "firstsecond", 10)


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_an_interrupted_push_exits_0_and_leaves_a_part(pct: Pct, folder: str, name: str) -> None:
    done = pct.script(
        f"cd {folder}; mkfifo slow; env --default-signal=INT pct push 200 slow {folder}/b & pushing=$!; exec 9>slow;"
        f"echo -n first >&9; sleep 0.5; kill -{name} $pushing; wait $pushing; echo $?; exec 9>&-"
    )
    assert (done.stdout, done.stderr) == (b"0\n", b"received interrupt\n")
    assert pct.inside(f"cat {folder}/b") == "first"


# ---- status, list, config, lifecycle ----------------------------------------------------------------------------


def test_status(pct: Pct) -> None:
    assert pct("status", "200").stdout == b"status: running\n"
    assert pct("status", "201").stdout == b"status: stopped\n"


def test_status_verbose_is_sorted_and_has_a_pid_only_while_running(pct: Pct) -> None:
    for vmid, pid in (("200", ["pid"]), ("201", [])):
        keys = [line.split(":")[0] for line in pct("status", vmid, "--verbose").stdout.decode().splitlines()]
        names = "cpus disk diskread diskwrite maxdisk maxmem maxswap mem name netin netout status swap type uptime vmid"
        assert keys == sorted(names.split() + pid)


def test_list_is_a_table_sorted_by_vmid(lab: Lab, pct: Pct) -> None:
    lab.node("sed", "-i", "$ a lock: backup", "/etc/pve/nodes/vm/lxc/201.conf")
    try:
        assert pct("list").stdout.decode().splitlines() == [
            "VMID       Status     Lock         Name                ",
            "200        running                 ct200               ",
            "201        stopped    backup       ct201               ",
        ]
    finally:
        lab.node("sed", "-i", "/^lock:/d", "/etc/pve/nodes/vm/lxc/201.conf")
    assert pct("list", "--output-format", "json").returncode == 2


def test_config_is_sorted_and_its_description_is_encoded(lab: Lab, pct: Pct) -> None:
    lab.node(
        "sed", "-i", "1 i #for the\\n#drafters\\nlxc.apparmor.profile: unconfined", "/etc/pve/nodes/vm/lxc/201.conf"
    )
    try:
        lines = pct("config", "201").stdout.decode().splitlines()
    finally:
        lab.node("sed", "-i", "/^#/d; /^lxc/d", "/etc/pve/nodes/vm/lxc/201.conf")
    raw = [line for line in lines if line.startswith("lxc.")]
    assert lines == sorted(set(lines) - set(raw)) + sorted(raw)  # lxc.* lines come last
    assert raw == ["lxc.apparmor.profile: unconfined"]
    assert "description: for the%0Adrafters%0A" in lines
    assert "hostname: ct201" in lines


def test_a_locked_container_can_be_entered_but_not_stopped(lab: Lab, pct: Pct, folder: str) -> None:
    lab.node("sed", "-i", "$ a lock: backup", "/etc/pve/nodes/vm/lxc/200.conf")
    try:
        assert pct("exec", "200", "--", "echo", "hi").stdout == b"hi\n"
        assert pct("push", "200", "/etc/hostname", f"{folder}/b").stderr == b""
        assert pct("status", "200").stdout == b"status: running\n"
        for verb in ("stop", "shutdown"):
            done = pct(verb, "200")
            assert (done.returncode, done.stderr) == (255, b"CT is locked (backup)\n")
        done = pct("start", "200")
        assert (done.returncode, done.stderr) == (255, b"CT 200 already running\n")
        # It is stopped without a look at the lock, and then the start refuses.
        done = pct("reboot", "200")
        assert (done.returncode, done.stderr) == (255, b"startup for container '200' failed\n")
        assert pct("status", "200").stdout == b"status: stopped\n"
    finally:
        lab.node("sed", "-i", "/^lock:/d", "/etc/pve/nodes/vm/lxc/200.conf")
        lab.start_container()
    lab.wait_booted()


def test_config_shows_what_waits_for_the_next_start_and_current_what_holds(lab: Lab, pct: Pct) -> None:
    path = "/etc/pve/nodes/vm/lxc/201.conf"
    lab.node(
        "sh", "-c", f"cp {path} /tmp/201.conf; printf '[pve:pending]\\nfeatures: nesting=1\\ncores: 9\\n' >> {path}"
    )
    try:
        shown = pct("config", "201").stdout.decode().splitlines()
        current = pct("config", "201", "--current").stdout.decode().splitlines()
        assert "cores: 9" in shown
        assert "cores: 9" not in current
        assert pct("config", "201", "--snapshot", "none").returncode == 2
    finally:
        lab.node("sh", "-c", f"cat /tmp/201.conf > {path}")


def test_a_node_whose_cluster_file_system_is_down_says_so_of_every_command(lab: Lab, pct: Pct) -> None:
    lab.node("sh", "-c", "mkdir -p /etc/dflash-lab; touch /etc/dflash-lab/pmxcfs-down")
    try:
        for words in (("exec", "200", "--", "true"), ("status", "200"), ("list",)):
            done = pct(*words)
            assert done.returncode == 111
            assert done.stderr.decode().splitlines() == [
                *(f"ipcc_send_rec[{number}] failed: Connection refused" for number in (1, 2, 3)),
                "Unable to load access control list: Connection refused",
            ]
        assert b"no command specified" in pct().stderr
    finally:
        lab.node("rm", "-f", "/etc/dflash-lab/pmxcfs-down")


def test_stop_shutdown_start_and_reboot_are_silent(lab: Lab, pct: Pct) -> None:
    for verb in ("stop", "start", "shutdown", "start", "reboot"):
        done = pct(verb, "200")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), verb
        if verb in ("start", "reboot"):
            lab.wait_booted()


# ---- over ssh, and the switch of the start-up time --------------------------------------------------------------


def ssh(lab: Lab, command: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*lab.ssh_command(), command], capture_output=True, timeout=60, **options)


def test_ssh_rejoins_the_words_for_the_login_shell(lab: Lab) -> None:
    words = ["pct", "exec", "200", "--", "printf", "[%s]\\n", *TRICKY, "é🚀"]
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    once = ssh(lab, shlex.join(words), env=env, stdin=subprocess.DEVNULL)
    assert once.stdout == printed(*TRICKY, "é🚀")
    on_the_node = ssh(lab, "pct exec 200 -- sh -c 'echo one'; hostname", stdin=subprocess.DEVNULL)
    assert on_the_node.stdout == b"one\nvm\n"


@pytest.mark.parametrize("code", [0, 1, 42, 255, 137])
def test_exit_codes_come_through_ssh(lab: Lab, code: int) -> None:
    assert ssh(lab, f"pct exec 200 -- sh -c 'exit {code}'", stdin=subprocess.DEVNULL).returncode == code


def test_twenty_megabytes_come_through_ssh_unchanged(lab: Lab) -> None:
    data = os.urandom(20_000_000)
    done = ssh(lab, "pct exec 200 -- cat", input=data)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_the_command_outlives_the_ssh_client_and_its_reader_sees_a_plain_end(lab: Lab, pct: Pct, name: str) -> None:
    pct.inside("rm -f /tmp/upload /tmp/done")
    script = "sh -c 'echo here; cat >/tmp/upload; echo $? >/tmp/done'"
    client = subprocess.Popen(
        [*lab.ssh_command(), f"pct exec 200 -- {script}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stdout.readline() == b"here\n"
    client.stdin.write(b"half")
    client.stdin.flush()
    wait_for("the first half is there", lambda: pct.inside("cat /tmp/upload") == "half", 10)
    getattr(client, "terminate" if name == "TERM" else "kill")()
    client.wait(10)
    wait_for(
        "cat has ended as if all were well", lambda: pct.inside("cat /tmp/done 2>/dev/null || true").strip() == "0", 10
    )


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_with_a_terminal_the_command_dies_with_the_ssh_client(lab: Lab, pct: Pct, name: str) -> None:
    command = [word if word != "-T" else "-tt" for word in lab.ssh_command()]
    client = subprocess.Popen(
        [*command, "pct exec 200 -- sh -c 'echo $$; exec sleep 62'"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    pid = client.stdout.readline().decode().strip()
    getattr(client, "terminate" if name == "TERM" else "kill")()
    client.wait(10)
    wait_for("the command has died", lambda: not pct.inside(f"ls -d /proc/{pid} 2>/dev/null || true"), 10)


def test_unicode_is_lost_when_the_client_sends_no_locale(lab: Lab) -> None:
    env = {key: value for key, value in os.environ.items() if key != "LANG" and not key.startswith("LC_")}
    done = ssh(lab, "pct exec 200 -- echo é", env=env, stdin=subprocess.DEVNULL)
    assert done.stdout.decode() == LOST * 2 + "\n"


def test_a_remote_command_of_128_kib_is_too_long_for_the_login_shell(lab: Lab) -> None:
    # The client's own argument has the same limit, so that the words arrive as several.
    done = subprocess.run(
        [*lab.ssh_command(), "pct exec 200 -- echo", "a" * 70_000, "b" * 70_000], capture_output=True, timeout=60
    )
    assert done.returncode == 1
    assert b"Argument list too long" in done.stderr


def test_twenty_execs_at_once_each_have_their_own_input_and_exit_code(lab: Lab) -> None:
    inner = ["pct", "exec", "200", "--", "sh", "-c", "read n; sleep 0.2; echo got $n; exit $n"]
    running = [
        subprocess.Popen(lab.in_node(*inner), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(20)
    ]
    outputs = [process.communicate(f"{number}\n", timeout=60)[0] for number, process in enumerate(running)]
    assert outputs == [f"got {number}\n" for number in range(20)]
    assert [process.returncode for process in running] == list(range(20))


def test_the_start_up_time_is_a_switch(lab: Lab, pct: Pct) -> None:
    with lab.slow_pct(0.8):
        started = time.monotonic()
        pct("exec", "200", "--", "true")
        assert time.monotonic() - started >= 0.8


def test_the_machine_itself_has_no_such_pct() -> None:
    assert not Path("/etc/pve").exists() or Path("/usr/bin/pveversion").exists()
