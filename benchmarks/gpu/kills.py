"""Part 3: trainers that are SIGKILLed while copies are in flight, and the restore of 17 GB.

Each life restores what the one before left and checks every bit on the device. It must be the newest snapshot that had
begun (N) or the one before (N-1); an older one, a newer one, or a mixture is a failure.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import Bench, end, private_run, scratch_directory, start
from results import say
from sizes import Task

from keepstep.arena import records as h
from keepstep.testing.run import LocalRun

WORDS = "words"
POLL_S = 0.001
LIFE_S = 90.0
"""deadline for one life to begin, restore and take its first snapshots"""
LEAST_BEGUN = 2
MOST_BEGUN = 6
SPAN_S = 0.12
"""the kill comes within this time after a snapshot has begun: a copy of 4 GiB takes 0.08 s"""
BOX_S = 240.0
SAVE_S, LOAD_S = 150.0, 90.0


def run_part(bench: Bench) -> None:
    if bench.wants("kills"):
        with private_run(bench.results, "kills") as run, scratch_directory() as scratch:
            _kill_lives(bench, run, scratch)
    if bench.wants("restore"):
        with private_run(bench.results, "restore") as run, scratch_directory() as scratch:
            _time_restore(bench, run, scratch)


class Words:
    """What a child says, read as it comes."""

    def __init__(self, scratch: str) -> None:
        self._path = Path(scratch) / WORDS
        self._read = 0
        self._rest = b""
        self.all: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """New words since the last look."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        new = [json.loads(line) for line in lines]
        self.all += new
        return new

    def wait(
        self, enough: Callable[[list[dict[str, Any]]], bool], child: subprocess.Popen[bytes], within_s: float
    ) -> bool:
        """Until the words since now are enough; False when the child ends or the time does."""
        deadline, new = time.monotonic() + within_s, list[dict[str, Any]]()
        while True:
            new += self.look()
            if enough(new):
                return True
            if child.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)


def _kill_lives(bench: Bench, run: LocalRun, scratch: str) -> None:
    rng, words = random.Random(1), Words(scratch)
    lives: list[dict[str, Any]] = []
    candidates: list[int] = []
    box = bench.give("train-until-killed", box_s=BOX_S, scratch=scratch)
    for number in range(bench.task.sizes.kills + 1):
        last = number == bench.task.sizes.kills
        if time.monotonic() > box.deadline:
            bench.results.measure("kills", "error", value=f"only {number} lives within the time box")
            break
        life = _live(bench.give(box.name, "last" if last else "", box_s=LIFE_S, scratch=scratch), run, words, rng)
        life["expected"], life["exact"] = candidates, _is_exact(life, candidates)
        candidates = _candidates(words.all)
        lives.append(life)
        bench.results.measure("kills", "lives", value=lives)
        say(f"life {number}: restored {life.get('restored')} of {life['expected']}, {_verdict(life)}")
        if "error" in life:
            bench.results.measure("kills", "error", value=life["error"])
            break
    ends = [life for life in lives if life.get("restored") is not None]
    summary = {
        "kills": sum("killed_at" in life for life in lives),
        "in_mid_capture": sum(bool(life.get("in_mid_capture")) for life in lives),
        "restored": len(ends),
        "exact": sum(life["exact"] for life in ends),
        "n": sum(life["restored"] == life["expected"][-1] for life in ends),
        "problems": [life["problem"] for life in ends if life["problem"]],
    }
    bench.results.measure("kills", "summary", value=summary)
    say(f"kills: {summary}")


def _live(task: Task, run: LocalRun, words: Words, rng: random.Random) -> dict[str, Any]:
    """One life: what it restored, and how it ended."""
    child = start(task, run.environ)
    try:
        if not words.wait(lambda new: any("restored" in word for word in new), child, LIFE_S):
            return {"error": f"a life did not restore (exit status {child.poll()})"}
        life = dict(next(word for word in reversed(words.all) if "restored" in word))
        if task.option == "last":
            return life if child.wait(LIFE_S) == 0 else {**life, "error": "the last life did not end well"}
        wanted = rng.randint(LEAST_BEGUN, MOST_BEGUN)
        if not words.wait(lambda new: sum("begun" in word for word in new) >= wanted, child, LIFE_S):
            return {**life, "error": f"fewer than {wanted} snapshots began (exit status {child.poll()})"}
        time.sleep(rng.random() * SPAN_S)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    finally:
        end(child)
    words.look()
    newest = _candidates(words.all)[-1]
    return {**life, "killed_at": newest, "in_mid_capture": _is_writing(run, newest)}


def _candidates(words: list[dict[str, Any]]) -> list[int]:
    """N-1 and N: the last two snapshots that began. A `take` in which the kill fell may count as N, or not at all."""
    begun = [word["begun"] for word in words if "begun" in word][-2:]
    tail = [word for word in words if word.keys() & {"take", "begun", "skipped"}][-1:]
    return [*begun, *(word["take"] for word in tail if "take" in word)]


def _is_exact(life: dict[str, Any], candidates: list[int]) -> bool:
    restored = life.get("restored")
    return (restored is None and not candidates) or (restored in candidates and not life.get("problem"))


def _is_writing(run: LocalRun, step: int) -> bool:
    """Whether the dead trainer has left a slot for `step`, or a later one, that it had not committed."""
    with run.arenas() as arenas:
        headers = [arena.trainer_header(slot) for arena in arenas for slot in range(arena.num_slots)]
    return any(found and found[1].state == h.WRITING and found[1].version.step >= step for found in headers)


def _verdict(life: dict[str, Any]) -> str:
    if "error" in life:
        return str(life["error"])
    told = "exact" if life["exact"] else f"NOT EXACT: {life.get('problem') or 'an unexpected step'}"
    if "killed_at" not in life:
        return f"{told}, and ended"
    return f"{told}, killed {'in mid-capture' if life['in_mid_capture'] else 'between captures'}"


def _time_restore(bench: Bench, run: LocalRun, scratch: str) -> None:
    words = Words(scratch)
    child = start(bench.give("save-large", box_s=SAVE_S, scratch=scratch), run.environ)
    try:
        if not words.wait(lambda new: any("complete" in word for word in new), child, SAVE_S):
            bench.results.measure("restore", "error", value=f"no snapshot was complete (exit status {child.poll()})")
            return
        say("restore: a snapshot is complete; its trainer is killed")
    finally:
        end(child)
    bench.run(bench.give("load-large", box_s=LOAD_S), run.environ, "restore")
