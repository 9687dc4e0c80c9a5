"""Clusters that train in parallel, lose nodes and are compared with a training that lost none. Not a test."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from keepstep.errors import KeeperError
from keepstep.testing.cluster import LocalCluster
from keepstep.types import Status

SCRIPT = Path(__file__).parents[1] / "integration" / "train_parallel.py"
WAIT_S = 120.0
REFERENCE_S = 240.0


class Reference:
    """The same training without keepstep and without failures, beside the one under test."""

    def __init__(self, course: Sequence[str]) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("KEEPSTEP_", "PET_"))}
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--reference", *course], env=environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def result(self) -> list[str]:
        told, errors = self._process.communicate(timeout=REFERENCE_S)
        assert self._process.returncode == 0, errors
        return list(json.loads(told))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)  # its ranks are in the same session
        self._process.communicate()


class Training:
    """A cluster under `train_parallel.py`, and what it must end with."""

    def __init__(self, cluster: LocalCluster, reference: Reference, seed: int) -> None:
        self.cluster, self.rng = cluster, random.Random(seed)
        self._reference = reference

    def wait_protected(self, beyond: int = -1, *, index: int | None = None) -> Status:
        """Until a version of this incarnation, later than step `beyond`, survives a node. Returns a node's status."""
        node = self.cluster.nodes[self._living if index is None else index]
        found: list[Status] = []

        def holds() -> bool:
            with contextlib.suppress(KeeperError, OSError):
                found[:] = [node.status()]
            return bool(found) and self._covers(found[0], beyond)

        self._wait(holds, lambda: f"a protected version after step {beyond}: {found}")
        return found[0]

    def wait_problem(self, text: str) -> str:
        """Until a living node's status shows a problem with this in its text."""
        found: list[str] = []

        def shown() -> bool:
            with contextlib.suppress(KeeperError, OSError):
                problems = self.cluster.nodes[self._living].status().problems
                found[:] = [problem for problem in problems if text in problem]
            return bool(found)

        self._wait(shown, lambda: f"a problem with {text!r}")
        return found[0]

    def _covers(self, status: Status, beyond: int) -> bool:
        return (
            status.incarnation >= self.cluster.incarnation
            and status.protected_step is not None
            and status.protected_step > beyond
            and not status.base_step
        )

    @property
    def _living(self) -> int:
        return next(i for i, node in enumerate(self.cluster.nodes) if not node.killed)

    def pause(self, longest_s: float) -> None:
        """A random while: what happens next happens anywhere in a step, a copy, a seal or an exchange."""
        time.sleep(self.rng.uniform(0.0, longest_s))

    def lose(self, *victims: int, longest_s: float = 0.5) -> None:
        """These nodes, at a random instant and all at once, and other machines in their places."""
        self.pause(longest_s)
        for victim in victims:
            self.cluster.node(victim).kill()
        for victim in victims:
            self.cluster.replace(victim)

    def finish(self) -> None:
        """Let the training come to its end, which must be the one that it would have had."""
        self.go()
        assert self.cluster.result(timeout_s=WAIT_S) == self._reference.result(), self.cluster.tails()

    def go(self) -> None:
        (self.cluster.directory / "facts" / "go").touch()

    def _wait(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what()}\n{self.cluster.tails()}"
            time.sleep(0.05)


@contextlib.contextmanager
def training(
    kind: str, *, steps: int, seed: int, pace_s: float = 0.1, course: Sequence[str] = (), nodes: int = 4,
    environ: dict[str, str] | None = None, backend: str = "keepstep",
) -> Iterator[Training]:  # fmt: skip
    """Four nodes with one rank each, which train `kind`; and the reference, at the same time."""
    print(f"seed {seed}: {kind}, {environ or {}}")
    reference = Reference([kind, str(steps), "0", *course])
    try:
        arguments = [kind, str(steps), str(pace_s), "--hold", *course]
        with LocalCluster(nodes=nodes, script=SCRIPT, arguments=arguments, environ=environ, backend=backend) as cluster:
            cluster.start()
            yield Training(cluster, reference, seed)
    finally:
        reference.close()
