"""Programs that others wrote, with the lines of the README added as an outsider would add them, under `keepstep check`.

Each one that is not exact is found with its cause, or refused with a sentence. Each exact one passes, and so do the
fixed forms. The programs are short versions of the real ones: the loop, the loader and the order of calls are theirs.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from checks import check

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=keepstep", "--max-restarts=50")
RANKS_2 = "2 ranks"

# program, ranks, environment, causes of which one is named
FOUND = [
    ("prefetch.py", "", {}, {"data fetched ahead"}),
    ("lost_epoch.py", "", {}, {"position"}),
    ("naive/mingpt_ddp.py", RANKS_2, {}, {"position", "random"}),
    ("naive/multigpu_torchrun.py", RANKS_2, {}, {"position", "fails after restore"}),
    ("naive/hf_callback.py", "", {}, {"position"}),
    ("naive/accelerate_loop.py", "", {}, {"refused", "no snapshot"}),
    ("naive/accelerate_loop.py", "", {"STATEFUL": "1"}, {"position", "random"}),
    ("naive/lightning_callback.py", "", {}, {"position", "random"}),
    ("naive/lightning_callback.py", "", {"FIXED": "1", "CHECKPOINT": "1"}, {"output directory"}),
    ("naive/id_keys.py", "", {}, {"refused", "keys", "no snapshot"}),
]
EXACT = [
    ("prefetch.py", "", {"CARRIED": "1"}),
    ("prefetch.py", "", {"BATCHES": "1"}),
    ("lost_epoch.py", "", {"RIGHT": "1"}),
    ("naive/mingpt_ddp.py", RANKS_2, {"FIXED": "1"}),
    ("naive/mingpt_ddp.py", RANKS_2, {"BATCHES": "1"}),
    ("naive/multigpu_torchrun.py", RANKS_2, {"FIXED": "1"}),
    ("naive/id_keys.py", "", {"FIXED": "1"}),
    ("naive/accelerate_loop.py", "", {"FIXED": "1"}),
    ("naive/hf_callback.py", "", {"FIXED": "1"}),
    ("naive/hf_callback.py", "", {"FIXED": "1", "EVALUATE": "1"}),
    ("naive/lightning_callback.py", "", {"FIXED": "1", "CHECKPOINT": "1", "EMPTIED": "1"}),
    ("naive/fsdp2.py", RANKS_2, {}),
    ("naive/muon.py", "", {}),
]


def launcher(ranks: str) -> tuple[str, ...]:
    """The arguments between the interpreter and the program."""
    return (*TORCHRUN, "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4().hex[:8]}") if ranks else ()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("program", "ranks", "environ", "causes"), FOUND)
def test_program_that_is_not_exact_is_found(
    tmp_path: Path, program: str, ranks: str, environ: dict[str, str], causes: set[str]
) -> None:
    options = ("--steps", "14", "--kills", "3")
    code, text, report = check(tmp_path, program, *options, launcher=launcher(ranks), **environ)
    assert code != 0, text
    assert report["result"]["cause"]["name"] in causes, text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("program", "ranks", "environ"), EXACT)
def test_program_that_is_exact_passes(tmp_path: Path, program: str, ranks: str, environ: dict[str, str]) -> None:
    options = ("--steps", "10", "--kills", "3")
    code, text, report = check(tmp_path, program, *options, launcher=launcher(ranks), **environ)
    assert code == 0, text
    assert report["result"]["restored"], text
