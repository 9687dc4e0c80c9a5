"""How much of a snapshot is cloned on the device in place of leaving straight from the live tensors. Pure.

What can leave before the optimizer writes again goes straight (direct). The rest is late: it is cloned on the device
just before the update and leaves from the clone. Clones cost device memory and a little time, waiting costs more, so
the late part is as small as the last snapshots show it can be: after each one it is known by how much the direct
copies were done too early or too late. Host and device are at different places in the program, so nothing but that
measure can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN_S = 0.006
"""direct copies should end this long before the update: steps are not all alike"""
TRUST = 0.25
"""of a spare time that was measured, this much is used at once: one long step must not make the next one wait"""


@dataclass
class StagingPolicy:
    """For one device. `scale` is for tests: a factor on what is held to be possible in time."""

    budget_bytes: int
    late_bytes: int = -1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.late_bytes < 0:
            self.late_bytes = self.budget_bytes  # nothing is known yet: as much as there is room for

    def late_of(self, total_bytes: int) -> int:
        """How much of a snapshot of this size is late."""
        late = min(self.late_bytes, total_bytes)
        if self.scale != 1.0:
            late = int(total_bytes - (total_bytes - late) * self.scale)
        return max(0, min(late, self.budget_bytes, total_bytes))

    def learn(self, spare_s: float, rate_bytes_s: float) -> None:
        """Direct copies ended `spare_s` before the update; negative: the update waited for them that long."""
        wanted = self.late_bytes - (spare_s - MARGIN_S) * rate_bytes_s
        change = wanted - self.late_bytes
        self.late_bytes = round(
            max(0.0, min(self.late_bytes + (change if change > 0 else TRUST * change), self.budget_bytes))
        )
