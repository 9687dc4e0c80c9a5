"""One control connection that is up: its keys, what waits to be sent on it, and the streams that depend on it."""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque

from keepstep import faults
from keepstep.transport.connection import PeerSocket
from keepstep.transport.frames import HEARTBEAT, MESSAGE, FrameSigner, FrameVerifier
from keepstep.transport.handshake import Handshake
from keepstep.transport.interface import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, MAX_STREAMS, Peer
from keepstep.transport.streams import FetchStreams

READ_BYTES = 256 << 10
READS_A_TURN = 16
"""a peer that sends without end must not keep the others from being heard"""
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class PeerSession:
    """Read and flushed by the control thread alone; `send` may be called by anybody."""

    def __init__(self, wire: PeerSocket, agreement: Handshake, *, dialled: bool) -> None:
        self.peer: Peer = agreement.peer
        self.dialled = dialled
        self.ident, self.key, from_dialer, from_listener = agreement.keys()
        self.wire = wire
        self.streams: FetchStreams | None = None
        self.why = ""
        """why it has ended; empty while it has not"""
        self.handed_over = False
        """the handshake is through and the control thread has the connection; under the lock of `Links`"""
        self.heard_at = self.spoke_at = time.monotonic()
        self._sealer = FrameSigner(from_dialer if dialled else from_listener)
        self._opener = FrameVerifier(from_listener if dialled else from_dialer)
        self._lock = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._guests: set[PeerSocket] = set()

    @property
    def wants_to_send(self) -> bool:
        return bool(self._queue)

    def is_of(self, peer: Peer) -> bool:
        return (self.peer.node_id, self.peer.instance) == (peer.node_id, peer.instance)

    def send(self, kind: int, body: bytes = b"") -> bool:
        """Queue a frame. False: the queue is full, or the session has ended."""
        with self._lock:
            full = self._queued_bytes + len(body) > MAX_QUEUED_BYTES or len(self._queue) >= MAX_QUEUED_MESSAGES
            if self.why or (full and kind == MESSAGE):
                return False
            if kind == HEARTBEAT and self._queue:
                return True  # whoever does not read what waits will not read this
            frame = memoryview(self._sealer.seal(kind, body))
            self._queue.append(frame)
            self._queued_bytes += len(frame)
            return True

    def flush(self) -> None:
        """Send what the connection takes now. Raises OSError when it takes nothing any more."""
        while self._queue:
            with self._lock:
                frame = self._queue[0]
            try:
                faults.point("peers.control.send")
                sent = self.wire.sock.send(frame)
            except _NOT_NOW:
                return
            with self._lock:
                self._queued_bytes -= sent
                if sent < len(frame):
                    self._queue[0] = frame[sent:]
                else:
                    self._queue.popleft()
            self.spoke_at = time.monotonic()

    def read(self) -> list[tuple[int, bytes]]:
        """Frames that have arrived. Raises OSError or FrameError when nothing more can come."""
        frames: list[tuple[int, bytes]] = []
        for _ in range(READS_A_TURN):
            try:
                faults.point("peers.control.receive")
                data = self.wire.sock.recv(READ_BYTES)
            except _NOT_NOW:
                return frames
            except OSError as error:
                data, why = b"", error.strerror or str(error)
            else:
                why = "the peer closed the connection"
            if not data:
                if frames:
                    return frames  # its last words first; the next look finds the end again
                raise ConnectionError(why)
            self.heard_at = time.monotonic()
            frames += self._opener.feed(data)
        return frames

    def admit(self, wire: PeerSocket) -> bool:
        """A data connection of this peer. False: the session has ended, or there are too many."""
        with self._lock:
            if self.why or len(self._guests) >= MAX_STREAMS:
                return False
            self._guests.add(wire)
            return True

    def leave(self, wire: PeerSocket) -> None:
        with self._lock:
            self._guests.discard(wire)

    def end(self, why: str) -> None:
        """By anybody. The control thread closes the connection when it finds out."""
        with self._lock:
            if self.why:
                return
            self.why = why
            guests = list(self._guests)
        self.wire.shut()
        for wire in guests:
            wire.shut()
        if self.streams is not None:
            self.streams.end(f"the link is down: {why}")
