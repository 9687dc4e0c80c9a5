"""Who a process is: whose state may be restored, and where the keeper is met."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.config import Config
from keepstep.errors import ConfigError, KeeperError
from keepstep.identity import SCHEDULER_IDS, Identity, ensure_private, identify, process_key, runtime_dir, start_time


def run_of(config: Config | None = None, *, launch: str = "", **environ: str) -> tuple[str, bool]:
    identity = identify(config or Config(), environ=environ, launch=launch)
    return identity.run_id, identity.outlives_launch


# The run id decides whose state may be restored


def test_configured_run_id_comes_first() -> None:
    assert run_of(Config(run_id="mine"), TORCHELASTIC_RUN_ID="elastic", SLURM_JOB_ID="7") == ("mine", True)


def test_rdzv_id_comes_before_the_scheduler() -> None:
    assert run_of(TORCHELASTIC_RUN_ID="elastic", SLURM_JOB_ID="7") == ("elastic", True)


@pytest.mark.parametrize("default", ["", "none"])
def test_default_of_torchrun_is_not_an_id(default: str) -> None:
    assert run_of(TORCHELASTIC_RUN_ID=default, SLURM_JOB_ID="7") == ("slurm-7", True)
    run_id, outlives = run_of(TORCHELASTIC_RUN_ID=default)
    assert run_id not in ("", "none")
    assert not outlives


def test_default_of_torchrun_given_on_purpose_is_refused() -> None:
    with pytest.raises(ConfigError, match="would mix jobs") as caught:
        run_of(Config(run_id="none"))
    assert "--rdzv-id" in caught.value.hint


@pytest.mark.parametrize(("variable", "label"), SCHEDULER_IDS)
def test_job_id_of_the_scheduler_is_used_when_torchrun_has_none(variable: str, label: str) -> None:
    assert run_of(**{variable: "42"}) == (f"{label}-42", True)
    assert run_of(**{variable: ""})[1] is False


def test_same_number_under_two_schedulers_is_two_runs() -> None:
    assert run_of(SLURM_JOB_ID="42") != run_of(PBS_JOBID="42")


def test_launch_without_an_id_gets_one_that_does_not_outlive_it() -> None:
    assert run_of(launch="123-456") == ("launch-123-456", False)
    assert run_of(launch="123-456") != run_of(launch="123-457")


def test_processes_without_a_launcher_do_not_share_a_run() -> None:
    mine = run_of()
    assert mine == run_of()
    code = "from keepstep.identity import *; print(identify(Config(), environ={}).run_id)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert other.stdout.strip() != mine[0]


def test_environment_of_the_process_is_used_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "from the environment")
    assert identify(Config()).run_id == "from the environment"


@pytest.mark.parametrize("bad", ["a\nb", "a\0b", "\x1b[31m", "x" * 201, "é" * 101, "\udcff", "a\u2028b"], ids=ascii)
def test_id_that_is_unprintable_or_too_long_is_refused(bad: str) -> None:
    for config in (Config(run_id=bad), Config(run_id="fine", node_id=bad)):
        with pytest.raises(ConfigError, match="not printable or longer than 200 bytes"):
            identify(config, environ={})
    with pytest.raises(ConfigError):
        identify(Config(), environ={"TORCHELASTIC_RUN_ID": bad})


def test_id_of_200_bytes_is_accepted() -> None:
    assert identify(Config(run_id="é" * 100), environ={}).run_id == "é" * 100


def test_node_is_the_host_unless_named() -> None:
    assert identify(Config(run_id="r"), environ={}).node_id == socket.gethostname()
    assert identify(Config(run_id="r", node_id="n"), environ={}).node_id == "n"


# The key names the sockets


def identity(run_id: str = "run", node_id: str = "node", base: Path = Path("/run/user/1")) -> Identity:
    return Identity(run_id, node_id, base, True)


def test_key_never_changes_between_versions_of_keepstep() -> None:
    """A keeper must be found by trainers and commands of another version."""
    assert identity().key == "139194545b04b9c2"
    assert identity("läufe/7", "node a").key == "7bb29776ed27bb7f"


def test_key_depends_on_run_and_node_and_on_nothing_else() -> None:
    pairs = [("run", "node"), ("run", "node2"), ("run2", "node"), ("runn", "ode"), ("node", "run"), ("", "runnode")]
    assert len({identity(*pair).key for pair in pairs}) == len(pairs)
    assert identity(base=Path("/elsewhere")).key == identity().key


def test_everything_of_a_run_lies_in_its_own_directory_and_the_lock_beside_it() -> None:
    one = identity()
    assert one.directory == Path("/run/user/1") / one.key
    assert {one.control_socket.parent, one.http_socket.parent, one.card.parent} == {one.directory}
    assert len({one.control_socket, one.http_socket, one.card}) == 3
    assert one.keeper_lock.parent == one.runtime_dir


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path: tmp_path can be longer than what a socket allows."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ks") as name:
        yield Path(name)


def test_sockets_in_the_longest_allowed_directory_can_be_bound(base: Path) -> None:
    longest = base / ("d" * (75 - len(str(base)) - 1))
    assert len(str(longest)) == 75
    ensure_private(longest)
    one = identity("r" * 200, "n" * 200, longest)
    one.directory.mkdir()
    for path in (one.control_socket, one.http_socket):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))


def test_directory_too_long_for_a_socket_is_refused_before_it_is_made(base: Path) -> None:
    too_long = base / ("d" * (76 - len(str(base)) - 1))
    with pytest.raises(KeeperError, match="too long for a unix socket path") as caught:
        ensure_private(too_long)
    assert "KEEPSTEP_RUNTIME_DIR" in caught.value.hint
    assert not too_long.exists()


def test_directory_that_an_ending_keeper_takes_away_meanwhile_is_made_again(base: Path) -> None:
    directory, done = base / "r", threading.Event()

    def take_away() -> None:
        while not done.wait(0.0001):
            with contextlib.suppress(OSError):
                directory.rmdir()

    thread = threading.Thread(target=take_away)
    thread.start()
    try:
        for _ in range(20_000):
            ensure_private(directory)
    finally:
        done.set()
        thread.join()


def test_length_of_the_directory_is_counted_in_bytes(base: Path) -> None:
    with pytest.raises(KeeperError, match="too long"):
        ensure_private(base / ("é" * 35))


# The runtime directory


def test_runtime_directory_is_configured_else_of_the_session_else_in_tmp(tmp_path: Path) -> None:
    session = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert runtime_dir(Config(runtime_dir="/mine"), session) == Path("/mine")
    assert runtime_dir(Config(), session) == tmp_path / "keepstep"
    assert runtime_dir(Config(), {}) == Path(f"/tmp/keepstep-{os.getuid()}")
    assert runtime_dir(Config(), {"XDG_RUNTIME_DIR": str(tmp_path / "missing")}).parent == Path("/tmp")


def test_relative_runtime_directory_means_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = runtime_dir(Config(runtime_dir="run"), {})
    assert found == tmp_path / "run"
    assert identify(Config(run_id="r", runtime_dir="run"), environ={}).control_socket.is_absolute()


def test_directory_is_made_private_whatever_the_umask(base: Path) -> None:
    for umask in (0o000, 0o022, 0o077):
        before = os.umask(umask)
        try:
            directory = base / f"{umask:o}"
            ensure_private(directory)
        finally:
            os.umask(before)
        assert stat.S_IMODE(directory.lstat().st_mode) == 0o700
        ensure_private(directory)


def test_missing_parents_are_made(base: Path) -> None:
    ensure_private(base / "a" / "b")
    assert (base / "a" / "b").is_dir()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o701, 0o710, 0o750, 0o704])
def test_directory_that_others_can_enter_is_refused(base: Path, mode: int) -> None:
    squatted = base / "squatted"
    squatted.mkdir()
    squatted.chmod(mode)
    with pytest.raises(KeeperError, match="not a directory of this user with mode 0700"):
        ensure_private(squatted)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_directory_of_another_user_is_refused(base: Path) -> None:
    squatted = base / "squatted"
    squatted.mkdir(mode=0o700)
    os.chown(squatted, 12345, 12345)
    with pytest.raises(KeeperError, match="not a directory of this user"):
        ensure_private(squatted)


def test_link_to_a_private_directory_is_refused(base: Path) -> None:
    """Whoever owns the link can point it elsewhere after the check."""
    real = base / "real"
    real.mkdir(mode=0o700)
    link = base / "link"
    link.symlink_to(real)
    with pytest.raises(KeeperError, match="not a directory of this user"):
        ensure_private(link)


def test_dangling_link_and_file_are_refused(base: Path) -> None:
    (base / "link").symlink_to(base / "nowhere")
    (base / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(KeeperError, match="is not a directory of this user"):
            ensure_private(base / name)
    assert not (base / "nowhere").exists()


def test_directory_below_a_file_is_a_keeper_error(base: Path) -> None:
    (base / "file").write_text("")
    with pytest.raises(KeeperError, match="cannot be made: Not a directory"):
        ensure_private(base / "file" / "below")


# Processes


def test_process_key_tells_a_process_from_the_next_owner_of_its_pid() -> None:
    assert process_key(os.getpid()) == f"{os.getpid()}-{start_time(os.getpid())}"
    assert start_time(os.getpid()) > start_time(1) >= 0


def test_start_time_is_read_behind_a_name_with_spaces_and_brackets() -> None:
    code = (
        "import os; from keepstep.identity import start_time; before = start_time(os.getpid())\n"
        "open('/proc/self/comm', 'w').write(') S 1 2 (x)')\n"
        "assert start_time(os.getpid()) == before > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_process_that_is_gone_has_no_start_time() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert start_time(child) == 0
