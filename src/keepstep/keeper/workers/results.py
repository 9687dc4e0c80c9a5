"""What threads hand to the keeper's loop: an event for the core, or a result that carries memory or an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from keepstep.arena.slots import Arena
from keepstep.control.messages import VerifyResult
from keepstep.errors import Error
from keepstep.keeper.node.effects import CreateArena
from keepstep.keeper.node.events import Conn, SlotVerified


class Results(Protocol):
    """The queue of the loop."""

    def put(self, result: object, /) -> None:
        """Hand over an event or a Result. From any thread."""


class Result:
    """Something that the loop does not pass to the core as it is."""

    def close(self) -> None:
        """Free the memory that it carries: the keeper ended before its loop took it."""


@dataclass(frozen=True)
class ArenaCreated(Result):
    """The arena that a rank asked for, or why there is none."""

    effect: CreateArena
    arena: Arena | Error

    def close(self) -> None:
        if isinstance(self.arena, Arena):
            self.arena.close()


@dataclass(frozen=True)
class SlotsChecked(Result):
    """The answer to `keepstep verify`, and an event for each slot that is damaged."""

    conn: Conn
    ticket: int
    results: list[VerifyResult]
    damaged: list[SlotVerified]
