"""SIGKILL of the keeper: training never stops, the next version is protected again, nothing is lost.

The trainers hold the memory too. They start a new keeper, give it back, and go on under the grant that
stands in the arenas. Where no trainer is up the launcher holds it (launcher/keeper_supervisor.py).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter

import pytest
from lives import Expectation, Job, Trainers, Zygote, job

from keepstep.config import Config
from keepstep.control.client import KeeperClient
from keepstep.launcher.keeper_supervisor import KeeperSupervisor
from keepstep.testing.run import alive, wait_until

PACE_S = 0.03
RATE = {"KEEPSTEP_TAKE_RATE_BYTES_S": str(240_000_000)}
PROTECTED_AGAIN_S = 30.0
# On a machine that others use too a step may wait for a core this long, with or without a keeper.
NOISE_S = 0.5


def kill_keeper_again_and_again(run: Job, trainers: Trainers, *, kills: int, rng: random.Random) -> float:
    """Kill it at random instants, each time after it has taken over; returns the longest time without cover."""
    longest = 0.0
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 6 * PACE_S))
        before = trainers.newest_complete()
        taken = max(trainers.steps("taken"))
        run.run.kill_keeper()
        killed = time.monotonic()
        wait_until(
            # Captured after the kill and complete: the new keeper grants, seals and tells.
            lambda before=before, taken=taken: trainers.newest_complete() > max(before, taken + 1),
            timeout_s=PROTECTED_AGAIN_S,
            what=lambda: f"a version to be complete again\n{trainers.text()}\n{run.keeper_log()}",
        )
        longest = max(longest, time.monotonic() - killed)
        assert set(trainers.codes()) == {None}, trainers.text()
    return longest


def step_times(trainers: Trainers, since: float, until: float) -> list[float]:
    return [line["took"] for line in trainers.events("taken") if since <= line["at"] <= until]


def run_through(run: Job, *, kills: int, seed: int) -> tuple[float, float, float]:
    """Returns (median, longest step while keepers die, longest time until protected again)."""
    rng = random.Random(seed)
    trainers = run.start(pace_s=PACE_S)
    trainers.wait_for("complete", 3)
    quiet_from = time.monotonic()
    time.sleep(1.0)
    kills_from = time.monotonic()
    longest = kill_keeper_again_and_again(run, trainers, kills=kills, rng=rng)
    now = time.monotonic()
    quiet, disturbed = step_times(trainers, quiet_from, kills_from), step_times(trainers, kills_from, now)
    steps = sorted({line["step"] for line in trainers.events("taken")})
    assert steps == list(range(len(steps))), "a step is missing: training stopped"
    # Nothing was lost: all trainers die now, and come back from what the last keeper holds.
    trainers.kill()
    run.check(trainers, Expectation())
    expect = Expectation().after(trainers, -1)
    reborn = run.start(pace_s=PACE_S)
    reborn.wait_for("restored")
    reborn.wait_for("complete")
    reborn.kill()
    assert run.check(reborn, expect) is not None
    bound = max(4 * max(quiet), statistics.median(quiet) + NOISE_S)
    assert max(disturbed) <= bound, f"a step took {max(disturbed):.3f} s, at most {max(quiet):.3f} s undisturbed"
    return statistics.median(disturbed), max(disturbed), longest


@pytest.mark.parametrize(("world", "kills"), [(1, 5), (2, 5)])
def test_training_goes_on_and_is_protected_again_when_its_keeper_is_killed(
    zygote: Zygote, world: int, kills: int
) -> None:
    with job(zygote, world=world, settings=RATE) as run:
        median, worst, longest = run_through(run, kills=kills, seed=world)
    print(f"{world} rank(s): {kills} kills, step {median:.3f} s, worst {worst:.3f} s, uncovered {longest:.2f} s")


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "slots", "kills"), [(1, 2, 20), (2, 2, 20), (2, 3, 10)])
def test_fifty_keepers_killed_lose_nothing(zygote: Zygote, world: int, slots: int, kills: int) -> None:
    with job(zygote, world=world, settings={**RATE, "KEEPSTEP_ARENA_SLOTS": str(slots)}) as run:
        median, worst, longest = run_through(run, kills=kills, seed=random.randrange(1 << 30))
    print(
        f"{world} rank(s), {slots} slots: {kills} kills, step {median:.3f} s, worst {worst:.3f} s, "
        f"uncovered {longest:.2f} s at most"
    )


@pytest.mark.parametrize("seed", range(3))
def test_keeper_killed_while_it_restores_gives_the_state_back_through_the_new_trainer(
    zygote: Zygote, seed: int
) -> None:
    """The new trainer holds the memory from its first message on: what it held is enough."""
    rng = random.Random(seed)
    with job(zygote, settings=RATE) as run:
        first = run.start(pace_s=PACE_S)
        first.wait_for("complete", 2)
        first.kill()
        expect = Expectation().after(first, run.check(first, Expectation()))
        second = run.start(pace_s=PACE_S, linger_s=0.1)
        second.wait_for("open")
        time.sleep(0.1 + rng.uniform(-0.02, 0.06))
        run.run.kill_keeper()
        second.wait_for("complete")
        second.kill()
        restored = run.check(second, expect)
        assert restored is not None
        assert restored >= 0


def kill_in_any_order(run: Job, *, rounds: int, seed: int) -> Counter[str]:
    """Keeper and trainers die, alone or together, at any time of a life; only the launcher's agent lives through it."""
    rng, seen = random.Random(seed), Counter[str]()
    holder = KeeperSupervisor(run.run.identity, Config())
    expect = Expectation()
    try:
        for number in range(1, rounds + 1):
            holder.status(timeout_s=30.0, patient=True)
            trainers = run.start({"KEEPSTEP_INCARNATION": f"{number}:{number:x}"}, pace_s=PACE_S)
            if number == 1:
                trainers.wait_for("complete", 2 * run.world)
            elif rng.random() < 0.6:
                trainers.wait_for("restored")
            time.sleep(rng.uniform(0.0, 0.6))
            act = rng.choice(["trainers", "both", "keeper then trainers", "trainers then keeper", "keeper twice"])
            seen[act] += 1
            if act.startswith("keeper"):
                _kill_if_there(run)
                time.sleep(rng.uniform(0.0, 1.0))
            if act == "keeper twice":
                _kill_if_there(run)
                trainers.wait_for("complete", timeout_s=60)
            if act == "both":
                _kill_if_there(run, wait=False)
            trainers.kill()
            if act == "trainers then keeper":
                time.sleep(rng.uniform(0.0, 0.1))
                _kill_if_there(run)
            restored = run.check(trainers, expect)
            seen["restored"] += restored is not None
            expect = expect.after(trainers, restored)
        holder.status(timeout_s=30.0, patient=True)
        last = run.start({"KEEPSTEP_INCARNATION": f"{rounds + 1}:1"}, pace_s=PACE_S)
        last.wait_for("restored")
        last.kill()
        assert run.check(last, expect) is not None
    finally:
        holder.close()
    return seen


def _kill_if_there(run: Job, *, wait: bool = True) -> None:
    pid = run.run.keeper_pid()
    if alive(pid):
        os.kill(pid, signal.SIGKILL)
        if wait:
            wait_until(lambda: not alive(pid), what="the end of the keeper")


def test_keeper_and_trainers_killed_in_any_order_lose_nothing_that_the_launcher_holds(zygote: Zygote) -> None:
    with job(zygote, world=2, settings=RATE) as run:
        seen = kill_in_any_order(run, rounds=10, seed=5)
    print(dict(seen))
    assert seen["restored"] >= 4


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "slots"), [(1, 2), (2, 2), (2, 3)])
def test_a_hundred_deaths_of_keeper_and_trainers_in_any_order(zygote: Zygote, world: int, slots: int) -> None:
    seed = random.randrange(1 << 30)
    with job(zygote, world=world, settings={**RATE, "KEEPSTEP_ARENA_SLOTS": str(slots)}) as run:
        seen = kill_in_any_order(run, rounds=34, seed=seed)
    print(f"seed {seed}, {world} rank(s), {slots} slots: {dict(seen)}")


def test_keeper_killed_while_the_memory_is_made_is_replaced_and_the_job_starts(zygote: Zygote) -> None:
    rng = random.Random(3)
    with job(zygote, world=2, settings=RATE) as run:
        trainers = run.start(pace_s=PACE_S, ballast_mb=150)
        trainers.wait_for("open")
        time.sleep(rng.uniform(0.0, 0.15))
        run.run.kill_keeper()
        trainers.wait_for("complete", 2)
        trainers.kill()
        expect = Expectation().after(trainers, run.check(trainers, Expectation()))
        reborn = run.start(pace_s=PACE_S, ballast_mb=150)
        reborn.wait_for("restored")
        reborn.kill()
        assert run.check(reborn, expect) is not None


def test_keeper_and_one_trainer_killed_at_once_leave_the_state_with_the_other_trainer(zygote: Zygote) -> None:
    with job(zygote, world=2, settings=RATE) as run:
        expect = Expectation()
        for victim in (0, 1):
            trainers = run.start(pace_s=PACE_S)
            trainers.wait_for("complete", 4)
            keeper = run.run.keeper_pid()
            trainers.kill(ranks=[victim])
            run.run.kill_keeper()
            wait_until(
                lambda keeper=keeper: run.run.keeper_pid() != keeper and _holds_all(run),
                what="the other trainer to start a keeper and give both arenas back",
            )
            trainers.kill()
            restored = run.check(trainers, expect)
            assert restored is not None
            expect = expect.after(trainers, restored)
        last = run.start(pace_s=PACE_S)
        last.wait_for("restored")
        last.kill()
        restored = run.check(last, expect)
        assert restored is not None
        assert restored > 0


def _holds_all(run: Job) -> bool:
    try:
        return len(run.run.status().ranks) == 2
    except Exception:
        return False


def test_a_stopped_keeper_does_not_stop_the_training(zygote: Zygote) -> None:
    with job(zygote, settings=RATE) as run:
        trainers = run.start(pace_s=PACE_S)
        trainers.wait_for("complete", 2)
        pid = run.run.keeper_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            steps = len(trainers.events("taken"))
            trainers.wait_for("taken", steps + 30)
        finally:
            os.kill(pid, signal.SIGCONT)
        before = trainers.newest_complete()
        wait_until(lambda: trainers.newest_complete() > before, what="a complete version after SIGCONT")
        assert alive(pid)
        assert KeeperClient(run.run.identity, "cli").close() is None
