"""torchtitan's own trainer under the adapter: killed again and again, it ends bit for bit as without keepstep.

torchtitan and its dependencies are too large for the test extra: without them these tests are skipped. Each case trains
twelve steps on the CPU (titan_trainer.py) over several epochs of its data, is killed at the instants given, and is
compared with the same training without keepstep: parameters, buffers, optimizers, schedulers, random states, and the
losses, gradient norm and batches of every step, repeated ones too.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keepstep.testing.run import LocalRun

MISSING = [name for name in ("torchtitan", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install 'keepstep[torchtitan]' triton"
    ),
    pytest.mark.timeout(900),
]

SCRIPT = Path(__file__).with_name("titan_trainer.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
KEEP = "keepstep.frameworks.torchtitan.keep"
VALIDATE = ("--validator.enable", "--validator.freq", "3", "--validator.steps", "2")
LIMIT_S = 800


@dataclass
class Job:
    """One training: `run` starts it under torchrun and waits for its end, restarts included."""

    out: Path
    ranks: int
    local: LocalRun
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, case: str, *flags: str, kills: str = "", keep: str = KEEP, check: bool = True) -> str:
        self.out.mkdir(exist_ok=True)
        launch = ["--rdzv-backend=keepstep", "--rdzv-id=titan", "--max-restarts=50"]
        if keep:
            flags = (*flags, "--override.imports", keep)
        command = [
            sys.executable, "-m", "torch.distributed.run", *(launch if keep else ["--standalone"]), "--nnodes=1",
            f"--nproc-per-node={self.ranks}", str(SCRIPT), str(self.out), case,
            *[f"--kill={kill}" for kill in kills.split()], *flags,
        ]  # fmt: skip
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("KEEPSTEP_", "PET_"))}
        environ = {**clean, **self.local.environ, **self.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.out)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        log = done.stdout + done.stderr
        assert not check or done.returncode == 0, log[-6000:]
        marks = {path.name.removeprefix("killed-") for path in self.out.glob("killed-*")}
        assert marks == set(kills.split()), "not every kill took place"
        return log

    def read(self, name: str, rank: int) -> list[str]:
        path = self.out / f"{name}-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def restored(self) -> list[str]:
        """What each life began with."""
        lives = self.read("restored", 0)
        assert all(self.read("restored", rank) == lives for rank in range(self.ranks))
        return lives

    def assert_equal(self, other: Job) -> None:
        for rank in range(self.ranks):
            for name in ("steps", "validated"):
                # A step that was repeated is there twice: equal lines only.
                assert sorted(set(self.read(name, rank))) == sorted(other.read(name, rank)), f"{name} of rank {rank}"
            ours, theirs = self.read("final", rank), other.read("final", rank)
            assert len(theirs) > 20
            assert [line for line in ours if line not in theirs] == []
            assert ours == theirs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    """The training under test, and the one without keepstep. Nothing is left of the first after its normal end."""
    ranks = 2
    with LocalRun("titan") as local, LocalRun("titan-reference") as unused:
        yield Job(tmp_path / "kept", ranks, local), Job(tmp_path / "plain", ranks, unused)
        assert local.processes() == []


def prove(jobs: tuple[Job, Job], case: str, kills: str, *flags: str) -> Job:
    kept, plain = jobs
    plain.run(case, *flags, keep="")
    kept.run(case, *flags, kills=kills)
    kept.assert_equal(plain)
    assert len(kept.restored) == 1 + len(kills.split())
    assert kept.restored[0] == "None"
    return kept


def test_fsdp2_killed_at_the_first_and_last_step_and_at_epoch_ends_ends_equal(jobs: tuple[Job, Job]) -> None:
    kills = "0@1:saved 1@3:forward 0@5:update 1@6:taking 0@7:saved 1@8:saved 0@11:forward 1@12:update 0@12:saved"
    kept = prove(jobs, "fsdp", kills)
    assert kept.restored[-1] == "12"


def test_gradient_accumulation_killed_between_forward_passes_ends_equal(jobs: tuple[Job, Job]) -> None:
    prove(jobs, "accumulate", "1@2:second 0@4:forward 1@6:saved 0@9:second 1@12:second")


def test_tensor_parallel_training_ends_equal(jobs: tuple[Job, Job]) -> None:
    prove(jobs, "tp", "0@1:saved 1@4:forward 0@6:update 1@9:taking 0@12:update")


def test_pipeline_parallel_training_ends_equal(jobs: tuple[Job, Job]) -> None:
    prove(jobs, "pp", "0@1:saved 1@4:forward 0@6:update 1@9:taking 0@12:update")


def test_expert_parallel_training_with_biases_of_the_router_ends_equal(jobs: tuple[Job, Job]) -> None:
    # Slow copies, which end in the next step, without fingerprints: the biases are written before its optimizers step.
    jobs[0].environ = {"KEEPSTEP_TAKE_RATE_BYTES_S": "20000000", "KEEPSTEP_TAKE_FINGERPRINT": "off"}
    kept = prove(jobs, "ep", "0@1:saved 1@4:forward 0@6:update 1@9:taking 0@12:update")
    assert any("expert_bias" in line for line in kept.read("final", 0))


def test_tensor_parallel_training_that_is_sharded_too_ends_equal(jobs: tuple[Job, Job]) -> None:
    for job in jobs:
        job.ranks = 4
    prove(jobs, "tp", "3@1:saved 1@5:forward 2@9:update")


def test_training_with_two_loader_workers_ends_equal(jobs: tuple[Job, Job]) -> None:
    prove(jobs, "workers", "0@1:saved 1@4:forward 0@6:update 1@9:taking 0@12:update")


def test_validation_that_a_kill_interrupts_or_follows_is_repeated(jobs: tuple[Job, Job]) -> None:
    kept = prove(jobs, "fsdp", "0@3:validation 1@4:forward 0@6:validation 1@7:forward 0@12:validation", *VALIDATE)
    assert {line.split()[0] for line in kept.read("validated", 0)} == {"1", "3", "6", "9", "12"}


def test_validation_that_is_repeated_before_the_first_step_of_a_pipeline_changes_nothing(jobs: tuple[Job, Job]) -> None:
    kept = prove(jobs, "pp", "0@3:validation 1@7:forward 0@12:validation", *VALIDATE)
    assert kept.restored == ["None", "3", "6", "12"]


def test_checkpoints_on_disk_are_written_as_without_keepstep(jobs: tuple[Job, Job]) -> None:
    disk = ("--checkpoint.enable", "--checkpoint.interval", "4")
    kept, plain = jobs
    prove(jobs, "fsdp", "0@4:written 1@6:saved 0@8:writing 1@12:writing 0@12:saved", *disk)
    for job in (kept, plain):
        folders = sorted(path.parent.name for path in job.out.glob("dump/checkpoint/step-*/.metadata"))
        assert folders == ["step-12", "step-4", "step-8"]


def test_exception_on_all_ranks_leaves_the_memory_to_the_restart(jobs: tuple[Job, Job]) -> None:
    kept, plain = jobs
    plain.run("fsdp", keep="")
    kept.run("fsdp", "--raise=5")
    assert kept.restored == ["None", "4"]
    kept.assert_equal(plain)


def test_run_without_memory_begins_from_the_disk(jobs: tuple[Job, Job]) -> None:
    kept, plain = jobs
    disk = ("--checkpoint.enable", "--checkpoint.interval", "4", "--training.steps", "12")
    plain.run("fsdp", keep="")
    kept.run("fsdp", "--checkpoint.enable", "--checkpoint.interval", "4", "--training.steps", "8",
             "--lr_scheduler.total_steps", "12", "--checkpoint.no-last_save_model_only")  # fmt: skip
    kept.run("fsdp", *disk)
    assert kept.restored == ["None", "None"]
    for rank in range(kept.ranks):
        assert sorted(kept.read("steps", rank)) == sorted(plain.read("steps", rank))


def test_example_is_a_configuration_of_torchtitan() -> None:
    code = "from torchtitan_llama3 import llama3_8b_kept as c; from torchtitan.config.override import *; d = c()\n"
    code += "apply_overrides(d.override, d); print(type(d.checkpoint).__name__, d.checkpoint.disk.interval)"
    environ = {**os.environ, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-2:] == ["MemoryCheckpointConfig", "1000"], done.stderr


def test_only_multiples_of_every_are_captured(jobs: tuple[Job, Job]) -> None:
    kept, plain = jobs
    plain.run("fsdp", keep="")
    kept.run("fsdp", kills="0@8:forward", keep=KEEP + '={"every": 3}')
    assert kept.restored == ["None", "6"]
    kept.assert_equal(plain)
