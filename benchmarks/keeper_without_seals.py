"""A keeper for measuring the copy alone: it reports every snapshot as sealed without reading it.

Started by `bench_take.py` instead of `python -m keepstep.keeper --detach`, with the same environment.
"""

from __future__ import annotations

from keepstep.arena.slots import Arena
from keepstep.keeper.__main__ import main
from keepstep.keeper.node.effects import SealSlot
from keepstep.keeper.node.events import SlotSealed
from keepstep.keeper.workers.sealing import WorkerPool


def report_sealed(self: WorkerPool, arena: Arena, effect: SealSlot) -> SlotSealed:
    committed = arena.committed(effect.slot)
    assert committed is not None
    return SlotSealed(arena.arena_id, effect.slot, committed[1].version, committed[1].info)


if __name__ == "__main__":
    WorkerPool._seal = report_sealed  # type: ignore[method-assign]
    raise SystemExit(main(["--detach"]))
