"""The listening socket. Strangers wait in a small room, for a short time, and the greedy leave first."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from keepstep.transport.connection import PeerSocket
from keepstep.transport.threads import ThreadGroup

log = logging.getLogger("keepstep")
MAX_UNAUTHENTICATED = 32
"""connections that have not proved themselves yet, at once"""
LOG_EVERY_S = 10.0
LOOK_S = 0.5

Greet = Callable[[PeerSocket, str, Callable[[], None]], None]
"""connection, address, and what to call once the peer has proved itself; owns and closes the connection"""


class Listener:
    """Accepts and hands each connection to `greet` on a thread of its own."""

    def __init__(self, listener: socket.socket, greet: Greet, crew: ThreadGroup, *, timeout_s: float) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._greet = greet
        self._crew = crew
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._waiting: dict[PeerSocket, str] = {}
        self._closed = False
        self._logged_at = 0.0
        self._num_quiet = 0

    def open(self) -> None:
        self._crew.start("door", self._accept)

    def close(self) -> None:
        """The accepting thread closes the socket; nobody else may use its number."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for wire in self._waiting:
                wire.shut()

    def turned_away(self, address: str, reason: str) -> None:
        """One line every ten seconds at most: strangers do not fill the log."""
        with self._lock:
            self._num_quiet += 1
            if time.monotonic() - self._logged_at < LOG_EVERY_S:
                return
            count, self._num_quiet, self._logged_at = self._num_quiet, 0, time.monotonic()
        log.warning("%d connection(s) turned away; the last from %s: %s", count, address, reason)

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        try:
            while not self._closed:
                if poll.poll(LOOK_S * 1000) and not self._closed:
                    self._take_one()
        finally:
            self._listener.close()

    def _take_one(self) -> None:
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closed:
                self.turned_away("somebody", error.strerror or str(error))
                time.sleep(0.05)  # no descriptors left: the queue of the listening socket waits
            return
        host = str(address[0])
        try:
            wire = PeerSocket(sock, timeout_s=self._timeout_s)
        except Exception as error:  # reset before we looked
            sock.close()
            log.debug("a connection from %s ended at once: %s", host, error)
            return
        self._make_room()
        with self._lock:
            self._waiting[wire] = host
        try:
            self._crew.start(f"greet-{host}", lambda: self._run(wire, host))
        except RuntimeError as error:
            self._leave(wire)
            wire.close()
            self.turned_away(host, str(error))

    def _run(self, wire: PeerSocket, host: str) -> None:
        try:
            if not self._closed:
                self._greet(wire, host, lambda: self._leave(wire))
            else:
                wire.close()
        finally:
            self._leave(wire)

    def _make_room(self) -> None:
        """When the room is full, the oldest connection of the address that has most goes."""
        with self._lock:
            if len(self._waiting) < MAX_UNAUTHENTICATED:
                return
            greediest = Counter(self._waiting.values()).most_common(1)[0][0]
            oldest = next(wire for wire, host in self._waiting.items() if host == greediest)
            del self._waiting[oldest]
        oldest.shut()

    def _leave(self, wire: PeerSocket) -> None:
        with self._lock:
            self._waiting.pop(wire, None)
