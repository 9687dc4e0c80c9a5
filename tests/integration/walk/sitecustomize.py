"""Records which functions of keepstep run, in every process whose PYTHONPATH names this folder. See `walked_files`.

Python imports a module of this name at its start. Each function is written down the first time that it runs while a
window is open, at once: the process may be killed at any time.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

CO_OPTIMIZED = 1  # a function; the bodies of modules and classes run where something is imported late
SOURCE = f"{os.sep}keepstep{os.sep}"


def record(directory: Path) -> None:
    with (directory / "window").open("rb") as file:
        window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    seen: dict[int, set[CodeType]] = {}

    def called(frame: FrameType, event: str, _: object) -> None:
        number = window[0]
        if not number or event != "call":
            return
        code, known = frame.f_code, seen.setdefault(number, set())
        if code in known:
            return
        known.add(code)
        if SOURCE in code.co_filename and code.co_flags & CO_OPTIMIZED:
            with open(directory / f"{os.getpid()}.calls", "a", encoding="utf-8") as file:
                file.write(f"{number} {code.co_filename.rpartition(SOURCE)[2]} {code.co_qualname}\n")

    threading.setprofile(called)
    sys.setprofile(called)


if "KEEPSTEP_TEST_WALK" in os.environ:
    record(Path(os.environ["KEEPSTEP_TEST_WALK"]))
