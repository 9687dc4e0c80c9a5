"""The same on real keeper processes: SIGKILL for lost nodes and for keepers alone, SIGSTOP for frozen ones."""

from __future__ import annotations

import itertools
import random
import signal
import time
from pathlib import Path

import pytest
from patterns import errors_of
from processes import ProcessNode, running

from keepstep.errors import RecoveryError

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("n", "m"), [(2, 1), (4, 1), (4, 2), (5, 3)])
def test_nodes_are_killed_and_replaced_until_too_many_are(n: int, m: int, place: Path) -> None:
    draw, names = random.Random(n * 10 + m), itertools.count()
    with running(place, losses=m, size_bytes=200_000) as run:
        order = [f"n{next(names)}" for _ in range(n)]
        run.add(*order)
        run.start(order)
        for _ in range(4):
            run.protect()
            version = run.rest()
            lost = draw.sample(range(n), draw.randrange(1, m + 1))
            for position in lost:
                run.nodes.pop(order[position]).kill()
                order[position] = f"n{next(names)}"
                run.add(order[position])
            answers = run.start(list(order))
            assert {answer.version for answer in answers} == {version}
            assert [p for p, answer in enumerate(answers) if answer.source == "parity"] == sorted(lost)
        run.protect()
        run.rest()
        if m + 1 == n:  # nobody would be left who could know that there was anything
            return
        for position in range(m + 1):
            run.nodes.pop(order[position]).kill()
            order[position] = f"n{next(names)}"
            run.add(order[position])
        run.begin(list(order))
        errors = errors_of(run)
        assert len(errors) == n
        assert all(isinstance(error, RecoveryError) and f"covers {m} lost" in str(error) for error in errors)


@pytest.mark.parametrize("died", ["a", "c"])
def test_training_goes_on_when_a_keeper_is_killed(died: str, place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        for _ in range(3):
            before = run.protect()
            run.revive(died)
            assert run.protect() > before
        version = run.rest()
        run.nodes.pop("b").kill()
        run.add("b2")
        assert {answer.version for answer in run.start(["a", "b2", "c"])} == {version}


@pytest.mark.parametrize("frozen", ["a", "c"])
def test_training_goes_on_while_a_keeper_is_frozen(frozen: str, place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        before = run.protect()
        node = run.nodes[frozen]
        assert isinstance(node, ProcessNode)
        node.signal(signal.SIGSTOP)
        longest, end = 0.0, time.monotonic() + 4
        while time.monotonic() < end:
            started = time.monotonic()
            run.train(1)
            longest = max(longest, time.monotonic() - started)
            time.sleep(0.01)
        node.signal(signal.SIGCONT)
        assert longest < 0.5, "no trainer waits for a frozen keeper"
        assert run.protect() > before
        version = run.rest()
        run.nodes.pop("b").kill()
        run.add("b2")
        assert {answer.version for answer in run.start(["a", "b2", "c"])} == {version}
