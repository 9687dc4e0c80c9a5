"""SIGKILL of all trainers at random instants: what comes back is the last complete version, or the one in flight.

Every tensor carries its step and rank (steps.py), copies are throttled so that a kill lands at a
random byte of one, and each life checks the whole state that it was given. Never a mix, never older,
the same on all ranks.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from lives import Expectation, Job, Zygote, job, within

# About six megabytes are copied behind `take`; at this rate that lasts most of a step.
PACE_S = 0.03
RATE = {"KEEPSTEP_TAKE_RATE_BYTES_S": str(240_000_000)}


def kill_again_and_again(run: Job, *, kills: int, budget_s: float, seed: int) -> Counter[str]:
    """`kills` lives, or as many as fit; returns what happened how often."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    expect, in_time = Expectation(), within(budget_s)
    for _ in range(kills):
        if not in_time():
            break
        trainers = run.start(pace_s=PACE_S)
        if rng.random() < 0.15:  # anywhere in the start: importing, registering, restoring, preparing memory
            time.sleep(rng.uniform(0.0, 1.0))
        else:
            trainers.wait_for("restored")
            if expect.complete < 0:  # the memory of a first start is prepared behind training
                trainers.wait_for("complete")
            time.sleep(rng.uniform(0.0, 8 * PACE_S))
        assert set(trainers.codes()) == {None}, f"a trainer ended by itself\n{trainers.text()}"
        # Sometimes one rank lives on into the next life: that is the keeper's to fence, which knows who registered.
        everybody = list(range(run.world))
        victims = everybody if rng.random() < 0.8 else [rng.randrange(run.world)]
        if len(trainers.events("open")) < run.world:
            victims = everybody
        trainers.kill(ranks=victims)
        restored = run.check(trainers, expect, killed=victims)
        if restored is not None:
            zombies = [pid for life in run.lives[:-1] for pid in life.living()]
            assert not zombies, f"trainers {zombies} of older lives are not fenced"
        seen["kills"] += 1
        seen["of one rank only"] += len(victims) < run.world
        if restored is None:
            seen["killed before it had restored"] += 1
        elif restored < 0:
            seen["first start"] += 1
        else:
            seen["restored the one in flight" if restored > expect.complete else "restored the last complete"] += 1
        expect = expect.after(trainers, restored)
        seen["newest step"] = max(seen["newest step"], expect.complete)
    last = run.start(pace_s=PACE_S)
    last.wait_for("restored")
    last.wait_for("complete")
    last.kill()
    run.check(last, expect)
    return seen


@pytest.mark.parametrize(("world", "seed"), [(1, 11), (2, 12)])
def test_trainers_killed_at_random_instants_come_back_at_the_last_or_the_flying_version(
    zygote: Zygote, world: int, seed: int
) -> None:
    with job(zygote, world=world, settings=RATE) as run:
        seen = kill_again_and_again(run, kills=25, budget_s=27.0, seed=seed)
    print(f"{world} rank(s): {dict(seen)}")
    assert seen["kills"] >= 5
    assert seen["newest step"] > 0


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world", "slots", "every", "kills"), [(1, 2, 1, 80), (2, 2, 1, 80), (2, 3, 2, 40), (2, 3, 1, 40)]
)
def test_two_hundred_kills_lose_and_mix_nothing(zygote: Zygote, world: int, slots: int, every: int, kills: int) -> None:
    settings = {**RATE, "KEEPSTEP_ARENA_SLOTS": str(slots), "KEEPSTEP_EVERY": str(every)}
    seed = random.randrange(1 << 30)
    with job(zygote, world=world, settings=settings) as run:
        seen = kill_again_and_again(run, kills=kills, budget_s=1500.0, seed=seed)
    print(f"seed {seed}, {world} rank(s), {slots} slots, every {every}: {dict(seen)}")
    assert seen["kills"] == kills
    assert seen["restored the last complete"] + seen["restored the one in flight"] > kills // 2
