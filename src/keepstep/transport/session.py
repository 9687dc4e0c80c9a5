"""One control connection that is up: its keys, the messages queued on it, and the streams that depend on it; and the
link to a peer, which may have one.

Invariants:
- Only the control thread (links.py) reads and flushes; any thread may queue messages.
- A session ends once. Its connection and all its streams, in both directions, end with it.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass

from keepstep import faults
from keepstep.transport.connection import PeerSocket
from keepstep.transport.fetch import FetchStreams, StreamDialer
from keepstep.transport.frames import HEARTBEAT, MESSAGE, FrameSigner, FrameVerifier
from keepstep.transport.handshake import SessionKeys
from keepstep.transport.interface import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, MAX_STREAMS, Peer
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.throttle import Traffic

FIRST_RETRY_S = 0.05  # before a lost link is dialled again
READ_BYTES = 256 << 10
READS_PER_TURN = 16  # So that a peer that sends without end does not delay the others.
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class PeerSession:
    """The link to one peer, from the end of the handshake on."""

    def __init__(
        self,
        connection: PeerSocket,
        keys: SessionKeys,
        *,
        dialled: bool,
        dialer: StreamDialer,
        traffic: Traffic,
        threads: ThreadGroup,
    ) -> None:
        """`dialled`: whether this side made the connection."""
        self.connection = connection
        self.keys = keys
        self.dialled = dialled
        self.streams = FetchStreams(keys, dialer, traffic, threads)
        self.end_reason = ""
        # The handshake is complete and the control thread owns the connection. Guarded by the lock of PeerLinks.
        self.handed_over = False
        self.received_at = self.sent_at = time.monotonic()
        self._signer = FrameSigner(keys.from_dialer if dialled else keys.from_listener)
        self._verifier = FrameVerifier(keys.from_listener if dialled else keys.from_dialer)
        self._lock = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._served_streams: set[PeerSocket] = set()
        self.invalid_messages = 0

    @property
    def peer(self) -> Peer:
        return self.keys.peer

    @property
    def ended(self) -> bool:
        return bool(self.end_reason)

    @property
    def wants_to_send(self) -> bool:
        return bool(self._queue)

    def is_of(self, peer: Peer) -> bool:
        return (self.peer.node_id, self.peer.instance) == (peer.node_id, peer.instance)

    def send(self, kind: int, body: bytes = b"") -> bool:
        """Queue a frame. False: the queue is full, or the session has ended."""
        with self._lock:
            full = self._queued_bytes + len(body) > MAX_QUEUED_BYTES or len(self._queue) >= MAX_QUEUED_MESSAGES
            if self.ended or (full and kind == MESSAGE):
                return False
            if kind == HEARTBEAT and self._queue:
                return True  # The frames that wait already are as good as a heartbeat.
            frame = memoryview(self._signer.seal(kind, body))
            self._queue.append(frame)
            self._queued_bytes += len(frame)
            return True

    def flush(self) -> None:
        """Send as much as the connection accepts now. Raises OSError when the connection is broken."""
        while self._queue:
            with self._lock:
                frame = self._queue[0]
            try:
                faults.point("peers.control.send")
                sent = self.connection.sock.send(frame)
            except _WOULD_BLOCK:
                return
            with self._lock:
                self._queued_bytes -= sent
                if sent < len(frame):
                    self._queue[0] = frame[sent:]
                else:
                    self._queue.popleft()
            self.sent_at = time.monotonic()

    def read(self) -> list[tuple[int, bytes]]:
        """Frames that have arrived. Raises OSError or PeerFrameError when nothing more can be received."""
        frames: list[tuple[int, bytes]] = []
        for _ in range(READS_PER_TURN):
            try:
                faults.point("peers.control.receive")
                data = self.connection.sock.recv(READ_BYTES)
            except _WOULD_BLOCK:
                return frames
            except OSError as error:
                data, reason = b"", error.strerror or str(error)
            else:
                reason = "the peer closed the connection"
            if not data:
                if frames:
                    return frames  # The next read meets the end again.
                raise ConnectionError(reason)
            self.received_at = time.monotonic()
            frames += self._verifier.feed(data)
        return frames

    def add_served_stream(self, connection: PeerSocket) -> bool:
        """Register a data connection of this peer. False: the session has ended, or the peer has too many."""
        with self._lock:
            if self.ended or len(self._served_streams) >= MAX_STREAMS:
                return False
            self._served_streams.add(connection)
            return True

    def remove_served_stream(self, connection: PeerSocket) -> None:
        with self._lock:
            self._served_streams.discard(connection)

    def end(self, reason: str) -> None:
        """End the session, from any thread. The control thread closes the connection later."""
        with self._lock:
            if self.ended:
                return
            self.end_reason = reason
            streams = list(self._served_streams)
        self.connection.shut()
        for stream in streams:
            stream.shut()
        self.streams.end(f"the link is down: {reason}")


@dataclass
class LinkState:
    """The link to a peer, up or not."""

    peer: Peer
    dial_at: float
    named: Peer | None  # by `set_peers`. While another instance is linked under this name, that one is `peer`.
    session: PeerSession | None = None
    dialling: bool = False
    retry_s: float = FIRST_RETRY_S
    was_linked: bool = False
    last_error: str = ""
