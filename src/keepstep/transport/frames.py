"""Wire format between keepers: control frames, requests and answers. Every length is checked before its bytes are read.

Control frames carry a MAC over their number, so that none can be forged, dropped, repeated or moved; data carries the
checksum of the bytes.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from keepstep.transport.interface import (
    CHECKSUM_BYTES,
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REASON_BYTES,
    MAX_REQUEST_BYTES,
)

HEARTBEAT, MESSAGE, GOODBYE = 0, 1, 2  # GOODBYE: this keeper closes the connection on purpose.
SERVED, REFUSED = 0, 1
MAC_BYTES = 16

_CONTROL = struct.Struct("<HBxI16s")
_CONTROL_MAGIC = 0x4B43
_REQUEST = struct.Struct("<HBxIQQ")
_REQUEST_MAGIC = 0x4B51
_ANSWER = struct.Struct("<HBxxxxxQQ16s")
_ANSWER_MAGIC = 0x4B41
REQUEST_HEAD_BYTES = _REQUEST.size
ANSWER_HEAD_BYTES = _ANSWER.size


class PeerFrameError(Exception):
    """The received bytes are not a frame, or not an authentic one. The connection ends."""


class FrameSigner:
    """Signs the control frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, kind: int, body: bytes = b"") -> bytes:
        """Encode one frame."""
        mac = _mac(self._key, self._number, kind, body)
        self._number += 1
        return _CONTROL.pack(_CONTROL_MAGIC, kind, len(body), mac) + body


class FrameVerifier:
    """Parses and verifies the control frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add received bytes. Returns the kind and body of each frame that is complete now."""
        self._buffer += data
        frames: list[tuple[int, bytes]] = []
        offset = 0
        while len(self._buffer) - offset >= _CONTROL.size:
            magic, kind, length, mac = _CONTROL.unpack_from(self._buffer, offset)
            if magic != _CONTROL_MAGIC or length > MAX_MESSAGE_BYTES:
                raise PeerFrameError(f"bad frame head (magic {magic:#x}, {length} bytes)")
            if len(self._buffer) - offset < _CONTROL.size + length:
                break
            body = bytes(memoryview(self._buffer)[offset + _CONTROL.size : offset + _CONTROL.size + length])
            if not hmac.compare_digest(mac, _mac(self._key, self._number, kind, body)):
                raise PeerFrameError("a frame with a wrong MAC: changed on its way, or forged")
            self._number += 1
            offset += _CONTROL.size + length
            frames.append((kind, body))
        del self._buffer[:offset]
        return frames


def _mac(key: bytes, number: int, kind: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<QBI", number, kind, len(body)) + body, "sha256")[:MAC_BYTES]


@dataclass(frozen=True)
class RequestHead:
    """Head of a request; `length` bytes of query follow."""

    number: int
    length: int
    size_bytes: int
    exact: bool  # The body must have `size_bytes` exactly, not at most.

    def pack(self) -> bytes:
        return _REQUEST.pack(_REQUEST_MAGIC, self.exact, self.length, self.number, self.size_bytes)

    @classmethod
    def unpack(cls, data: bytes) -> RequestHead:
        magic, exact, length, number, size_bytes = _REQUEST.unpack(data)
        if magic != _REQUEST_MAGIC or exact > 1 or length > MAX_REQUEST_BYTES or size_bytes > MAX_BODY_BYTES:
            raise PeerFrameError(f"bad request head (magic {magic:#x}, {length} bytes for {size_bytes})")
        return cls(number, length, size_bytes, bool(exact))

    def fits(self, size_bytes: int) -> bool:
        return size_bytes == self.size_bytes if self.exact else size_bytes <= self.size_bytes


@dataclass(frozen=True)
class AnswerHead:
    """Head of an answer; `length` bytes of body follow, or of the reason for the refusal."""

    number: int
    status: int
    length: int
    checksum: bytes

    def pack(self) -> bytes:
        assert len(self.checksum) == CHECKSUM_BYTES
        return _ANSWER.pack(_ANSWER_MAGIC, self.status, self.number, self.length, self.checksum)

    @classmethod
    def unpack(cls, data: bytes, request: RequestHead) -> AnswerHead:
        magic, status, number, length, checksum = _ANSWER.unpack(data)
        if magic != _ANSWER_MAGIC or number != request.number or status not in (SERVED, REFUSED):
            raise PeerFrameError(
                f"bad answer head (magic {magic:#x}, number {number} for {request.number}, status {status})"
            )
        if not request.fits(length) if status == SERVED else length > MAX_REASON_BYTES:
            raise PeerFrameError(f"an answer of {length} bytes to a request for {request.size_bytes}")
        return cls(number, status, length, checksum)
