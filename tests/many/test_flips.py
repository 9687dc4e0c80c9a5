"""Show 4: bits that flip in memory. Exact recovery, an older version or a clear error; never a wrong byte.

`PlainTrainer.restore` compares every byte, so a test that passes has seen none that is wrong.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clones import Image, protected_image
from flips import IN_PARITY, IN_SLOTS, Flip, flip_in
from nodes import Run

from keepstep.control.messages import RestoreFrom
from keepstep.errors import Error, IntegrityError, RecoveryError
from keepstep.keeper.process import TICK_S

PARTS = (*IN_SLOTS, *IN_PARITY)


@pytest.fixture(scope="module", params=[1, 2])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    with tempfile.TemporaryDirectory(prefix="ks") as directory:
        yield protected_image(Path(directory), "abcd", losses=request.param)


@pytest.mark.parametrize("what", PARTS)
def test_one_flipped_bit_costs_nothing_when_no_node_is_lost(what: str, image: Image) -> None:
    both(lambda late: flipped(image, what, seed=1, lost=(), late=late, exact=True))


@pytest.mark.parametrize("what", PARTS)
def test_one_flipped_bit_and_one_lost_node(what: str, image: Image) -> None:
    """With m = 2 both are covered. With m = 1 one is not: a clear error, or an older version."""
    exact = image.run.losses == 2
    both(lambda late: flipped(image, what, seed=2, lost=("b",), late=late, exact=exact))


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(40))
def test_random_bits_and_random_losses(seed: int, image: Image) -> None:
    draw = random.Random(seed)
    for _ in range(5):
        lost = tuple(draw.sample(image.order, draw.choice([0, 1, 1, 2])))
        count = draw.choice([1, 1, 2, 3])
        what = [draw.choice(PARTS) for _ in range(count)]
        exact = len(lost) + count <= image.run.losses
        flipped(image, *what, seed=draw.randrange(1 << 30), lost=lost, late=draw.random() < 0.5, exact=exact)


def both(call: Callable[[bool], None]) -> None:
    """Before a keeper takes the memory back, and while it has it: at once, most of it is waiting."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, [False, True]))


def flipped(image: Image, *what: str, seed: int, lost: tuple[str, ...], late: bool, exact: bool) -> None:
    draw = random.Random(f"{seed}{what}{lost}{late}")
    memory = dict(image.memory)
    flips = []
    left = [node for node in image.order if node not in lost]
    for part in what:
        node_id, flip = draw_flip(part, image, draw.sample(left, len(left)), draw)
        flips.append((node_id, flip))
        if not late:
            memory[node_id] = flip.of(memory[node_id])
    with image.again(lost, memory=memory) as run:
        for node_id, flip in flips:
            if late:
                with run.nodes[node_id].memory.duplicates() as fds:
                    flip.now(fds[flip.name])
        if late and "arena header" in what:
            time.sleep(2 * TICK_S)  # the keeper writes it again
        run.begin(image.places(lost))
        outcome = restored(run)
        if exact:
            assert outcome == [image.version], f"{what} flipped in {[node for node, _ in flips]}: {outcome}"
        if image.version in outcome:
            run.go()
            run.protect()


def draw_flip(part: str, image: Image, nodes: list[str], draw: random.Random) -> tuple[str, Flip]:
    """In the first of these nodes that has such a part: small states have no parity on some."""
    for node_id in nodes:
        flip = flip_in(part, image.memory[node_id], image.version, draw, run_id=image.run.run_id, node_id=node_id)
        if flip is not None:
            return node_id, flip
    return draw_flip("payload", image, nodes, draw)


def restored(run: Run) -> list[object]:
    """The one version that all ranks got, or the errors that all of them raised."""

    def one(restore: Callable[[], RestoreFrom]) -> RestoreFrom | Error:
        try:
            return restore()
        except (RecoveryError, IntegrityError) as error:
            return error

    answers = run.each(lambda trainer: one(trainer.restore))
    versions = {answer.version for answer in answers if isinstance(answer, RestoreFrom)}
    errors = [answer for answer in answers if isinstance(answer, Error)]
    assert not errors or len(errors) == len(answers), f"some ranks restore, some do not: {answers}"
    assert None not in versions, "there was something"
    assert all(str(error) for error in errors)
    return [*versions, *errors]
