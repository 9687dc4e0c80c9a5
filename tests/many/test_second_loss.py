"""A second node dies while the first one is being replaced: another plan or a clean error, and the next start works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from clones import Image, protected_image
from nodes import wait_for
from patterns import errors_of

from keepstep.control.messages import RestoreFrom
from keepstep.errors import Error, KeeperError, RecoveryError

MB = 1_000_000


def test_a_node_dies_between_the_start_and_restore(place: Path) -> None:
    image = protected_image(place, "abcd", losses=2)
    with image.again(["a"]) as run:
        run.begin(["a'", "b", "c", "d"])
        run.nodes["c"].kill()
        run.add("c'")
        answers = run.start(["a'", "b", "c'", "d"])
        assert {answer.version for answer in answers} == {image.version}
        run.protect()


def test_more_than_covered_die_between_the_start_and_restore(place: Path) -> None:
    image = protected_image(place, "abc", losses=1)
    with image.again(["a"]) as run:
        run.begin(["a'", "b", "c"])
        run.nodes["b"].kill()
        run.add("b'")
        run.begin(["a'", "b'", "c"])
        for error in errors_of(run):
            assert isinstance(error, RecoveryError)
            assert "covers 1 lost" in str(error)


@pytest.fixture
def slow(place: Path) -> Image:
    """Fetching this one takes seconds."""
    image = protected_image(place, "abcd", losses=2, size_bytes=5 * MB)
    image.run.peers["rate_bytes_s"] = 5 * MB
    return image


def test_a_node_dies_in_mid_fetch_and_the_next_start_works(slow: Image) -> None:
    with slow.again(["a"]) as run:
        run.begin(["a'", "b", "c", "d"])
        outcomes: list[RestoreFrom | Error] = []
        waiting = threading.Thread(target=lambda: outcomes.extend(restored_or_error(run.trainers[0].restore)))
        waiting.start()
        bringing = run.nodes["a'"].keeper
        wait_for(lambda: bringing.core.restore.fetching, "bytes are on their way")
        time.sleep(0.3)
        run.nodes["c"].kill()
        run.add("c'")
        answers = run.start(["a'", "b", "c'", "d"])
        assert {answer.version for answer in answers} == {slow.version}
        waiting.join(5)
        assert isinstance(outcomes[0], KeeperError), "what waited in the incarnation that ended is told so"


def test_a_source_outside_the_job_dies_in_mid_fetch_and_another_one_takes_its_place(slow: Image) -> None:
    """d is not a member any more, only a source: nobody has to start again when it dies."""
    with slow.again(["a"]) as run:
        run.add("e")
        former = [run.nodes["d"].card().card]
        run.begin(["a'", "b", "c", "e"], former)
        bringing = run.nodes["e"].keeper
        answers: list[RestoreFrom] = []
        waiting = threading.Thread(target=lambda: answers.extend(run.restore()))
        waiting.start()
        wait_for(lambda: bringing.core.restore.fetching, "bytes are on their way")
        time.sleep(0.3)
        run.nodes["d"].kill()
        wait_for(
            lambda: bringing.core.restore.order is not None and bringing.core.restore.order.number > 1, "another plan"
        )
        waiting.join(30)
        assert [answer.version for answer in answers] == [slow.version] * 4
        assert [answer.source for answer in answers] == ["parity", "memory", "memory", "parity"]


def restored_or_error(call: Callable[[], RestoreFrom]) -> list[RestoreFrom | Error]:
    try:
        return [call()]
    except Error as error:
        return [error]
