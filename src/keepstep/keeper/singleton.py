"""One keeper per run and node: its lock, its sockets, and the removal of all its files.

The lock is held for the life of the process: a second keeper for the same run and node cannot start. The lock file is
beside the run's directory, so that the directory can be removed while the lock is still held.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from pathlib import Path

from keepstep._version import VERSION
from keepstep.errors import KeeperError
from keepstep.identity import Identity, ensure_private

BACKLOG = 64


class AlreadyRunningError(KeeperError):
    """Another keeper holds this run and node."""


class KeeperDirectory:
    """The keeper's files in the runtime directory: lock, sockets, card. `close` removes all of them."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        ensure_private(identity.runtime_dir)
        self._lock = _take_lock(identity.keeper_lock)
        ensure_private(identity.directory)
        self.control = _listen(identity.control_socket)
        self.http = _listen(identity.http_socket)

    def announce(self, instance: str) -> None:
        card = {
            "run_id": self.identity.run_id, "node_id": self.identity.node_id, "pid": os.getpid(),
            "instance": instance, "version": VERSION,
        }  # fmt: skip
        temporary = self.identity.card.with_suffix(".new")
        temporary.write_text(json.dumps(card), encoding="utf-8")
        temporary.rename(self.identity.card)

    def close(self) -> None:
        for sock in (self.control, self.http):
            sock.close()
        shutil.rmtree(self.identity.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.identity.keeper_lock.unlink()
        os.close(self._lock)
        with contextlib.suppress(OSError):  # removed with the last run of this user
            self.identity.runtime_dir.rmdir()


def _take_lock(path: Path) -> int:
    for _ in range(100):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise AlreadyRunningError(f"another keeper holds {path}") from None
        # An ending keeper unlinks the file before it releases the lock: check that the locked file has the name.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)
    raise KeeperError(f"the lock {path} is replaced again and again")


def _listen(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):  # of a keeper that was killed: this one holds its lock now
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise KeeperError(f"{path} cannot be bound: {error.strerror}", hint="set KEEPSTEP_RUNTIME_DIR") from error
    finally:
        os.umask(before)
    sock.listen(BACKLOG)
    return sock
