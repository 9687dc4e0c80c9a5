"""One training: torchrun and everything below it, in a runtime directory of its own.

Invariants: every wait has a deadline, named below; on exit no process of the training is alive, whatever happened.
Writes its log, its launcher's output and its results into `out`; the script that it runs fills the first and the last.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from keepstep.cli.story.processes import POLL_S, Processes
from keepstep.cli.story.record import Event, Result
from keepstep.errors import Error

RUN_S = 240.0
"""A whole run, restarts included; it takes 20 to 45 s on two cores."""
SILENCE_S = 90.0
"""Without a line in the log: covers starting torch on a busy machine and torchelastic's 30 s for a stuck trainer."""
EXIT_S = 10.0
"""From the launcher's end until the last process is gone; a normal end takes far less."""
NODE_ID = "demo"


class Job(msgspec.Struct, frozen=True):
    """What both runs have in common."""

    script: Path
    out: Path
    steps: int
    nproc: int
    seed: int


class Training:
    """torchrun and everything below it: started on entry; on exit none of it is left, whatever happened."""

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.name = name
        self.run_id = f"demo-{name}-{uuid.uuid4().hex[:8]}"
        self.log = job.out / f"{name}.jsonl"
        self.output = job.out / f"{name}.out"
        self.result = job.out / f"{name}.result"
        self._directory = tempfile.TemporaryDirectory(prefix="keepstep-demo-", ignore_cleanup_errors=True)
        self.runtime_dir = Path(self._directory.name)
        self.processes = Processes(self.runtime_dir)
        self._deadline = time.monotonic() + RUN_S

    def __enter__(self) -> Training:
        for rank in range(self.job.nproc):
            self._result_of(rank).unlink(missing_ok=True)
        self.log.write_bytes(b"")
        with self.output.open("wb") as output:
            # In its own session: Ctrl-C reaches this process only, which then ends the launcher in order.
            self.launcher = subprocess.Popen(
                self._command(), env=self._environment(), stdout=output, stderr=output, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_launcher()
            self.processes.end(timeout_s=EXIT_S)
        finally:
            self._directory.cleanup()

    def _command(self) -> list[str]:
        job = self.job
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={job.nproc}"]
        rendezvous = ["--rdzv-backend=keepstep", f"--rdzv-id={self.run_id}", "--rdzv-endpoint=localhost:0"]
        training = [str(job.script), f"--steps={job.steps}", f"--seed={job.seed}"]
        return [
            *launch,
            *rendezvous,
            "--max-restarts=20",
            *training,
            f"--log-file={self.log}",
            f"--result={self.result}",
        ]

    def _environment(self) -> dict[str, str]:
        """The user's environment without settings meant for another job."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
        own = {"KEEPSTEP_RUNTIME_DIR": str(self.runtime_dir), "KEEPSTEP_NODE_ID": NODE_ID, "OMP_NUM_THREADS": "1"}
        return {**inherited, **own}

    def follow(self) -> Iterator[Event]:
        """Each event as it is logged, until the launcher has ended well; raises when it fails or stands still."""
        decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
        heard_at = time.monotonic()
        with self.log.open("rb") as log:
            ended, pending = False, b""
            while not ended:
                ended = self.launcher.poll() is not None  # asked before the read: nothing is logged after it
                *lines, pending = (pending + log.read()).split(b"\n")
                for line in lines:
                    heard_at = time.monotonic()
                    yield decoder.decode(line)
                self._check_progress(heard_at)
                time.sleep(POLL_S)
        if self.launcher.returncode != 0:
            raise self._failure(f"ended with exit code {self.launcher.returncode}")

    def _check_progress(self, heard_at: float) -> None:
        now = time.monotonic()
        if now - heard_at > SILENCE_S:
            raise self._failure(f"logged nothing for {SILENCE_S:.0f} s")
        if now > self._deadline:
            raise self._failure(f"took longer than {RUN_S:.0f} s")

    def _failure(self, what: str) -> Error:
        return Error(f"the {self.name} training {what}", hint=f"read {self.output}")

    def read_results(self) -> list[Result]:
        try:
            texts = [self._result_of(rank).read_bytes() for rank in range(self.job.nproc)]
        except FileNotFoundError as error:
            raise self._failure(f"left no result at {error.filename}") from error
        return [msgspec.json.decode(text, type=Result) for text in texts]

    def _result_of(self, rank: int) -> Path:
        return self.result.with_name(f"{self.result.name}.rank{rank}")

    def wait_for_quiet(self) -> list[str]:
        """The processes that are still there `EXIT_S` after a normal end: keepstep promises that there are none."""
        return self.processes.wait_for_quiet(timeout_s=EXIT_S)

    def kill(self, pid: int) -> None:
        if not self.processes.kill(pid):
            raise Error(f"process {pid} was gone before it could be killed", hint=f"read {self.output}")

    def _end_launcher(self) -> None:
        """Ask first: the launcher ends its trainers in order."""
        if self.launcher.poll() is None:
            self.launcher.terminate()
        try:
            self.launcher.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait(EXIT_S)
