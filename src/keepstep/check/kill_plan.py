"""Which kills a check makes, chosen from the undisturbed run (pure).

The first step, the last, and both sides of each boundary come first: there state is in flight that a kill in the middle
of an epoch does not meet. A boundary is where a counter begins again (the place in a loader), a variable or value named
like an epoch changes, the program evaluates, or the pause between two takes is long. The others are drawn at random.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence

from keepstep.check.trajectory import RankRun, TakeRecord
from keepstep.control.check_events import AFTER, BEFORE, EVALUATION, WITHIN, KillOrder

LONG_PAUSE = 3.0  # times the median pause
LEAST_PAUSE_S = 0.02
MOMENTS = (AFTER, BEFORE, WITHIN)


def evaluations(takes: Sequence[TakeRecord]) -> list[int]:
    """Indices of takes that an evaluation follows. None where each step evaluates: that is no boundary."""
    indices = [index for index in range(len(takes) - 1) if takes[index + 1].trace.evaluations]
    return [] if len(indices) == len(takes) - 1 else indices


def boundaries(takes: Sequence[TakeRecord]) -> list[int]:
    """Indices of takes that are the last before a boundary. None where there is one at each step."""
    pauses = [after.at - before.at for before, after in itertools.pairwise(takes)]
    limit = max(LEAST_PAUSE_S, LONG_PAUSE * statistics.median(pauses)) if pauses else 0.0
    sure = {
        index
        for index, (before, after) in enumerate(itertools.pairwise(takes))
        if _begins_again(before.state, after.state) or _begins_again(before.around, after.around)
    }
    if len(sure) > len(takes) // 2:
        sure = set()
    return sorted(sure | {index for index, pause in enumerate(pauses) if index and pause > limit and not sure})


def _begins_again(before: dict[str, str], after: dict[str, str]) -> bool:
    for path, text in after.items():
        earlier = before.get(path, text)
        if earlier == text:
            continue
        if "epoch" in path.lower() and text.isdigit():
            return True
        if text.isdigit() and earlier.isdigit() and int(text) < int(earlier) and int(text) <= 1:
            return True
    return False


def choose_kills(ranks: Sequence[RankRun], num_kills: int, seed: int) -> list[KillOrder]:
    """At most one kill for each step, in the order of steps."""
    takes = ranks[0].takes
    within = set(evaluations(takes))
    chosen = _choose_indices(len(takes), boundaries(takes), sorted(within), num_kills, seed)
    draw = random.Random(seed)
    orders = []
    for number, index in enumerate(chosen):
        moment = AFTER if index == 0 else draw.choice(MOMENTS)
        rank = draw.randrange(len(ranks))
        if index in within and index != 0:
            evaluating = [run.rank for run in ranks if run.takes[index + 1].trace.evaluations]
            moment, rank = EVALUATION, rank if rank in evaluating else evaluating[0]
        orders.append(KillOrder(number, rank, takes[index].step, moment))
    return orders


def _choose_indices(
    num_takes: int, ends: Sequence[int], evaluated: Sequence[int], num_kills: int, seed: int
) -> list[int]:
    """The first step, both sides of the first epoch's end and evaluation, then of the next ones."""
    # The run ends at its last take: a kill there shows nothing, unless the program ends by itself behind it.
    room = list(range(max(0, num_takes - 1)))
    wanted = [0]
    for end, evaluation in itertools.zip_longest(ends, evaluated):
        wanted += [index for base in (end, evaluation) if base is not None for index in (base, base + 1)]
    chosen: list[int] = []
    for index in wanted:
        if index in room and index not in chosen and len(chosen) < num_kills:
            chosen.append(index)
    rest = [index for index in room if index not in chosen]
    random.Random(seed).shuffle(rest)
    return sorted(chosen + rest[: num_kills - len(chosen)])
