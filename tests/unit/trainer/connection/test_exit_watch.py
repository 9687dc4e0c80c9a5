"""What ExitWatch reports of programs that end in each way: real interpreters, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OWNER = """
import os, signal, sys, threading, time
from keepstep.trainer.connection.exit_watch import ExitWatch

class Owner:
    def __enter__(self): return self
    def __exit__(self, kind, error, trace):
        print("finished" if kind is None else kind.__name__, flush=True)

def start():
    global watch
    watch = ExitWatch(Owner())

"""
ENDS = {
    "returns": ("start()", "finished"),
    "returns after an exception was handled": ("start()\ntry: 1 / 0\nexcept ZeroDivisionError: pass", "finished"),
    "returns from a function": ("def main():\n    start()\nif __name__ == '__main__':\n    main()", "finished"),
    "sys.exit": ("start()\nsys.exit(0)", "SystemExit"),
    "sys.exit of what main returned": ("def main():\n    start()\n    return 0\nsys.exit(main())", "SystemExit"),
    "sys.exit with a code": ("start()\nsys.exit(3)", "SystemExit"),
    "an exception": ("start()\nraise ValueError", "ValueError"),
    "an exception in a function": ("def main():\n    start()\n    {}['x']\nmain()", "KeyError"),
    "Ctrl-C": (  # A shell starts a job in the background with SIGINT ignored.
        "start()\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(60)",
        "KeyboardInterrupt",
    ),
    "a handler of SIGTERM that exits": (
        "start()\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)",
        "SystemExit",
    ),
    "SIGTERM": ("start()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", ""),
    "os._exit": ("start()\nos._exit(0)", ""),
    "a thread": ("thread = threading.Thread(target=start)\nthread.start()\nthread.join()", "SystemExit"),
    "cancelled": ("start()\nwatch.cancel()", ""),
    "a forked child": (
        "start()\npid = os.fork()\nif pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\nprint('parent', flush=True)",
        "parent finished",
    ),
    "an interactive interpreter": ("sys.ps1 = '>>> '\nstart()", "SystemExit"),
}  # fmt: skip


def run(*command: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False, cwd=directory
    )
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_script(end: str, tmp_path: Path) -> None:
    program, seen = ENDS[end]
    (tmp_path / "script.py").write_text(OWNER + program)
    assert run("script.py", directory=tmp_path) == seen


@pytest.mark.parametrize("end", ["returns", "sys.exit of what main returned", "an exception in a function"])
def test_end_of_a_module(end: str, tmp_path: Path) -> None:
    program, seen = ENDS[end]
    (tmp_path / "script.py").write_text(OWNER + program)
    assert run("-m", "script", directory=tmp_path) == seen


def test_child_of_multiprocessing_is_never_finished(tmp_path: Path) -> None:
    program = (
        "import multiprocessing\nif __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=start)\n    child.start()\n    child.join()\n"
    )
    (tmp_path / "script.py").write_text(OWNER + program)
    assert run("script.py", directory=tmp_path) == "SystemExit"
