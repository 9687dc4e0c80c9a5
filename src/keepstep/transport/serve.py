"""Accepting side: the listening socket, and the server that answers a peer's requests for bytes.

Invariants:
- At most MAX_UNAUTHENTICATED connections may be unauthenticated at a time, each for the time of a handshake. When full,
  the oldest connection of the host that has the most of them is closed.
- Each connection has a thread of its own. A stream serves one request at a time.
- A request that cannot be served is refused with a reason. A malformed request closes its stream and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from keepstep.transport.connection import PeerSocket, PeerSocketError
from keepstep.transport.frames import REFUSED, REQUEST_HEAD_BYTES, SERVED, AnswerHead, PeerFrameError, RequestHead
from keepstep.transport.interface import CHECKSUM_BYTES, MAX_REASON_BYTES, Body, Refusal, TransportListener
from keepstep.transport.session import PeerSession
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.throttle import Traffic

log = logging.getLogger("keepstep")
MAX_UNAUTHENTICATED = 32
LOG_EVERY_S = 10.0  # Rejected connections are logged at most this often, so that they cannot fill the log.
POLL_S = 0.5
NO_DESCRIPTOR_S = 0.05  # Pause after a failed accept: without free descriptors the connections wait in the backlog.

ConnectionHandler = Callable[[PeerSocket, str], None]  # connection and host; owns and closes the connection


class Listener:
    """Accepts connections and runs the handler for each on a thread of its own."""

    def __init__(
        self, listening: socket.socket, handler: ConnectionHandler, threads: ThreadGroup, *, timeout_s: float
    ) -> None:
        self._listening = listening
        self._listening.setblocking(False)
        self._handler = handler
        self._threads = threads
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._unauthenticated: dict[PeerSocket, str] = {}
        self._closed = False
        self._logged_at = 0.0
        self._num_unlogged = 0

    def open(self) -> None:
        """Start to accept connections."""
        self._threads.start("listen", self._accept_all)

    def close(self) -> None:
        """End all unauthenticated connections. The accepting thread closes the listening socket itself."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for connection in self._unauthenticated:
                connection.shut()

    def authenticated(self, connection: PeerSocket) -> None:
        """This connection does not count as unauthenticated any more."""
        with self._lock:
            self._unauthenticated.pop(connection, None)

    def log_rejected(self, host: str, reason: str) -> None:
        """Count a rejected connection, and log the count now and then."""
        with self._lock:
            self._num_unlogged += 1
            if time.monotonic() - self._logged_at < LOG_EVERY_S:
                return
            count, self._num_unlogged, self._logged_at = self._num_unlogged, 0, time.monotonic()
        log.warning("%d connection(s) rejected; the last from %s: %s", count, host, reason)

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        try:
            while not self._closed:
                if poll.poll(POLL_S * 1000) and not self._closed:
                    self._accept()
        finally:
            self._listening.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closed:
                self.log_rejected("an unknown host", error.strerror or str(error))
                time.sleep(NO_DESCRIPTOR_S)
            return
        host = str(address[0])
        try:
            connection = PeerSocket(sock, timeout_s=self._timeout_s)
        except Exception as error:  # The peer has reset it already.
            sock.close()
            log.debug("a connection from %s ended at once: %s", host, error)
            return
        self._make_room()
        with self._lock:
            self._unauthenticated[connection] = host
        try:
            self._threads.start(f"accept-{host}", lambda: self._handle(connection, host))
        except RuntimeError as error:
            self.authenticated(connection)
            connection.close()
            self.log_rejected(host, str(error))

    def _handle(self, connection: PeerSocket, host: str) -> None:
        try:
            if not self._closed:
                self._handler(connection, host)
            else:
                connection.close()
        finally:
            self.authenticated(connection)

    def _make_room(self) -> None:
        """If the limit is reached, close the oldest connection of the host that has the most."""
        with self._lock:
            if len(self._unauthenticated) < MAX_UNAUTHENTICATED:
                return
            busiest = Counter(self._unauthenticated.values()).most_common(1)[0][0]
            oldest = next(connection for connection, host in self._unauthenticated.items() if host == busiest)
            del self._unauthenticated[oldest]
        oldest.shut()


class RequestServer:
    """Answers the requests of one peer on one stream, for as long as the peer's session lasts."""

    def __init__(self, session: PeerSession, listener: TransportListener, traffic: Traffic) -> None:
        self._session = session
        self._node_id = session.peer.node_id
        self._listener = listener
        self._traffic = traffic

    def run(self, connection: PeerSocket) -> None:
        """Serve until the connection cannot be used any more. Does not close it."""
        try:
            while not self._session.ended:
                connection.limit(math.inf)
                head = RequestHead.unpack(connection.read_exact(REQUEST_HEAD_BYTES))
                connection.limit(self._traffic.timeout_s)
                query = connection.read_exact(head.length)
                self._answer(connection, head, query)
        except PeerFrameError as error:
            log.warning("a stream of %s is closed: %s", self._node_id, error)
        except PeerSocketError as error:
            log.debug("a stream of %s has ended: %s", self._node_id, error.reason)

    def _answer(self, connection: PeerSocket, head: RequestHead, query: bytes) -> None:
        body, reason = self._body_for(query)
        if body is None:
            self._refuse(connection, head, reason)
            return
        try:
            if not head.fits(body.size_bytes):
                self._refuse(connection, head, f"the body has {body.size_bytes} bytes, not {head.size_bytes}")
                return
            answer = AnswerHead(head.number, SERVED, body.size_bytes, body.checksum)
            connection.write(answer.pack(), more=body.size_bytes > 0)
            self._send(connection, body)
            self._traffic.counters.add("served")
        finally:
            if body.release is not None:
                body.release()

    def _body_for(self, query: bytes) -> tuple[Body | None, str]:
        try:
            body = self._listener.serve(self._node_id, query)
        except Refusal as refusal:
            return None, str(refusal)
        except Exception as error:
            log.exception("serving %s failed", self._node_id)
            return None, f"the server failed: {type(error).__name__}"
        return body, ""

    def _refuse(self, connection: PeerSocket, head: RequestHead, reason: str) -> None:
        self._traffic.counters.add("refused")
        text = reason.encode()[:MAX_REASON_BYTES]
        connection.write(AnswerHead(head.number, REFUSED, len(text), bytes(CHECKSUM_BYTES)).pack() + text)

    def _send(self, connection: PeerSocket, body: Body) -> None:
        cap, meter = self._traffic.cap_out, self._traffic.meter_out
        data = memoryview(body.data).cast("B") if body.data is not None and body.size_bytes else memoryview(b"")
        done = 0
        while done < body.size_bytes:
            want = min(cap.slice_bytes, body.size_bytes - done)
            if not cap.take(want, lambda: self._session.ended):
                raise PeerSocketError("stopped")
            if body.data is not None:
                count = connection.write_some(data[done : done + want])
            else:
                count = connection.write_file(body.fd, body.offset + done, want)
            cap.give_back(want - count)
            meter.add(count)
            done += count
