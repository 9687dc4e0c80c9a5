"""Nodes whose keepers are processes, as in production: killed by SIGKILL, frozen by SIGSTOP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from nodes import DEADLINE_S, Node, Run, wait_for

from keepstep.control.spawn import start_keeper
from keepstep.types import Version


class ProcessNode(Node):
    """A keeper that `python -m keepstep.keeper --detach` has started."""

    def _begin(self) -> None:
        start_keeper(self.identity, self.run.config(self.node_id))
        wait_for(self.identity.card.exists, "the keeper has announced itself")
        self.pid: int = json.loads(self.identity.card.read_text())["pid"]
        self._pidfd = os.pidfd_open(self.pid)

    def end(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def wait_for_end(self) -> None:
        if self._pidfd >= 0:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                try:
                    signal.pidfd_send_signal(self._pidfd, 0)
                except ProcessLookupError:
                    break
                time.sleep(0.005)
            os.close(self._pidfd)
            self._pidfd = -1


class ProcessRun(Run):
    node_type = ProcessNode

    def rest(self) -> Version:
        """Until the newest complete version is the protected one, on all nodes, and no newer one is on its way."""

        def resting() -> bool:
            found = [self.nodes[node_id].status() for node_id in self.order]
            return len({status.step for status in found}) == 1 and all(s.step == s.protected_step for s in found)

        def told() -> Version | None:
            found = {trainer.protected for trainer in self.trainers}
            return found.pop() if len(found) == 1 else None

        def rested() -> bool:
            """What a keeper says is on its way when it says it of itself."""
            if self.awaits_a_version:
                return False
            version = told()
            return resting() and version is not None and version.step == self.nodes[self.order[0]].status().step

        wait_for(rested, "the newest version is protected, and all ranks know")
        version = told()
        assert version is not None
        return version


@contextlib.contextmanager
def running(directory: Path, **settings: object) -> Iterator[ProcessRun]:
    run = ProcessRun(directory, **settings)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.close()
