"""One connection to a peer: exact reads and writes, each with a deadline, over plain TCP or TLS 1.3.

Invariants:
- One thread at a time reads and writes a PeerSocket. Any thread may call `shut`, which wakes that one; only the owner
  calls `close`, so that a descriptor number is never reused while a thread still uses it.
- Deadlines of plain sockets are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): no poll before a call, and MSG_WAITALL works.
- With TLS both sides show a certificate of the run's authority. It only shows that the authority admits the holder:
  names in it are not checked, and one certificate may serve all nodes. handshake.py identifies the peer, inside TLS
  and bound to it (see `channel_binding`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import ssl
import struct
import threading
import time

from keepstep import faults
from keepstep.config import PeersConfig
from keepstep.errors import ConfigError

log = logging.getLogger("keepstep.keeper")
SHORTEST_S = 0.001
TLS_SLICE_BYTES = 256 << 10


class PeerSocketError(Exception):
    """The connection cannot be used any more."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.timed_out = timed_out


class PeerSocket:
    """A socket that its owner reads and writes with deadlines."""

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._closed = False
        self._limit_s = -1.0
        self.tls: ssl.SSLSocket | None = None
        _set_options(sock, timeout_s)
        self.limit(timeout_s)

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def connect(self, address: tuple[str, int], *, timeout_s: float) -> None:
        """Connect a new socket. `shut` stops this too."""
        try:
            self._sock.settimeout(max(timeout_s, SHORTEST_S))
            self._sock.connect(address)
        except OSError as error:
            raise PeerSocketError(f"cannot connect: {error.strerror or error}") from None
        self._limit_s = -1.0

    def secure(self, context: ssl.SSLContext, *, server: bool, timeout_s: float) -> None:
        """Run the TLS handshake and use TLS from here on."""
        try:
            with self._lock:
                if self._closed:
                    raise PeerSocketError("closed")
                self._sock.settimeout(timeout_s)
                self._sock = self.tls = context.wrap_socket(
                    self._sock, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=True
                )
            self.tls.do_handshake()
        except OSError as error:
            raise _socket_error(error) from None
        self._limit_s = -1.0

    def limit(self, seconds: float) -> None:
        """Fail reads and writes that move no byte for longer than this (math.inf: only `shut` ends them)."""
        seconds = max(seconds, SHORTEST_S)
        forever = seconds == math.inf
        if seconds == self._limit_s:
            return
        self._limit_s = seconds
        try:
            if self.tls is not None:
                self._sock.settimeout(None if forever else seconds)
                return
            self._sock.settimeout(None)
            interval = struct.pack("ll", 0, 0) if forever else struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        except OSError as error:
            raise _socket_error(error) from None

    def read_some(self, view: memoryview, *, fill: bool = True) -> int:
        """Read at least one byte; with `fill`, as many as fit and arrive in time."""
        try:
            faults.point("peers.receive")
            if self.tls is not None:
                count = self.tls.recv_into(view[:TLS_SLICE_BYTES])
            else:
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL if fill else 0)
        except OSError as error:
            raise _socket_error(error) from None
        if count == 0:
            raise PeerSocketError("the peer closed the connection")
        return count

    def read_exact(self, size_bytes: int, *, deadline: float | None = None) -> bytes:
        """Read exactly this many bytes: heads, handshakes, requests."""
        data = bytearray(size_bytes)
        view = memoryview(data)
        done = 0
        while done < size_bytes:
            if deadline is not None:
                self.limit(_remaining_s(deadline))
            done += self.read_some(view[done:])
        return bytes(data)

    def write(self, data: bytes | memoryview, *, more: bool = False, deadline: float | None = None) -> None:
        """Write all of it. `more`: another write follows at once, so both may share a segment."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            if deadline is not None:
                self.limit(_remaining_s(deadline))
            view = view[self.write_some(view, more=more) :]

    def write_some(self, view: memoryview, *, more: bool = False) -> int:
        try:
            faults.point("peers.send")
            if self.tls is not None:
                return self.tls.send(view[:TLS_SLICE_BYTES])
            return self._sock.send(view, socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0))
        except OSError as error:
            raise _socket_error(error) from None

    def write_file(self, fd: int, offset: int, size_bytes: int) -> int:
        """Write some bytes of a file without copying them into this process. TLS needs the copy, to encrypt it."""
        try:
            faults.point("peers.sendfile")
            if self.tls is not None:
                data = os.pread(fd, min(size_bytes, TLS_SLICE_BYTES), offset)
                count = self.tls.send(data) if data else 0
            else:
                count = os.sendfile(self._sock.fileno(), fd, offset, size_bytes)
        except OSError as error:
            raise _socket_error(error) from None
        if count == 0:
            raise PeerSocketError("the served file ended early")
        return count

    def shut(self) -> None:
        """Stop all reads and writes: a thread that waits in one gets PeerSocketError."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown, which removes the TLS object under the thread that uses it.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):
                self._sock.close()


class Tls:
    """TLS contexts of a node: one for the connections it makes, one for those it accepts."""

    def __init__(self, config: PeersConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._changed_at = _changed_at(config)
        self._dial, self._listen = _contexts(config)

    @classmethod
    def of(cls, config: PeersConfig) -> Tls | None:
        """None when TLS is off. Setting some of the files but not all is an error."""
        files = (config.tls_cert, config.tls_key, config.tls_ca)
        if any(files) and not all(files):
            raise ConfigError("peers.tls_cert, tls_key and tls_ca go together", hint="set all three, or none")
        return cls(config) if all(files) else None

    def secure(self, connection: PeerSocket, *, server: bool, timeout_s: float) -> None:
        """Make this connection a TLS connection, by the files as they are now."""
        self._reload()
        connection.secure(self._listen if server else self._dial, server=server, timeout_s=timeout_s)

    def _reload(self) -> None:
        """Take up certificates that were renewed. Files that cannot be used leave the last ones in force."""
        with self._lock:
            changed_at = _changed_at(self._config)
            if changed_at == self._changed_at:
                return
            self._changed_at = changed_at
            try:
                self._dial, self._listen = _contexts(self._config)
            except ConfigError as error:
                log.warning("renewed TLS files are not used: %s", error)
            else:
                log.info("renewed TLS files are used")


def channel_binding(connection: PeerSocket) -> bytes:
    """A value unique to this TLS connection, for the handshake; empty without TLS.

    The client's Finished message, which `ssl` offers under its old name `tls-unique`. In TLS 1.3 it is a MAC over the
    whole transcript, certificates included, with a key of this connection alone, as long as no session is resumed:
    there are no tickets here. (`ssl` in Python 3.11 has no exporter.)
    """
    if connection.tls is None:
        return b""
    binding = connection.tls.get_channel_binding("tls-unique")
    if not binding or connection.tls.version() != "TLSv1.3" or connection.tls.session_reused:
        raise PeerSocketError("this TLS connection has no unique channel binding")
    return binding


def _changed_at(config: PeersConfig) -> tuple[int, ...]:
    """When each of the TLS files was written; 0 for one that is not there."""
    times = []
    for path in (config.tls_cert, config.tls_key, config.tls_ca):
        try:
            times.append(os.stat(path).st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def _contexts(config: PeersConfig) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    dial, listen = _context(ssl.PROTOCOL_TLS_CLIENT, config), _context(ssl.PROTOCOL_TLS_SERVER, config)
    listen.num_tickets = 0
    return dial, listen


def _context(kind: int, config: PeersConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # Never prompt on a terminal.
        context.load_verify_locations(config.tls_ca)
    except OSError as error:
        raise ConfigError(
            f"the TLS files of the peers cannot be used: {error}", hint="check peers.tls_cert, tls_key and tls_ca"
        ) from error
    return context


def _remaining_s(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise PeerSocketError("the deadline has passed", timed_out=True)
    return remaining


def _socket_error(error: OSError) -> PeerSocketError:
    if isinstance(error, TimeoutError | BlockingIOError | ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return PeerSocketError("no byte moved in time", timed_out=True)
    if isinstance(error, ssl.SSLError):
        return PeerSocketError(f"TLS: {error.reason or error}")
    return PeerSocketError(error.strerror or str(error))


def _set_options(sock: socket.socket, timeout_s: float) -> None:
    # Buffer sizes are left to the kernel: 1 and 4 MiB gained nothing here, and a fixed size disables auto-tuning.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(timeout_s / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
