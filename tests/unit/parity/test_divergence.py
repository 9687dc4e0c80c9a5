"""Which ranks and chunks the comparison names when units contradict each other."""

from __future__ import annotations

import random

import pytest

from keepstep.parity.code import coefficients
from keepstep.parity.divergence import Comparison, ReplicaAudit, ReplicaAuditAnswer, ReplicaUnit, find
from keepstep.parity.fingerprint import combine
from keepstep.parity.placement import ShareMap
from keepstep.types import Version


def shares(n: int, m: int, chunks: int, wrong: dict[int, set[int]], seed: int = 0) -> list[ReplicaAuditAnswer]:
    """The answers of n nodes with one rank each; `wrong`: chunks that differ in the replica of a rank."""
    rng = random.Random(seed)
    right = [rng.randbytes(16) for _ in range(chunks)]
    other = [rng.randbytes(16) for _ in range(chunks)]
    placed = ShareMap(chunks, n, m, seed)
    answers = []
    for rank in range(n):
        own = [other[q] if q in wrong.get(rank, ()) else right[q] for q in range(chunks)]
        units = [ReplicaUnit(q, -1, rank, own[q]) for q in placed.data_of(rank)]
        for stripe, row in placed.parity_of(rank):
            sources = placed.sources_of(stripe)
            made = combine(coefficients(m, row, n - m)[: len(sources)], [own[q] for q in sources])
            units.append(ReplicaUnit(stripe, row, rank, made))
        answers.append(ReplicaAuditAnswer(n, m, tuple(units)))
    return answers


@pytest.mark.parametrize(("n", "m"), [(2, 1), (4, 1), (4, 2), (6, 2), (7, 3), (8, 4)])
def test_share_that_differs_in_one_chunk_is_found_where_it_was_read(n: int, m: int) -> None:
    chunks = 3 * (n - m) + 1
    for seed in range(n):
        placed = ShareMap(chunks, n, m, seed)
        for chunk in range(chunks):
            stripe = chunk // (n - m)
            for rank in range(n):
                suspects = find(shares(n, m, chunks, {rank: {chunk}}, seed))
                coded = stripe in {row for row, _ in placed.parity_of(rank)}
                if not coded and chunk not in placed.data_of(rank):
                    assert not suspects.chunks, "it was not read at this turn"
                    continue
                assert chunk in suspects.chunks
                assert rank in suspects.ranks
                if m > 1:
                    assert suspects.certain
                    assert suspects.ranks == (rank,)
                    assert suspects.chunks == ((chunk,) if not coded else tuple(placed.sources_of(stripe)))


def test_turns_in_a_row_read_every_chunk_of_every_replica() -> None:
    n, m, chunks = 5, 2, 20
    for rank in range(n):
        for chunk in range(chunks):
            assert any(find(shares(n, m, chunks, {rank: {chunk}}, turn)).chunks for turn in range(-(-n // m)))


def test_a_certain_rank_is_named_and_all_doubtful_chunks_are_listed() -> None:
    n, m, chunks = 6, 2, 16
    suspects = find(shares(n, m, chunks, {1: set(range(chunks)), 4: {0, 1, 2, 3}}))
    assert suspects.certain
    assert suspects.ranks == (1,)
    assert {0, 1, 2, 3} <= set(suspects.chunks)
    assert not find(shares(n, m, chunks, {})).chunks


def test_an_answer_that_lacks_units_names_no_rank() -> None:
    answers = shares(4, 1, 9, {})
    assert find([ReplicaAuditAnswer(), *answers]) == find(answers)
    assert find([]).chunks == ()


def test_the_minority_of_the_copies_is_named() -> None:
    def said(rank: int, *digests: bytes) -> ReplicaAuditAnswer:
        return ReplicaAuditAnswer(3, 0, tuple(ReplicaUnit(q, -1, rank, digest) for q, digest in enumerate(digests)))

    comparison = Comparison(ReplicaAudit(Version(3, 1), "class"))
    assert comparison.receive([said(0, b"a", b"b"), said(5, b"a", b"x"), said(9, b"a", b"b")]) is None
    assert comparison.question.chunks == (1,)
    verdict = comparison.receive(
        [ReplicaAuditAnswer(paths=("model.w",)), ReplicaAuditAnswer(paths=("model.w",)), ReplicaAuditAnswer()]
    )
    assert verdict is not None
    assert verdict.rank == 5
    assert verdict.paths == ("model.w",)
    assert "model.w: rank 5 differs from the other replicas" in verdict.reason

    tie = Comparison(ReplicaAudit(Version(3, 1), "class"))
    tie.receive([said(0, b"a"), said(1, b"b")])
    verdict = tie.receive([ReplicaAuditAnswer(paths=("w",)), ReplicaAuditAnswer(paths=("w",))])
    assert verdict is not None
    assert "one of ranks 0, 1 differs from the others" in verdict.reason


def test_a_difference_that_is_gone_still_has_a_reason() -> None:
    verdict = Comparison(ReplicaAudit(Version(3, 1), "class")).receive([ReplicaAuditAnswer(), ReplicaAuditAnswer()])
    assert verdict is not None
    assert "no longer" in verdict.reason
