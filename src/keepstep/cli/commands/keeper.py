"""`keepstep keeper`: this node's keeper in the foreground, for systemd, a sidecar or a DaemonSet.

Logs JSON lines to standard error. SIGTERM and SIGINT end it and free the state. All settings but the run,
the node and the directory come from KEEPSTEP_KEEPER_* or keepstep.toml, as for any keeper.
"""

from __future__ import annotations

import argparse

from keepstep.cli.keepers import add_choice, settings
from keepstep.errors import ConfigError, KeeperError
from keepstep.identity import identify
from keepstep.keeper.__main__ import serve
from keepstep.keeper.singleton import AlreadyRunningError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    identity = identify(config)
    if not identity.outlives_launch:
        raise ConfigError("the keeper has no run id", hint="keepstep keeper --run-id NAME, the job's --rdzv-id")
    try:
        serve(identity, config)
    except AlreadyRunningError as error:
        raise KeeperError(
            f"a keeper serves run {identity.run_id!r} on node {identity.node_id!r} already",
            hint=f"keepstep status --run-id {identity.run_id}; keepstep release --run-id {identity.run_id} ends it",
        ) from error
    return 0
