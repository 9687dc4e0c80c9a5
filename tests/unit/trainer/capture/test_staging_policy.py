"""How much of a snapshot is staged, from the spare time that the last snapshots had."""

from __future__ import annotations

from itertools import pairwise

from keepstep.trainer.capture.device_lane import MARGIN_S, StagingPolicy

RATE = 50e9
GB = 1_000_000_000


def settle(window_s: float, total: int, budget: int, snapshots: int = 40) -> list[int]:
    """The staged bytes of snapshots in a row, when the update comes `window_s` after `take` each time."""
    policy, history = StagingPolicy(budget), []
    for _ in range(snapshots):
        staged = policy.staged_of(total)
        history.append(staged)
        policy.learn(window_s - (total - staged) / RATE, RATE)
    return history


def test_first_snapshot_stages_all_it_may_because_nothing_is_known() -> None:
    assert StagingPolicy(2 * GB).staged_of(17 * GB) == 2 * GB
    assert StagingPolicy(2 * GB).staged_of(GB) == GB


def test_staged_part_becomes_what_direct_copies_leave_with_a_margin() -> None:
    staged = settle(window_s=0.32, total=17 * GB, budget=2 * GB)
    needed = 17 * GB - (0.32 - MARGIN_S) * RATE
    assert abs(staged[-1] - needed) < 0.01 * GB
    assert all(a >= b for a, b in pairwise(staged)), "step by step, never below"


def test_nothing_is_staged_where_there_is_time_for_everything() -> None:
    assert settle(window_s=1.0, total=17 * GB, budget=2 * GB)[-1] == 0


def test_waiting_update_raises_the_staged_part_at_once_and_a_long_step_lowers_it_slowly() -> None:
    policy = StagingPolicy(2 * GB, staged_bytes=GB)
    policy.learn(-0.01, RATE)
    assert policy.staged_of(17 * GB) == round(GB + (0.01 + MARGIN_S) * RATE)
    policy = StagingPolicy(2 * GB, staged_bytes=GB)
    policy.learn(MARGIN_S + 0.01, RATE)
    assert GB - 0.3 * 0.01 * RATE < policy.staged_of(17 * GB) < GB


def test_staged_part_stays_within_its_budget_however_long_the_update_waits() -> None:
    assert settle(window_s=0.01, total=17 * GB, budget=GB)[-1] == GB
    assert settle(window_s=0.01, total=17 * GB, budget=0)[-1] == 0


def test_scale_is_wrong_on_purpose_and_still_within_bounds() -> None:
    assert StagingPolicy(2 * GB, staged_bytes=GB, scale=4.0).staged_of(17 * GB) == 0
    assert StagingPolicy(2 * GB, staged_bytes=GB, scale=0.25).staged_of(17 * GB) == 2 * GB
