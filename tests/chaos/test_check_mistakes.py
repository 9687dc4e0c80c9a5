"""Planted mistakes under `keepstep check`: each is found, with its cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import check

# The mistake, and the names of the causes that describe it.
MISTAKES = {
    "batch fetched ahead": {"data fetched ahead"},
    "buffer": {"buffer outside"},
    "counter in a module": {"buffer outside", "variable outside"},
    "tensor in a module": {"buffer outside"},
    "average outside": {"tensor outside"},
    "teacher outside": {"module outside"},
    "optimizer outside": {"optimizer outside"},
    "scheduler outside": {"scheduler outside"},
    "generator outside": {"generator outside"},
    "python generator outside": {"generator outside"},
    "numpy generator outside": {"generator outside"},
    "order outside": {"position", "variable outside"},
    "counts outside": {"variable outside"},
    "scale outside": {"tensor outside", "position"},
    "running mean of norms": {"variable outside"},
    "mean outside": {"printed"},
    "load_state_dict drops": {"not written back", "refused"},
    "restore never called": {"restore not called"},
    "step lost": {"position"},
    "step repeated": {"position"},
    "epoch begun anew": {"position"},
    "draw after restore": {"random"},
    "seeded after restore": {"random"},
    "numpy seeded anew at restore": {"random"},
    "python random not seeded": {"not deterministic"},
    "not seeded": {"not deterministic"},
    "kernels": {"kernels"},
    "learning rate set after restore": {"changed after restore"},
    "weights set after restore": {"changed after restore"},
    "scheduler after take": {"scheduler after take"},
    "evaluation after take": {"random"},
    "weights clamped after take": {"changed after take"},
    "take before the step": {"take before step"},
    "accumulation": {"gradients"},
    "same step twice": {"steps"},
    "fails after restore": {"fails after restore"},
}
LEAST_SHARE = 0.9  # of the mistakes, with the right cause; all of them must be found


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, str]]:
    """The cause that was named, by mistake. Judged together at the end."""
    named: dict[str, str] = {}
    yield named
    right = [mistake for mistake, cause in named.items() if cause in MISTAKES[mistake]]
    print(json.dumps({"named": named, "right": len(right), "of": len(named)}, indent=1))
    assert len(named) < len(MISTAKES) or len(right) >= LEAST_SHARE * len(named), {
        m: c for m, c in named.items() if m not in right
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_planted_mistake_is_found(tmp_path: Path, outcomes: dict[str, str], mistake: str) -> None:
    code, text, report = check(tmp_path, "mistakes.py", "--steps", "9", "--kills", "4", MISTAKE=mistake)
    outcomes[mistake] = report["result"]["cause"]["name"] if code else "exact"
    print(text)
    assert code != 0, text


@pytest.mark.timeout(600)
def test_program_without_a_mistake_is_exact(tmp_path: Path) -> None:
    code, text, report = check(tmp_path, "mistakes.py", "--steps", "9", "--kills", "6")
    assert code == 0, text
    assert {kill["moment"] for kill in report["result"]["kills"]} >= {"after", "evaluation"}, text
