"""The published formulas for memory and time, against stripes that are counted."""

from __future__ import annotations

import itertools

import pytest

from keepstep.arena.slots import CHUNK_BYTES, DIGEST_BYTES
from keepstep.parity import cost_model
from keepstep.parity.cost_model import memory_bytes, min_node_period_s
from keepstep.parity.placement import Placement, ShareMap


def bytes_held(n: int, m: int, sizes: list[int], *, position: int, slots: int) -> int:
    """Counted: slots, and in two buffers the parity chunks of the stripes and the checksum tables of m others."""
    placed, chunks = Placement(n, m), [-(-size // CHUNK_BYTES) for size in sizes]
    held = 0
    for stripe, _ in placed.parity_stripes(position):
        cells = [placed.where(source, chunk) for source in placed.sources(stripe) for chunk in range(chunks[source])]
        held += len({row for where, row in cells if where == stripe}) * CHUNK_BYTES
    return slots * sizes[position] + 2 * (held + m * max(chunks) * DIGEST_BYTES)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 2), (4, 1), (6, 2), (8, 1), (8, 3)])
def test_the_memory_formula_is_what_the_stripes_hold(n: int, m: int) -> None:
    same = [5 * (n - m) * CHUNK_BYTES] * n
    unequal = [(5 + 3 * position) * CHUNK_BYTES + 1234 * position for position in range(n)]
    for position, sizes in itertools.product(range(n), (same, unequal)):
        counted = bytes_held(n, m, sizes, position=position, slots=3)
        promised = memory_bytes(
            slots=3, unique_bytes=sizes[position], largest_unique_bytes=max(sizes), n=n, m=m, window_bytes=0
        )
        assert counted <= promised
        assert sizes is unequal or counted == promised


@pytest.mark.parametrize(("slots", "factor"), [(2, 2.29), (3, 3.29), (4, 4.29)])
def test_the_figures_of_the_protocol(slots: int, factor: float) -> None:
    size = 100_000_000_000
    found = memory_bytes(slots=slots, unique_bytes=size, largest_unique_bytes=size, n=8, m=1, window_bytes=0)
    assert found / size == pytest.approx(factor, abs=0.005)


def test_every_term_of_the_memory_formula_counts() -> None:
    base = {"slots": 2, "unique_bytes": 0, "largest_unique_bytes": 0, "n": 4, "m": 2, "window_bytes": 0}
    assert memory_bytes(**base) == 0  # type: ignore[arg-type]
    for change, expected in [
        ({"unique_bytes": 10}, 20),
        ({"largest_unique_bytes": 1}, 2 * 2 * (CHUNK_BYTES + 16)),
        ({"replicas": [(100, 4), (90, 3)]}, 2 * (50 + 90)),
        ({"values_bytes": 7}, 2 * 7 + 4 * 7),
        ({"values_bytes": 7, "largest_values_bytes": 9}, 2 * 7 + 4 * 9),
        ({"window_bytes": 5}, 5),
        ({"restore_ring_bytes": 6}, 6),
    ]:
        assert memory_bytes(**{**base, **change}) == expected  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unique state"):
        memory_bytes(**{**base, "replicas": [(1, 2)]})  # type: ignore[arg-type]


def test_shares_hold_what_the_formula_says() -> None:
    num_chunks, n, m = 700, 8, 1
    shares = ShareMap(num_chunks, n, m)
    held = max(len(shares.data_of(p)) + len(shares.parity_of(p)) for p in range(n))
    promised = memory_bytes(
        slots=1, unique_bytes=0, largest_unique_bytes=0, replicas=[(num_chunks * CHUNK_BYTES, n)],
        n=n, m=m, window_bytes=0,
    )  # fmt: skip
    assert held * CHUNK_BYTES == promised


def test_the_shortest_period_is_set_by_the_scarcest_resource() -> None:
    size = 136_000_000_000
    assert min_node_period_s(unique_bytes=size, m=1, cores=16, nic_bytes_s=50e9) == pytest.approx(5.1)
    assert min_node_period_s(unique_bytes=size, m=2, cores=1000, nic_bytes_s=10e9) == pytest.approx(27.2)
    assert min_node_period_s(unique_bytes=size, m=1, cores=16, nic_bytes_s=50e9, cap_bytes_s=1e9) == 136
    assert cost_model.CPU_S_PER_GB == 0.6
