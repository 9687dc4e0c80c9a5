"""What a restore would do if some nodes were lost now: the planner of `recovery`, given what would be left. Pure.

While the job serves, nodes do not report what they hold. It follows from the orders: every node has the snapshots
of its ranks for each retained version, less what it reports as damaged, and the parity sets it reports as placed.
Of sets from before the last restart only those of the coordinator's own group are known here; the forecast may then
name a loss where a restore would still find a way, never the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from keepstep.control.messages import PlanIs, PlannedPiece
from keepstep.errors import KeeperError
from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.coordinator.state import SERVING, CoordinatorState
from keepstep.keeper.node.state import NodeState
from keepstep.recovery.inventory import Holding, Inventory, ParitySet
from keepstep.recovery.plan import OWN, PEER, Plan, RankSource, plan
from keepstep.types import SnapshotInfo

MAX_LOST = 4096  # names that are checked


def forecast(node: NodeState, lost: Sequence[str]) -> PlanIs:
    """Raises KeeperError where this keeper does not coordinate, the job does not train, or a name means no node."""
    job = _coordinated(node)
    reports = {node_id: view.report for node_id, view in job.views.items() if view.report is not None}
    _check_names(lost, reports)
    away = [n for n in reports if n not in lost and n != node.card.node_id and not node.orders.links.get(n)]
    left = {node_id: report for node_id, report in reports.items() if node_id not in lost and node_id not in away}
    newest = max(report.progress for report in reports.values())
    if not left:
        return PlanIs(None, newest, [], [], "no node would be left that holds anything of this run")
    inventories = {node_id: _inventory(node, job, reports, report) for node_id, report in left.items()}
    homes = {rank: node_id for node_id, report in left.items() for rank in report.ranks}
    chosen = plan(inventories, homes, away)
    reasons = list(chosen.reasons)
    if away:
        reasons.insert(0, f"the keepers of {', '.join(away)} cannot be reached now: counted as lost too")
    if chosen.version is None:
        failure = chosen.failure or "no version is complete yet: the run would begin again"
        return PlanIs(None, newest, [], reasons, failure)
    return PlanIs(chosen.version.step, newest, list(_pieces(chosen, reports)), reasons)


def _coordinated(node: NodeState) -> CoordinatorState:
    job, membership = node.orders.coordinator, node.orders.membership
    if job is None and membership is not None and membership.nodes[0].node_id != node.card.node_id:
        other = membership.nodes[0].node_id
        raise KeeperError(
            f"the keeper of node {other!r} coordinates this run; only that keeper can plan",
            hint=f"keepstep plan --node-id {other}, on the machine of that node",
        )
    if job is None or job.state != SERVING:
        raise KeeperError("the job is not training yet: nothing can be planned", hint="keepstep status --watch")
    return job


def _check_names(lost: Sequence[str], reports: Mapping[str, Report]) -> None:
    unknown = [node_id for node_id in lost[:MAX_LOST] if node_id not in reports]
    if unknown:
        raise KeeperError(
            f"this run has no node {', '.join(map(repr, unknown))}", hint=f"its nodes are {', '.join(reports)}"
        )


# What would be left


def _inventory(node: NodeState, job: CoordinatorState, reports: Mapping[str, Report], report: Report) -> Inventory:
    orders = job.orders
    retained = sorted(orders.retain - set(report.damaged))
    holdings = tuple(
        Holding.of(SnapshotInfo(version, rank, report.world_size, len(report.ranks), 0), local_index=index)
        for version in retained
        for index, rank in enumerate(report.ranks)
    )
    sets = tuple(s for s in _sets(node, job, reports, report.node_id) if s.key in report.placed)
    return Inventory(holdings, orders.complete, (), sets, orders.protected)


def _sets(node: NodeState, job: CoordinatorState, reports: Mapping[str, Report], node_id: str) -> Iterator[ParitySet]:
    """The parity sets that this node may hold: of its group now, and of the coordinator's group before."""
    group = job.protection.groups.get(node_id)
    for key in reports[node_id].placed:
        before = node.protection.sets.get(key)
        if key.incarnation != job.incarnation and before is not None and node_id in before.members:
            position = before.members.index(node_id)
            yield ParitySet(key, before.losses, position, before.members, before.ranks, before.world_size)
        elif key.incarnation == job.incarnation and group is not None and set(group.members) <= reports.keys():
            ranks = tuple(reports[member].ranks for member in group.members)
            world_size = reports[node_id].world_size
            yield ParitySet(key, group.losses, group.members.index(node_id), group.members, ranks, world_size)


# The answer


def _pieces(chosen: Plan, reports: Mapping[str, Report]) -> Iterator[PlannedPiece]:
    by_rank = {piece.rank: piece for piece in chosen.pieces}
    for node_id, report in reports.items():
        ranks_by_source: dict[tuple[str, str], list[int]] = {}
        for rank in report.ranks:
            if piece := by_rank.get(rank):
                ranks_by_source.setdefault((piece.source, _reason(piece, node_id)), []).append(rank)
        for (source, reason), ranks in ranks_by_source.items():
            yield PlannedPiece(ranks, node_id, source, reason)


def _reason(piece: RankSource, node_id: str) -> str:
    if piece.source == OWN:
        return "held on the node itself"
    if piece.source == PEER or piece.rebuild is None:
        return f"{piece.node_id} holds it"
    rebuild = piece.rebuild
    data = sorted({source for nodes in rebuild.data for source in nodes if source})
    parity = sorted({source for source in rebuild.parity if source})
    return (
        f"rebuilt in the place of {node_id} from the snapshots of {', '.join(data)} "
        f"and the parity of {', '.join(parity)}; its group of {len(rebuild.ranks)} may lose {rebuild.losses}"
    )
