"""Signals come at any instant: while a line is being logged, a flag is being read, an object is being collected."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

START = """
import os, signal, sys, threading
from trainer.__main__ import configure_logging
from trainer.run.signals import Signals
configure_logging(False)
signals = Signals()
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", START + program], stderr=subprocess.PIPE, text=True)


def test_a_stop_in_the_middle_of_a_line_that_nobody_reads_yet_is_not_lost() -> None:
    run = start(
        "import logging\n"
        "signals.training = True\n"
        "while not signals.stop: logging.info('x' * 10_000)\n"
        "logging.info('in order')\n"
    )
    time.sleep(2)  # the pipe is full: the process waits inside a write
    run.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    _, log = run.communicate(timeout=30)
    assert run.returncode == 0, log[-3000:]
    assert log.splitlines()[-1].endswith("in order")
    assert "Error" not in log


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_inside_the_handler_or_the_reading_of_another_does_not_hold_the_process(number: int) -> None:
    # Sent at every line that runs meanwhile, in whatever module.
    run = start(
        f"number = {int(number)}\n"
        "signals.training = True\n"
        "def trace(frame, event, argument):\n"
        "    if frame.f_code.co_name != 'trace':\n"
        "        sys.settrace(None); os.kill(os.getpid(), number); sys.settrace(trace)\n"
        "    return trace\n"
        "os.kill(os.getpid(), number)\n"
        "sys.settrace(trace)\n"
        "signals.take_checkpoint_request()\n"
        "sys.settrace(None)\n"
        "os._exit(0)\n"
    )
    _, log = run.communicate(timeout=30)
    assert run.returncode == 0, log[-3000:]


def test_a_stop_before_training_that_python_swallows_is_remembered() -> None:
    run = start(
        "class Collected:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)\n"
        "Collected()\n"
        "sys.exit(5 if signals.stop else 6)\n"
    )
    _, log = run.communicate(timeout=30)
    assert "SIGTERM before training began: leaving" in log
    assert run.returncode == 5, log


def test_a_second_interrupt_means_it() -> None:
    run = start(
        "signals.training = True\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert signals.stop\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: sys.exit(5)\n"
    )
    _, log = run.communicate(timeout=30)
    assert run.returncode == 5, log
