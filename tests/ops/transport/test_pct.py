"""What pct, lxc-attach, sudo and shells say when a container cannot be entered, and what the user hears of it."""

from __future__ import annotations

import pytest

from dflash_ops.inventory.models import ContainerEntry
from dflash_ops.transport.pct import enter_command, explain, sudoers_line
from dflash_ops.transport.program import BOOTSTRAP

PCT = ContainerEntry(host="pve1", container=200)
ATTACH = ContainerEntry(host="pve1", container=200, enter="lxc-attach")


def test_the_command_line_is_constant_but_for_the_container() -> None:
    assert enter_command(PCT, sudo=False) == f"/usr/sbin/pct exec 200 --keep-env 0 -- {BOOTSTRAP}"
    assert enter_command(PCT, sudo=True) == f"sudo -n /usr/sbin/pct exec 200 --keep-env 0 -- {BOOTSTRAP}"
    assert enter_command(ATTACH, sudo=False) == f"/usr/bin/lxc-attach -n 200 --clear-env -- {BOOTSTRAP}"


def test_the_sudoers_line_allows_this_container_only() -> None:
    line = sudoers_line(PCT, "trainer")
    assert line == "trainer ALL=(root) NOPASSWD: /usr/sbin/pct exec 200 --keep-env 0 -- /bin/sh -c *"
    command = line.partition("NOPASSWD: ")[2].removesuffix("*")
    assert enter_command(PCT, sudo=False).startswith(command)
    command = sudoers_line(ATTACH).partition("NOPASSWD: ")[2].removesuffix("*")
    assert enter_command(ATTACH, sudo=False).startswith(command)


@pytest.mark.parametrize(
    ("text", "code", "said", "cure"),
    [
        ("container '200' not running!", 69, "container 200 on pve1 is stopped", "pct start 200"),
        ("Configuration file 'nodes/vm/lxc/200.conf' does not exist", 78, "no container 200 on pve1 (node vm)", "node"),
        ("sudo: a password is required", 77, "asks for a password", "NOPASSWD: /usr/sbin/pct exec 200"),
        ("sudo: a terminal is required to read the password; either", 77, "asks for a password", "NOPASSWD"),
        ("sudo: no tty present and no askpass program specified", 77, "asks for a password", "NOPASSWD"),
        ("Sorry, user t is not allowed to execute '/usr/sbin/pct exec 200' as root on vm.", 77, "not allow", "sudoers"),
        ("trainer is not in the sudoers file.", 77, "not allow", "sudoers"),
        ("bash: line 1: sudo: command not found", 78, "no sudo", "root"),
        ("zsh:1: command not found: sudo", 78, "no sudo", "root"),
        ("bash: line 1: /usr/sbin/pct: No such file or directory", 78, "no /usr/sbin/pct on pve1", "Proxmox"),
        ("sh: 1: /usr/sbin/pct: not found", 78, "no /usr/sbin/pct on pve1", "Proxmox"),
        ("zsh:1: no such file or directory: /usr/sbin/pct", 78, "no /usr/sbin/pct on pve1", "Proxmox"),
        ("fish: Unknown command: /usr/sbin/pct", 78, "no /usr/sbin/pct on pve1", "Proxmox"),
        ("sudo: /usr/sbin/pct: command not found", 78, "no /usr/sbin/pct on pve1", "Proxmox"),
        ("ipcc_send_rec[1] failed: Unknown error -1\nUnable to load access control list: x", 77, "needs root", "sudo"),
        ("bash: line 1: /usr/sbin/pct: Permission denied", 77, "may not run /usr/sbin/pct", "root"),
        ("CT is locked (backup)", 75, "container 200 on pve1 is locked: a backup runs", "pct unlock 200"),
        ("CT is locked (mounted)", 75, "`pct mount` holds it", "pct unmount 200"),
        ("CT is locked (migrate)", 75, "moved to another node", "new node"),
        ("CT is locked (novel)", 75, "a task of Proxmox VE holds it", "pct unlock 200"),
        (
            "ipcc_send_rec[1] failed: Connection refused\nipcc_send_rec[2] failed: Connection refused\n"
            "Unable to load access control list: Connection refused",
            75,
            "cluster file system of pve1 is not up",
            "systemctl status pve-cluster",
        ),
        ("can't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout", 75, "is locked", "try again"),
        (
            'lxc-attach: 200: ../src/lxc/attach.c: 1845 No such file or directory - Failed to exec "/bin/sh"',
            78,
            "/bin/sh",
            "",
        ),
        ("400 unable to parse option\npct exec <vmid> [<extra-args>] [OPTIONS]", 78, "options", "8.2"),
        ("Unknown option: keep-env\n400 unable to parse option", 78, "options", "8.2"),
    ],
)
def test_pct_s_words_become_one_sentence_its_cure_and_a_code(text: str, code: int, said: str, cure: str) -> None:
    noise = "perl: warning: Setting locale failed.\nWelcome to vm\n"
    error = explain(noise + text, 255, PCT, "pve1")
    assert error is not None
    assert error.code == code
    assert said in error.message
    assert cure in error.hint
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("lxc-attach: 200: ../src/lxc/attach.c: get_attach_context: 405 Failed to get init pid", 69, "is stopped"),
        ("lxc-attach: 200: attach.c: lxc_attach: 99 Connection refused - Failed to get init pid", 69, "is stopped"),
        (
            "lxc-attach: 200: tools/lxc_attach.c: main: 1 Insufficent privileges to control 200: Permission denied",
            77,
            "root",
        ),
        ("bash: line 1: /usr/bin/lxc-attach: No such file or directory", 78, "no /usr/bin/lxc-attach"),
    ],
)
def test_lxc_attach_s_words_too(text: str, code: int, said: str) -> None:
    error = explain(text, 1, ATTACH, "pve1")
    assert error is not None
    assert error.code == code
    assert said in error.message


@pytest.mark.parametrize("status", [0, 1, 2, 126, 127, 255, None])
def test_an_exit_code_alone_decides_nothing(status: int | None) -> None:
    assert explain("Last login: today\n", status, PCT, "pve1") is None


def test_lxc_attach_that_shows_a_container_to_root_only_is_a_missing_right_for_others() -> None:
    said = "lxc-attach: 200: ../src/lxc/attach.c: 841 Failed to get init pid"
    for text, root, code in ((said, True, 69), (said, False, 77)):
        error = explain(text, 1, ATTACH, "pve1", root=root)
        assert error is not None
        assert error.exit_code == code
    error = explain("You lack access to /home/t/.local/share/lxc", 1, ATTACH, "pve1")
    assert error is not None
    assert error.exit_code == 77
