"""The rendezvous store: opened by the agent that hosts it, or as a process of its own (`keepstep store`).

The side of a network split that reaches the store goes on, the other one stops (agent.py). A store that an agent serves
dies with that agent's node, and the survivors stop. So give all agents the address of a store elsewhere instead
(`--rdzv-endpoint=HOST:PORT`, and on its own machine `--rdzv-conf is_host=0`).

torch's server would listen on all interfaces. A store of keepstep listens on one address, where the name that the
others were given leads to one. Nothing is kept on disk. When the store restarts while a job runs, the members write
the state of the round again.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.errors import ConfigError

OPEN_S = 30.0
ANY_ADDRESS = ""

log = logging.getLogger("keepstep.launcher")


class PortTakenError(ConfigError):
    """Another process listens on the port."""


def serve(address: str, port: int, *, timeout_s: float = OPEN_S) -> TCPStore:
    """Serve for as long as the result is referenced. `port` 0 takes a free one: see `.port` of the result."""
    try:
        listener = _listen(address, port)
        # Given a socket, torch's server uses that one, and closes it.
        return TCPStore(
            address, listener.getsockname()[1], is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach(),
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise (PortTakenError if taken else ConfigError)(
            f"no store can be served at {address}:{port}: {str(error).partition(chr(10))[0]}",
            hint="give an address of this machine and a free port",
        ) from error


def serve_as(host: str, port: int, *, timeout_s: float, one_node: bool) -> TCPStore:
    """Serve under the name or address by which other agents reach this machine, on one address if it can be found."""
    address = _address_to_listen_on(host, one_node=one_node)
    if address != ANY_ADDRESS:
        return serve(address, port, timeout_s=timeout_s)
    log.warning(
        "the rendezvous store listens on all interfaces: %s is no address of one interface of this machine "
        "(give an IP address instead)", host,
    )  # fmt: skip
    try:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        kind = PortTakenError if "EADDRINUSE" in reason else ConfigError
        raise kind(f"no store can be served at {host}:{port}: {reason}", hint="give a free port") from error


def is_own(host: str) -> bool:
    """Whether a name or address leads to this machine."""
    return host in (socket.gethostname(), socket.getfqdn()) or any(_is_local(address) for address in _resolve(host))


def _address_to_listen_on(host: str, *, one_node: bool) -> str:
    addresses = [address for address in _resolve(host) if _is_local(address)]
    if one_node or host == "localhost" or _is_address(host):
        return addresses[0] if addresses else ANY_ADDRESS
    # In /etc/hosts a machine's own name often is a loopback address, where no other machine reaches it.
    reachable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return reachable[0] if reachable else ANY_ADDRESS


def _resolve(host: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    infos.sort(key=lambda info: info[0] != socket.AF_INET)  # torch's client tries both.
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


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
