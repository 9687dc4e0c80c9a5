"""The events of one trainer under `keepstep check`, one line each, and the kills that it carries out on itself."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.control.check_events import KILLED, CheckOrders, TrainerEvent, killed_path, record_path


@dataclass(frozen=True)
class EventLog:
    """Appends events to the file of this rank."""

    directory: Path
    rank: int
    world_size: int

    def write(self, kind: str, **fields: Any) -> None:
        event = TrainerEvent(
            kind=kind, at=time.time(), pid=os.getpid(), rank=self.rank, world_size=self.world_size, **fields
        )
        line = msgspec.json.encode(event) + b"\n"
        fd = os.open(record_path(self.directory, self.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class KillSwitch:
    """Kills this process where an order says so, each order once in a run."""

    log: EventLog
    orders: CheckOrders

    def strike(self, step: int, moment: str) -> None:
        for order in self.orders.kills:
            if (order.rank, order.step, order.moment) == (self.log.rank, step, moment):
                try:
                    killed_path(self.log.directory, order).touch(exist_ok=False)
                except FileExistsError:
                    continue
                self.log.write(KILLED, step=step, text=moment)
                os.kill(os.getpid(), signal.SIGKILL)
