"""Files with secrets: refused in one sentence that names the file, before anything listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.config import Config, PeersConfig
from keepstep.control.secret_file import MAX_SECRET_BYTES, MIN_SECRET_BYTES, read_secret
from keepstep.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "secret"
    made.touch(mode=0o600)
    return made


def test_there_may_be_no_file() -> None:
    assert read_secret(Config()) == b""


def test_the_secret_is_read_without_its_newline(path: Path) -> None:
    path.write_bytes(b"s" * MIN_SECRET_BYTES + b"\n")
    assert read_secret(Config(secret_file=str(path))) == b"s" * MIN_SECRET_BYTES


@pytest.mark.parametrize("size", [0, 1, MIN_SECRET_BYTES - 1, MAX_SECRET_BYTES + 1])
def test_a_secret_of_another_length_is_refused(path: Path, size: int) -> None:
    path.write_bytes(b"s" * size)
    with pytest.raises(ConfigError, match=f"secret_file {path} holds"):
        read_secret(Config(secret_file=str(path)))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o666, 0o644])
def test_files_that_others_can_open_are_refused(path: Path, mode: int) -> None:
    path.write_bytes(b"s" * MIN_SECRET_BYTES)
    path.chmod(mode)
    for config in (Config(secret_file=str(path)), Config(peers=PeersConfig(tls_key=str(path)))):
        with pytest.raises(ConfigError, match=f"{path} can be read or written by others .*{mode:04o}"):
            read_secret(config)


def test_a_missing_file_is_named(path: Path) -> None:
    path.unlink()
    for config in (Config(secret_file=str(path)), Config(peers=PeersConfig(tls_key=str(path)))):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file"):
            read_secret(config)
