"""Connect to a keeper's unix socket, and be sure that the keeper is this user's.

Under /tmp anybody may make a directory with the name that another user's keeper would use, and serve a keeper there. So
the directories are checked before the connection (owner, mode 0700, no link), and the uid of the process at the other
end after it; nothing is sent before. A root operator may connect to a user's keeper: then the directory and the process
must both be that user's.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from keepstep.errors import KeeperError
from keepstep.identity import ForeignDirectoryError, Identity, check_private

RETRY_S = 0.01
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def open_socket(identity: Identity, path: Path, timeout_s: float, *, operator: bool = False) -> socket.socket:
    """Connect within `timeout_s`, which is the socket's timeout afterwards. `operator`: root may be anybody's.

    Raises OSError where no keeper listens, KeeperError where it is not this user's.
    """
    owner = os.geteuid()
    if operator and owner == 0:
        owner = identity.runtime_dir.lstat().st_uid
    for directory in (identity.runtime_dir, identity.directory):
        if not check_private(directory, owner):
            raise FileNotFoundError(2, "no such directory", str(directory))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        _connect(sock, path, time.monotonic() + timeout_s)
        _, uid = peer_of(sock)
        if uid != owner:
            raise ForeignKeeperError(path, uid, owner)
    except BaseException:
        sock.close()
        raise
    return sock


class ForeignKeeperError(ForeignDirectoryError):
    """Another user serves the socket."""

    def __init__(self, path: Path, uid: int, owner: int) -> None:
        KeeperError.__init__(
            self, f"the process that serves {path} belongs to user {uid}, not to user {owner}",
            hint="end it, or set KEEPSTEP_RUNTIME_DIR to a private directory",
        )  # fmt: skip


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as the kernel knows them."""
    pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def _connect(sock: socket.socket, path: Path, deadline: float) -> None:
    while True:
        try:
            sock.connect(str(path))
            return
        except BlockingIOError:  # The backlog is full: a unix socket does not wait by itself.
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)
