"""Exits of real child processes, read although somebody else reaps them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from keepstep.launcher.worker_exits import WorkerExit, WorkerExits

WAIT = "import sys, time; sys.stdin.read(); {}"


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", WAIT.format(code)], stdin=subprocess.PIPE)


def end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()


def wait_for(exits: WorkerExits) -> WorkerExit:
    deadline = time.monotonic() + 20
    while (first := exits.first()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return first


@pytest.mark.parametrize(
    ("code", "text", "killed"),
    [
        ("sys.exit(3)", "exit code 3", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", True),
    ],
)
def test_exit_is_read_before_it_is_reaped(code: str, text: str, killed: bool) -> None:
    exits = WorkerExits()
    child, peaceful = start(code), start("pass")
    exits.begin()
    end(peaceful)
    peaceful.wait(20)
    end(child)
    first = wait_for(exits)
    assert (first.pid, str(first), first.killed) == (child.pid, text, killed)
    code_seen = child.wait(20)
    assert code_seen == first.code, "the exit is still there for those who started it"
    exits.begin()
    assert exits.first() is None


def test_a_kill_is_the_cause_of_exits_at_the_same_moment() -> None:
    exits = WorkerExits()
    victim, survivor = start("pass"), start("sys.exit(1)")
    exits.begin()
    end(survivor)
    victim.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while exits.first() is None or not wait_for(exits).killed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert wait_for(exits).pid == victim.pid
    end(victim)
    assert (victim.wait(20), survivor.wait(20)) == (-signal.SIGKILL, 1)
