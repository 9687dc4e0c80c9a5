"""The files that keep other users and hosts out: the job's secret, and the TLS key. Checked when a job is launched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from keepstep.config import Config
from keepstep.errors import ConfigError

SECRET_BYTES = 32  # of a drawn one
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


def security_level(config: Config) -> str:
    """What keeps others out of a job of several nodes, in words."""
    files = [name for name, given in (("secret file", config.secret_file), ("TLS", config.peers.tls_key)) if given]
    if not config.secret_file:
        files.insert(0, "open store")
    return " and ".join(files)


def read_secret(config: Config) -> bytes:
    """The job's secret from its file; b"" when there is none. Also refuses a TLS key that others can read."""
    if config.peers.tls_key:
        _read("peers.tls_key", config.peers.tls_key)
    path = config.secret_file
    if not path:
        return b""
    secret = _read("secret_file", path).strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"secret_file {path} holds {len(secret)} bytes, and {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} are needed",
            hint=f"(umask 077; head -c {SECRET_BYTES} /dev/urandom | base64 > {path}), the same file on all nodes",
        )
    return secret


def _read(setting: str, path: str) -> bytes:
    """The first bytes of a file that only its owner may read."""
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_SECRET_BYTES + 2)
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(
            f"{setting} {path} can be read or written by others (mode {mode:04o})", hint=f"chmod 600 {path}"
        )
    return content
