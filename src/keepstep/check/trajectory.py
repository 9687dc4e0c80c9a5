"""The run of one rank as a value: its lives, what each restored, and the state at each take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.control.check_events import OPENED, StepTrace, TrainerEvent

MAX_SEGMENT_BYTES = 1_000_000


@dataclass(frozen=True)
class TakeRecord:
    """The state at one `take`."""

    step: int
    at: float
    state: dict[str, str]
    around: dict[str, str]
    error: str = ""  # why the state could not be read
    trace: StepTrace = field(default_factory=StepTrace)
    printed: tuple[str, ...] | None = None  # lines since the take before it, or since the restore; by rank 0 alone
    prints_alone: bool = True  # no other rank writes into the same file


@dataclass
class TrainerLife:
    """One process of one rank."""

    asked: bool = False  # whether restore() was called
    restored: int | None = None
    state: dict[str, str] = field(default_factory=dict)  # after the restore
    refused: str = ""
    takes: list[TakeRecord] = field(default_factory=list)
    killed: str = ""  # the moment of the kill that ended it
    skipped: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class RankRun:
    """All lives of one rank in one run."""

    rank: int
    lives: list[TrainerLife]

    @property
    def takes(self) -> list[TakeRecord]:
        return [take for life in self.lives for take in life.takes]


def rank_runs(events: Iterable[TrainerEvent]) -> list[RankRun]:
    """The run of every rank, by rank."""
    lives: dict[int, list[TrainerLife]] = {}
    offsets: dict[int, tuple[str, int]] = {}
    for event in events:
        own = lives.setdefault(event.rank, [])
        if event.kind == OPENED or not own:
            own.append(TrainerLife())
            offsets.pop(event.rank, None)
        life = own[-1]
        match event.kind:
            case "restored":
                offsets[event.rank] = (event.output, event.output_bytes)
                life.asked, life.restored, life.state = True, event.step if event.step >= 0 else None, event.state
            case "refused":
                life.asked, life.refused = True, event.text
            case "take":
                printed = _printed(offsets.get(event.rank), event) if event.rank == 0 else None
                alone = event.world_size == 1
                offsets[event.rank] = (event.output, event.output_bytes)
                life.takes.append(
                    TakeRecord(event.step, event.at, event.state, event.around, event.text, event.trace, printed, alone)
                )
            case "kept":
                life.kept.add(event.step)
            case "skipped":
                life.skipped[event.step] = event.text
            case "killed":
                life.killed = event.text
    return [RankRun(rank, own) for rank, own in sorted(lives.items())]


def _printed(before: tuple[str, int] | None, event: TrainerEvent) -> tuple[str, ...] | None:
    """The lines that were printed between two takes of one life. None where that cannot be known."""
    if before is None or before[0] != event.output or not event.output or before[1] < 0:
        return None
    try:
        with Path(event.output).open("rb") as file:
            file.seek(before[1])
            text = file.read(min(event.output_bytes - before[1], MAX_SEGMENT_BYTES))
    except OSError:
        return None
    return tuple(text.decode("utf-8", "replace").splitlines())
