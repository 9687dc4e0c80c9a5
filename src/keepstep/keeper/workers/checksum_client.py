"""Client of the checksum worker, a process that maps large slots to hash them and may die at any time.

The worker is always asked first. When it fails, is slow or answers with the wrong form, `digests` returns None and the
caller reads through the descriptor, which also reports what is wrong with the memory. A failed worker is replaced after
a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from keepstep.arena.checksum import Chunk
from keepstep.arena.slots import DIGEST_BYTES, Arena
from keepstep.keeper.workers import checksum_worker as worker

log = logging.getLogger("keepstep.keeper")

WORKER = "keepstep.keeper.workers.checksum_worker"
RESTART_S = 60.0  # before a failed worker is replaced: bad memory would end the next one too
MIN_BYTES_PER_S = 500e6  # a slower worker is ended
ANSWER_S = 10.0  # on top of that
END_S = 5.0


class ChecksumClient:
    """One worker for all arenas, started by the first request. For any thread; one request at a time."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._mapped: set[str] = set()  # arenas that the worker maps
        self._serial = 0
        self._not_before = 0.0
        self._closed = False

    def digests(self, arena: Arena, chunks: Sequence[Chunk]) -> bytes | None:
        """16 bytes for each chunk; None where the caller must read for itself."""
        with self._lock:
            if self._closed or time.monotonic() < self._not_before:
                return None
            try:
                fd = os.dup(arena.segment.fd)
            except OSError:
                return None  # The arena is closed.
            try:
                channel = self._channel or self._start()
                starts = range(0, len(chunks), worker.MAX_SPANS)
                return b"".join(
                    [self._ask(channel, arena.arena_id, fd, chunks[at : at + worker.MAX_SPANS]) for at in starts]
                )
            except BaseException as error:  # The answer may still arrive: this channel is not used again.
                self._fail(f"{error!r}")
                if not isinstance(error, (OSError, subprocess.SubprocessError)):
                    raise
                return None
            finally:
                os.close(fd)

    def forget(self, arena_id: str) -> None:
        """Unmap an arena; its memory is freed with the last map. It must be closed, or it is mapped again.

        Waits for the request in progress.
        """
        with self._lock:
            if arena_id not in self._mapped or self._channel is None:
                return
            self._mapped.discard(arena_id)
            if not self._mapped:
                self._end()
                return
            try:
                self._channel.settimeout(ANSWER_S)
                self._request(self._channel, worker.ForgetArena(arena_id, self._next_serial()))
            except BaseException as error:
                self._fail(f"{error!r}")
                if not isinstance(error, OSError):
                    raise

    def close(self) -> None:
        """End the worker, also while a thread waits for an answer: that thread gets None."""
        self._closed = True
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._end()

    def _ask(self, channel: socket.socket, arena_id: str, fd: int, chunks: Sequence[Chunk]) -> bytes:
        size_bytes = sum(chunk.span.size_bytes for chunk in chunks)
        channel.settimeout(ANSWER_S + size_bytes / MIN_BYTES_PER_S)
        spans = b"".join([worker.SPAN.pack(chunk.span.offset, chunk.span.size_bytes) for chunk in chunks])
        fds = [] if arena_id in self._mapped else [fd]
        self._mapped.add(arena_id)
        digests = self._request(channel, worker.DigestSpans(arena_id, self._next_serial(), spans), fds)
        if len(digests) != DIGEST_BYTES * len(chunks):
            raise OSError(f"{len(digests)} bytes for {len(chunks)} checksums")
        return digests

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _request(self, channel: socket.socket, request: worker.Request, fds: Sequence[int] = ()) -> bytes:
        if fds:
            socket.send_fds(channel, [worker.pack(request)], fds)
        else:
            channel.sendall(worker.pack(request))
        answer = channel.recv(worker.MAX_MESSAGE_BYTES)
        if not answer:
            raise OSError("the checksum worker has died")
        if not answer.startswith(worker.answer_to(request.serial)):
            raise OSError("the checksum worker has answered another request")
        return answer[worker.SERIAL.size :]

    def _start(self) -> socket.socket:
        own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", WORKER, str(others.fileno()), str(self._num_threads)],
                    pass_fds=[others.fileno()], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except BaseException:
                own.close()
                raise
        self._channel = own
        return own

    def _fail(self, reason: str) -> None:
        if self._closed:
            return
        process = self._process
        self._end()
        status = process.returncode if process is not None else None
        self._not_before = time.monotonic() + RESTART_S
        fields = {"reason": reason, "exit_status": status}
        log.warning("the checksum worker has failed, slots are read through their descriptors", extra=fields)

    def _end(self) -> None:
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        self._mapped = set()
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a system call: it ends after that
                process.wait(END_S)
