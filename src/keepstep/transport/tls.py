"""TLS 1.3 between keepers: both sides show a certificate of the run's authority, on control and data alike.

Who a peer is comes from the handshake of `auth.py`, inside TLS and bound to it; a certificate only says that the
authority let it in. So names in certificates are not checked, and one certificate may serve all nodes.

The binding is the client's Finished message, which `ssl` hands out under its old name `tls-unique`. In TLS 1.3 it is a
MAC over the whole transcript, certificates included, with a key of this connection alone, as long as no session is
resumed: there are no tickets here. (`ssl` in Python 3.11 has no exporter.)
"""

from __future__ import annotations

import ssl

from keepstep.config import PeersConfig
from keepstep.errors import ConfigError
from keepstep.transport.connection import PeerSocket, PeerSocketError


class Tls:
    """The two contexts of a node: as the one who dials, and as the one who listens."""

    def __init__(self, config: PeersConfig) -> None:
        self._dial = _context(ssl.PROTOCOL_TLS_CLIENT, config)
        self._listen = _context(ssl.PROTOCOL_TLS_SERVER, config)
        self._listen.num_tickets = 0

    @classmethod
    def of(cls, config: PeersConfig) -> Tls | None:
        """None when TLS is off. Half of it is an error: see `config.py`."""
        files = (config.tls_cert, config.tls_key, config.tls_ca)
        if any(files) and not all(files):
            raise ConfigError("peers.tls_cert, tls_key and tls_ca go together", hint="set all three, or none")
        return cls(config) if all(files) else None

    def secure(self, wire: PeerSocket, *, server: bool, timeout_s: float) -> None:
        wire.secure(self._listen if server else self._dial, server=server, timeout_s=timeout_s)


def channel_binding(wire: PeerSocket) -> bytes:
    """What nobody else's connection has; empty without TLS."""
    if wire.tls is None:
        return b""
    binding = wire.tls.get_channel_binding("tls-unique")
    if not binding or wire.tls.version() != "TLSv1.3" or wire.tls.session_reused:
        raise PeerSocketError("this TLS connection cannot be bound to")
    return binding


def _context(kind: int, config: PeersConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # never ask a terminal
        context.load_verify_locations(config.tls_ca)
    except OSError as error:
        raise ConfigError(
            f"the TLS files of the peers cannot be used: {error}", hint="check peers.tls_cert, tls_key and tls_ca"
        ) from error
    return context
