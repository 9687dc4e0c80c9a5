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
