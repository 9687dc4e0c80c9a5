"""`keepstep check` on programs as a user writes them: exact ones pass, others are found with their cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check


@pytest.mark.timeout(120)
def test_batch_that_was_fetched_ahead_is_found(tmp_path: Path) -> None:
    code, text, report = check(tmp_path, "prefetch.py", "--steps", "6", "--kills", "1")
    assert code == 1, text
    assert report["result"]["cause"]["name"] == "data fetched ahead", text
    assert report["result"]["difference"]["step"] == 1, text


@pytest.mark.timeout(120)
def test_batch_that_is_part_of_the_state_is_exact(tmp_path: Path) -> None:
    code, text, report = check(tmp_path, "prefetch.py", "--steps", "6", "--kills", "1", CARRIED="1")
    assert code == 0, text
    assert report["result"]["restored"] == [0]


@pytest.mark.timeout(240)
def test_average_outside_the_state_is_found_although_the_state_is_equal(tmp_path: Path) -> None:
    code, text, report = check(tmp_path, "mistakes.py", "--steps", "4", "--kills", "1", MISTAKE="average outside")
    assert code == 1, text
    assert report["result"]["cause"]["name"] == "tensor outside", text
    assert "average.shadow" in text


@pytest.mark.timeout(240)
def test_epoch_that_is_lost_behind_the_last_step_is_not_plainly_exact(tmp_path: Path) -> None:
    code, text, _ = check(tmp_path, "lost_epoch.py", "--steps", "5", "--kills", "3")
    assert code == 0, text
    assert text.startswith("exact so far: 5 steps"), text
    assert "but `epoch` was 0 instead of 1 at step 3;" in text, text
    assert "spent" not in text, "a time differs in undisturbed runs too"
