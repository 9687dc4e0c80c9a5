"""A connection to the keeper of this node, for trainers, launchers and the command line.

Invariants:
- One thread reads. Answers go to the request with their ticket; all other messages go to the listener.
- When the connection ends, waiting requests fail at once and the listener's `on_lost` is called once. Reconnecting is
  the caller's task (trainer/connection/keeper_link.py, launcher/keeper_supervisor.py), starting a keeper is spawn.py's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol, TypeVar

from keepstep import faults
from keepstep.control.framing import FrameError, FrameReader, receive, send
from keepstep.control.messages import (
    PROTOCOL,
    Hello,
    Refused,
    Welcome,
)
from keepstep.control.private_socket import open_socket
from keepstep.control.status import without_controls
from keepstep.errors import KeeperError
from keepstep.identity import Identity

CONNECT_S = 5.0
OPERATOR = "cli"  # The role of the command line: as root it may connect to a user's keeper
JOIN_S = 5.0
REQUEST_S = 60.0  # Deadline for an answer, restoring and memory excepted: a keeper that takes longer hangs
RESTORE_S = 600.0  # Deadline for what reads or makes memory: the decision what to restore, verification, new arenas
M = TypeVar("M")


class ClientListener(Protocol):
    """Receives what the keeper sends without being asked. Called from the thread that reads."""

    def on_push(self, message: Any, fds: list[int]) -> None:
        """The keeper sent a message. The listener owns the descriptors."""

    def on_lost(self) -> None:
        """The connection ended, and not by `close`."""


class NoAnswerError(KeeperError):
    """The keeper did not answer in time; the connection is still there."""


class KeeperClient:
    """One connection. The constructor raises KeeperError when no keeper answers."""

    def __init__(
        self,
        identity: Identity,
        role: str,
        *,
        timeout_s: float = CONNECT_S,
        listener: ClientListener | None = None,
    ) -> None:
        self.identity = identity
        self._listener = listener
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Future[tuple[Any, list[int]]]] = {}
        self._lock = threading.Lock()
        self._operator = role == OPERATOR
        self._closed = False
        self._shut_down = False
        self._socket = _connect(identity, timeout_s, operator=self._operator)
        self._thread = threading.Thread(target=self._read, name="keepstep-link", daemon=True)
        self._thread.start()
        try:
            self.welcome, _ = self.request(
                Hello(PROTOCOL, identity.run_id, identity.node_id, role), Welcome, timeout_s=timeout_s
            )
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        return self._closed or self._shut_down

    def fileno(self) -> int:
        return self._socket.fileno()

    def post(self, message: Any, fds: list[int] | None = None) -> None:
        """Send without waiting for an answer. A failure ends the connection: half of the message may be sent."""
        try:
            faults.point(f"send.{type(message).__name__}")
            with self._lock:
                send(self._socket, message, fds)
        except OSError as error:
            self.hang_up()
            raise KeeperError(f"the keeper is gone: {error.strerror}", hint="another one is started") from error

    def request(
        self, message: Any, expect: type[M], *, timeout_s: float, fds: list[int] | None = None
    ) -> tuple[M, list[int]]:
        """Send and wait for the answer. Raises the error that the keeper refused with."""
        import msgspec

        ticket = next(self._tickets)
        future: Future[tuple[Any, list[int]]] = Future()
        self._waiting[ticket] = future
        try:
            if self._closed:
                raise KeeperError("the connection to the keeper is closed")
            self.post(msgspec.structs.replace(message, ticket=ticket), fds)
            answer, received = future.result(timeout_s)
        except FutureTimeout:
            raise NoAnswerError(
                f"the keeper did not answer {type(message).__name__} within {timeout_s:g} s",
                hint="keepstep status shows what the keeper does; all ranks must register, restore and close alike",
            ) from None
        finally:
            self._waiting.pop(ticket, None)
        if not isinstance(answer, expect):
            for fd in received:
                os.close(fd)
            if isinstance(answer, Refused):
                raise answer.error()
            raise KeeperError(f"the keeper answered {type(message).__name__} with {type(answer).__name__}")
        return answer, received

    def hang_up(self) -> None:
        """End the connection as if the keeper had: waiting requests fail, and `on_lost` is called."""
        self._shut_down = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; the reading thread ends by itself."""
        self._closed = True
        self.hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=JOIN_S)
        self._socket.close()

    def close_in_forked_child(self) -> None:
        """A forked data-loader worker must not keep the connection open after its parent's death."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    def _read(self) -> None:
        reader = FrameReader()
        try:
            while True:
                data, fds = receive(self._socket)
                if not data:
                    break
                for message, with_fds in reader.feed(data, fds):
                    self._deliver(message, with_fds)
        except (OSError, FrameError):
            pass
        finally:
            reader.close()
            was_closed, self._closed = self._closed, True
            for future in list(self._waiting.values()):
                if not future.done():
                    future.set_exception(KeeperError("the keeper is gone", hint="another one is started"))
            if not was_closed and self._listener is not None:
                self._listener.on_lost()

    def _deliver(self, message: Any, fds: list[int]) -> None:
        if self._operator:
            message = _fit_for_terminal(message)
        future = self._waiting.get(getattr(message, "ticket", 0) or 0)
        if future is not None and not future.done():
            future.set_result((message, fds))
        elif self._listener is not None:
            self._listener.on_push(message, fds)
        else:
            for fd in fds:
                os.close(fd)


def _connect(identity: Identity, timeout_s: float, *, operator: bool) -> socket.socket:
    try:
        sock = open_socket(identity, identity.control_socket, timeout_s, operator=operator)
    except OSError as error:
        raise KeeperError(
            f"no keeper answers for run {identity.run_id!r} on node {identity.node_id!r}: {error.strerror or error}",
            hint="keepstep status lists the runs of this node",
        ) from error
    sock.settimeout(None)
    return sock


def _fit_for_terminal(message: Any) -> Any:
    """The same message; a command prints the names and reasons in it."""
    import msgspec

    return msgspec.convert(without_controls(msgspec.to_builtins(message)), type(message))
