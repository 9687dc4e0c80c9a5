"""The rendezvous store as a process of its own, on a machine that does not fail with the job.

The side of a network split that reaches the store goes on, the other one stops (agent.py). A store that an agent serves
dies with that agent's node, and the survivors stop. So give all agents the address of this one instead
(`--rdzv-endpoint=HOST:PORT`, and on its own machine `--rdzv-conf is_host=0`).

Nothing is kept on disk. When the store restarts while a job runs, the members write the state of the round again.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.errors import ConfigError

OPEN_S = 30.0


def serve(address: str, port: int) -> TCPStore:
    """Serve for as long as the result is referenced. `port` 0 takes a free one: see `.port` of the result."""
    try:
        listener = _listen(address, port)
        # torch's server would listen on all interfaces. Given a socket it uses that one, and closes it.
        return TCPStore(
            address, listener.getsockname()[1], is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=OPEN_S), master_listen_fd=listener.detach(),
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no store can be served at {address}:{port}: {str(error).partition(chr(10))[0]}",
            hint="give an address of this machine and a free port",
        ) from error


def _listen(address: str, port: int) -> socket.socket:
    infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, socket_address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        listener.listen(2048)
        return listener
    except BaseException:
        listener.close()
        raise
