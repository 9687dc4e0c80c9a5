"""One run of a simulated job: it starts, faults are injected, and after the last one everything must recover."""

from __future__ import annotations

from mayhem import Mayhem
from world_of_many import Setting, World

START_S, HEAL_S = 20.0, 40.0


def live(seed: int, setting: Setting) -> World:
    """Raises AssertionError with all that is needed to run it again."""
    world = World(seed, setting)
    mayhem = Mayhem(world)
    try:
        assert world.run(START_S, lambda: world.rules.covers > 0), "rule 6: nothing was ever protected"
        for _ in range(world.random.randrange(1, 5)):
            world.run(world.random.choice([0.0, 0.3, 1.5, 3.0]) * world.random.random())
            mayhem.strike()
        heal(world)
    except AssertionError as error:
        story = "\n  ".join(mayhem.done)
        raise AssertionError(f"live({seed}, {setting}) at {world.now:.2f} s: {error}\n  {story}") from error
    return world


def heal(world: World) -> None:
    """After the last fault: snapshots and the protection of every group recover."""
    world.run(5.0)  # the last cut, frost or storm is over
    rules, before = world.rules, world.rules.covers
    healed = world.run(HEAL_S, lambda: rules.covers >= before + 2 and _healthy(world))
    assert healed, f"rule 6: not healed: {describe(world)}"


def _healthy(world: World) -> bool:
    number = world.launcher.number
    cores = [world.machines[node_id].core for node_id in world.launcher.order]
    return all(
        core is not None
        and core.orders.active.incarnation.number == number
        and core.orders.active.protected is not None
        and core.orders.active.protected.incarnation.number == number
        and not core.orders.active.exposed
        for core in cores
    )


def describe(world: World) -> str:
    lines = [f"completed {world.rules.completed}, cover {world.rules.cover and world.rules.cover.version}"]
    for node_id in world.launcher.order:
        machine = world.machines[node_id]
        core = machine.core
        if core is None:
            lines.append(f"{node_id}: no keeper")
            continue
        orders, active, order = core.orders, core.orders.active, core.restore.order
        lines.append(
            f"{node_id}: {core.state} {core.incarnation.number} links={[n for n, up in orders.links.items() if up]} "
            f"active={active.complete}/{active.protected}/{active.target} exposed={active.exposed} "
            f"open={core.grants.open} trainers={[(t.rank, t.stage, t.progress, t.alive) for t in machine.trainers]} "
            f"job={orders.coordinator and orders.coordinator.state} plan={order and order.number}"
        )
    return "\n    ".join(lines)
