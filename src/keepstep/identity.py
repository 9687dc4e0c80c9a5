"""Identity of this process: run, node, and the paths of the node's keeper.

The run id decides whose state may be restored, so it is never guessed: torchrun's default id `none`
is not an id (two jobs would share it), and without any id a fresh one is used for this launch only.
Socket names are a hash of (run id, node id), because a unix socket path has 107 bytes at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.config import Config
from keepstep.errors import ConfigError, KeeperError

NO_ID = ("", "none")
MAX_ID_BYTES = 200
MAKE_WITHIN_S = 5.0  # a keeper that ends removes its directory with it: making it is tried again for this long
SCHEDULER_IDS = (
    ("SLURM_JOB_ID", "slurm"),
    ("KUBERNETES_JOB_UID", "k8s"),
    ("JOB_COMPLETION_UID", "k8s"),
    ("LSB_JOBID", "lsf"),
    ("PBS_JOBID", "pbs"),
)


class ForeignDirectoryError(KeeperError):
    """A directory of the keeper's sockets that another user could have prepared. Trying again does not help."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"the runtime directory {directory} is not a directory of this user with mode 0700",
            hint="remove it, or set KEEPSTEP_RUNTIME_DIR to a private directory",
        )


@dataclass(frozen=True)
class Identity:
    """The run and node that a process belongs to."""

    run_id: str
    node_id: str
    runtime_dir: Path
    outlives_launch: bool  # False when the id was made for this launch: a later launch cannot find the state

    @property
    def key(self) -> str:
        return hashlib.blake2b(f"{self.run_id}\0{self.node_id}".encode(), digest_size=8).hexdigest()

    @property
    def directory(self) -> Path:
        """The files of this run on this node: sockets, locks, the keeper's own log."""
        return self.runtime_dir / self.key

    @property
    def control_socket(self) -> Path:
        return self.directory / "control.sock"

    @property
    def http_socket(self) -> Path:
        return self.directory / "http.sock"

    @property
    def keeper_lock(self) -> Path:
        return self.runtime_dir / f"{self.key}.lock"

    @property
    def card(self) -> Path:
        """A small JSON file with the run and node of the directory, for `keepstep status` without arguments."""
        return self.directory / "keeper.json"


def identify(config: Config, *, environ: Mapping[str, str] | None = None, launch: str = "") -> Identity:
    """Resolve run and node. `launch` identifies this launch, for jobs that have no id of their own."""
    environ = os.environ if environ is None else environ
    run_id, outlives = _run_id(config, environ, launch)
    node_id = config.node_id or socket.gethostname()
    for name, value in (("run id", run_id), ("node id", node_id)):
        if not value.isprintable() or len(value.encode()) > MAX_ID_BYTES:
            raise ConfigError(f"the {name} {value[:40]!r} is not printable or longer than {MAX_ID_BYTES} bytes")
    return Identity(run_id, node_id, runtime_dir(config, environ), outlives)


def _run_id(config: Config, environ: Mapping[str, str], launch: str) -> tuple[str, bool]:
    if config.run_id:
        if config.run_id in NO_ID:
            raise ConfigError(
                f"run id {config.run_id!r} is torchrun's default and would mix jobs",
                hint="--rdzv-id=<a name of its own>",
            )
        return config.run_id, True
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic not in NO_ID:
        return elastic, True
    for variable, label in SCHEDULER_IDS:
        if environ.get(variable):
            return f"{label}-{environ[variable]}", True
    return f"launch-{launch or process_key(os.getpid())}", False


def runtime_dir(config: Config, environ: Mapping[str, str] | None = None) -> Path:
    """Directory of this user's sockets. The default is decided without touching the file system."""
    environ = os.environ if environ is None else environ
    if config.runtime_dir:
        # Absolute: the keeper and the command line do not share the trainer's working directory.
        return Path(config.runtime_dir).absolute()
    base = environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return Path(base) / "keepstep"
    return Path(f"/tmp/keepstep-{os.getuid()}")


def _make(directory: Path) -> os.stat_result:
    """Make the directory, again when it is removed meanwhile."""
    deadline = time.monotonic() + MAKE_WITHIN_S
    while True:
        try:
            # The caller checks a directory that exists already; it may be gone at the next line.
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700, parents=True)
            return directory.lstat()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.0005)


def ensure_private(directory: Path) -> None:
    """Make `directory` with mode 0700, or refuse one that another user could have prepared."""
    if len(os.fsencode(directory)) > 75:
        raise KeeperError(
            f"the runtime directory {directory} is too long for a unix socket path",
            hint="set KEEPSTEP_RUNTIME_DIR to a path of at most 75 bytes",
        )
    try:
        status = _make(directory)
    except OSError as error:
        raise KeeperError(
            f"the runtime directory {directory} cannot be made: {error.strerror}", hint="set KEEPSTEP_RUNTIME_DIR"
        ) from error
    if not _is_private(status, os.getuid()):
        raise ForeignDirectoryError(directory)


def check_private(directory: Path, owner: int) -> bool:
    """Refuse a directory that is not `owner`'s alone. False: there is none."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    if not _is_private(status, owner):
        raise ForeignDirectoryError(directory)
    return True


def _is_private(status: os.stat_result, owner: int) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == owner and not stat.S_IMODE(status.st_mode) & 0o077


def process_key(pid: int) -> str:
    """Name of a process that a later process with the same pid does not share."""
    return f"{pid}-{start_time(pid)}"


def start_time(pid: int) -> int:
    """The kernel's start time of `pid` in clock ticks, 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
