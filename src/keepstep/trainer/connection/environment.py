"""Rank, world and launcher of this trainer, from the process group or the environment. Read once, at the start."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed

from keepstep.arena.slots import requested_slots
from keepstep.config import Config, resolve
from keepstep.control.check_events import CHECK
from keepstep.control.messages import Register
from keepstep.errors import ConfigError
from keepstep.identity import Identity, identify, process_key
from keepstep.types import Incarnation

log = logging.getLogger("keepstep")

SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankPlace:
    """Rank and node of this trainer. Written into every slot header."""

    rank: int
    world_size: int
    local_index: int
    local_world_size: int


@dataclass(frozen=True)
class World:
    """All ranks of a job with more than one node, and the node of each."""

    rank: int
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, place: RankPlace, environ: Mapping[str, str] | None = None) -> World | None:
        """None on a single node, and where the environment does not show which ranks share a node."""
        environ = os.environ if environ is None else environ
        size, local = place.world_size, place.local_world_size
        if size == local or size % local or place.rank % local != place.local_index:
            return None
        if environ.get("GROUP_RANK", str(place.rank // local)) != str(place.rank // local):
            return None
        return cls(place.rank, tuple(rank // local for rank in range(size)))

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))


def find_settings(config: Config | None) -> Config:
    """The settings of this trainer. Under `keepstep check`: capture every step, under the run of the check."""
    settings, environ = resolve(config), os.environ
    if CHECK not in environ:
        return settings
    return replace(
        settings, every=1, run_id=environ["KEEPSTEP_RUN_ID"], runtime_dir=environ["KEEPSTEP_RUNTIME_DIR"]
    )  # fmt: skip


def find_place(environ: Mapping[str, str] | None = None) -> RankPlace:
    """Rank and world from the process group, else from the launcher's environment, else a single process."""
    environ = os.environ if environ is None else environ
    rank, world = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    local_world = _number(environ, "LOCAL_WORLD_SIZE", world)
    place = RankPlace(rank, world, _number(environ, "LOCAL_RANK", rank % max(local_world, 1)), local_world)
    if not (0 <= place.rank < place.world_size and 0 <= place.local_index < place.local_world_size <= place.world_size):
        raise ConfigError(f"the environment contradicts itself: {place}", hint="check RANK, WORLD_SIZE and LOCAL_RANK")
    return place


def find_identity(config: Config, place: RankPlace) -> Identity:
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    owner = os.getppid() if launched or place.world_size > 1 else os.getpid()
    identity = identify(config, launch=process_key(owner))
    if not identity.outlives_launch and place.world_size > place.local_world_size:
        raise ConfigError(
            "this job has several nodes and no name: its keepers could not find each other",
            hint="--rdzv-id=<a name>, or KEEPSTEP_RUN_ID=<a name> on all nodes",
        )
    if not identity.outlives_launch and place.rank == 0:
        log.warning(
            "this run has no id, it is called %r: %s. Set KEEPSTEP_RUN_ID, or --rdzv-id, to a unique name.",
            identity.run_id,
            "its state can be restored under this launcher only" if launched else "no later start restores its state",
        )
    return identity


def registration(config: Config, place: RankPlace, agreed: Incarnation | None = None) -> Register:
    """The first message to the keeper. `agreed`: the incarnation, where the trainers agreed on it themselves."""
    environ = os.environ
    launched = "TORCHELASTIC_RUN_ID" in environ
    given = environ.get("KEEPSTEP_INCARNATION")
    incarnation = _parse_incarnation(given) if given else agreed
    if place.world_size == 1 and not launched:
        label = process_key(os.getpid())
    else:
        round_ = f"{environ.get('TORCHELASTIC_RESTART_COUNT', '')}:{environ.get('MASTER_PORT', '')}"
        label = f"{process_key(os.getppid())}:{round_}"
    return Register(
        rank=place.rank, world_size=place.world_size, local_index=place.local_index,
        local_world_size=place.local_world_size, incarnation=incarnation,
        label=label, launcher_pid=os.getppid() if launched else 0, every=config.every,
        slots=requested_slots(config.arena), progress=-1, no_holder=not given,
    )  # fmt: skip


def warn_about_shared_store() -> None:
    """torchrun 2.13 gives a restarted round the old round's store; workers then read stale keys and hang."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" not in environ or "KEEPSTEP_INCARNATION" in environ:
        return
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environ.get(SHARED_STORE) != "1":
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if version >= (2, 12) and environ.get("RANK", "0") == "0":
            log.warning(
                "this torchrun hands its restarts a used store, and they may hang: set %s=1 on all nodes, "
                "or launch with --rdzv-backend=keepstep",
                SHARED_STORE,
            )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not a number") from None


def _parse_incarnation(text: str) -> Incarnation:
    try:
        return Incarnation.parse(text)
    except ValueError:
        raise ConfigError(f"KEEPSTEP_INCARNATION={text!r} is not an incarnation", hint="unset it") from None
