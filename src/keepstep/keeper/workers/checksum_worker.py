"""Checksum worker: hashes large slots in a process that maps them.

Started by the keeper as `python -m keepstep.keeper.workers.checksum_worker FD THREADS`.

Mapped memory is read once, in place: half the time and half the CPU of reading it through a descriptor. But a page that
the machine has lost ends the process that touches it (SIGBUS), and mapped pages count for the OOM killer. So this
process does it, not the keeper: it has no state and may die at any time (see `checksum_client`).

Pages are mapped by the first read that touches them. That read costs no more CPU than one through the descriptor.

It serves one request after the other and ends with the keeper, which closes its end of the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from keepstep.arena.memfd import Mapping, Memfd

SPAN, SERIAL = struct.Struct("<QQ"), struct.Struct("<Q")
MAX_SPANS = 4096  # in one request: it and its answer fit a datagram
MAX_MESSAGE_BYTES = 1 << 17
NICENESS = 10  # of all threads that read snapshots: training that has work for every core goes first
OOM_SCORE = "1000"  # the first to be killed: nothing is lost with it
PR_SET_PDEATHSIG = 1


class DigestSpans(msgspec.Struct, tag="Digest"):
    """Answered with 16 bytes for each span. The first request for an arena carries its descriptor."""

    arena_id: str
    serial: int
    spans: bytes


class ForgetArena(msgspec.Struct, tag="Forget"):
    """Answered when the arena is unmapped."""

    arena_id: str
    serial: int


Request = DigestSpans | ForgetArena


def pack(request: Request) -> bytes:
    return msgspec.msgpack.encode(request)


def answer_to(serial: int, data: bytes = b"") -> bytes:
    """An answer names its request: one that nobody waited for must not answer the next."""
    return SERIAL.pack(serial) + data


class ArenaHasher:
    """The maps, and threads to read them."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="keepstep-hash")
        self._maps: dict[str, Mapping] = {}

    def map(self, arena_id: str, fd: int) -> None:
        segment = Memfd.adopt(fd)
        try:
            self._maps[arena_id] = Mapping(segment, writable=False)
        finally:
            segment.close()  # the map holds the memory

    def forget(self, arena_id: str) -> None:
        del self._maps[arena_id]

    def digest(self, arena_id: str, spans: list[tuple[int, int]]) -> bytes:
        memory = self._maps[arena_id].map
        if any(begin + size > len(memory) for begin, size in spans):
            raise ValueError("beyond the end of the arena")
        digests, todo = [b""] * len(spans), iter(enumerate(spans))

        def hash_next() -> None:
            # next() on such an iterator is atomic under the GIL: each span goes to one thread, and none has a long
            # rest when the others are done.
            for index, (begin, size) in todo:
                digests[index] = xxhash.xxh3_128_digest(memory[begin : begin + size])

        for task in [self._pool.submit(hash_next) for _ in range(min(self._num_threads, len(spans)))]:
            task.result()
        return b"".join(digests)


def serve(channel: socket.socket, num_threads: int) -> None:
    """Serve until the keeper is gone. Any error ends this process: the keeper reads for itself then."""
    hasher = ArenaHasher(num_threads)
    while True:
        data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
        if not data:
            return
        request: Request = msgspec.msgpack.decode(data, type=Request)
        if fds:
            hasher.map(request.arena_id, fds[0])
        if isinstance(request, DigestSpans):
            digests = hasher.digest(request.arena_id, list(SPAN.iter_unpack(request.spans)))
            channel.sendall(answer_to(request.serial, digests))
        else:
            hasher.forget(request.arena_id)
            channel.sendall(answer_to(request.serial))


def main(arguments: list[str]) -> None:
    # The keeper's end kills this process even while it is stopped and cannot notice the closed socket.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    try:
        serve(socket.socket(fileno=int(arguments[0])), int(arguments[1]))
    except BaseException:
        os._exit(1)  # not waiting for threads that still read
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
