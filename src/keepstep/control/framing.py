"""Frames on the control socket: a message, and the file descriptors beside it.

A frame is 8 bytes (magic, number of file descriptors, length) and a msgpack body; descriptors travel with its first
byte by SCM_RIGHTS.

Invariants:
- Every length and every count is checked before anything is allocated.
- A descriptor that arrived is either returned with its message or closed here.
- A malformed frame raises FrameError, which ends that connection and no other. Both sides belong to one user (the
  socket is 0600 and the keeper checks the uid), but input is treated as hostile all the same.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from typing import Any

import msgspec

from keepstep.control.messages import Message
from keepstep.errors import KeeperError

MAGIC = 0x4B53
MAX_FRAME_BYTES = 1 << 20
MAX_FDS = 64
RECEIVE_BYTES = 1 << 16  # of one recvmsg call
_HEAD = struct.Struct("<HHI")

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


class FrameError(Exception):
    """The peer sent bytes that are not a frame of this protocol."""


def pack(message: Any, num_fds: int = 0) -> bytes:
    """Encode one frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES or num_fds > MAX_FDS:
        raise KeeperError(f"a {type(message).__name__} of {len(body)} bytes and {num_fds} fds is too large to send")
    return _HEAD.pack(MAGIC, num_fds, len(body)) + body


class FrameReader:
    """Parser: bytes and descriptors as they arrive into messages. Closes every descriptor that it does not return."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: list[int]) -> list[tuple[Any, list[int]]]:
        """Add what was received. Returns each message that is complete now, with its descriptors."""
        self._buffer += data
        self._fds.extend(fds)
        messages: list[tuple[Any, list[int]]] = []
        try:
            while (message := self._next()) is not None:
                messages.append(message)
            # The rest of the buffer is one unfinished frame: descriptors travel with its first byte.
            if len(self._fds) > (MAX_FDS if self._buffer else 0):
                raise FrameError(f"{len(self._fds)} descriptors received that no message announces")
        except FrameError:
            for _, message_fds in messages:
                self._fds.extend(message_fds)
            self.close()
            raise
        return messages

    def _next(self) -> tuple[Any, list[int]] | None:
        if len(self._buffer) < _HEAD.size:
            return None
        magic, num_fds, length = _HEAD.unpack_from(self._buffer)
        if magic != MAGIC or length > MAX_FRAME_BYTES or num_fds > MAX_FDS:
            raise FrameError(f"bad frame head (magic {magic:#x}, {num_fds} fds, {length} bytes)")
        if len(self._buffer) < _HEAD.size + length:
            return None
        body = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
        del self._buffer[: _HEAD.size + length]
        if len(self._fds) < num_fds:
            raise FrameError(f"{num_fds} descriptors announced, {len(self._fds)} received")
        try:
            message = _decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FrameError(f"bad message: {error}") from error
        return message, [self._fds.popleft() for _ in range(num_fds)]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())


def send(sock: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    """Send one whole frame on a blocking socket; descriptors go with its first bytes."""
    frame = memoryview(pack(message, len(fds or [])))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    # Without MSG_NOSIGNAL a dead keeper would kill a trainer that has set SIGPIPE back to its default.
    sent = sock.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL)
    while sent < len(frame):
        sent += sock.send(frame[sent:], socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive the bytes and descriptors that have arrived. No bytes: the peer closed the connection."""
    data, ancillary, flags, _ = sock.recvmsg(RECEIVE_BYTES, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise FrameError("some descriptors beside the message were lost")
    return data, fds
