"""What threads hand to the keeper's loop: an event for the core, or a result that carries memory or an answer.

A thread that moves bytes until it is done or stopped is a TransferThread; its end is a result too.
"""

from __future__ import annotations

import threading
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


class TransferThread(threading.Thread):
    """Subclasses implement `run` and check `stopped`. Its end is a result in the keeper's queue, not an exception."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"keepstep-{name}", daemon=True)
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Ask it to end. Until it has, what it writes to is its own."""
        self.stopped.set()


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
