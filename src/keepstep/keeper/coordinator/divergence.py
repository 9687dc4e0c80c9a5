"""Replicas that should be the same and are not: which, and whose. Pure.

A class that is the same everywhere costs a few bytes per node and version. When it is not, all nodes are asked twice:
what they hold, unit by unit, and which paths lie in the chunks that differ. This is also how silent data corruption
shows itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.keeper.coordinator.messages import ReplicaAudit, ReplicaAuditAnswer, ReplicaSetDigest, ReplicaUnit
from keepstep.parity import galois
from keepstep.parity.code import coefficients

MAX_CHUNKS = 64
MAX_PATHS_SAID = 5


class Divergence(NamedTuple):
    """Why the version is void."""

    rank: int
    reason: str
    paths: tuple[str, ...]


class Suspects(NamedTuple):
    chunks: tuple[int, ...]
    ranks: tuple[int, ...]
    certain: bool
    """whether it is these ranks that differ; otherwise one of them does"""


def odd_class(said: Iterable[Sequence[ReplicaSetDigest]]) -> str | None:
    """A class whose replicas differ, from what all nodes say of it."""
    equal: dict[str, bytes] = {}
    shares: dict[str, list[ReplicaSetDigest]] = defaultdict(list)
    for digests in said:
        for one in digests:
            if one.shared_by:
                shares[one.class_id].append(one)
            elif equal.setdefault(one.class_id, one.digest) != one.digest:
                return one.class_id
    return next((class_id for class_id, found in shares.items() if not _add_up(found)), None)


def _add_up(shares: list[ReplicaSetDigest]) -> bool:
    if len(shares) < shares[0].shared_by:
        return True  # some of it is with nobody who could be asked: recovery will say so
    total = 0
    for one in shares:
        total ^= int.from_bytes(one.digest, "little")
    return total == 0


@dataclass
class Comparison:
    """Two questions to all nodes, and what follows from the answers."""

    asked: ReplicaAudit
    suspects: Suspects | None = None

    def hear(self, answers: Collection[ReplicaAuditAnswer]) -> Divergence | None:
        """Everybody has answered. None: `asked` is now the second question."""
        if self.suspects is not None:
            return _verdict(self.suspects, answers)
        self.suspects = find(answers)
        if not self.suspects.chunks:
            return Divergence(-1, "replicated state differs between nodes, and not any more when they were asked", ())
        self.asked = ReplicaAudit(self.asked.version, self.asked.class_id, self.suspects.chunks)
        return None


def find(answers: Collection[ReplicaAuditAnswer]) -> Suspects:
    units = [unit for answer in answers for unit in answer.units]
    n, m = max(((answer.n, answer.m) for answer in answers if answer.units), default=(0, 0))
    found = _in_code(units, n - m, m) if m else _in_copies(units)
    chunks = sorted({chunk for one in found for chunk in one.chunks})
    certain = [one for one in found if one.certain]  # worth more than what is in doubt elsewhere
    ranks = sorted({rank for one in certain or found for rank in one.ranks})
    return Suspects(tuple(chunks[:MAX_CHUNKS]), tuple(ranks), bool(certain))


def _in_copies(units: Iterable[ReplicaUnit]) -> list[Suspects]:
    by_chunk: dict[int, list[ReplicaUnit]] = defaultdict(list)
    for unit in units:
        by_chunk[unit.chunk].append(unit)
    found = []
    for chunk, held in by_chunk.items():
        counts = Counter(unit.digest for unit in held).most_common()
        if len(counts) > 1:
            most = counts[0][0] if counts[0][1] > counts[1][1] else None
            odd = [unit.rank for unit in held if unit.digest != most]
            found.append(Suspects((chunk,), tuple(odd), most is not None))
    return found


def _in_code(units: Iterable[ReplicaUnit], k: int, m: int) -> list[Suspects]:
    stripes: dict[int, dict[int, ReplicaUnit]] = defaultdict(dict)
    for unit in units:
        stripe, source = divmod(unit.chunk, k) if unit.code_row < 0 else (unit.chunk, k + unit.code_row)
        stripes[stripe][source] = unit
    found = []
    for stripe, held in stripes.items():
        odd = _odd_pieces(held, k, m)
        if not odd:
            continue
        # A parity that is odd was made from a replica that differs in one of its sources, and nobody knows in which.
        sources = [piece for piece in odd if piece < k] if max(odd) < k else [piece for piece in held if piece < k]
        chunks = tuple(stripe * k + source for source in sources)
        found.append(Suspects(chunks, tuple(held[piece].rank for piece in odd), len(odd) == 1))
    return found


def _odd_pieces(held: dict[int, ReplicaUnit], k: int, m: int) -> list[int]:
    """Of a stripe, the pieces one of which is not what the others say; none when they fit together.

    With two rows or more, a single odd piece is known by its column in the code.
    """
    rest = {}
    for row in range(m):
        if k + row in held:
            factors = coefficients(m, row, k)
            rest[row] = held[k + row].digest
            for source in range(k):  # absent at the end of the stream: zero
                if source in held:
                    rest[row] = galois.add(rest[row], galois.scale(factors[source], held[source].digest))
    wrong = [row for row, value in rest.items() if any(value)]
    if not wrong:
        return []
    if len(rest) > 1:
        alone = [piece for piece in held if piece < k and _explains(piece, rest, k, m)]
        alone += [k + row for row in wrong if len(wrong) == 1]
        if len(alone) == 1:
            return alone
    return list(held)


def _explains(source: int, rest: dict[int, bytes], k: int, m: int) -> bool:
    """Whether what is left over in all rows is one change of this source."""
    changes = {galois.scale(galois.inv(coefficients(m, row, k)[source]), value) for row, value in rest.items()}
    return len(changes) == 1


def _verdict(suspects: Suspects, answers: Iterable[ReplicaAuditAnswer]) -> Divergence:
    paths = list(dict.fromkeys(path for answer in answers for path in answer.paths))
    more = len(paths) - MAX_PATHS_SAID
    named = ", ".join(paths[:MAX_PATHS_SAID]) + (f" and {more} more" if more > 0 else "")
    ranks = suspects.ranks
    if not suspects.certain:
        who = f"one of ranks {', '.join(map(str, ranks))} differs from the others"
    elif len(ranks) == 1:
        who = f"rank {ranks[0]} differs from the other replicas"
    else:
        who = f"ranks {', '.join(map(str, ranks))} differ from the other replicas"
    text = f"replicated state has diverged: {named}: {who} (silent corruption, or not replicated after all)"
    return Divergence(min(ranks), text, tuple(paths))
