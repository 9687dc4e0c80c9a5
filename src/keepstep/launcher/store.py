"""The rendezvous store as a process of its own, on a machine that does not fail with the job.

Whoever holds the store decides which nodes go on (attendance.py). Served by an agent it dies with that
agent's node, and the survivors stop: give all agents the address of this one instead
(`--rdzv-endpoint=HOST:PORT`, and on its own machine `--rdzv-conf is_host=0`).

It keeps nothing on disk. Restarted while a job runs it is told again by the members where the job stands.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.errors import ConfigError

OPEN_S = 30.0


def serve(address: str, port: int) -> TCPStore:
    """Serve until what is returned is dropped. `port` 0 takes a free one: see `.port` of the result."""
    try:
        listener = _listen(address, port)
        # torch's server would listen on all interfaces; given a socket it takes that one (and closes it).
        return TCPStore(
            address, listener.getsockname()[1], is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=OPEN_S), master_listen_fd=listener.detach(),
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no store can be served at {address}:{port}: {str(error).partition(chr(10))[0]}",
            hint="an address of this machine, and a port that is free",
        ) from error


def _listen(address: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, place = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(2048)
        return listener
    except BaseException:
        listener.close()
        raise
