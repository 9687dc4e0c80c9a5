"""One connection on the control socket: its process, the messages received, the messages waiting to be sent.

The user of the process is checked, bytes are bounded both ways. A process that sends invalid frames or does not read is
disconnected; other connections are not affected.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
from collections import deque
from typing import Any

from keepstep import faults
from keepstep.control.framing import FrameError, FrameReader, pack, receive
from keepstep.control.private_socket import peer_of

MAX_QUEUED_BYTES = 4 << 20  # for a process that does not read


class Connection:
    """A non-blocking control connection. Raises FrameError for anything that must end it."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        sock.setblocking(False)
        self.pid, self.uid = peer_of(sock)
        self.role = ""
        self.note = ""  # What a launcher wants to be read in the status.
        self.since = time.monotonic()
        self.held: set[str] = set()  # memfds that the other side has confirmed
        self.offered: set[str] = set()  # memfds sent to it
        self._reader = FrameReader()
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0

    @property
    def wants_to_send(self) -> bool:
        return bool(self._queue)

    def read(self) -> list[tuple[Any, list[int]]] | None:
        """Messages received since the last call; None when the other side has closed."""
        try:
            data, fds = receive(self.sock)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._reader.feed(data, fds) if data else None

    def queue(self, message: Any, fds: list[int] | None = None) -> None:
        """Send `message`, with duplicates of `fds` beside it."""
        frame = pack(message, len(fds or []))
        self._queued_bytes += len(frame)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            raise FrameError("the other side does not read its messages")
        self._queue.append((memoryview(frame), [os.dup(fd) for fd in fds or []]))
        self.flush()

    def flush(self) -> None:
        while self._queue:
            frame, fds = self._queue[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                faults.point("keeper.send")
                sent = self.sock.sendmsg([frame], ancillary)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # The other side has closed, but its last message (Goodbye) may be unread: reading ends the connection.
                self._discard()
                return
            except OSError as error:
                raise FrameError(f"nothing can be sent: {error.strerror}") from error
            _close_all(fds)
            self._queued_bytes -= sent
            if sent < len(frame):
                self._queue[0] = (frame[sent:], [])
                return
            self._queue.popleft()

    def _discard(self) -> None:
        for _, fds in self._queue:
            _close_all(fds)
        self._queue.clear()
        self._queued_bytes = 0

    def close(self) -> None:
        self._reader.close()
        self._discard()
        with contextlib.suppress(OSError):
            self.sock.close()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
