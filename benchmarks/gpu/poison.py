"""Part 4, the race check: snapshots at full speed with a window of the wrong size, each read in the arena.

The trainer writes its step into every byte of its state at each update. The parent reads every sealed slot and compares
every element with what it must be after that step: a tensor, or a snapshot, that mixes steps cannot pass.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from children import Bench, end, private_run, scratch_directory, start
from kills import Words
from results import say
from stamped import SCALE
from stamps import COUNTER, ODD, name_of, number_of, salt_of

from keepstep import layout as layouts
from keepstep.arena.memfd import Mapping
from keepstep.arena.slots import Arena, SealedSlot
from keepstep.layout import Entry, Layout
from keepstep.testing.run import LocalRun

SETTINGS = {"KEEPSTEP_ARENA_SLOTS": "4", "KEEPSTEP_TAKE_STAGING_SHARE": "0.5"}
"""time to read a slot before it is used again; room for clones, so that a wrong split can be wrong either way"""
STOP = "stop"
BEGIN_S = 60.0
END_S = 60.0
BOX_S = 120.0
THREADS = 8
PIECE = 1 << 20
"""elements that are compared at a time: they stay in the cache"""
POLL_S = 0.002
NUMBERS: dict[str, Any] = {"float32": np.int32, "bfloat16": np.int16}


def run_poison(bench: Bench) -> None:
    sizes = bench.task.sizes
    wanted = -(-sizes.poison_snapshots // len(sizes.poison_scales))
    for scale in sizes.poison_scales:
        key = f"window x {scale:g}"
        with private_run(bench.results, "poison") as run, scratch_directory() as scratch:
            found = _run_one(bench, run, scratch, scale, wanted)
        bench.results.measure("poison", key, value=found)
        say(f"poison, {key}: {found}")


def _run_one(bench: Bench, run: LocalRun, scratch: str, scale: float, wanted: int) -> dict[str, Any]:
    words = Words(scratch)
    task = bench.give("train-poisoned", box_s=BOX_S, scratch=scratch)
    child = start(task, {**run.environ, **SETTINGS, SCALE: f"{scale:g}"})
    try:
        if not words.wait(lambda new: any("ready" in word for word in new), child, BEGIN_S):
            return {"error": f"the trainer did not begin (exit status {child.poll()})"}
        with run.arenas() as (arena,), Reader(arena) as reader:
            deadline = min(task.deadline, time.monotonic() + BOX_S) - END_S / 2
            while len(reader.checked) < wanted and child.poll() is None and time.monotonic() < deadline:
                reader.look()
                time.sleep(POLL_S)
            found = reader.summary()
        (Path(scratch) / STOP).touch()
        if not words.wait(lambda new: any("taken" in word for word in new), child, END_S):
            return {**found, "error": f"the trainer did not end (exit status {child.poll()})"}
        child.wait(END_S)
        return {**found, **next(word for word in reversed(words.all) if "taken" in word)}
    finally:
        end(child)


class Reader:
    """Looks at the slots of a live arena. What it read counts if the slot is still sealed as before."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._mapping = Mapping(arena.segment)
        self._bytes = np.frombuffer(self._mapping.map, dtype=np.uint8)
        self._pool = ThreadPoolExecutor(THREADS)
        self._ramps: dict[Any, Any] = {}
        self.checked: set[int] = set()
        self.num_mixed = 0
        self.mixed: list[str] = []
        self.overtaken = 0
        """snapshots whose slot was given to a newer one while they were read: nothing is said about them"""
        self._num_tensors = 0

    def look(self) -> None:
        for slot in range(self._arena.num_slots):
            sealed = self._arena.sealed(slot)
            if sealed is None or sealed.version.step in self.checked:
                continue
            wrong = self._wrong_in(sealed)
            if wrong and self._is_overtaken(sealed):
                self.overtaken += 1
                continue
            self.checked.add(sealed.version.step)
            self.num_mixed += bool(wrong)
            self.mixed += [f"step {sealed.version.step}: {text}" for text in wrong]

    def summary(self) -> dict[str, Any]:
        steps = sorted(self.checked)
        return {
            "checked": len(steps), "first_step": steps[0] if steps else None, "last_step": steps[-1] if steps else None,
            "tensors_each": self._num_tensors, "overtaken": self.overtaken,
            "num_mixed": self.num_mixed, "mixed": self.mixed[:10],
        }  # fmt: skip

    def _is_overtaken(self, before: SealedSlot) -> bool:
        now = self._arena.sealed(before.slot)
        return now is None or now.keeper.trainer_sequence != before.keeper.trainer_sequence

    def _wrong_in(self, sealed: SealedSlot) -> list[str]:
        layout = self._layout(sealed)
        if layout is None:
            return ["its layout cannot be read"]
        start = self._arena.payload_span(sealed.slot).offset
        stamped = [entry for entry in layout.entries if name_of(entry.path) is not None]
        self._num_tensors = len(stamped)
        found = self._pool.map(lambda entry: self._wrong_entry(entry, start, sealed.version.step), stamped)
        return [text for text in found if text]

    def _layout(self, sealed: SealedSlot) -> Layout | None:
        span = self._arena.layout_span(sealed.slot)
        encoded = self._arena.segment.read(span.offset, sealed.trainer.layout_bytes)
        try:
            return layouts.decode(encoded, payload_bytes=sealed.trainer.payload_bytes)
        except Exception:
            return None  # overtaken in this moment, or broken: the caller looks which

    def _wrong_entry(self, entry: Entry, start: int, step: int) -> str:
        name = name_of(entry.path)
        assert name is not None
        index, kind = name
        raw = self._bytes[start + entry.offset : start + entry.offset + entry.size_bytes]
        if kind == COUNTER:
            value = float(raw.view(np.float32)[0])
            return "" if value == step else f"{entry.path} counts {value:g}"
        dtype = NUMBERS[entry.pieces[0].dtype.removeprefix("torch.")]
        elements = raw.view(dtype)
        number = dtype(number_of(step, salt_of(index, kind), 8 * elements.itemsize))
        ramp = self._ramp(dtype, len(elements))
        for at in range(0, len(elements), PIECE):
            piece = elements[at : at + PIECE]
            if not np.array_equal(piece, ramp[at : at + PIECE] + number):
                odd = np.flatnonzero(piece != ramp[at : at + PIECE] + number)
                return f"{entry.path}: {len(odd)} elements of another step from {at + int(odd[0])} on"
        return ""

    def _ramp(self, dtype: Any, length: int) -> Any:
        known = self._ramps.get(dtype)
        if known is None or len(known) < length:
            known = (np.arange(length, dtype=np.int32) * np.int32(ODD)).astype(dtype)
            self._ramps[dtype] = known
        return known[:length]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()
        del self._bytes
        self._mapping.close()
