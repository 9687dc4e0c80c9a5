"""Part 3: trainers that are SIGKILLed while copies are in flight, and the restore of 17 GB.

Each life restores what the one before left and checks every bit on the device. It must be the newest snapshot that the
dead trainer had committed, as its headers say; an older one, a newer one, or a mixture is a failure. `lost` counts the
snapshots that had begun after it: in flight, at most as many as `arena.slots` allows at once.
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
    expected: int | None = None
    box = bench.give("train-until-killed", box_s=BOX_S, scratch=scratch)
    for number in range(bench.task.sizes.kills + 1):
        last = number == bench.task.sizes.kills
        if time.monotonic() > box.deadline:
            bench.results.measure("kills", "error", value=f"only {number} lives within the time box")
            break
        life = _live(bench.give(box.name, "last" if last else "", box_s=LIFE_S, scratch=scratch), run, words, rng)
        life["expected"], life["exact"] = expected, life.get("restored") == expected and not life.get("problem")
        expected = life.get("committed")
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
        "most_lost": max((life["lost"] for life in lives if "lost" in life), default=None),
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
    committed, writing = _slots(run)
    begun = [word["begun"] for word in words.all if "begun" in word]
    lost = sum(step > (-1 if committed is None else committed) for step in begun)
    return {**life, "killed_at": begun[-1], "in_mid_capture": writing, "committed": committed, "lost": lost}


def _slots(run: LocalRun) -> tuple[int | None, bool]:
    """The newest step that the dead trainer had committed, which must be restored; whether it was writing another."""
    with run.arenas() as arenas:
        headers = [arena.trainer_header(slot) for arena in arenas for slot in range(arena.num_slots)]
    found = [header[1] for header in headers if header is not None]
    committed = [trainer.version.step for trainer in found if trainer.state == h.COMMITTED]
    return max(committed, default=None), any(trainer.state == h.WRITING for trainer in found)


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
