"""How much memory the cgroup and the machine allow, measured before any is allocated.

Shortage must be one error with its numbers before step 0: later it would be an OOM kill or a SIGBUS
in the middle of training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from keepstep.arena.slots import FEW_SLOTS, FIRST_SLOT
from keepstep.errors import KeeperError
from keepstep.layout import gib

RESERVE_BYTES = 64 << 20  # for the rest of the job: page tables, sockets, the keeper itself
UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for no limit
MORE_SLOTS = 3  # The next snapshot begins while the last one is sealed or protected.
# Three are chosen where four would fit: the rest is for parity (at most two slots where two nodes mirror each other)
# and for what the job itself still allocates.
ROOM_SLOTS = 4


@dataclass(frozen=True)
class MemoryLimits:
    """Memory that the machine and the cgroup still have."""

    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_used_bytes: int

    @property
    def free_bytes(self) -> int:
        if self.cgroup_limit_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.cgroup_limit_bytes - self.cgroup_used_bytes)


def measure(root: Path = Path("/")) -> MemoryLimits:
    limit, used = _cgroup(root)
    return MemoryLimits(_mem_available(root), limit, used)


@dataclass(frozen=True)
class SlotChoice:
    """How many slots `arena.slots = auto` means on this node, and why."""

    slots: int
    reason: str


def choose_slots(slot_bytes: int, num_ranks: int, limits: MemoryLimits, memory_limit_bytes: int = 0) -> SlotChoice:
    """Choose the slots of every rank of a node, from what a slot of one rank takes up in its arena."""
    free, need = max(0, limits.free_bytes - RESERVE_BYTES), ROOM_SLOTS * slot_bytes * num_ranks
    if memory_limit_bytes and FIRST_SLOT + MORE_SLOTS * slot_bytes > memory_limit_bytes:
        limit = f"arena.memory_limit_bytes {gib(memory_limit_bytes)}"
        return SlotChoice(FEW_SLOTS, f"three slots of {gib(slot_bytes)} exceed {limit}")
    ranks = f" for {num_ranks} ranks" if num_ranks > 1 else ""
    room = f"four slots of {gib(slot_bytes)}{ranks} need {gib(need)} and {gib(free)} are free"
    return SlotChoice(MORE_SLOTS if need <= free else FEW_SLOTS, room)


def check(need_bytes: int, what: str, *, room: MemoryLimits, memory_limit_bytes: int = 0) -> None:
    """Raise the one error that a user gets when the arena does not fit."""
    allowed = room.free_bytes - RESERVE_BYTES
    if memory_limit_bytes:
        allowed = min(allowed, memory_limit_bytes)
    if need_bytes <= allowed:
        return
    cgroup = "none"
    if room.cgroup_limit_bytes is not None:
        cgroup = f"{gib(room.cgroup_limit_bytes)} with {gib(room.cgroup_used_bytes)} in use"
    limit = f", arena.memory_limit_bytes {gib(memory_limit_bytes)}" if memory_limit_bytes else ""
    raise KeeperError(
        f"{what} needs {gib(need_bytes)}, and {gib(max(allowed, 0))} can be had "
        f"(cgroup limit: {cgroup}; MemAvailable: {gib(room.available_bytes)}{limit})",
        hint="raise the memory limit, use KEEPSTEP_ARENA_SLOTS=2, or end runs that hold memory (keepstep release)",
    )


def _mem_available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup(root: Path) -> tuple[int | None, int]:
    """The tightest memory limit of this process and the memory used under it, for cgroup v1 and v2."""
    limits: list[tuple[int, int]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _limits(mount: Path, path: str, limit_file: str, used_file: str) -> list[tuple[int, int]]:
    limits = []
    folder = mount / path.lstrip("/")
    while True:
        try:
            text = (folder / limit_file).read_text().strip()
            if text != "max" and int(text) < UNLIMITED:
                used = int((folder / used_file).read_text()) - _cache(folder)
                limits.append((int(text), max(used, 0)))
        except (OSError, ValueError):
            pass
        if folder == mount or mount not in folder.parents:
            return limits
        folder = folder.parent


def _cache(folder: Path) -> int:
    """File pages that the kernel drops under pressure: they count as used, and are available all the same."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
