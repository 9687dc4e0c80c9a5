"""This node's part in protecting a version: start and stop exchanges, keep and free parity. Pure."""

from __future__ import annotations

from keepstep.keeper.coordinator.messages import ExchangeProgress
from keepstep.keeper.node.effects import FreeParity, StartExchange, StopExchange
from keepstep.keeper.node.events import ExchangeAdvanced, ParityPlaced
from keepstep.keeper.node.state import NodeState
from keepstep.recovery.inventory import SetKey


def take_orders(node: NodeState) -> None:
    """Do what the coordinator's target asks for, and free what nobody retains."""
    key = _target(node)
    running = node.exchange.key if node.exchange is not None else None
    if running is not None and running != key:
        node.do(StopExchange(running))
        node.exchange = None
    free_parity(node)
    group = node.kept.group
    if key is None or group is None or key in node.sets or running == key:
        return
    node.exchange, node.exchange_began = ExchangeProgress(key, 0), node.now
    node.count("exchanges")
    node.do(StartExchange(key, group.members, group.losses))


def _target(node: NodeState) -> SetKey | None:
    kept = node.kept
    return SetKey(kept.target, kept.incarnation, kept.attempt) if kept.target is not None else None


def free_parity(node: NodeState) -> None:
    """A parity buffer is free if and only if it protects nothing that is retained."""
    kept = node.kept
    # Where nobody could say what protects the version that was restored, all that may do so stays.
    base = kept.base if kept.protected_by is None else None
    for key, found in list(node.sets.items()):
        needed = key in (kept.protected_by, _target(node)) or (base is not None and key.version == base)
        if not needed:
            del node.sets[key]
            node.do(FreeParity(found.buffer_id))


def placed(node: NodeState, event: ParityPlaced) -> None:
    found = event.parity_set
    running = node.exchange is not None and node.exchange.key == found.key
    node.sets[found.key] = found
    if running:
        node.exchange = ExchangeProgress(found.key, event.moved_bytes)
        node.exchange_s = node.now - node.exchange_began
        node.count("exchanged_bytes", event.moved_bytes)
        node.count("protected_versions")


def moved(node: NodeState, event: ExchangeAdvanced) -> None:
    if node.exchange is None or node.exchange.key != event.key:
        return
    node.exchange = ExchangeProgress(event.key, event.moved_bytes, event.problem)
    if event.problem:
        node.count("exchange_failures")
        node.log("warning", "an exchange failed", version=str(event.key.version), reason=event.problem)
