"""The address where peers reach this node.

Configured rather than guessed where a node has several networks: the wrong one is a common failure (torchft#329).
"""

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
UNUSED_ADDRESS = "203.0.113.1"  # Reserved (RFC 5737): the route to it is the default route. Nothing is sent there.


def resolve_address(configured: str, *, towards: str = "") -> str:
    """The local address of an address, interface or host name; if empty, the source of the route to `towards`."""
    if not configured:
        return _source_towards(towards or UNUSED_ADDRESS)
    if _is_address(configured):
        return configured
    if configured in {name for _, name in socket.if_nameindex()}:
        address = _address_of(configured)
        if not address:
            raise ConfigError(
                f"peers.address = {configured!r}: the interface has no address", hint="set an IP address instead"
            )
        return address
    try:
        return str(socket.getaddrinfo(configured, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"peers.address = {configured!r} is no address, interface or host name here: {error.strerror}",
            hint="interfaces: " + ", ".join(name for _, name in socket.if_nameindex()),
        ) from error


def listen_on(address: str, port: int) -> socket.socket:
    """A listening socket on that address alone, so that other networks of the node cannot connect."""
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
    """A socket for a connection to `address`, bound to `source` if both are of one family. Not connected yet."""
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
            pass  # It has no IPv4 address.
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
