"""The memfd of an arena: created by the keeper, mapped by the trainer, held by both and the launcher.

A memfd has no name to leak, is not limited by /dev/shm, and lives as long as a process holds it. Its
size is sealed, so no process can truncate it under a mapping (SIGBUS). The keeper never maps it: it
reads and writes through the descriptor, so that its own resident size, and with it its rank for the
OOM killer, stays small. Its checksum worker maps it, because a worker may die.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keepstep import faults
from keepstep.errors import IntegrityError, KeeperError

NAME = "keepstep-arena"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
F_SEAL_FUTURE_WRITE = 0x10
MADV_POPULATE_READ = 22
POPULATE_STEP = 4 << 20  # other allocations of the process wait for one step
RESERVE_STEP = 16 << 20
MAX_BYTES = 1 << 46
EHWPOISON = 133

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Memfd:
    """A memfd with its size sealed. Owns the descriptor."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes

    @classmethod
    def create(cls, size_bytes: int, *, reserve: bool = True) -> Memfd:
        """A new memfd with all its memory reserved: shortage is an error here, not a SIGBUS later.

        Without `reserve`, call `reserve()` before the memory is mapped: writing into pages that are not
        allocated yet costs less than having them zeroed first.
        """
        if not 0 < size_bytes <= MAX_BYTES:
            raise KeeperError(f"an arena of {size_bytes:,} bytes cannot be made: 1 to {MAX_BYTES:,} can")
        fd = -1
        try:
            faults.point("segment.create")
            fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size_bytes)
            if reserve:
                os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise _refused(size_bytes, error) from error
        return cls(fd, size_bytes)

    def reserve(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Allocate all memory, last pages first, in steps between which others can write."""
        try:
            for end in range(self.size_bytes, 0, -RESERVE_STEP):
                if cancelled():
                    return
                start = max(0, end - RESERVE_STEP)
                faults.point("segment.reserve")
                os.posix_fallocate(self.fd, start, end - start)
        except OSError as error:
            raise _refused(self.size_bytes, error) from error

    @classmethod
    def adopt(cls, fd: int) -> Memfd:
        """Take over a received descriptor after checking that it is a sealed memfd of sane size.

        The caller closes a refused descriptor.
        """
        status = os.fstat(fd)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise IntegrityError("the descriptor is not a memfd") from error
        if not stat.S_ISREG(status.st_mode) or seals & SEALS != SEALS:
            raise IntegrityError("the descriptor is not a memfd with its size sealed")
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if mode != os.O_RDWR or seals & (fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
            raise IntegrityError("the descriptor is a memfd that cannot be written")
        if not 0 < status.st_size <= MAX_BYTES:
            raise IntegrityError(f"a memfd of {status.st_size} bytes is not an arena")
        return cls(fd, status.st_size)

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def read(self, offset: int, size_bytes: int) -> bytes:
        try:
            faults.point("segment.read")
            data = os.pread(self.fd, size_bytes, offset)
        except OSError as error:
            _refuse_bad_memory(error, offset)
            raise
        if len(data) != size_bytes:
            raise IntegrityError(f"the arena ends at {self.size_bytes}, wanted {size_bytes} bytes at {offset}")
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` without mapping anything."""
        done = 0
        while done < len(buffer):
            try:
                faults.point("segment.read")
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as error:
                _refuse_bad_memory(error, offset + done)
                raise
            if count <= 0:
                raise IntegrityError(f"the arena ends before {offset + len(buffer)}")
            done += count

    def write(self, offset: int, data: bytes | memoryview) -> None:
        faults.point("segment.write")
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], offset + done)

    def close(self) -> None:
        fd, self.fd = self.fd, -1  # first: another thread must not use a number that was reused by then
        if fd >= 0:
            os.close(fd)


def _refused(size_bytes: int, error: OSError) -> KeeperError:
    return KeeperError(
        f"{size_bytes:,} bytes of shared memory were refused: {error.strerror}",
        hint="give the job more memory, or use fewer slots (KEEPSTEP_ARENA_SLOTS=2)",
    )


def _refuse_bad_memory(error: OSError, offset: int) -> None:
    """Raise IntegrityError for a bad page: it is an erasure, like a failed checksum; other errors are not."""
    if error.errno in (errno.EIO, EHWPOISON):
        raise IntegrityError(f"the memory of the arena is bad at {offset}: {error.strerror}") from error


_mapped: weakref.WeakSet[Memfd] = weakref.WeakSet()


class Mapping:
    """A map of a whole memfd, in a trainer or a checksum worker. Forked children keep neither it nor the descriptor.

    Not an `mmap.mmap`: that keeps a duplicate of the descriptor which cannot be closed in a forked child, so
    a data-loader worker that outlives its trainer would hold the memory.
    """

    def __init__(self, segment: Memfd, *, writable: bool = True) -> None:
        faults.point("segment.map")
        _mapped.add(segment)
        size = segment.size_bytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size, access, mmap.MAP_SHARED, segment.fd, 0)
        if address == _MAP_FAILED:
            raise KeeperError(f"the arena of {size:,} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
        _libc.madvise(address, size, mmap.MADV_DONTFORK)
        mapped_bytes = (ctypes.c_ubyte * size).from_address(address)
        # Every view of the map references `mapped_bytes`: the memory is unmapped with the last of them.
        weakref.finalize(mapped_bytes, _unmap, address, size, os.getpid()).atexit = False
        self.map = memoryview(mapped_bytes).cast("B")
        self.address: int = address
        self.size_bytes = size

    def populate(self, threads: int, begin: int = 0, end: int | None = None) -> None:
        """Fault every page of [begin, end) in, so that the first snapshot costs what the hundredth does."""
        held = self.map  # A `close` ends this, and must not unmap the memory under it.
        stop = self.size_bytes if end is None else end
        # next() on such an iterator is atomic under the GIL: each step goes to exactly one thread.
        todo = iter(range(begin, stop, POPULATE_STEP))

        def populate_next() -> None:
            for start in todo:
                if self.map is not held or not held:
                    return
                size = min(POPULATE_STEP, stop - start)
                faults.point("segment.populate")
                failed = _libc.madvise(self.address + start, size, MADV_POPULATE_READ) != 0
                if failed and ctypes.get_errno() == errno.EINVAL:  # not for a bad page: to touch it would end us
                    for page in range(start, start + size, mmap.PAGESIZE):  # kernels before 5.14
                        held[page]

        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="keepstep-populate") as pool:
            for task in [pool.submit(populate_next) for _ in range(threads)]:
                task.result()

    def close(self) -> None:
        """Release the map. Tensors that still point into it keep it; it is unmapped with the last of them."""
        self.map = memoryview(b"")


def _close_in_forked_child() -> None:
    for segment in list(_mapped):
        with contextlib.suppress(OSError):
            segment.close()


os.register_at_fork(after_in_child=_close_in_forked_child)


def _unmap(address: int, size_bytes: int, pid: int) -> None:
    # A forked child never had the map; the addresses may be used by something else.
    if os.getpid() == pid:
        _libc.munmap(address, size_bytes)
