"""What protection costs in memory and time: the formulas that the documentation publishes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.arena.slots import CHUNK_BYTES, DIGEST_BYTES
from keepstep.parity.placement import Placement

WINDOW_BYTES = 256 << 20  # chunks in flight during an exchange or a restore: what 100 Gbit/s carry in 20 ms
CPU_S_PER_GB = 0.6  # to seal, send, receive, verify and encode one GB of unique state for one parity row, measured


def memory_bytes(
    *,
    slots: int,
    unique_bytes: int,
    largest_unique_bytes: int,
    replicas: Sequence[tuple[int, int]] = (),
    values_bytes: int = 0,
    largest_values_bytes: int = 0,
    n: int,
    m: int,
    window_bytes: int = WINDOW_BYTES,
    restore_ring_bytes: int = 0,
) -> int:
    """Memory that a keeper holds on one node; `largest_` is over the nodes of the group.

    `replicas` are (bytes, nodes that share them); a replica set kept whole on every node counts as
    (bytes, m + 1). Parity is reserved in whole chunks, twice: that of the protected version stays until the
    next is acknowledged.
    """
    k = Placement(n, m).k
    if any(nodes <= m for _, nodes in replicas):
        raise ValueError(f"state on {m} nodes or fewer cannot lose {m}: it counts as unique state of one of them")
    shares = sum(-(-size // (nodes - m)) for size, nodes in replicas)
    chunks = -(-largest_unique_bytes // CHUNK_BYTES)
    parity = 2 * m * -(-chunks // k) * CHUNK_BYTES
    copies = 2 * m * (max(values_bytes, largest_values_bytes) + chunks * DIGEST_BYTES)
    return slots * (unique_bytes + shares + values_bytes) + parity + copies + window_bytes + restore_ring_bytes


def min_node_period_s(
    *, unique_bytes: int, m: int, cores: float, nic_bytes_s: float, cap_bytes_s: float = 0.0
) -> float:
    """The shortest time between two protected versions. A cap of 0 is none."""
    moved = m * unique_bytes
    rates = [rate for rate in (nic_bytes_s, cap_bytes_s) if rate > 0]
    return max([CPU_S_PER_GB * moved / 1e9 / cores, *(moved / rate for rate in rates)])
