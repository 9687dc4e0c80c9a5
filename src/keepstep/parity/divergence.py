"""Divergence of replicas: which replica set differs, and on whose ranks. Pure.

A replica set that is the same everywhere costs a few bytes per node and version. When it is not, all nodes are asked
twice: what they hold, unit by unit, and which paths lie in the chunks that differ. This also finds silent data
corruption.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from keepstep.parity import galois
from keepstep.parity.code import coefficients
from keepstep.types import Version

MAX_CHUNKS = 64  # that the second question names: enough to name the paths
MAX_PATHS_NAMED = 5  # in a message; the rest are counted


# Sent between keepers: field names are part of the wire format.


class ReplicaAudit(msgspec.Struct, frozen=True):
    """A replica set differs: all nodes report what they hold of it, chunk by chunk."""

    version: Version
    class_id: str
    chunks: tuple[int, ...] = ()  # none: what is held, unit by unit; some: which paths lie in them


class ReplicaSetDigest(msgspec.Struct, frozen=True, array_like=True):
    """What a node holds of a replica set, in a few bytes."""

    class_id: str
    digest: bytes
    # 0: every node holds all of it, and digests are equal. Otherwise this many nodes hold a share each, and the
    # digests of all of them add up to zero.
    shared_by: int = 0


class ReplicaUnit(msgspec.Struct, frozen=True, array_like=True):
    """One stored chunk of a replica set on one node."""

    chunk: int  # of the set; its stripe where it is parity
    code_row: int  # -1: data
    rank: int
    digest: bytes


class ReplicaAuditAnswer(msgspec.Struct, frozen=True):
    """What a node holds of a replica set, unit by unit, or which paths lie in the chunks it was asked for."""

    n: int = 0
    m: int = 0  # 0: every node holds all of it
    units: tuple[ReplicaUnit, ...] = ()
    paths: tuple[str, ...] = ()


class Divergence(NamedTuple):
    """Why the version is void."""

    rank: int
    reason: str
    paths: tuple[str, ...]


class Suspects(NamedTuple):
    """Chunks that differ, and the ranks that may hold the wrong bytes."""

    chunks: tuple[int, ...]
    ranks: tuple[int, ...]
    certain: bool  # all of these ranks differ; otherwise one of them does


def add_shares(ranks: Iterable[Sequence[ReplicaSetDigest]]) -> tuple[ReplicaSetDigest, ...]:
    """The digests of all ranks of a node: they hold different chunks of a set, and digests add up in any order."""
    total: dict[str, ReplicaSetDigest] = {}
    for shares in ranks:
        for share in shares:
            before = total.get(share.class_id)
            digest = share.digest if before is None else galois.add(before.digest, share.digest)
            total[share.class_id] = ReplicaSetDigest(share.class_id, digest, share.shared_by)
    return tuple(total[class_id] for class_id in sorted(total))


def diverged_set(reports: Iterable[Sequence[ReplicaSetDigest]]) -> str | None:
    """The id of a replica set that differs, from the digests of all nodes."""
    equal: dict[str, bytes] = {}
    shares: dict[str, list[ReplicaSetDigest]] = defaultdict(list)
    for digests in reports:
        for digest in digests:
            if digest.shared_by:
                shares[digest.class_id].append(digest)
            elif equal.setdefault(digest.class_id, digest.digest) != digest.digest:
                return digest.class_id
    return next((class_id for class_id, digests in shares.items() if not _add_up(digests)), None)


def _add_up(shares: list[ReplicaSetDigest]) -> bool:
    if len(shares) < shares[0].shared_by:
        return True  # part of it is on no node of the job: a restore would report that
    total = 0
    for share in shares:
        total ^= int.from_bytes(share.digest, "little")
    return total == 0


@dataclass
class Comparison:
    """Two questions to all nodes, and what follows from the answers."""

    question: ReplicaAudit
    suspects: Suspects | None = None

    def receive(self, answers: Collection[ReplicaAuditAnswer]) -> Divergence | None:
        """All nodes have answered. None: `question` is now the second one."""
        if self.suspects is not None:
            return _divergence(self.suspects, answers)
        self.suspects = find(answers)
        if not self.suspects.chunks:
            return Divergence(-1, "replicated state differed between nodes, and no longer did when they were asked", ())
        self.question = ReplicaAudit(self.question.version, self.question.class_id, self.suspects.chunks)
        return None


def find(answers: Collection[ReplicaAuditAnswer]) -> Suspects:
    """Compare the units of all nodes: copies with each other, shares by the code."""
    units = [unit for answer in answers for unit in answer.units]
    n, m = max(((answer.n, answer.m) for answer in answers if answer.units), default=(0, 0))
    suspects = _in_code(units, n - m, m) if m else _in_copies(units)
    chunks = sorted({chunk for suspect in suspects for chunk in suspect.chunks})
    certain = [suspect for suspect in suspects if suspect.certain]  # worth more than what is in doubt elsewhere
    ranks = sorted({rank for suspect in certain or suspects for rank in suspect.ranks})
    return Suspects(tuple(chunks[:MAX_CHUNKS]), tuple(ranks), bool(certain))


def _in_copies(units: Iterable[ReplicaUnit]) -> list[Suspects]:
    by_chunk: dict[int, list[ReplicaUnit]] = defaultdict(list)
    for unit in units:
        by_chunk[unit.chunk].append(unit)
    suspects = []
    for chunk, held in by_chunk.items():
        counts = Counter(unit.digest for unit in held).most_common()
        if len(counts) > 1:
            most = counts[0][0] if counts[0][1] > counts[1][1] else None
            odd = [unit.rank for unit in held if unit.digest != most]
            suspects.append(Suspects((chunk,), tuple(odd), most is not None))
    return suspects


def _in_code(units: Iterable[ReplicaUnit], k: int, m: int) -> list[Suspects]:
    stripes: dict[int, dict[int, ReplicaUnit]] = defaultdict(dict)
    for unit in units:
        stripe, source = divmod(unit.chunk, k) if unit.code_row < 0 else (unit.chunk, k + unit.code_row)
        stripes[stripe][source] = unit
    suspects = []
    for stripe, held in stripes.items():
        odd = _odd_units(held, k, m)
        if not odd:
            continue
        # An odd parity unit was made from a replica that differs in one of its sources; which one is unknown.
        sources = [unit for unit in odd if unit < k] if max(odd) < k else [unit for unit in held if unit < k]
        chunks = tuple(stripe * k + source for source in sources)
        suspects.append(Suspects(chunks, tuple(held[unit].rank for unit in odd), len(odd) == 1))
    return suspects


def _odd_units(held: dict[int, ReplicaUnit], k: int, m: int) -> list[int]:
    """The units of a stripe of which one contradicts the others; none when they fit together.

    With two rows or more, a single odd unit is known by its column in the code.
    """
    rest = {}
    for row in range(m):
        if k + row in held:
            factors = coefficients(m, row, k)
            rest[row] = held[k + row].digest
            for source in range(k):  # absent at the end of the set: zero
                if source in held:
                    rest[row] = galois.add(rest[row], galois.scale(factors[source], held[source].digest))
    wrong = [row for row, value in rest.items() if any(value)]
    if not wrong:
        return []
    if len(rest) > 1:
        alone = [unit for unit in held if unit < k and _explains(unit, rest, k, m)]
        alone += [k + row for row in wrong if len(wrong) == 1]
        if len(alone) == 1:
            return alone
    return list(held)


def _explains(source: int, rest: dict[int, bytes], k: int, m: int) -> bool:
    """Whether the remainders of all rows are one change of this source."""
    changes = {galois.scale(galois.inv(coefficients(m, row, k)[source]), value) for row, value in rest.items()}
    return len(changes) == 1


def _divergence(suspects: Suspects, answers: Iterable[ReplicaAuditAnswer]) -> Divergence:
    paths = list(dict.fromkeys(path for answer in answers for path in answer.paths))
    more = len(paths) - MAX_PATHS_NAMED
    named = ", ".join(paths[:MAX_PATHS_NAMED]) + (f" and {more} more" if more > 0 else "")
    ranks = suspects.ranks
    if not suspects.certain:
        who = f"one of ranks {', '.join(map(str, ranks))} differs from the others"
    elif len(ranks) == 1:
        who = f"rank {ranks[0]} differs from the other replicas"
    else:
        who = f"ranks {', '.join(map(str, ranks))} differ from the other replicas"
    text = f"replicated state has diverged: {named}: {who} (silent corruption, or not replicated after all)"
    return Divergence(min(ranks), text, tuple(paths))
