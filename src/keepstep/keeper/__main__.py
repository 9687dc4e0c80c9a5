"""`python -m keepstep.keeper [--detach]`: run this node's keeper, settings from the environment.

With --detach the first process exits when the keeper listens (0), when one runs already (75), or with the reason on
standard error (1). The keeper itself has no terminal, no parent and no open pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from keepstep.config import Config, resolve
from keepstep.control.spawn import ALREADY_RUNNING
from keepstep.errors import Error
from keepstep.identity import Identity, identify
from keepstep.keeper.log_file import log_to
from keepstep.keeper.process import Keeper
from keepstep.keeper.singleton import AlreadyRunningError

# Killing the keeper would free nothing while trainers hold the memory: ask the OOM killer to choose others first.
OOM_SCORE = "-500"


def main(arguments: list[str]) -> int:
    try:
        config = resolve()
        identity = identify(config)
        if "--detach" in arguments:
            return _detach(identity, config)
        serve(identity, config)
    except AlreadyRunningError as error:
        print(error, file=sys.stderr)
        return ALREADY_RUNNING
    except Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def serve(identity: Identity, config: Config) -> None:
    """In the foreground, before the job: systemd, a sidecar. Waits for its first trainer without a limit."""
    keeper = Keeper(identity, config, sidecar=True)
    log_to(None)
    _avoid_oom_killer()
    keeper.run()


def _avoid_oom_killer() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def _detach(identity: Identity, config: Config) -> int:
    """Fork twice; the keeper reports to the first process through a pipe whether it started."""
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = pipe.read()
        if answer == "ok":
            os._exit(0)  # who started the keeper waits for this: nothing here needs an orderly end
        code, _, text = answer.partition(" ")
        print(text or "the keeper died while it started", file=sys.stderr)
        return int(code) if code.isdigit() else 1
    os.close(read)
    os.setsid()
    if os.fork():
        os._exit(0)
    _serve_detached(identity, config, write)
    os._exit(0)


def _serve_detached(identity: Identity, config: Config, write: int) -> None:
    try:
        keeper = Keeper(identity, config)
        _close_standard_streams()
        log_to(Path(config.keeper.log_file) if config.keeper.log_file else identity.directory / "keeper.log")
        _avoid_oom_killer()
    except AlreadyRunningError as error:
        os.write(write, f"{ALREADY_RUNNING} {error}".encode())
        os._exit(ALREADY_RUNNING)
    except BaseException as error:
        os.write(write, f"1 {error}".encode())
        os._exit(1)
    os.write(write, b"ok")
    os.close(write)
    try:
        keeper.run()
    except BaseException:
        logging.getLogger("keepstep.keeper").exception("the keeper failed")
        os._exit(1)


def _close_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
