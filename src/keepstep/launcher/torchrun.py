"""Entry point of `torchrun --rdzv-backend=keepstep`: checks of the arguments, and the defaults of `keepstep run`.

torch loads the entry point in every process that imports its rendezvous, chosen or not: importing this module imports
no torch and has no effect. `create` is called in the agent's process only.
"""

from __future__ import annotations

import os
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.config import Config, resolve
from keepstep.control.membership import check_losses
from keepstep.errors import ConfigError
from keepstep.identity import NO_ID, Identity, identify

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "keepstep"
LOCAL_ENDPOINT = "localhost:0"
MAX_RESTARTS = 1_000_000  # keepstep has a limit of its own: launch.restarts within an hour.


def get_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous handler. Called by torchrun when this backend was chosen."""
    from keepstep.launcher.rendezvous import KeepstepRendezvous

    config = resolve()
    identity = _identify(config, params.run_id)
    if params.max_nodes > 1 and _max_restarts() == 0:
        raise ConfigError(
            "--max-restarts=0 (torchrun's default) ends the job when a node is lost: "
            "the workers on the other nodes fail, and a failure needs a restart",
            hint=f"--max-restarts={MAX_RESTARTS}, or keepstep run, which sets it",
        )
    if params.max_nodes > 1:  # Every possible round must bear the losses, except that of one node.
        check_losses(config.parity.losses, max(params.min_nodes, 2))
    if params.get("store_type", "tcp").strip().lower() != "tcp":
        raise ConfigError("rounds of keepstep need a TCP store", hint="--rdzv-conf without store_type")
    if params.max_nodes == 1 and not params.endpoint:
        params.endpoint = LOCAL_ENDPOINT  # torch's default port is the same for all jobs of a machine.
    return KeepstepRendezvous(params, identity=identity, config=config)


def _identify(config: Config, rendezvous_id: str) -> Identity:
    if not config.run_id and rendezvous_id in NO_ID:
        raise ConfigError(
            "this job has no run id, and its state must not be mixed with another job's", hint="set --rdzv-id=<a name>"
        )
    return identify(config, environ={**os.environ, "TORCHELASTIC_RUN_ID": rendezvous_id})


def _max_restarts() -> int | None:
    """The value given to torchrun; None when this process is another launcher."""
    program = Path(sys.argv[0])
    if program.name != "torchrun" and program.parts[-3:] != ("torch", "distributed", "run.py"):
        return None
    from torch.distributed.run import get_args_parser

    return int(get_args_parser().parse_args(sys.argv[1:]).max_restarts)


def torchrun_arguments(arguments: list[str]) -> list[str]:
    """torchrun's arguments, with keepstep's defaults in front for what neither they nor PET_* set.

    torchrun's own parser reads them, so that every spelling that it accepts works here too. Malformed arguments end the
    process with its usage message. The script and its arguments are not changed.
    """
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()
    parser.set_defaults(rdzv_backend=None, rdzv_endpoint=None, rdzv_id=None, max_restarts=None)
    given = parser.parse_args(arguments)
    one_node = parse_min_max_nnodes(given.nnodes)[1] == 1
    if _choice(given, "rdzv_backend") not in (None, BACKEND):
        return arguments  # Another rendezvous: keepstep's limit on restarts does not apply there.
    if given.standalone:  # torchrun would replace our backend and run id by its own.
        options = len(arguments) - 1 - len(given.training_script_args)
        arguments = [a for a in arguments[:options] if not a.startswith("--stan")] + arguments[options:]
    defaults = {"rdzv_backend": BACKEND, "max_restarts": str(MAX_RESTARTS)}
    run_id = os.environ.get("KEEPSTEP_RUN_ID", "")
    if one_node:
        defaults["rdzv_endpoint"] = LOCAL_ENDPOINT
        run_id = run_id or f"launch-{uuid.uuid4().hex}"
    if run_id:
        defaults["rdzv_id"] = run_id
    missing = {name: value for name, value in defaults.items() if _choice(given, name) is None}
    return [f"--{name.replace('_', '-')}={value}" for name, value in missing.items()] + arguments


def _choice(given: Namespace, name: str) -> object:
    """The argument, else the variable that torchrun reads, else None."""
    argument = getattr(given, name)
    return os.environ.get(f"PET_{name.upper()}") if argument is None else argument
