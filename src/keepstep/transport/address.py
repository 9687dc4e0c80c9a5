"""Which address peers reach this node under. Said, not guessed: the wrong network card is a classic (torchft#329)."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import socket
import struct
from pathlib import Path

from keepstep.errors import ConfigError

log = logging.getLogger("keepstep")
SIOCGIFADDR = 0x8915
ANYWHERE = "203.0.113.1"
"""an address of nobody (RFC 5737): the route to it is the default route. Nothing is sent there."""


def resolve_address(said: str, *, towards: str = "") -> str:
    """The local address that `said` means: an address, an interface, a host name; if empty, the way to `towards`."""
    if not said:
        return _source_towards(towards or ANYWHERE)
    if _is_address(said):
        return said
    if said in {name for _, name in socket.if_nameindex()}:
        found = _address_of(said)
        if not found:
            raise ConfigError(f"peers.address = {said!r}: the interface has no address", hint="name an address instead")
        return found
    try:
        return str(socket.getaddrinfo(said, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"peers.address = {said!r} is no address, interface or host name here: {error.strerror}",
            hint="interfaces: " + ", ".join(name for _, name in socket.if_nameindex()),
        ) from error


def listen_on(address: str, port: int) -> socket.socket:
    """A listening socket on that address alone: whoever cannot reach it has nothing to knock at."""
    sock = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {address} port {port}: {error.strerror}",
            hint="set KEEPSTEP_PEERS_ADDRESS to an address of this node and KEEPSTEP_PEERS_PORT to a free port or 0",
        ) from error
    return sock


def socket_towards(address: str, *, source: str) -> socket.socket:
    """A socket, not yet connected, that will leave from our own chosen address where both are of one kind."""
    family = _family(address)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if source and _family(source) == family:
            sock.bind((source, 0))
    except BaseException:
        sock.close()
        raise
    return sock


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _address_of(interface: str) -> str:
    """The first IPv4 address of an interface, else its first global IPv6 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # it has none
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        packed, _, _, scope, _, name = line.split()
        if name == interface and scope == "00":
            return str(ipaddress.IPv6Address(bytes.fromhex(packed)))
    return ""


def _source_towards(host: str) -> str:
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError as error:
        log.warning("no route to %s (%s): peers on other machines cannot reach 127.0.0.1", host, error)
        return "127.0.0.1"
