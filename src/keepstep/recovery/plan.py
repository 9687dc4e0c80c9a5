"""What to restore: the newest version that every rank can get, each piece with its reason. Pure.

`plan` never returns an older version without saying what was wrong with the newer ones, and never
says "nothing" when something should be there: that is a failure with the inventory in its text.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from keepstep.recovery.inventory import Holding, Inventory
from keepstep.types import Version


@dataclass(frozen=True)
class Plan:
    """`version` None and `failure` empty: there is truly nothing to restore."""

    version: Version | None
    pieces: tuple[Holding, ...]
    reasons: tuple[str, ...]
    failure: str = ""


def plan(inventory: Inventory) -> Plan:
    """Choose the newest version whose ranks are all there."""
    by_version: dict[Version, dict[int, Holding]] = defaultdict(dict)
    for holding in inventory.holdings:
        by_version[holding.version][holding.local_index] = holding
    reasons = list(inventory.damaged)
    for version in sorted(by_version, reverse=True):
        held = by_version[version]
        wanted = next(iter(held.values())).local_world_size
        missing = [index for index in range(wanted) if index not in held]
        if missing:
            reasons.append(f"{version} is not complete: local ranks {missing} have no sealed snapshot of it")
            continue
        newest = inventory.complete
        if newest is not None and newest > version and not any(str(newest) in reason for reason in reasons):
            reasons.append(f"{newest} was complete once and is not held any more")
        reasons.append(f"{version} is the newest version that all {wanted} local ranks have: own slots")
        return Plan(version, tuple(held[index] for index in range(wanted)), tuple(reasons))
    if inventory.complete is not None:
        text = "; ".join(reasons) or "no sealed snapshot is left"
        failure = f"{inventory.complete} was complete once and cannot be given back: {text}"
        return Plan(None, (), tuple(reasons), failure)
    if inventory.damaged:
        return Plan(None, (), tuple(reasons), "; ".join(reasons))
    reasons.append("no version of this run was ever complete")
    return Plan(None, (), tuple(reasons))
