"""Start a keeper: a clean interpreter in its own session, detached from its starter.

Invariants:
- The keeper is in no process group of the launcher: torchelastic kills the process group of a worker. And it is no
  child that the starter must reap: `python -m keepstep.keeper --detach` forks twice, and its first process exits when
  the keeper listens (exit code 0), or prints the reason to standard error.
- Trainers and launchers may start one at the same time: the keeper's own lock lets only one live.
"""

from __future__ import annotations

import os
import subprocess
import sys

from keepstep.config import Config, as_environment
from keepstep.errors import KeeperError
from keepstep.identity import Identity, ensure_private

ALREADY_RUNNING = 75
UNNAMED_LEASE_S = 60.0  # of a run without a name: no later launch can find its state
START_S = 30.0  # Deadline for a keeper that starts: a new interpreter, on a node that starts its trainers too


def lease_of(identity: Identity, config: Config) -> float:
    """How long the keeper that is started for this run keeps the state of a job without processes."""
    lease_s = config.keeper.lease_s
    return lease_s if identity.outlives_launch else min(lease_s, UNNAMED_LEASE_S)


def start_keeper(identity: Identity, config: Config) -> None:
    """Start the node's keeper unless one runs. Returns when it listens."""
    ensure_private(identity.runtime_dir)
    environ = {**os.environ, **as_environment(config)}
    environ.update(
        KEEPSTEP_RUN_ID=identity.run_id, KEEPSTEP_NODE_ID=identity.node_id,
        KEEPSTEP_RUNTIME_DIR=str(identity.runtime_dir),
    )  # fmt: skip
    if not identity.outlives_launch:
        environ["KEEPSTEP_KEEPER_LEASE_S"] = str(lease_of(identity, config))
    # A keeper is not a worker: it must not inherit the variables of one.
    for name in ("KEEPSTEP_INCARNATION", "KEEPSTEP_SOCKET", "RANK", "LOCAL_RANK"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "keepstep.keeper", "--detach"]
    try:
        result = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=START_S, start_new_session=True, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KeeperError(f"the keeper could not be started: {error}", hint="keepstep doctor") from error
    if result.returncode not in (0, ALREADY_RUNNING):
        text = result.stderr.decode(errors="replace").strip().splitlines()
        raise KeeperError(
            f"the keeper did not start: {text[-1] if text else result.returncode}", hint="keepstep doctor"
        )
