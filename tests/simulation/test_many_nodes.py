"""Many nodes, simulated: a thousand lives with faults, and scenarios that must go well (or must be refused).

A life that fails says which: `live(seed, setting)` in `lives_of_many` runs it again, step by step the same.
"""

from __future__ import annotations

import pytest
from lives_of_many import describe, heal, live
from mayhem import Mayhem
from world_of_many import Setting, World

SETTINGS = {
    "three nodes": (Setting(3, losses=1), 200),
    "two ranks each": (Setting(4, losses=1, local=2, slots=3), 150),
    "two may be lost": (Setting(4, losses=2), 200),
    "two groups": (Setting(6, losses=1, group_size=3), 150),
    "four slots": (Setting(5, losses=2, slots=4), 100),
    "an exchange takes many steps": (Setting(4, losses=1, slots=4, pace_s=(0.4, 0.6)), 50),
    "two groups of which two may be lost": (Setting(6, losses=2, group_size=3, slots=3), 150),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_thousand_lives_keep_every_rule_and_heal(name: str) -> None:
    setting, seeds = SETTINGS[name]
    for seed in range(seeds):
        live(seed, setting)


def test_a_life_is_the_same_when_it_is_lived_again() -> None:
    setting = Setting(4, losses=1, local=2, slots=3)
    lives = [live(7, setting) for _ in range(2)]
    assert len({(world.handled, world.now, world.rules.covers, str(world.rules.completed)) for world in lives}) == 1


def started(seed: int, setting: Setting) -> World:
    world = World(seed, setting)
    assert world.run(20.0, lambda: world.rules.covers > 0), describe(world)
    return world


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_snapshots_go_on_while_two_nodes_cannot_reach_each_other(slots: int) -> None:
    """Rule 7. Protection is impossible for a minute; the version that is protected stays, and so does the cadence."""
    for seed in range(5):
        world = started(seed, Setting(4, losses=1, slots=slots))
        world.network.cut("n1", "n2", 60.0)
        world.run(5.0)
        for _ in range(5):
            before = world.rules.completed
            world.run(11.0)
            assert world.rules.completed != before, f"seed {seed}: nothing after {before}: {describe(world)}"
        heal(world)


def test_a_version_stays_protected_while_the_exchange_of_the_next_one_is_frozen() -> None:
    for seed in range(5):
        world = started(seed, Setting(4, losses=1))
        before = world.rules.cover
        world.network.freeze(world.machines["n2"], 3.5)
        world.run(3.0)
        assert before is not None
        assert world.rules.cover is not None
        assert world.rules.cover.version >= before.version
        heal(world)


def test_more_nodes_than_the_code_covers_are_refused_with_the_reason_and_nothing_older_is_made_up() -> None:
    """The job is refused with the reason, instead of starting from step 0."""
    for seed in range(5):
        world = started(seed, Setting(4, losses=1))
        world.rules.cover = world.rules.promise = None  # what follows is not covered
        for node_id in ("n1", "n2"):
            world.machines[node_id].alive, world.machines[node_id].core = False, None
            world.network.recompute(world.machines[node_id])
        world.launcher.again(0.3)
        with pytest.raises(AssertionError, match="was complete once and cannot be given back"):
            world.run(20.0)


def test_a_node_that_is_killed_while_another_one_is_being_rebuilt_is_covered_too() -> None:
    """Two of four may be lost: one, and the next in the middle of the recovery."""
    for seed in range(10):
        world = started(seed, Setting(4, losses=2))
        mayhem = Mayhem(world)
        mayhem._kill_nodes([world.machines["n1"]])
        world.run(0.9 + 0.1 * seed)
        mayhem._kill_nodes([world.machines["n2"]])
        assert not world.machines["n2"].alive
        heal(world)
