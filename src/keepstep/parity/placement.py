"""Which nodes protect each other, which stripe each chunk belongs to, and what can be recovered. Pure.

A group of n nodes, m of which may be lost, has k = n - m data units per stripe. Nodes are named by their position in
the group, which is sticky: it belongs to the ledger, not to the order of ranks.

    Placement   state that only one node has: its chunks go to the parity holders of n rotating stripes
    ShareMap    state that n nodes have alike: each keeps its share of the stripes and computes its own parity of them
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from keepstep.errors import ConfigError
from keepstep.parity.code import MAX_DATA, MAX_PARITY


@dataclass(frozen=True)
class NodePlace:
    """A node and its failure domain (rack, switch); an empty domain means the node alone."""

    node_id: str
    domain: str = ""


def cut_groups(nodes: Sequence[NodePlace], group_size: int, losses: int) -> tuple[tuple[int, ...], ...]:
    """Groups of indices into `nodes`, for `losses` lost nodes per group, sizes that differ by at most one.

    Nodes are assigned in the order of their domains, so that a domain's nodes are as far as possible in different
    groups. The result depends on names only, not on the order of `nodes`.
    """
    count = len(nodes)
    largest = max(0, min(count - 1, MAX_PARITY))
    if not 0 <= losses <= largest:
        raise ConfigError(
            f"{count} nodes cannot survive the loss of {losses}: {largest} is the most",
            hint=f"set parity.losses to {largest} or less",
        )
    if group_size < 1:
        raise ConfigError(f"groups of {group_size} nodes", hint="parity.group_size of 2 or more")
    if not nodes:
        return ()
    num_groups = -(-count // group_size)
    while num_groups > 1 and count // num_groups < losses + 1:
        num_groups -= 1
    while -(-count // num_groups) - losses > MAX_DATA:
        num_groups += 1
    dealt = sorted(range(count), key=lambda i: (nodes[i].domain or nodes[i].node_id, nodes[i].node_id, i))
    groups = [tuple(sorted(dealt[start::num_groups])) for start in range(num_groups)]
    return tuple(sorted(groups))


def keep_positions(before: Sequence[str], nodes: Sequence[str]) -> tuple[str, ...]:
    """The nodes by position: survivors stay where they were, newcomers fill the holes in their order.

    When the number of nodes changed there are no places to keep: survivors come first, in their old order.
    """
    if len(set(nodes)) != len(nodes) or len(set(before)) != len(before):
        raise ValueError("a node is listed twice")
    present, former = set(nodes), set(before)
    newcomers = [node for node in nodes if node not in former]
    if len(before) != len(nodes):
        return (*(node for node in before if node in present), *newcomers)
    newcomer = iter(newcomers)
    return tuple(node if node in present else next(newcomer) for node in before)


@dataclass(frozen=True)
class Placement:
    """The stripes of a group: n of them, in each m positions hold parity and the other k are its sources."""

    n: int
    m: int

    def __post_init__(self) -> None:
        _check_shape(self.n, self.m)

    @property
    def k(self) -> int:
        return self.n - self.m

    def parity_holders(self, stripe: int) -> tuple[int, ...]:
        """Positions that hold parity, by row of the code: the p-th holder computes row p."""
        self._check(stripe, "stripe")
        return tuple((stripe + row) % self.n for row in range(self.m))

    def sources(self, stripe: int) -> tuple[int, ...]:
        """Positions whose chunks are the data of this stripe, by index in the code."""
        holders = self.parity_holders(stripe)
        return tuple(position for position in range(self.n) if position not in holders)

    def parity_stripes(self, position: int) -> tuple[tuple[int, int], ...]:
        """(stripe, row of the code) of all parity that a position holds."""
        self._check(position, "position")
        return tuple(sorted(((position - row) % self.n, row) for row in range(self.m)))

    def data_stripes(self, position: int) -> tuple[int, ...]:
        """The k stripes that a position is a source of; its chunk c belongs to the (c mod k)-th of them."""
        self._check(position, "position")
        return self._data_stripes[position]

    def where(self, position: int, chunk: int) -> tuple[int, int]:
        """(stripe, row in the stripe) of a chunk of a position."""
        if chunk < 0:
            raise ValueError(f"chunk {chunk}")
        return self.data_stripes(position)[chunk % self.k], chunk // self.k

    def chunk_of(self, position: int, stripe: int, row: int) -> int:
        """The chunk of a position in a row of a stripe; beyond the position's last chunk it is zero."""
        if stripe not in self.data_stripes(position) or row < 0:
            raise ValueError(f"position {position} has no data in row {row} of stripe {stripe}")
        return row * self.k + self.data_stripes(position).index(stripe)

    def source_index(self, position: int, stripe: int) -> int:
        """The index in the code of a position's data in a stripe."""
        return self.sources(stripe).index(position)

    @cached_property
    def _data_stripes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(stripe for stripe in range(self.n) if position not in self.parity_holders(stripe))
            for position in range(self.n)
        )

    def _check(self, value: int, what: str) -> None:
        if not 0 <= value < self.n:
            raise ValueError(f"{what} {value} of {self.n}")


def recoverable(n: int, m: int, data_lost: Set[int], parity_lost: Set[int]) -> str:
    """The reason why a stripe cannot be decoded, else empty. Positions may lose their data, their parity or both."""
    placement = Placement(n, m)
    for stripe in range(n):
        lost = [position for position in placement.sources(stripe) if position in data_lost]
        left = sum(holder not in parity_lost for holder in placement.parity_holders(stripe))
        if len(lost) > left:
            names = ", ".join(map(str, lost))
            return (
                f"stripe {stripe} needs {len(lost)} parity units to rebuild the data of position {names} "
                f"and has {left} of {m} left"
            )
    return ""


@dataclass(frozen=True)
class ShareMap:
    """Which position keeps which part of a replica set that all n positions hold.

    Chunk q is source q % k of stripe-row q // k. In each stripe-row every position takes one unit, m of them parity,
    from an origin that moves on by one with the row and by m with `turn`. Give the count of snapshots as turn, not the
    step (with every=N steps may share a factor with n): in ceil(n / m) turns in a row each position has then computed
    parity over every chunk of its own copy, which is how a replica that has drifted is found.
    """

    num_chunks: int
    n: int
    m: int
    turn: int = 0

    def __post_init__(self) -> None:
        _check_shape(self.n, self.m)
        if self.num_chunks < 0:
            raise ValueError(f"{self.num_chunks} chunks")

    @property
    def k(self) -> int:
        return self.n - self.m

    @property
    def num_stripes(self) -> int:
        return -(-self.num_chunks // self.k)

    def sources_of(self, stripe: int) -> list[int]:
        """The chunks of a stripe-row, by index in the code; the last may have fewer than k."""
        if not 0 <= stripe < self.num_stripes:
            raise ValueError(f"stripe {stripe} of {self.num_stripes}")
        return list(range(stripe * self.k, min((stripe + 1) * self.k, self.num_chunks)))

    def data_of(self, position: int) -> list[int]:
        """The chunks that a position keeps."""
        places = ((stripe, self._place(position, stripe) - self.m) for stripe in range(self.num_stripes))
        chunks = (stripe * self.k + source for stripe, source in places if source >= 0)
        return [chunk for chunk in chunks if chunk < self.num_chunks]

    def parity_of(self, position: int) -> list[tuple[int, int]]:
        """(stripe-row, row of the code) of the parity that a position keeps."""
        places = ((stripe, self._place(position, stripe)) for stripe in range(self.num_stripes))
        return [(stripe, place) for stripe, place in places if place < self.m]

    def _origin(self, stripe: int) -> int:
        return stripe + self.turn * max(self.m, 1)

    def _place(self, position: int, stripe: int) -> int:
        """0..m-1: a row of parity; from there on: a source."""
        if not 0 <= position < self.n:
            raise ValueError(f"position {position} of {self.n}")
        return (position - self._origin(stripe)) % self.n


def _check_shape(n: int, m: int) -> None:
    if not (0 <= m <= MAX_PARITY and 1 <= n - m <= MAX_DATA):
        raise ValueError(
            f"a group of {n} nodes cannot lose {m}: at most {MAX_PARITY}, and 1 to {MAX_DATA} must be left"
        )
