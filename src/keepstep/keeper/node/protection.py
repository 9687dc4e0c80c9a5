"""This node's part in protecting a version: start and stop exchanges, keep and free parity. Pure.

Owner of `node.protection`.
"""

from __future__ import annotations

from keepstep.keeper.coordinator.messages import ExchangeProgress
from keepstep.keeper.node.effects import FreeParity, StartExchange, StopExchange
from keepstep.keeper.node.events import ExchangeAdvanced, ParityPlaced
from keepstep.keeper.node.state import NodeState
from keepstep.recovery.inventory import SetKey


def follow_orders(node: NodeState) -> None:
    """Encode parity of the coordinator's target, and free parity that protects nothing retained."""
    key, group = _target(node), node.orders.active.group
    running = node.protection.exchange.key if node.protection.exchange is not None else None
    if running is not None and running != key:
        node.emit(StopExchange(running))
        node.protection.exchange = None
    _free_parity(node)
    if key is None or group is None or key in node.protection.sets or running == key:
        return
    node.protection.exchange, node.protection.exchange_started = ExchangeProgress(key, 0), node.now
    node.count("exchanges")
    node.emit(StartExchange(key, group.members, group.losses))


def _target(node: NodeState) -> SetKey | None:
    orders = node.orders.active
    return SetKey(orders.target, orders.incarnation, orders.attempt) if orders.target is not None else None


def _free_parity(node: NodeState) -> None:
    """A parity buffer is free if and only if it protects nothing that is retained."""
    orders = node.orders.active
    # Where nobody knows what protects the version that was restored, all parity that may do so stays.
    base = orders.base if orders.protected_by is None else None
    for key, parity_set in list(node.protection.sets.items()):
        needed = key in (orders.protected_by, _target(node)) or (base is not None and key.version == base)
        if not needed:
            del node.protection.sets[key]
            node.emit(FreeParity(parity_set.buffer_id))


def placed(node: NodeState, event: ParityPlaced) -> None:
    """Parity of this node is complete, or a holder gave it back."""
    key, protection = event.parity_set.key, node.protection
    protection.sets[key] = event.parity_set
    if protection.exchange is not None and protection.exchange.key == key:
        protection.exchange = ExchangeProgress(key, event.moved_bytes)
        protection.exchange_s = node.now - protection.exchange_started
        node.count("exchanged_bytes", event.moved_bytes)
        node.count("protected_versions")


def advanced(node: NodeState, event: ExchangeAdvanced) -> None:
    protection = node.protection
    if protection.exchange is None or protection.exchange.key != event.key:
        return
    protection.exchange = ExchangeProgress(event.key, event.moved_bytes, event.problem)
    if event.problem:
        node.count("exchange_failures")
        node.log("warning", "an exchange failed", version=str(event.key.version), reason=event.problem)
