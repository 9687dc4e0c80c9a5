"""Groups, positions, stripes and shares, and recovery of real bytes through them."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from keepstep.errors import ConfigError
from keepstep.parity.code import Code
from keepstep.parity.placement import (
    NodePlace,
    Placement,
    ShareMap,
    cut_groups,
    keep_positions,
    recoverable,
)

SHAPES = [(n, m) for n in range(2, 9) for m in range(5) if m < n]
CHUNK = 16
"""of the simulated nodes, in bytes"""


def places(*domains: str) -> list[NodePlace]:
    return [NodePlace(f"node{i:02}", domain) for i, domain in enumerate(domains)]


# Groups


@pytest.mark.parametrize(
    ("count", "group_size", "losses", "sizes"),
    [
        (9, 8, 1, [4, 5]), (8, 8, 1, [8]), (16, 8, 2, [8, 8]), (17, 8, 1, [5, 6, 6]), (1, 8, 0, [1]), (2, 8, 1, [2]),
        (5, 3, 2, [5]), (9, 2, 2, [3, 3, 3]), (4, 2, 1, [2, 2]), (3, 2, 1, [3]), (5, 2, 1, [2, 3]),
        (40, 40, 1, [20, 20]), (33, 36, 1, [33]), (37, 36, 4, [18, 19]),
    ],
)  # fmt: skip
def test_groups_differ_by_one_and_are_large_enough(count: int, group_size: int, losses: int, sizes: list[int]) -> None:
    groups = cut_groups(places(*[""] * count), group_size, losses)
    assert sorted(map(len, groups)) == sizes
    assert sorted(itertools.chain(*groups)) == list(range(count))


def test_all_small_clusters_are_cut_into_groups_that_can_lose_nodes() -> None:
    for count, group_size, losses in itertools.product(range(1, 80), (2, 3, 5, 8, 36), range(5)):
        if losses > count - 1:
            continue
        sizes = [len(group) for group in cut_groups(places(*[""] * count), group_size, losses)]
        assert sum(sizes) == count
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= losses + 1
        assert max(sizes) - losses <= 32
        # Larger than asked only where smaller groups could not lose as many.
        assert max(sizes) <= group_size or count // (len(sizes) + 1) < losses + 1


def test_a_domain_is_spread_over_all_groups() -> None:
    groups = cut_groups(places(*"aaabbbcccddd"), 4, 1)
    racks = [Counter("aaabbbcccddd"[i] for i in group) for group in groups]
    assert len(groups) == 3
    assert all(set(rack.values()) == {1} for rack in racks)


def test_a_domain_larger_than_the_number_of_groups_is_spread_as_far_as_possible() -> None:
    for names in itertools.product("abc", repeat=6):
        groups = cut_groups(places(*names), 3, 1)
        for domain, count in Counter(names).items():
            assert max(sum(names[i] == domain for i in group) for group in groups) == -(-count // len(groups))


def test_groups_do_not_depend_on_the_order_of_nodes() -> None:
    nodes = places(*"abcabcabcab")
    shuffled = random.Random(0).sample(nodes, len(nodes))
    by_name = [
        {frozenset(some[i].node_id for i in group) for group in cut_groups(some, 4, 1)} for some in (nodes, shuffled)
    ]
    assert by_name[0] == by_name[1]


@pytest.mark.parametrize(("count", "losses", "most"), [(1, 1, 0), (3, 3, 2), (2, 4, 1), (20, 5, 4), (4, -1, 3)])
def test_too_many_losses_are_refused_with_the_most_that_is_possible(count: int, losses: int, most: int) -> None:
    with pytest.raises(ConfigError, match=f"{most} is the most") as caught:
        cut_groups(places(*[""] * count), 8, losses)
    assert str(most) in caught.value.hint


def test_no_nodes_are_no_groups() -> None:
    assert cut_groups([], 8, 0) == ()
    with pytest.raises(ConfigError, match="groups of 0"):
        cut_groups(places(""), 0, 0)


# Positions


@pytest.mark.parametrize(
    ("before", "nodes", "after"),
    [
        ("abcd", "dcba", "abcd"), ("abcd", "axcy", "axcy"), ("abcd", "xayc", "axcy"), ("abcd", "wxyz", "wxyz"),
        ("abcd", "dba", "abd"), ("abcd", "xcab", "abcx"), ("abc", "xcayb", "abcxy"), ("", "ba", "ba"), ("ab", "", ""),
    ],
)  # fmt: skip
def test_survivors_keep_their_positions(before: str, nodes: str, after: str) -> None:
    assert "".join(keep_positions(before, nodes)) == after


def test_a_node_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        keep_positions("ab", "aa")
    with pytest.raises(ValueError, match="twice"):
        keep_positions("aa", "ab")


# Stripes


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_where_and_chunk_of_are_inverse(n: int, m: int) -> None:
    placed = Placement(n, m)
    for position in range(n):
        cells = [placed.where(position, chunk) for chunk in range(5 * placed.k)]
        assert len(set(cells)) == len(cells)
        for chunk, (stripe, row) in enumerate(cells):
            assert placed.chunk_of(position, stripe, row) == chunk
            assert position in placed.sources(stripe)
            assert position not in placed.parity_holders(stripe)
            assert placed.sources(stripe)[placed.source_index(position, stripe)] == position
            assert row == chunk // placed.k


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_every_position_is_source_of_k_stripes_and_holds_each_row_once(n: int, m: int) -> None:
    placed = Placement(n, m)
    for position in range(n):
        held = placed.parity_stripes(position)
        assert sorted(row for _, row in held) == list(range(m))
        assert all(placed.parity_holders(stripe)[row] == position for stripe, row in held)
        assert len(placed.data_stripes(position)) == placed.k
        assert {stripe for stripe, _ in held} | set(placed.data_stripes(position)) == set(range(n))


def test_the_documented_example() -> None:
    placed = Placement(4, 2)
    assert [placed.parity_holders(stripe) for stripe in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert [placed.sources(stripe) for stripe in range(4)] == [(2, 3), (0, 3), (0, 1), (1, 2)]
    assert [placed.where(0, chunk) for chunk in range(4)] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert placed.parity_stripes(0) == ((0, 0), (3, 1))
    assert Placement(2, 1).sources(0) == (1,)
    assert Placement(3, 2).parity_holders(1) == (1, 2)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 4), (4, -1), (9, 5), (34, 1)])
def test_groups_without_a_code_are_refused(n: int, m: int) -> None:
    with pytest.raises(ValueError, match="cannot lose"):
        Placement(n, m)
    with pytest.raises(ValueError, match="cannot lose"):
        ShareMap(1, n, m)


def test_what_is_outside_is_refused() -> None:
    placed = Placement(4, 1)
    for call in (
        lambda: placed.sources(4), lambda: placed.parity_stripes(-1), lambda: placed.where(0, -1),
        lambda: placed.where(4, 0), lambda: placed.chunk_of(0, 0, 0), lambda: placed.chunk_of(0, 1, -1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"chunk|stripe|position"):
            call()


# Recovery of real bytes


class Group:
    """Nodes of unequal size with their chunks, and the parity they hold for each other."""

    def __init__(self, n: int, m: int) -> None:
        draw = random.Random(n * 10 + m)
        self.placed, self.code = Placement(n, m), Code(n - m, m)
        # Each has a chunk in every stripe, the last chunk is short, no two nodes are alike.
        sizes = [CHUNK * (self.placed.k + position) + 1 + draw.randrange(CHUNK - 1) for position in range(n)]
        states = [draw.randbytes(size) for size in sizes]
        self.chunks = [[state[at : at + CHUNK] for at in range(0, len(state), CHUNK)] for state in states]
        self.num_rows = -(-max(map(len, self.chunks)) // self.placed.k)
        self.parity: dict[tuple[int, int, int], bytes] = {}
        for position in range(n):
            for stripe, code_row in self.placed.parity_stripes(position):
                for row in range(self.num_rows):
                    out = bytearray(CHUNK)
                    sources = [self.chunk(source, stripe, row) for source in self.placed.sources(stripe)]
                    self.code.encode(code_row, sources, out)
                    self.parity[stripe, row, code_row] = bytes(out)

    def chunk(self, position: int, stripe: int, row: int) -> bytes:
        index = self.placed.chunk_of(position, stripe, row)
        return self.chunks[position][index] if index < len(self.chunks[position]) else b""

    def rebuild(self, position: int, index: int, data_lost: set[int], parity_lost: set[int]) -> bytes:
        stripe, row = self.placed.where(position, index)
        available = {
            at: self.chunk(source, stripe, row)
            for at, source in enumerate(self.placed.sources(stripe))
            if source not in data_lost
        }
        for code_row, holder in enumerate(self.placed.parity_holders(stripe)):
            if holder not in parity_lost:
                available[self.placed.k + code_row] = self.parity[stripe, row, code_row]
        out = bytearray(len(self.chunks[position][index]))
        self.code.rebuild(self.placed.source_index(position, stripe), available, out)
        return bytes(out)

    def recovers(self, data_lost: set[int], parity_lost: set[int]) -> bool:
        """Whether each lost chunk can be rebuilt; one that comes out wrong fails the test."""
        for position in data_lost:
            for index, chunk in enumerate(self.chunks[position]):
                try:
                    assert self.rebuild(position, index, data_lost, parity_lost) == chunk
                except ValueError as error:
                    if "are needed" in str(error):
                        return False
                    raise
        return True


def subsets(n: int) -> list[set[int]]:
    return [set(some) for size in range(n + 1) for some in itertools.combinations(range(n), size)]


@pytest.mark.parametrize(("n", "m"), [(n, m) for n in range(2, 7) for m in range(1, 4) if m < n])
def test_lost_nodes_are_recovered_exactly_when_recoverable_says_so(n: int, m: int) -> None:
    group = Group(n, m)
    for lost in subsets(n):
        assert group.recovers(lost, lost) == (recoverable(n, m, lost, lost) == "") == (len(lost) <= m), (n, m, lost)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 2), (4, 1), (4, 2), (5, 3)])
def test_data_and_parity_may_be_lost_apart(n: int, m: int) -> None:
    """A keeper that lived has its parity; a node that was healed has its data and not yet its parity."""
    group = Group(n, m)
    for data_lost, parity_lost in itertools.product(subsets(n), repeat=2):
        recovered = group.recovers(data_lost, parity_lost)
        assert recovered == (recoverable(n, m, data_lost, parity_lost) == ""), (data_lost, parity_lost)


def test_the_reason_names_what_the_stripe_needs() -> None:
    assert recoverable(4, 1, {2, 3}, {2, 3}) == (
        "stripe 0 needs 2 parity units to rebuild the data of position 2, 3 and has 1 of 1 left"
    )
    assert recoverable(3, 1, {0}, {1}) == (
        "stripe 1 needs 1 parity units to rebuild the data of position 0 and has 0 of 1 left"
    )


# Shares of replicated state

SHARES = [(n, m, chunks, turn) for n, m in SHAPES for chunks in (0, 1, 7, 40) for turn in (0, 1, 5)]


def holders_of(shares: ShareMap) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
    """The position that keeps each chunk, and each row of parity."""
    positions = range(shares.n)
    chunks = {chunk: position for position in positions for chunk in shares.data_of(position)}
    return chunks, {row: position for position in positions for row in shares.parity_of(position)}


@pytest.mark.parametrize(("n", "m", "num_chunks", "turn"), SHARES)
def test_each_position_takes_one_piece_of_each_stripe(n: int, m: int, num_chunks: int, turn: int) -> None:
    shares = ShareMap(num_chunks, n, m, turn)
    assert sorted(q for position in range(n) for q in shares.data_of(position)) == list(range(num_chunks))
    parity = sorted(piece for position in range(n) for piece in shares.parity_of(position))
    assert parity == [(s, row) for s in range(shares.num_stripes) for row in range(m)]
    chunk_holders, parity_holders = holders_of(shares)
    for stripe in range(shares.num_stripes):
        holders = [chunk_holders[q] for q in shares.sources_of(stripe)]
        holders += [parity_holders[stripe, row] for row in range(m)]
        assert len(set(holders)) == len(holders)
    counts = [len(shares.data_of(position)) + len(shares.parity_of(position)) for position in range(n)]
    assert max(counts, default=0) - min(counts, default=0) <= 1


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 2), (4, 1), (5, 2), (6, 3)])
def test_shares_of_lost_nodes_are_rebuilt_from_the_others(n: int, m: int) -> None:
    draw, code = random.Random(n), Code(n - m, m)
    stream = [draw.randbytes(CHUNK) for _ in range(3 * (n - m) + 1)] + [draw.randbytes(5)]
    shares = ShareMap(len(stream), n, m, turn=3)
    chunk_holders, parity_holders = holders_of(shares)
    for lost in itertools.combinations(range(n), m):
        for q, chunk in enumerate(stream):
            if chunk_holders[q] not in lost:
                continue
            stripe, index = divmod(q, n - m)
            sources = [stream[i] for i in shares.sources_of(stripe)]
            available: dict[int, bytes | None] = dict.fromkeys(range(len(sources), n - m))
            for i, other in enumerate(shares.sources_of(stripe)):
                if chunk_holders[other] not in lost:
                    available[i] = stream[other]
            for row in range(m):
                if parity_holders[stripe, row] not in lost:
                    parity = bytearray(CHUNK)
                    code.encode(row, sources + [b""] * (n - m - len(sources)), parity)
                    available[n - m + row] = bytes(parity)
            out = bytearray(len(chunk))
            code.rebuild(index, available, out)
            assert out == chunk


@pytest.mark.parametrize(("n", "m"), [(n, m) for n, m in SHAPES if m > 0])
def test_every_copy_is_audited_whole_in_a_few_turns(n: int, m: int) -> None:
    """A position looks at the chunks it keeps and at all chunks of the stripes whose parity it computes."""
    num_chunks, turns = 4 * n * (n - m), -(-n // m)
    for first in range(3):
        for position in range(n):
            seen: set[int] = set()
            for turn in range(first, first + turns):
                shares = ShareMap(num_chunks, n, m, turn)
                seen.update(shares.data_of(position))
                for stripe, _ in shares.parity_of(position):
                    seen.update(shares.sources_of(stripe))
            assert len(seen) == num_chunks


def test_shares_outside_the_stream_are_refused() -> None:
    shares = ShareMap(10, 4, 1)
    for call in (
        lambda: shares.sources_of(4), lambda: shares.data_of(4), lambda: ShareMap(-1, 4, 1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"chunk|stripe|position"):
            call()


# What it costs
