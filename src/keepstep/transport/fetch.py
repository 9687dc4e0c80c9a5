"""One fetch on its way: the future that the caller holds, and what a stream needs to serve it.

Shared by both transports, so that they cannot differ in when a future ends and when the buffer is the caller's again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import xxhash

from keepstep.transport.interface import (
    CHECKSUM_BYTES,
    MAX_BODY_BYTES,
    MAX_LOOSE_BODY_BYTES,
    MAX_REQUEST_BYTES,
    Fetched,
    FetchError,
    FetchRequest,
)


class PendingFetch(Future[Fetched]):
    """Ends exactly once. Whoever ends it has let go of the buffer before."""

    def __init__(self, request: FetchRequest) -> None:
        super().__init__()
        into, size_bytes = request.into, request.size_bytes
        if not 0 <= size_bytes <= (MAX_LOOSE_BODY_BYTES if into is None else MAX_BODY_BYTES):
            raise ValueError(f"a fetch of {size_bytes} bytes is out of bounds")
        if into is not None and (into.nbytes != size_bytes or not into.contiguous or (into.readonly and size_bytes)):
            raise ValueError(f"the buffer of {into.nbytes} bytes cannot receive {size_bytes}")
        if len(request.query) > MAX_REQUEST_BYTES:
            raise ValueError(f"a request of {len(request.query)} bytes is too long")
        if request.expect is not None and len(request.expect) != CHECKSUM_BYTES:
            raise ValueError("an xxh3_128 has 16 bytes")
        self.node_id = request.node_id
        self.query = bytes(request.query)
        self.into = into.cast("B") if into is not None and size_bytes else into
        self.size_bytes = size_bytes
        self.expect = request.expect
        self.deadline = time.monotonic() + request.timeout_s
        self._guard = threading.RLock()  # done-callbacks run inside `cancel`
        self._interrupt: Callable[[], None] | None = None
        self.abandoned = False

    @property
    def exact(self) -> bool:
        return self.into is not None

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def begin(self) -> bool:
        """Called by the stream that takes it up. False: it was cancelled or has ended meanwhile."""
        with self._guard:
            return not self.done() and self.set_running_or_notify_cancel()

    def interruptible(self, interrupt: Callable[[], None] | None) -> bool:
        """How to stop the stream that works on this. False: it is to stop already."""
        with self._guard:
            self._interrupt = interrupt
            return not self.abandoned

    def cancel(self) -> bool:
        """Also while it runs: the stream is stopped, and the future ends when it has let go of the buffer."""
        with self._guard:
            if self.done():
                return False
            if super().cancel():
                self.into = None
                self.set_running_or_notify_cancel()
                return True
            self.abandoned = True
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()
        return True

    def target(self, size_bytes: int) -> tuple[memoryview, bytearray | None]:
        """Where `size_bytes` go: the caller's buffer, or one of our own."""
        if self.into is not None:
            return self.into, None
        loose = bytearray(size_bytes)
        return memoryview(loose), loose

    def succeed(self, size_bytes: int, checksum: bytes, data: bytearray | None) -> None:
        self.into = None
        self.interruptible(None)
        self.set_result(Fetched(size_bytes, checksum, None if data is None else bytes(data)))

    def fail(self, reason: str, *, lost: bool) -> None:
        """End it: called by the stream that works on it, outside of `except` (a traceback would hold the buffer)."""
        self.into = None
        self.interruptible(None)
        self.set_exception(CancelledError() if self.abandoned else FetchError(self.node_id, reason, lost=lost))

    def fail_waiting(self, reason: str, *, lost: bool) -> None:
        """End it unless a stream works on it: that one will."""
        if self.begin():
            self.fail(reason, lost=lost)


class BodyDigest:
    """xxh3_128 over a body while it arrives, each piece while it is in the cache."""

    def __init__(self, expect: bytes | None, said: bytes) -> None:
        self._state = xxhash.xxh3_128()
        self._expect = expect if expect is not None else said
        self.update = self._state.update

    def verdict(self) -> tuple[bytes, str]:
        """The checksum of what came, and what is wrong with it."""
        found = self._state.digest()
        if found == self._expect:
            return found, ""
        return found, f"the bytes do not match their checksum ({found.hex()[:12]}, not {self._expect.hex()[:12]})"
