"""Reports that reach the keeper of node rank 0 before its trainers do: it coordinates only from then on."""

from __future__ import annotations

from keepstep.config import Config
from keepstep.control.messages import Membership, NodeCard, Register
from keepstep.keeper.coordinator.messages import Orders, Report
from keepstep.keeper.node.core import Core
from keepstep.keeper.node.effects import Effect, SendToPeer
from keepstep.keeper.node.events import MembershipSet, PeerLink, PeerMessage, TrainerRegisters
from keepstep.keeper.node.state import SERVING
from keepstep.types import Incarnation, Version

INCARNATION = Incarnation(3, 7)
COMPLETE = Version(INCARNATION, 40)
OWN, PEER = NodeCard("a", "1", "127.0.0.1", 1), NodeCard("b", "1", "127.0.0.1", 2)


def report(number: int = 1, incarnation: Incarnation = INCARNATION, card: NodeCard = PEER) -> Report:
    return Report(
        node_id="b", instance=card.instance, incarnation=incarnation, number=number, state=SERVING, card=card,
        whole=True, ranks=(1,), world_size=2, progress=41, ready=True, losses=1,
        orders=Orders(incarnation, 1, 9, complete=COMPLETE, ready=True),
    )  # fmt: skip


def new_keeper(*reports: Report) -> tuple[Core, list[Effect]]:
    """A keeper that replaced the coordinator's: its peer links and reports, then its own trainer comes back.

    Returns what it does at the trainer's registration, which is the last event.
    """
    core = Core(Config())
    core.open_network(OWN, report_number=100)
    core.handle(MembershipSet(Membership(INCARNATION, [OWN, PEER], 0, b"s" * 32)), 0.0)
    core.handle(PeerLink("b", True), 0.0)
    for early in reports:
        core.handle(PeerMessage("b", early, early.instance), 0.0)
    register = Register(0, 2, 0, 1, INCARNATION, "", 0, 1, 2, progress=41, rejoin=True)
    return core, core.handle(TrainerRegisters(1, 4321, True, register, 9), 0.0)


def orders_sent(effects: list[Effect]) -> list[Orders]:
    return [e.message for e in effects if isinstance(e, SendToPeer) and isinstance(e.message, Orders)]


def test_coordinator_continues_when_its_trainers_are_back_without_another_report_of_its_peers() -> None:
    core, effects = new_keeper(report())
    assert core.orders.coordinator is not None
    assert core.orders.coordinator.state == SERVING
    (orders,) = orders_sent(effects)
    assert orders.complete == COMPLETE
    assert core.orders.early_reports == {}


def test_newest_early_report_counts_and_one_of_another_incarnation_does_not() -> None:
    core, effects = new_keeper(report(incarnation=Incarnation(2, 5)))
    assert core.orders.coordinator is not None
    assert core.orders.coordinator.state != SERVING
    assert orders_sent(effects) == []
    core, effects = new_keeper(report(1, Incarnation(2, 5)), report(2))
    assert [orders.complete for orders in orders_sent(effects)] == [COMPLETE]


def test_address_in_an_early_report_reaches_all_nodes() -> None:
    moved = NodeCard("b", "2", "127.0.0.1", 3)
    _, effects = new_keeper(report(card=moved))
    assert [moved in orders.cards for orders in orders_sent(effects)] == [True]
    _, effects = new_keeper(report())
    assert [PEER in orders.cards for orders in orders_sent(effects)] == [False]  # the membership names it
