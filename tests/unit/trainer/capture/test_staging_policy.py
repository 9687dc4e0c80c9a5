"""What is cloned in place of leaving straight, from how the last snapshots went."""

from __future__ import annotations

from itertools import pairwise

from keepstep.trainer.capture.device_lane import MARGIN_S, StagingPolicy

RATE = 50e9
GB = 1_000_000_000


def settle(window_s: float, total: int, budget: int, snapshots: int = 40) -> list[int]:
    """The late bytes of snapshots in a row, when the update comes `window_s` after `take` each time."""
    split, found = StagingPolicy(budget), []
    for _ in range(snapshots):
        late = split.late_of(total)
        found.append(late)
        split.learn(window_s - (total - late) / RATE, RATE)
    return found


def test_first_snapshot_stages_all_it_may_because_nothing_is_known() -> None:
    assert StagingPolicy(2 * GB).late_of(17 * GB) == 2 * GB
    assert StagingPolicy(2 * GB).late_of(GB) == GB


def test_late_part_becomes_what_the_window_leaves_over_with_a_margin() -> None:
    late = settle(window_s=0.32, total=17 * GB, budget=2 * GB)
    needed = 17 * GB - (0.32 - MARGIN_S) * RATE
    assert abs(late[-1] - needed) < 0.01 * GB
    assert all(a >= b for a, b in pairwise(late)), "step by step, never below"


def test_nothing_is_late_where_there_is_time_for_everything() -> None:
    assert settle(window_s=1.0, total=17 * GB, budget=2 * GB)[-1] == 0


def test_a_step_that_had_to_wait_is_answered_at_once_and_a_long_one_hardly() -> None:
    split = StagingPolicy(2 * GB, late_bytes=GB)
    split.learn(-0.01, RATE)
    assert split.late_of(17 * GB) == round(GB + (0.01 + MARGIN_S) * RATE)
    split = StagingPolicy(2 * GB, late_bytes=GB)
    split.learn(MARGIN_S + 0.01, RATE)
    assert GB - 0.3 * 0.01 * RATE < split.late_of(17 * GB) < GB


def test_late_part_stays_within_its_budget_however_long_the_update_waits() -> None:
    assert settle(window_s=0.01, total=17 * GB, budget=GB)[-1] == GB
    assert settle(window_s=0.01, total=17 * GB, budget=0)[-1] == 0


def test_scale_is_wrong_on_purpose_and_still_within_bounds() -> None:
    assert StagingPolicy(2 * GB, late_bytes=GB, scale=4.0).late_of(17 * GB) == 0
    assert StagingPolicy(2 * GB, late_bytes=GB, scale=0.25).late_of(17 * GB) == 2 * GB
