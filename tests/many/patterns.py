"""One way to lose nodes, tried on a copy of a protected job: what must come back, and what the error must say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from clones import Image
from nodes import Run

from keepstep.control.messages import RestoreFrom
from keepstep.errors import Error, RecoveryError
from keepstep.parity.placement import recoverable

# Most of the time of a pattern is spent waiting for links to be made and keepers to end.
AT_ONCE = 4


def every_pattern(nodes: Sequence[str]) -> list[tuple[str, ...]]:
    return [lost for count in range(len(nodes) + 1) for lost in itertools.combinations(nodes, count)]


def check_all(image: Image, patterns: Iterable[tuple[str, ...]], groups: Sequence[Sequence[str]] = ()) -> None:
    """Each must be restored, byte for byte, if and only if the code covers it."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda lost: check(image, lost, groups or [image.order]), patterns):
            pass


def check(image: Image, lost: tuple[str, ...], groups: Sequence[Sequence[str]]) -> None:
    beyond = [group for group in groups if not covered(group, lost, image.run.losses)]
    with image.again(lost) as run:
        run.begin(image.places(lost))
        if len(lost) == len(image.order):  # nobody is left who could know that there was anything
            assert all(answer.version is None for answer in run.restore())
        elif beyond:
            for error in errors_of(run):
                assert isinstance(error, RecoveryError), error
                check_text(str(error), image, lost, beyond)
        else:
            answers = run.restore()
            assert {answer.version for answer in answers} == {image.version}, lost
            rebuilt = {t.node.node_id for t, a in zip(run.trainers, answers, strict=True) if a.source == "parity"}
            assert rebuilt == {node_id + "'" for node_id in lost}


def covered(group: Sequence[str], lost: Sequence[str], losses: int) -> bool:
    gone = {position for position, node_id in enumerate(group) if node_id in lost}
    return recoverable(len(group), losses, gone, gone) == ""


def check_text(text: str, image: Image, lost: Sequence[str], beyond: Sequence[Sequence[str]]) -> None:
    """It names the group, what covers it, and who is lost."""
    assert str(image.version) in text
    some = [group for group in beyond if not set(group) <= set(lost)]
    for group in some:  # of a group that is gone as a whole nobody knows the members
        assert f"group of {len(group)} nodes ({', '.join(group)}) covers {image.run.losses} lost" in text, text
        gone = ", ".join(node_id for node_id in group if node_id in lost)
        assert f"and {gone} are lost" in text, text


def errors_of(run: Run) -> list[Error]:
    """What restore() raises on each rank."""

    def failing(call: Callable[[], RestoreFrom]) -> Error:
        try:
            answer = call()
        except Error as error:
            return error
        raise AssertionError(f"restored {answer.version} from {answer.source}: {answer.plan}")

    return run.each(lambda trainer: failing(trainer.restore))
