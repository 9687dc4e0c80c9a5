"""This trainer's place in its job: settings, rank, run, and the link to the keeper. One per process and run.

`find` may open it before the Snapshotter exists, which then goes on with the same link: a trainer registers once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from keepstep.config import Config
from keepstep.control.client import RESTORE_S
from keepstep.control.messages import RestoreFrom, WantRestore
from keepstep.errors import ConfigError, Error
from keepstep.identity import Identity
from keepstep.trainer.connection.environment import (
    RankPlace,
    World,
    find_identity,
    find_place,
    find_settings,
    warn_about_shared_store,
)
from keepstep.trainer.connection.keeper_link import KeeperLink, RankState

log = logging.getLogger("keepstep")
_open_here: set[str] = set()
_finished_here: set[str] = set()
_found: dict[str, TrainerJob] = {}  # opened by `find`, until a Snapshotter takes them


@dataclass
class TrainerJob:
    """An open link, and what it was opened with."""

    config: Config
    place: RankPlace
    identity: Identity
    link: KeeperLink
    rank: RankState
    key: str = field(default="")

    @classmethod
    def open(cls, config: Config | None) -> TrainerJob:
        """Register with the keeper, or go on with the link that `find` has opened."""
        settings, place = find_settings(config), find_place()
        identity = find_identity(settings, place)
        key = f"{os.getpid()}:{identity.key}"
        found = _found.pop(key, None)
        if found is not None:
            if found.config == settings:
                return found
            found.link.close(finished=False)
            _open_here.discard(key)
            raise ConfigError(
                "the settings are not those that keepstep.find was called with", hint="give both the same"
            )
        warn_about_shared_store()
        if key in _open_here:
            raise ConfigError("another Snapshotter of this run is open in this process", hint="close() it first")
        if key in _finished_here and identity.outlives_launch and place.rank == 0:
            log.warning(
                "run %r has finished in this process before: after a restart its first Snapshotter would restore what "
                "this one captures. Give each part of a program a run id of its own: Config(run_id=...)",
                identity.run_id,
            )
        rank = RankState()
        job = cls(settings, place, identity, KeeperLink.for_trainer(identity, settings, place, rank), rank, key)
        job.link.connect()
        _open_here.add(key)
        return job

    @property
    def world(self) -> World | None:
        """None on a single node."""
        return World.of(self.place)

    def close(self, *, finished: bool) -> None:
        self.link.close(finished=finished)
        _open_here.discard(self.key)
        if finished and self.rank.step >= 0:
            _finished_here.add(self.key)


def find(config: Config | None = None) -> int | None:
    """The step that `restore()` will restore in this process; None on a first start.

    For programs that compute where they begin before their objects exist. Call it on every rank, with the settings that
    the Snapshotter gets. The keeper decides and verifies here, and `restore()` then gives this step.
    """
    job = TrainerJob.open(config)
    try:
        answer, fds = job.link.request(WantRestore(), RestoreFrom, timeout_s=RESTORE_S)
    except Error as error:
        job.link.report_failure(error, restoring=True)
        job.close(finished=False)
        raise
    for fd in fds:
        os.close(fd)
    _found[job.key] = job
    return answer.version.step if answer.version is not None else None
