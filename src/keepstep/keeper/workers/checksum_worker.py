"""Checksum worker: hashes large slots in a process that maps them.

Started by the keeper as `python -m keepstep.keeper.workers.checksum_worker FD THREADS`.

Mapped memory is read once, in place: half the time and half the CPU of reading it through a descriptor. But a page
that the machine has lost ends whoever touches it (SIGBUS), and pages that are mapped count for the OOM killer. So not
the keeper does it but this process, which knows nothing and may die at any time: see `reading`.

It serves one request after the other and ends with the keeper, whose end of the socket closes then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from keepstep.arena.memfd import Mapping, Memfd

SPAN, SERIAL = struct.Struct("<QQ"), struct.Struct("<Q")
MOST_SPANS = 4096
"""in one request: with its answer it fits a datagram"""
MOST_BYTES = 1 << 17
NICENESS = 10
"""of whatever reads snapshots: a training that has work for every core goes first"""
FIRST_TO_DIE = "1000"
PR_SET_PDEATHSIG = 1


class MapArena(msgspec.Struct, tag="Map"):
    """The descriptor of an arena comes with it."""

    arena_id: str


class PrefaultPages(msgspec.Struct, tag="Warm"):
    """Have these pages in the map before they are asked for."""

    arena_id: str
    begin: int
    end: int


class ForgetArena(msgspec.Struct, tag="Forget"):
    """Answered when the map is gone."""

    arena_id: str
    serial: int


class DigestSpans(msgspec.Struct, tag="Digest"):
    """Answered with 16 bytes for each span."""

    arena_id: str
    serial: int
    spans: bytes


Request = MapArena | PrefaultPages | ForgetArena | DigestSpans


def pack(request: Request) -> bytes:
    return msgspec.msgpack.encode(request)


def answer_to(serial: int, data: bytes = b"") -> bytes:
    """It names its request: what was not waited for to the end must not answer the next one."""
    return SERIAL.pack(serial) + data


class ArenaHasher:
    """The maps, and threads to read them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="keepstep-reader")
        self._maps: dict[str, Mapping] = {}

    def map(self, request: MapArena, fds: list[int]) -> None:
        segment = Memfd.adopt(fds[0])
        try:
            self._maps[request.arena_id] = Mapping(segment, writable=False)
        finally:
            segment.close()  # the map holds the memory

    def warm(self, request: PrefaultPages, fds: list[int]) -> None:
        self._maps[request.arena_id].populate_range(request.begin, request.end, self._threads)

    def forget(self, request: ForgetArena, fds: list[int]) -> bytes:
        del self._maps[request.arena_id]
        return answer_to(request.serial)

    def digest(self, request: DigestSpans, fds: list[int]) -> bytes:
        there = self._maps[request.arena_id].map
        spans = list(SPAN.iter_unpack(request.spans))
        if any(begin + size > len(there) for begin, size in spans):
            raise ValueError("beyond the end of the arena")

        found, todo = [b""] * len(spans), iter(enumerate(spans))

        def some() -> None:
            """Each takes the next one: nobody is left with a long rest when the others are done.

            An iterator of this kind gives each thing to one thread: it runs outside the interpreter's loop.
            """
            for index, (begin, size) in todo:
                found[index] = xxhash.xxh3_128_digest(there[begin : begin + size])

        for one in [self._pool.submit(some) for _ in range(min(self._threads, len(spans)))]:
            one.result()
        return answer_to(request.serial, b"".join(found))


def serve(channel: socket.socket, threads: int) -> None:
    """Until the keeper is gone. Whatever goes wrong ends this process: the keeper reads for itself then."""
    reader = ArenaHasher(threads)
    served: dict[type, Callable[[Any, list[int]], bytes | None]] = {
        MapArena: reader.map, PrefaultPages: reader.warm, ForgetArena: reader.forget, DigestSpans: reader.digest,
    }  # fmt: skip
    while True:
        data, fds, _, _ = socket.recv_fds(channel, MOST_BYTES, 1)
        if not data:
            return
        request = msgspec.msgpack.decode(data, type=Request)
        answer = served[type(request)](request, fds)
        if answer is not None:
            channel.sendall(answer)


def main(arguments: list[str]) -> None:
    # Also while it is stopped, and does not see that the socket is closed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_DIE)  # nothing is lost with it
    try:
        serve(socket.socket(fileno=int(arguments[0])), int(arguments[1]))
    except BaseException:
        os._exit(1)  # not waiting for threads that still read
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
