"""What a node's memory holds after many versions, and that nothing is left when its keeper ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from clones import rest
from nodes import Run, running

from keepstep.arena.memfd import NAME
from keepstep.keeper.transfer.protect import ParityBuilt
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.cost_model import memory_bytes

# Headers, tables and values: pages, not parts of the state.
SMALL = 256 << 10
MEMFD = f"/memfd:{NAME} (deleted)"


@pytest.mark.parametrize(
    ("nodes", "versions"), [("abc", 8), pytest.param("abcd", 30, marks=pytest.mark.chaos)]
)  # fmt: skip
def test_memory_is_what_the_formula_says_after_many_versions(nodes: str, versions: int, place: Path) -> None:
    size = (len(nodes) - 1) * CHUNK_BYTES
    with running(place, losses=1, size_bytes=size, growth=0) as run:
        run.add(*nodes)
        run.start(list(nodes))
        assert len({run.protect() for _ in range(versions)}) == versions
        rest(run)
        expected = memory_bytes(
            slots=2, unique_bytes=size, largest_unique_bytes=size, n=len(nodes), m=1, window_bytes=0
        )  # fmt: skip
        for node in run.nodes.values():
            network = node.keeper.network
            assert network is not None
            found = memfd_bytes(node.keeper.memory_fds().values()) + network._pool.size_bytes
            assert expected <= found <= expected * 1.02 + SMALL, f"{found:,} where {expected:,} are expected"
            assert node.status().memory_bytes == found


def memfd_bytes(fds: Iterable[int]) -> int:
    return sum(os.fstat(fd).st_blocks * 512 for fd in fds)


def test_nothing_is_left_of_keepers_that_ended(place: Path) -> None:
    train(place)  # imports, pools of the interpreter
    before, names = descriptors(), {thread.name for thread in threading.enumerate()}
    for _ in range(3):
        train(place)
    assert descriptors() == before
    assert {thread.name for thread in threading.enumerate()} <= names


def test_parity_that_is_ready_when_its_keeper_has_ended_goes_with_it(place: Path) -> None:
    before = descriptors().get(MEMFD, 0)
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        keeper = run.nodes["a"].keeper
        network = keeper.network
        assert network is not None

        class TooLate:
            def put(self, result: object, /) -> None:
                if isinstance(result, ParityBuilt):
                    keeper.end("killed by the test")
                keeper.put(result)

        network._results = TooLate()
        run.train_until(lambda: keeper.ending, "parity is ready")
    assert descriptors().get(MEMFD, 0) == before


def train(place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        run.protect()
        run.nodes["b"].kill()
        run.add("b'")
        run.start(["a", "b'", "c"])
        run.protect()
        stop_in_the_middle(run)


def stop_in_the_middle(run: Run) -> None:
    """Keepers end while an exchange runs and a trainer has a grant."""
    run.train(2)


def descriptors() -> dict[str, int]:
    """Open ones by what they point to, numbers of sockets left out."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}").split(":[")[0]
        except OSError:
            continue
        found[target] = found.get(target, 0) + 1
    return found
