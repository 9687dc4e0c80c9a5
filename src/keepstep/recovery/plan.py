"""Restore plan: the newest version that every rank can get, with the reasons. Pure.

`plan` never returns an older version without the reason why each newer one was not chosen, and never returns
"nothing to restore" when a version should exist: that is a failure with the inventory in its text. A rank's bytes
come from the slots of the node it runs on, else from another node's slots, else they are rebuilt from parity. Any
keeper may be a source, also one whose node has no place in the job now.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from keepstep.parity.placement import recoverable
from keepstep.recovery.inventory import Holding, Inventory, ParitySet, SetKey
from keepstep.types import Version

OWN, PEER, REBUILD = "own slots", "a peer's slots", "parity"


class Rebuild(msgspec.Struct, frozen=True):
    """The nodes that hold the units of a group, by position: of each rank's data ("" where lost) and of the parity."""

    key: SetKey
    losses: int
    position: int  # of the node whose snapshots are rebuilt
    ranks: tuple[tuple[int, ...], ...]
    data: tuple[tuple[str, ...], ...]
    parity: tuple[str, ...]


class RankSource(msgspec.Struct, frozen=True):
    """The source of one rank's snapshot."""

    version: Version
    rank: int
    source: str
    node_id: str  # that holds it; "" when it is rebuilt
    size_bytes: int = 0
    local_index: int = 0
    arena_id: str = ""
    slot: int = 0
    rebuild: Rebuild | None = None


@dataclass(frozen=True)
class Plan:
    """What to restore. `version` None and `failure` empty: no version of this run was ever complete."""

    version: Version | None
    pieces: tuple[RankSource, ...]
    reasons: tuple[str, ...]
    failure: str = ""
    local_world_size: int = 0
    world_size: int = 0
    holders: tuple[str, ...] = ()  # nodes with snapshots of this version, any of which may hold replicated state


_SetOfGroup = tuple[SetKey, tuple[str, ...]]


@dataclass
class _VersionSources:
    """Everything the inventories hold of one version."""

    by_rank: dict[int, list[tuple[str, Holding]]] = field(default_factory=lambda: defaultdict(list))
    # By position; all groups of a job share a key.
    sets: dict[_SetOfGroup, dict[int, tuple[str, ParitySet]]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def world_size(self) -> int:
        for held in self.by_rank.values():
            return held[0][1].world_size
        return next(s.world_size for sets in self.sets.values() for _, s in sets.values())


def plan(inventories: Mapping[str, Inventory], homes: Mapping[int, str], silent: Sequence[str] = ()) -> Plan:
    """Choose the newest version that every rank can get.

    `homes`: the node on which each rank runs now, where it is known. `silent`: keepers that did not answer.
    """
    versions = _by_version(inventories)
    reasons = [text for inventory in inventories.values() for text in inventory.damaged]
    newest = max((i.complete for i in inventories.values() if i.complete is not None), default=None)
    for version in sorted(versions, reverse=True):
        sources = versions[version]
        pieces, missing = _pieces(version, sources, homes)
        if missing:
            reasons.append(f"{version} cannot be had: {'; '.join(missing)}")
            continue
        if newest is not None and newest > version and not any(str(newest) in reason for reason in reasons):
            reasons.append(f"{newest} was complete once and is not held any more")
        reasons.append(f"{version} is the newest version that all {len(pieces)} ranks can get: {_sources(pieces)}")
        local = next((h.local_world_size for held in sources.by_rank.values() for _, h in held), 0)
        holders = {node_id for held in sources.by_rank.values() for node_id, _ in held}
        return Plan(version, pieces, tuple(reasons), "", local, sources.world_size, tuple(sorted(holders)))
    if silent:
        reasons.append(f"no answer from the keepers of {', '.join(silent)}")
    if newest is not None:
        text = "; ".join(reasons) or "no sealed snapshot is left"
        return Plan(None, (), tuple(reasons), f"{newest} was complete once and cannot be given back: {text}")
    if silent or any(i.damaged for i in inventories.values()):
        return Plan(None, (), tuple(reasons), "; ".join(reasons))
    reasons.append("no version of this run was ever complete")
    return Plan(None, (), tuple(reasons))


def covering(inventories: Mapping[str, Inventory], newest: Version) -> SetKey | None:
    """The newest protection, up to this version, whose parity is still held by all its members that answered."""
    groups_of: dict[SetKey, dict[tuple[str, ...], ParitySet]] = defaultdict(dict)
    holders: dict[SetKey, set[str]] = defaultdict(set)
    for node_id, inventory in inventories.items():
        for parity in inventory.sets:
            groups_of[parity.key][parity.members] = parity
            holders[parity.key].add(node_id)
    for key in sorted((key for key in groups_of if key.version <= newest), reverse=True):
        groups = groups_of[key].values()
        ranks = {rank for group in groups for ranks in group.ranks for rank in ranks}
        members = {member for group in groups for member in group.members}
        world_size = next(iter(groups)).world_size
        # A member that answered without it never acknowledged it; a lost member is what it protects from.
        if len(ranks) == world_size and members & inventories.keys() <= holders[key]:
            return key
    return None


def stands(inventories: Mapping[str, Inventory], key: SetKey) -> bool:
    """All members of that protection are among these nodes, with their parity and the data it protects."""
    for inventory in inventories.values():
        for group in inventory.sets:
            if group.key != key:
                continue
            for member, ranks in zip(group.members, group.ranks, strict=True):
                held = inventories.get(member)
                data = {h.rank for h in held.holdings if h.version == key.version} if held is not None else set()
                if held is None or not data.issuperset(ranks) or all(parity.key != key for parity in held.sets):
                    return False
    return True


def _by_version(inventories: Mapping[str, Inventory]) -> dict[Version, _VersionSources]:
    versions: dict[Version, _VersionSources] = defaultdict(_VersionSources)
    for node_id, inventory in inventories.items():
        for holding in inventory.holdings:
            versions[holding.version].by_rank[holding.rank].append((node_id, holding))
        for parity in inventory.sets:
            versions[parity.key.version].sets[parity.key, parity.members][parity.position] = (node_id, parity)
    return versions


def _pieces(
    version: Version, sources: _VersionSources, homes: Mapping[int, str]
) -> tuple[tuple[RankSource, ...], list[str]]:
    """The source of every rank, or what is missing, one sentence each."""
    pieces: list[RankSource] = []
    missing: dict[str, list[int]] = defaultdict(list)
    rebuilds: dict[int, Rebuild | str] = {}
    for rank in range(sources.world_size):
        held = sources.by_rank.get(rank, [])
        if held:
            home = homes.get(rank)
            node_id, holding = min(held, key=lambda held: (home not in (None, held[0]), held[0], held[1].slot))
            source = OWN if home in (None, node_id) else PEER
            where = (holding.size_bytes, holding.local_index, holding.arena_id, holding.slot)
            pieces.append(RankSource(version, rank, source, node_id, *where))
            continue
        if rank not in rebuilds:
            rebuilds.update(_rebuilds(rank, sources))
        rebuild = rebuilds[rank]
        if isinstance(rebuild, str):
            missing[rebuild].append(rank)
        else:
            pieces.append(RankSource(version, rank, REBUILD, "", rebuild=rebuild))
    return tuple(pieces), [f"ranks {ranks_text(ranks)} {why}" for why, ranks in missing.items()]


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as text, with runs as ranges: 0-7, 12."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _rebuilds(rank: int, sources: _VersionSources) -> dict[int, Rebuild | str]:
    """How the ranks of a lost node can be rebuilt: from the newest parity set that allows it."""
    why = "have no sealed snapshot of it, and no parity covers them"
    for key, members in sorted(sources.sets, reverse=True):
        held = sources.sets[key, members]
        first = next(iter(held.values()))[1]
        position = next((p for p, ranks in enumerate(first.ranks) if rank in ranks), None)
        if position is None:
            continue
        data = tuple(
            tuple(min((n for n, _ in sources.by_rank.get(r, [])), default="") for r in ranks) for ranks in first.ranks
        )
        parity = tuple(held[p][0] if p in held else "" for p in range(len(first.members)))
        data_lost = {p for p, nodes in enumerate(data) if "" in nodes}
        parity_lost = {p for p, node in enumerate(parity) if not node}
        problem = recoverable(len(first.members), first.losses, data_lost, parity_lost)
        if not problem:
            return {
                r: Rebuild(key, first.losses, p, first.ranks, data, parity)
                for p in data_lost
                for r in first.ranks[p]
                if not sources.by_rank.get(r)
            }
        gone = [first.members[p] for p in sorted(data_lost | parity_lost)]
        why = (
            f"were on {first.members[position]}; its group of {len(first.members)} nodes "
            f"({', '.join(first.members)}) covers {first.losses} lost, and {', '.join(gone)} are lost: {problem}"
        )
    return {rank: why}


def _sources(pieces: Sequence[RankSource]) -> str:
    counts = Counter(piece.source for piece in pieces)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} from {source}" for source, count in counts.items())
