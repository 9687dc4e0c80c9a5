"""The line of `keepstep status` on how takes ended, and the counters behind it."""

from __future__ import annotations

from keepstep.cli.commands.status import _takes
from keepstep.keeper.status import _take_counters
from keepstep.types import COPYING, SEALING, SKIP_KINDS, TakeCounts


def counts(asked: int, *, waited_us: int = 0, **skipped: int) -> TakeCounts:
    return TakeCounts(asked, int(waited_us > 0), waited_us, tuple(skipped.get(kind, 0) for kind in SKIP_KINDS))


def test_counters_are_sums_over_the_trainers_of_the_node() -> None:
    counters = _take_counters([counts(10, sealing=2), counts(10, sealing=1, copying=1, waited_us=500_000)])
    assert counters["takes_asked"] == 20
    assert counters["takes_waited"] == 1
    assert counters["take_wait_seconds"] == 0.5
    assert counters[f"takes_skipped_{SEALING}"] == 3
    assert counters[f"takes_skipped_{COPYING}"] == 1


def test_status_names_the_reasons_by_number() -> None:
    line = str(_takes(_take_counters([counts(120, later_step=2, sealing=6, waited_us=210_000)])))
    assert line == "120 takes · 8 skipped (sealing 6, later step 2) · 1 waited for the device, 0.2 s in all"


def test_status_says_what_a_missing_grant_means_to_a_user() -> None:
    line = str(_takes(_take_counters([counts(4, no_grant=3)])))
    assert line == "4 takes · 3 skipped (memory not ready or other ranks behind 3)"


def test_status_of_a_run_without_skips_is_short() -> None:
    assert str(_takes(_take_counters([counts(7)]))) == "7 takes · 0 skipped"
