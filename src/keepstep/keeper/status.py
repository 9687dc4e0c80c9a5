"""The status of a keeper and its metrics, read from the core by the loop."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from keepstep._version import VERSION
from keepstep.arena.slots import AUTO
from keepstep.identity import Identity
from keepstep.keeper.node import arenas
from keepstep.keeper.node.state import (
    FENCING,
    RESTORING,
    SEALED,
    SERVING,
    ArenaState,
    NodeState,
    RegisteredTrainer,
    Slot,
)
from keepstep.types import (
    SKIP_KINDS,
    KeeperStatus,
    PeerStatus,
    RankStatus,
    SlotStatus,
    Status,
    Survives,
    TakeCounts,
    Version,
)

PEERS = "peers_"  # prefix of the transport's counters

# Counters of the core, by name: the metrics' help texts. A name that is not here is a mistake (tests).
COUNTERS = {
    "brought_in_bytes": "bytes of snapshots fetched or rebuilt for ranks of this node",
    "complete_versions": "versions sealed on all ranks",
    "corrupt_slots": "slots that failed verification",
    "exchange_failures": "parity builds that failed",
    "exchanged_bytes": "bytes fetched to build parity",
    "exchanges": "parity builds started",
    "protected_versions": "versions whose parity is placed on all members",
    "registrations": "trainers registered",
    "seal_seconds": "time spent sealing",
    "sealed_bytes": "bytes of sealed snapshots",
    "trainer_deaths": "trainers that died",
    "voids": "grants that ended without a snapshot",
}


def status_of(
    core: NodeState,
    identity: Identity,
    *,
    instance: str,
    started: float,
    holders: int,
    parity_bytes: int = 0,
    traffic: Mapping[str, float] | None = None,
    slots_reason: str = "",
    takes: Sequence[TakeCounts] = (),
    notes: Sequence[str] = (),
    security: str = "",
) -> Status:
    """The status now. Its fields are a contract (`types.Status`).

    `traffic`: counters of the transport, if there is one. `slots_reason`: of the slots that this keeper chose.
    `notes`: what launchers want to be read.
    """
    kept = core.orders.active
    protected, group, membership = kept.protected, kept.group, core.orders.membership
    steps = [core.progress.get(index, -1) for index in core.trainers.registered]
    indexes = sorted({arena.local_index for arena in core.arenas.by_id.values()} | set(core.trainers.registered))
    complete = core.orders.active.complete
    ages = [s.sealed_at for _, s in core.arenas.slots() if s.version == complete and s.sealed_at]
    keeper = KeeperStatus(
        pid=os.getpid(), instance=instance, version=VERSION, uptime_s=core.now - started, state=_state(core),
        launcher_alive=bool(core.trainers.launchers), lease_left_s=core.lease_left_s(), holders=holders,
    )  # fmt: skip
    return Status(
        run_id=identity.run_id, node_id=identity.node_id, keeper=keeper, incarnation=core.incarnation.number,
        step=complete.step if complete else None, age_s=core.now - max(ages) if ages else None,
        survives=_survives_of(core, complete).name.lower(),
        losses_covered=group.losses if group is not None and protected is not None else 0, exposed=kept.exposed,
        base_step=core.orders.active.base.step if core.orders.active.base else None,
        ranks=[_rank_status(core, index) for index in indexes],
        memory_bytes=sum(arena.size_bytes for arena in core.arenas.by_id.values())
        + parity_bytes,
        counters=_counters(core, traffic or {}, takes), problems=[*_problems(core, complete), *notes],
        protected_step=protected.step if protected else None, target_step=kept.target.step if kept.target else None,
        lag_steps=max(0, max(steps) - protected.step) if protected and steps else None,
        num_nodes=len(membership.nodes) if membership else 1,
        coordinator=membership.nodes[0].node_id if membership else identity.node_id,
        group=[
            PeerStatus(node_id, i, node_id == identity.node_id or core.orders.links.get(node_id, False))
            for i, node_id in enumerate(group.members if group is not None else ())
        ],
        parity_bytes=parity_bytes, exchange_bytes_s=(traffic or {}).get("rate_in_bytes_s", 0.0),
        min_node_period_s=core.protection.exchange_s,
        slots=arenas.slots_per_rank(core) if core.arenas.by_id else 0, slots_reason=_slots_reason(core, slots_reason),
        security=security,
    )  # fmt: skip


def _slots_reason(core: NodeState, chosen: str) -> str:
    registers = [trainer.register for trainer in core.trainers.registered.values()]
    if not registers or not core.arenas.by_id:
        return ""
    if registers[0].slots != AUTO:
        return "arena.slots"
    return f"auto: {chosen or 'chosen by the keeper before this one'}"


def _state(core: NodeState) -> str:
    if core.lease_since is not None:
        return "leased"
    return core.state


def _survives_of(core: NodeState, version: Version | None) -> Survives:
    if version is None:
        return Survives.NOTHING
    return Survives.NODE if version == core.orders.active.protected else Survives.PROCESS


def _counters(core: NodeState, traffic: Mapping[str, float], takes: Sequence[TakeCounts]) -> dict[str, float]:
    of_peers = {f"{PEERS}{name}": value for name, value in traffic.items()}
    return core.counters | _take_counters(takes) | of_peers


def _take_counters(takes: Sequence[TakeCounts]) -> dict[str, float]:
    """Sums over the trainers of this node, since each of them started."""
    counters: dict[str, float] = {
        "takes_asked": sum(count.asked for count in takes),
        "takes_waited": sum(count.waited for count in takes),
        "take_wait_seconds": sum(count.waited_us for count in takes) / 1e6,
    }
    for index, kind in enumerate(SKIP_KINDS):
        counters[f"takes_skipped_{kind}"] = sum(count.skipped[index] for count in takes)
    return counters


def _survives(is_held: bool) -> Survives:
    return Survives.PROCESS if is_held else Survives.NOTHING


def _problems(core: NodeState, complete: Version | None) -> list[str]:
    problems = list(core.problems)
    if core.state == SERVING and core.trainers.registered and complete is None:
        problems.append("no version is complete yet: a crash now would start the run again")
    group, kept = core.orders.active.group, core.orders.active
    if core.state == SERVING and group is not None:
        away = [m for m in group.members if m != core.card.node_id and not core.orders.links.get(m)]
        if away:
            problems.append(f"the keepers of {', '.join(away)} cannot be reached: no new version can be protected")
        if kept.exposed:
            problems.append(
                "protection stands still: snapshots go on, and a crash in mid-copy costs the steps since "
                f"{kept.protected or kept.base}"
            )
    if (
        core.state in (RESTORING, SERVING)
        and core.trainers.registered
        and core.orders.coordinator is None
        and core.orders.membership is None
    ):
        problems.append("this node was not told the other nodes of the job: nothing is granted")
    if core.state == FENCING and core.trainers.dying:
        problems.append("waiting for trainers of an older incarnation to die")
    elif core.state == FENCING:
        problems.append("waiting for the launcher to give back what it holds")
    return problems


def _rank_status(core: NodeState, index: int) -> RankStatus:
    member: RegisteredTrainer | None = core.trainers.registered.get(index)
    arenas = [a for a in core.arenas.by_id.values() if a.local_index == index]
    arena: ArenaState | None = max(arenas, key=lambda a: a.generation, default=None)
    slots = [s for a in arenas for s in a.slots]
    newest = max((s for s in slots if s.state == SEALED and s.version), key=_version_of, default=None)
    complete = core.orders.active.complete
    return RankStatus(
        rank=member.register.rank if member else (newest.info.rank if newest and newest.info else index),
        local_index=index, pid=member.pid if member else 0, alive=bool(member and member.alive),
        progress=core.progress.get(index), step=newest.version.step if newest and newest.version else None,
        age_s=core.now - newest.sealed_at if newest and newest.sealed_at is not None else None,
        survives=_survives(any(s.version == complete for s in slots) and complete is not None).name.lower(),
        arena_bytes=sum(a.size_bytes for a in arenas),
        slots=[_slot_status(slot) for slot in (arena.slots if arena else [])],
    )  # fmt: skip


def _version_of(slot: Slot) -> Version:
    assert slot.version is not None
    return slot.version


def _slot_status(slot: Slot) -> SlotStatus:
    version = slot.version
    return SlotStatus(
        slot.index, slot.state, version.step if version else None,
        version.incarnation.number if version else None, slot.info.size_bytes if slot.info else 0,
    )  # fmt: skip


def metrics(status: Status) -> bytes:
    """The status as Prometheus text. The library is imported on first use: most keepers are never scraped."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

    registry = CollectorRegistry()
    names = ["run_id", "node_id"]
    values = [status.run_id, status.node_id]

    def gauge(name: str, text: str, value: float | None) -> None:
        if value is not None:
            Gauge(f"keepstep_{name}", text, names, registry=registry).labels(*values).set(value)

    gauge("step", "newest step complete on all ranks", status.step)
    gauge("age_seconds", "seconds since that version was sealed", status.age_s)
    gauge("survives", "0 nothing, 1 process, 2 node, 3 cluster", Survives[status.survives.upper()].value)
    gauge("incarnation", "incarnations of the job so far", status.incarnation)
    gauge("memory_bytes", "shared memory held for this run", status.memory_bytes)
    gauge("holders", "processes besides the keeper that hold all of it", status.keeper.holders)
    gauge("trainers_alive", "registered trainers that are alive", sum(rank.alive for rank in status.ranks))
    gauge("problems", "problems in the status", len(status.problems))
    gauge("keeper_uptime_seconds", "seconds since the keeper started", status.keeper.uptime_s)
    for name, value in sorted(status.counters.items()):
        text = COUNTERS.get(name, f"count of {name}")
        Counter(f"keepstep_{name}", text, names, registry=registry).labels(*values).inc(value)
    progress = Gauge("keepstep_rank_progress", "step of the last take", [*names, "rank"], registry=registry)
    for rank in status.ranks:
        if rank.progress is not None:
            progress.labels(*values, str(rank.rank)).set(rank.progress)
    return generate_latest(registry)
