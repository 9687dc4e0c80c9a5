"""An empty keeper in a later incarnation: whether a launcher may still give memory back."""

from __future__ import annotations

import pytest

from keepstep.config import Config
from keepstep.control.messages import Register
from keepstep.keeper.node import restore
from keepstep.keeper.node.core import Core
from keepstep.keeper.node.events import LauncherSeen, TrainerRegisters
from keepstep.keeper.node.state import RESTORING
from keepstep.types import Incarnation


@pytest.mark.parametrize("no_holder", [True, False])
def test_only_a_launcher_that_holds_memory_is_waited_for(no_holder: bool) -> None:
    """Under plain torchrun the trainers of a replaced node once waited for a launcher that did not exist."""
    core = Core(Config())
    register = Register(
        rank=3, world_size=4, local_index=0, local_world_size=1, incarnation=Incarnation(2, 5), label="",
        launcher_pid=0, every=1, slots=2, progress=-1, no_holder=no_holder,
    )  # fmt: skip
    core.handle(TrainerRegisters(1, 4321, True, register, 7), 0.0)
    assert (core.state == RESTORING) is no_holder
    core.handle(LauncherSeen(99, alive=True), 0.0)
    assert core.state == RESTORING
    assert restore.inventory_ready(core)
