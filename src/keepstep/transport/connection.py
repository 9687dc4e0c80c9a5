"""One connection: exact reads and writes, each with a deadline, over plain TCP or TLS.

One thread at a time uses a wire. `shut` may be called by any thread and wakes that one up; only the user closes, so
a descriptor number is never somebody else's by the time it is used.

Deadlines of plain sockets are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): no poll before a call, and MSG_WAITALL works.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import ssl
import struct
import threading
import time

from keepstep import faults

SHORTEST_S = 0.001
TLS_PIECE_BYTES = 256 << 10


class PeerSocketError(Exception):
    """The connection is of no more use."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.timed_out = timed_out


class PeerSocket:
    """A connected socket that its owner reads and writes with deadlines."""

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._closed = False
        self._limit_s = -1.0
        self.tls: ssl.SSLSocket | None = None
        _tune(sock, timeout_s)
        self.limit(timeout_s)

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def connect(self, address: tuple[str, int], *, timeout_s: float) -> None:
        """For a socket that is not connected yet, so that `shut` can stop this too."""
        try:
            self._sock.settimeout(max(timeout_s, SHORTEST_S))
            self._sock.connect(address)
        except OSError as error:
            raise PeerSocketError(f"cannot connect: {error.strerror or error}") from None
        self._limit_s = -1.0

    def secure(self, context: ssl.SSLContext, *, server: bool, timeout_s: float) -> None:
        """Speak TLS from here on."""
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
            raise _failed(error) from None
        self._limit_s = -1.0

    def limit(self, seconds: float) -> None:
        """No read or write may move nothing for longer than this (math.inf: for ever, until `shut`)."""
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
            raise _failed(error) from None

    def read_some(self, view: memoryview, *, fill: bool = True) -> int:
        """At least one byte, as many as fit if `fill` and they come in time."""
        try:
            faults.point("peers.receive")
            if self.tls is not None:
                count = self.tls.recv_into(view[:TLS_PIECE_BYTES])
            else:
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL if fill else 0)
        except OSError as error:
            raise _failed(error) from None
        if count == 0:
            raise PeerSocketError("the peer closed the connection")
        return count

    def read_exact(self, size_bytes: int, *, deadline: float | None = None) -> bytes:
        """For small things: heads, handshakes, requests."""
        data = bytearray(size_bytes)
        view = memoryview(data)
        done = 0
        while done < size_bytes:
            if deadline is not None:
                self.limit(_until(deadline))
            done += self.read_some(view[done:])
        return bytes(data)

    def write(self, data: bytes | memoryview, *, more: bool = False, deadline: float | None = None) -> None:
        """All of it. `more`: something follows at once, so it can share a segment."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            if deadline is not None:
                self.limit(_until(deadline))
            view = view[self.write_some(view, more=more) :]

    def write_some(self, view: memoryview, *, more: bool = False) -> int:
        try:
            faults.point("peers.send")
            if self.tls is not None:
                return self.tls.send(view[:TLS_PIECE_BYTES])
            return self._sock.send(view, socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0))
        except OSError as error:
            raise _failed(error) from None

    def write_file(self, fd: int, offset: int, size_bytes: int) -> int:
        """Some of a file, without a copy in this process. Under TLS the bytes must pass through it, to be encrypted."""
        try:
            faults.point("peers.sendfile")
            if self.tls is not None:
                piece = os.pread(fd, min(size_bytes, TLS_PIECE_BYTES), offset)
                count = self.tls.send(piece) if piece else 0
            else:
                count = os.sendfile(self._sock.fileno(), fd, offset, size_bytes)
        except OSError as error:
            raise _failed(error) from None
        if count == 0:
            raise PeerSocketError("the file that is served ended early")
        return count

    def shut(self) -> None:
        """Nothing moves any more. Whoever waits in a read or write finds out now."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown: that one takes the TLS object away under the thread that uses it.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):
                self._sock.close()


def _until(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise PeerSocketError("took too long", timed_out=True)
    return remaining


def _failed(error: OSError) -> PeerSocketError:
    if isinstance(error, TimeoutError | BlockingIOError | ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return PeerSocketError("nothing moved in time", timed_out=True)
    if isinstance(error, ssl.SSLError):
        return PeerSocketError(f"TLS: {error.reason or error}")
    return PeerSocketError(error.strerror or str(error))


def _tune(sock: socket.socket, timeout_s: float) -> None:
    """Buffer sizes are left to the kernel: 1 and 4 MiB gained nothing here, and a fixed size ends its own tuning."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(timeout_s / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
