"""The keeper's reader: a process that maps large slots to checksum them (`reader`), and may die at any time.

A slot is read through its descriptor the first time, and mapped behind that: pages that are not in a map yet cost more
than they save. When the reader is gone, slow or wrong in form the same work is done through the descriptor, which says
what is wrong with the memory; a new one is not started at once.
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
from collections.abc import Callable, Sequence

from keepstep.arena.chunks import Chunk
from keepstep.arena.slots import DIGEST_BYTES, Arena
from keepstep.keeper.workers import checksum_worker as r

log = logging.getLogger("keepstep.keeper")

WORKER = "keepstep.keeper.workers.checksum_worker"

AGAIN_S = 60.0
"""until a reader that has failed is replaced: memory that is bad would end the next one too"""
LEAST_BYTES = 256 << 20  # a slot of this size is worth a process: it checksums in half the CPU time
LEAST_BYTES_S = 500e6
"""slower than this it is given up"""
PATIENCE_S = 10.0
END_S = 5.0


class ChecksumClient:
    """One reader for all arenas, started when there is something large to read. For any thread."""

    def __init__(self, threads: int, least_bytes: int) -> None:
        """`least_bytes`: a slot of this size is worth it; 0: none is."""
        self._threads, self._least_bytes = threads, least_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._warm: set[tuple[str, int]] = set()
        """(arena, slot) of which the pages are mapped"""
        self._mapped: set[str] = set()
        self._forgotten: set[str] = set()
        """arenas that are gone for good, though somebody may still be reading one"""
        self._serial = 0
        self._not_before = 0.0
        self._closed = False

    def digests(self, arena: Arena, slot: int, chunks: Sequence[Chunk]) -> bytes | None:
        """16 bytes for each chunk; None where the caller must read for itself."""
        with self._lock:
            channel = self._channel
            if channel is None or (arena.arena_id, slot) not in self._warm:
                return None
            try:
                return b"".join(
                    self._ask(channel, arena.arena_id, chunks[at : at + r.MOST_SPANS])
                    for at in range(0, len(chunks), r.MOST_SPANS)
                )
            except BaseException as error:  # an answer that is still to come must find nobody
                self._fail(f"{error!r}")
                if not isinstance(error, OSError):
                    raise
                return None

    def warm(self, arena: Arena, slot: int, chunks: Sequence[Chunk]) -> None:
        """This slot was read through its descriptor; next time it should be in the map."""
        with self._lock:
            known = arena.arena_id in self._forgotten or (arena.arena_id, slot) in self._warm
            if self._closed or known or not self._is_worth_it(chunks):
                return
            try:
                fd = os.dup(arena.segment.fd)
            except OSError:
                return  # the arena was given up meanwhile
            try:
                channel = self._channel or self._start()
                channel.settimeout(PATIENCE_S)
                if arena.arena_id not in self._mapped:
                    socket.send_fds(channel, [r.pack(r.MapArena(arena.arena_id))], [fd])
                    self._mapped.add(arena.arena_id)
                begin = min(chunk.span.offset for chunk in chunks)
                end = max(chunk.span.offset + chunk.span.size_bytes for chunk in chunks)
                channel.sendall(r.pack(r.PrefaultPages(arena.arena_id, begin, end)))
                self._warm.add((arena.arena_id, slot))
            except (OSError, subprocess.SubprocessError) as error:
                self._fail(f"{error!r}")
            finally:
                os.close(fd)

    def drop(self, arena_id: str) -> None:
        """This arena is given up: it is not mapped any more from now on. `forget` it then."""
        self._forgotten.add(arena_id)

    def forget(self, arena_id: str) -> None:
        """The memory goes when its last map does. Waits for what is being read."""
        self.drop(arena_id)
        with self._lock:
            self._warm = {(arena, slot) for arena, slot in self._warm if arena != arena_id}
            if arena_id not in self._mapped or self._channel is None:
                return
            self._mapped.discard(arena_id)
            if not self._mapped:
                self._end()
                return
            try:
                self._channel.settimeout(PATIENCE_S)
                self._request(self._channel, lambda serial: r.ForgetArena(arena_id, serial))
            except BaseException as error:
                self._fail(f"{error!r}")
                if not isinstance(error, OSError):
                    raise

    def tend(self) -> None:
        """Now and then: one that has died leaves nothing behind. Waits for nobody."""
        if self._process is not None and self._lock.acquire(blocking=False):
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._fail("the reader has died")
            finally:
                self._lock.release()

    def close(self) -> None:
        """Also while somebody waits for an answer: there will be none."""
        self._closed = True
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._end()

    def _is_worth_it(self, chunks: Sequence[Chunk]) -> bool:
        size = sum(chunk.span.size_bytes for chunk in chunks)
        return 0 < self._least_bytes <= size and time.monotonic() >= self._not_before

    def _ask(self, channel: socket.socket, arena_id: str, chunks: Sequence[Chunk]) -> bytes:
        size = sum(chunk.span.size_bytes for chunk in chunks)
        channel.settimeout(PATIENCE_S + size / LEAST_BYTES_S)
        spans = b"".join(r.SPAN.pack(chunk.span.offset, chunk.span.size_bytes) for chunk in chunks)
        found = self._request(channel, lambda serial: r.DigestSpans(arena_id, serial, spans))
        if len(found) != DIGEST_BYTES * len(chunks):
            raise OSError(f"{len(found)} bytes for {len(chunks)} checksums")
        return found

    def _request(self, channel: socket.socket, make: Callable[[int], r.Request]) -> bytes:
        self._serial += 1
        channel.sendall(r.pack(make(self._serial)))
        answer = channel.recv(r.MOST_BYTES)
        if not answer:
            raise OSError("the reader has died")
        if not answer.startswith(r.answer_to(self._serial)):
            raise OSError("the reader has answered something else")
        return answer[r.SERIAL.size :]

    def _start(self) -> socket.socket:
        own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", WORKER, str(others.fileno()), str(self._threads)],
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
        status = self._process.poll() if self._process is not None else None
        self._end()
        self._not_before = time.monotonic() + AGAIN_S
        fields = {"reason": reason, "exit_status": status}
        log.warning("the reader has failed, slots are read through their descriptors", extra=fields)

    def _end(self) -> None:
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        self._warm, self._mapped = set(), set()
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands: it ends when it comes back
                process.wait(END_S)
