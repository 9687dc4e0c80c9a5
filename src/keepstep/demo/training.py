"""One training: four nodes on this machine (`testing.cluster`), the events they log, and the ways to kill them.

Invariants: every wait has a deadline, named below; on exit no process of the training is alive, whatever happened.
Its log, the nodes' output and its results are in `out`; the training script writes the first and the last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from keepstep.control.status import fetch_status
from keepstep.demo.run_record import Event, FinalState
from keepstep.errors import Error
from keepstep.testing.cluster import LocalCluster
from keepstep.testing.node import CLUSTER, END_S, Node
from keepstep.testing.run import marked_processes, wait_until
from keepstep.types import Status

RUN_S = 300.0  # a whole run, restarts included; it takes 20 to 60 s on two cores
SILENCE_S = 120.0  # without a line in the log: covers starting torch eight times on a busy machine
EXIT_S = 10.0  # from the agents' end until the last process has ended; a normal end takes far less
ANSWER_S = 1.0  # a keeper that does not answer within this is asked again at the next step
POLL_S = 0.02
NODES = 4
LOSSES = 2


class DemoRun(msgspec.Struct, frozen=True):
    """Settings that both runs share."""

    script: Path
    out: Path
    steps: int
    seed: int


class Training:
    """Agents, keepers and trainers: started on entry, ended on exit, whatever happened."""

    def __init__(self, job: DemoRun, name: str) -> None:
        self.job, self.name = job, name
        self.log = job.out / f"{name}.jsonl"
        self.output = job.out / f"{name}.out"
        self.result = job.out / f"{name}.result"
        self._deadline = time.monotonic() + RUN_S
        arguments = [f"--steps={job.steps}", f"--seed={job.seed}", "--batch=4"]
        self.cluster = LocalCluster(
            nodes=NODES, script=job.script,
            arguments=[*arguments, f"--log-file={self.log.resolve()}", f"--result={self.result.resolve()}"],
            environ={"KEEPSTEP_PARITY_LOSSES": str(LOSSES)},
        )  # fmt: skip

    def __enter__(self) -> Training:
        for rank in range(NODES):
            self._result_of(rank).unlink(missing_ok=True)
        self.log.write_bytes(b"")
        try:
            self.cluster.start()
        except BaseException:  # Ctrl-C included: started processes must be ended
            self._close(in_order=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(in_order=error is None)

    def _close(self, *, in_order: bool) -> None:
        try:
            self.output.write_text(self.cluster.tails(), encoding="utf-8")
            if not in_order:
                self._kill_all()
        finally:
            try:
                self.cluster.close()
            except AssertionError as error:
                raise Error(f"the {self.name} training did not end: {error}", hint="ps shows its processes") from error

    def _kill_all(self) -> None:
        """End all processes at once, also keepers that would release their state and nodes that are half started."""
        for node in self.cluster.nodes:
            node.kill()
        # Again, because a process that is just being started may not show its mark yet.
        wait_until(lambda: not (self._kill_marked() or self._kill_marked()), timeout_s=END_S, what="the end")

    def _kill_marked(self) -> list[int]:
        pids = marked_processes(f"{CLUSTER}={self.cluster.mark}".encode())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    # Events and results

    def follow(self) -> Iterator[Event]:
        """Each event as it is logged, until all agents have ended well; raises when one fails or all stand still."""
        decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
        event_at = time.monotonic()
        with self.log.open("rb") as log:
            ended, pending = False, b""
            while not ended:
                ended = self._has_ended()  # asked before the read: nothing is logged after it
                *lines, pending = (pending + log.read()).split(b"\n")
                for line in lines:
                    event_at = time.monotonic()
                    yield decoder.decode(line)
                self._check_progress(event_at)
                time.sleep(POLL_S)

    def _has_ended(self) -> bool:
        codes = {node.node_id: node.agent.poll() for node in self.cluster.nodes if node.agent is not None}
        for node_id, code in codes.items():
            if code:
                raise self._failure(f"ended on {node_id} with exit code {code}")
        return all(code == 0 for code in codes.values())

    def _check_progress(self, event_at: float) -> None:
        now = time.monotonic()
        if now - event_at > SILENCE_S:
            raise self._failure(f"logged nothing for {SILENCE_S:.0f} s")
        if now > self._deadline:
            raise self._failure(f"took longer than {RUN_S:.0f} s")

    def _failure(self, what: str) -> Error:
        return Error(f"the {self.name} training {what}", hint=f"read {self.output}")

    def covers(self, losses: int, *, newer_than: int) -> bool:
        """Whether so many nodes may be lost now: a version newer than that step is protected by a complete group."""
        try:
            status = self.status()
        except Error:
            return False
        protected = status.protected_step is not None and status.protected_step > newer_than
        return protected and status.losses_covered >= losses and all(peer.up for peer in status.group)

    def status(self) -> Status:
        return fetch_status(self.cluster.nodes[0].identity, timeout_s=ANSWER_S)

    def read_results(self) -> list[FinalState]:
        try:
            texts = [self._result_of(rank).read_bytes() for rank in range(NODES)]
        except FileNotFoundError as error:
            raise self._failure(f"wrote no result at {error.filename}") from error
        return [msgspec.json.decode(text, type=FinalState) for text in texts]

    def _result_of(self, rank: int) -> Path:
        return self.result.with_name(f"{self.result.name}.rank{rank}")

    def wait_for_quiet(self) -> list[str]:
        """The processes that are alive `EXIT_S` after a normal end: keepstep promises that there are none."""
        try:
            wait_until(lambda: not self._living(), timeout_s=EXIT_S)
        except AssertionError:
            return [f"{pid} {read_command(pid)}" for pid in self._living()]
        return []

    def _living(self) -> list[int]:
        return [pid for node in self.cluster.nodes for pid in node.processes()]

    # Failures, by position: a node that replaces another one has its position.

    def kill_trainer(self, position: int) -> str:
        node = self.cluster.nodes[position]
        return f"pid {node.kill_trainer()} on {node.node_id}"

    def kill_keeper(self, position: int) -> str:
        node = self.cluster.nodes[position]
        return f"pid {node.kill_keeper()} on {node.node_id}"

    def kill_nodes(self, positions: Sequence[int]) -> str:
        """Kill all of them at once; another machine replaces each."""
        nodes: list[Node] = [self.cluster.nodes[position] for position in positions]
        counts = [len(node.processes()) for node in nodes]
        for node in nodes:
            node.freeze()  # no node reacts to the end of another
        for node in nodes:
            node.kill()
        for position in positions:
            self.cluster.replace(position)
        return ", ".join(f"{node.node_id}: {number} processes" for node, number in zip(nodes, counts, strict=True))


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"
