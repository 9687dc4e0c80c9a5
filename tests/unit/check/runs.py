"""Runs of one rank as values, for unit tests of `check`."""

from __future__ import annotations

from typing import Any

from keepstep.check.trajectory import RankRun, TakeRecord, TrainerLife
from keepstep.control.check_events import StepTrace


def taken(
    step: int, *, around: dict[str, str] | None = None, printed: tuple[str, ...] | None = None, **state: str
) -> TakeRecord:
    """A take whose state is `state`, with random states and the start of its step."""
    trace = StepTrace({"rng.torch": f"r{step - 1}", **state}, around or {}, (f"#x{step}",), stepped=True)
    return TakeRecord(step, float(step), {"rng.torch": f"r{step}", **state}, around or {}, "", trace, printed)


def life(*takes: TakeRecord, restored: int | None = None, **more: Any) -> TrainerLife:
    kept = {take.step for take in takes}
    return TrainerLife(asked=True, restored=restored, takes=list(takes), kept=kept, **more)


def one_rank(*lives: TrainerLife) -> list[RankRun]:
    return [RankRun(0, list(lives))]
