"""Who may write, who may speak: forked children, zombies, other jobs, other users, and rubbish on the socket.

The keeper believes pidfds, never a closed socket; it opens an incarnation only when the trainers of
older ones are dead; it closes a connection that misbehaves and lives on.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lives import SCRIPT, Expectation, Zygote, job
from steps import read_log

import keepstep
from keepstep.config import Config
from keepstep.control import framing
from keepstep.control import messages as p
from keepstep.control.client import KeeperClient
from keepstep.control.spawn import ALREADY_RUNNING, start_keeper
from keepstep.launcher.keeper_supervisor import KeeperSupervisor
from keepstep.testing.run import LocalRun, alive, wait_until
from keepstep.types import Incarnation, Version

pytestmark = pytest.mark.computing

PACE_S = 0.03
RATE = {"KEEPSTEP_TAKE_RATE_BYTES_S": str(240_000_000)}
MEMFD = "memfd:keepstep-arena"


@pytest.fixture
def run() -> Iterator[LocalRun]:
    """A run whose keeper is up and has nothing to keep."""
    with LocalRun() as made:
        start_keeper(made.identity, made.config())
        yield made


def raw(run: LocalRun) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    deadline = time.monotonic() + 10
    while True:
        try:
            sock.connect(str(run.identity.control_socket))
            return sock
        except BlockingIOError:  # the line is full
            assert time.monotonic() < deadline
            time.sleep(0.001)


def hello(run: LocalRun, **changes: Any) -> p.Hello:
    fields = {"protocol": p.PROTOCOL, "run_id": run.identity.run_id, "node_id": run.identity.node_id, "role": "trainer"}
    return p.Hello(**{**fields, **changes}, ticket=1)


def answer_to(sock: socket.socket, message: Any) -> Any:
    """The first message back; None when the keeper hangs up."""
    framing.send(sock, message)
    reader = framing.FrameReader()
    with contextlib.suppress(ConnectionResetError):
        while True:
            data, fds = framing.receive(sock)
            if not data:
                return None
            found = reader.feed(data, fds)
            if found:
                return found[0][0]
    return None


def is_hung_up(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def memfds(pid: int) -> list[str]:
    """Arenas that a process holds, by descriptor or by map."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(fd))
    return [line for line in [*links, *Path(f"/proc/{pid}/maps").read_text().splitlines()] if MEMFD in line]


# Processes that outlive their time


def test_forked_children_neither_delay_the_news_of_a_death_nor_keep_the_memory(zygote: Zygote) -> None:
    with job(zygote, settings=RATE) as made:
        trainers = made.start(pace_s=PACE_S, children=2)
        trainers.wait_for("complete", 2)
        children = [line["pid"] for line in trainers.events("child")]
        try:
            assert len(children) == 2
            assert memfds(trainers.pids[0])
            for child in children:
                assert not memfds(child), "a forked child holds the arena"
            trainers.kill()
            wait_until(lambda: not made.run.status().ranks[0].alive, timeout_s=20, what="the news of the death")
            assert all(alive(child) for child in children)
            expect = Expectation().after(trainers, made.check(trainers, Expectation()))
            reborn = made.start(pace_s=PACE_S)
            reborn.wait_for("restored")
            made.check(reborn, expect)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_children_forked_before_the_arena_exists_do_not_keep_the_connection(zygote: Zygote) -> None:
    with job(zygote, settings=RATE) as made:
        trainers = made.start(pace_s=PACE_S, children=1, linger_s=0.2)
        trainers.wait_for("complete")
        (child,) = [line["pid"] for line in trainers.events("child")]
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{child}/fd").iterdir()]
            assert not [link for link in links if link.startswith("socket:")], "the child holds the trainer's socket"
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("stopped", [False, True], ids=["it writes on", "it is stopped in mid-copy"])
def test_a_zombie_of_an_older_incarnation_is_dead_before_the_new_one_restores(zygote: Zygote, stopped: bool) -> None:
    with job(zygote, settings=RATE) as made:
        zombie = made.start(pace_s=PACE_S)
        zombie.wait_for("complete", 2)
        if stopped:
            time.sleep(PACE_S / 2)
            os.kill(zombie.pids[0], signal.SIGSTOP)
        reborn = made.start(pace_s=PACE_S)
        reborn.wait_for("restored")
        assert not alive(zombie.pids[0]), "the old trainer was not fenced"
        reborn.wait_for("complete", 2)
        wait_until(lambda: zombie.codes() == [-signal.SIGKILL], what="the zombie to be reaped")
        expect = Expectation().after(zombie, made.check(zombie, Expectation()))
        restored = made.check(reborn, expect)
        assert restored is not None
        assert restored >= 0


def test_a_zombie_that_never_came_back_to_the_new_keeper_is_fenced_too(zygote: Zygote) -> None:
    """Stopped in mid-copy when its keeper dies: the keeper that takes over has never met it, and it holds a map."""
    with job(zygote, settings=RATE) as made:
        holder = KeeperSupervisor(made.run.identity, Config())
        try:
            holder.status(timeout_s=30.0, patient=True)
            zombie = made.start({"KEEPSTEP_INCARNATION": "1:1"}, pace_s=PACE_S)
            zombie.wait_for("complete", 2)
            time.sleep(PACE_S / 2)
            os.kill(zombie.pids[0], signal.SIGSTOP)
            made.run.kill_keeper()
            holder.status(timeout_s=30.0, patient=True)
            reborn = made.start({"KEEPSTEP_INCARNATION": "2:2"}, pace_s=PACE_S)
            reborn.wait_for("restored")
            assert not alive(zombie.pids[0]), "the old trainer was not fenced"
            reborn.wait_for("complete", 2)
            expect = Expectation().after(zombie, made.check(zombie, Expectation()))
            restored = made.check(reborn, expect)
            assert restored is not None
            assert restored >= 0
        finally:
            holder.close()


def test_two_jobs_with_the_default_id_of_torchrun_do_not_see_each_other(tmp_path: Path) -> None:
    """`none` is not an id: each launch gets one of its own, also in one runtime directory."""
    with LocalRun() as made:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        environ["KEEPSTEP_RUNTIME_DIR"] = str(made.identity.runtime_dir)
        jobs = []
        for number in range(2):
            life = {"log": str(tmp_path / f"{number}.jsonl"), "steps": 8, "pace_s": 0.1, "finish": True}
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--master-port=0"]
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(SCRIPT), json.dumps(life)]
            errors = (tmp_path / f"{number}.stderr").open("wb")
            jobs.append(subprocess.Popen(command, env=environ, stdout=errors, stderr=errors, start_new_session=True))
            errors.close()
        try:
            logs = [tmp_path / f"{number}.jsonl" for number in range(2)]
            keepers: set[str] = set()

            def both_have_begun() -> bool:
                # All the while: on a busy machine one may have ended before the other begins.
                keepers.update(found.parent.name for found in made.identity.runtime_dir.glob("*/keeper.json"))
                return all(any(line["event"] == "restored" for line in read_log(log)) for log in logs)

            wait_until(both_have_begun, timeout_s=90, what="both jobs to start")
            assert len(keepers) == 2, keepers
            for child in jobs:
                assert child.wait(timeout=60) == 0
            for log in logs:
                (restored,) = [line for line in read_log(log) if line["event"] == "restored"]
                assert restored["step"] == -1, "a job restored the other one's state"
        finally:
            for child in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait(timeout=20)
        wait_until(lambda: not made.files(), what=lambda: f"files to be gone: {made.files()}")


# Who is refused


def test_a_trainer_of_an_older_incarnation_is_refused(run: LocalRun) -> None:
    register = p.Register(0, 1, 0, 1, Incarnation(5, 1), "", 0, 1, 2, -1, no_holder=True)
    with contextlib.closing(KeeperClient(run.identity, "trainer")) as client:
        assert client.request(register, p.Registered, timeout_s=10)[0].incarnation == Incarnation(5, 1)
        for older in (Incarnation(4, 9), Incarnation(5, 2)):
            with contextlib.closing(KeeperClient(run.identity, "trainer")) as late:
                late_register = msgspec.structs.replace(register, incarnation=older)
                with pytest.raises(keepstep.KeeperError, match="is over"):
                    late.request(late_register, p.Registered, timeout_s=10)


def test_a_second_snapshotter_in_one_process_is_refused(run: LocalRun) -> None:
    state = {"plain": {"tensor": torch.zeros(3)}}
    with keepstep.Snapshotter(state, run.config()) as first:
        first.restore()
        with pytest.raises(keepstep.ConfigError, match="another Snapshotter"):
            keepstep.Snapshotter(state, run.config())
        assert first.take(0).wait(timeout_s=10) == keepstep.Survives.PROCESS


def test_another_run_node_role_or_protocol_is_refused_with_a_reason(run: LocalRun) -> None:
    for changes, reason in (
        ({"protocol": 99}, "speaks protocol"),
        ({"run_id": "somebody-else"}, "belongs to run"),
        ({"node_id": "elsewhere"}, "belongs to run"),
        ({"role": "admin"}, "not a role"),
    ):
        with contextlib.closing(raw(run)) as sock:
            answer = answer_to(sock, hello(run, **changes))
            assert isinstance(answer, p.Refused)
            assert reason in answer.message
            # It stays a stranger.
            assert answer_to(sock, p.WantStatus(ticket=2)) is None


def test_a_second_keeper_for_one_run_does_not_start(run: LocalRun) -> None:
    pid = run.keeper_pid()
    command = [sys.executable, "-m", "keepstep.keeper", "--detach"]
    done = subprocess.run(command, env=os.environ | run.environ, capture_output=True, timeout=30, check=False)
    assert done.returncode == ALREADY_RUNNING
    assert run.keeper_pid() == pid
    assert run.status().keeper.pid == pid


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_cut_off_even_where_the_file_modes_would_let_him_in(run: LocalRun) -> None:
    for path in (run.directory, run.identity.runtime_dir, run.identity.directory):
        path.chmod(0o755)
    run.identity.control_socket.chmod(0o666)
    code = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
        "try:\n    data = s.recv(100)\nexcept ConnectionResetError:\n    data = b''\n"
        "sys.exit(0 if data == b'' else 1)\n"
    )
    try:
        command = [sys.executable, "-I", "-c", code, str(run.identity.control_socket)]
        assert subprocess.run(command, timeout=30, check=False).returncode == 0
    finally:
        for path in (run.directory, run.identity.runtime_dir, run.identity.directory):
            path.chmod(0o700)
    assert run.status().keeper.pid == run.keeper_pid()


# Rubbish on the socket


def fds_of(run: LocalRun) -> int:
    return len(os.listdir(f"/proc/{run.keeper_pid()}/fd"))


def lives(run: LocalRun, pid: int, descriptors: int) -> None:
    """The same keeper answers, and has dropped what came with the rubbish."""
    assert run.status().keeper.pid == pid
    wait_until(lambda: fds_of(run) <= descriptors + 1, what=lambda: f"{fds_of(run)} fds to become {descriptors}")


def test_malformed_frames_close_their_connection_and_nothing_else(run: LocalRun) -> None:
    pid, descriptors = run.keeper_pid(), fds_of(run)
    head = struct.Struct("<HHI")
    bad = {
        "noise": random.Random(1).randbytes(4096),
        "a giant length": head.pack(framing.MAGIC, 0, 0xFFFFFFFF) + b"x" * 100,
        "a length just too large": head.pack(framing.MAGIC, 0, framing.MAX_FRAME_BYTES + 1),
        "too many descriptors announced": head.pack(framing.MAGIC, 0xFFFF, 4) + b"abcd",
        "descriptors that did not come": head.pack(framing.MAGIC, 3, 4) + b"abcd",
        "an empty body": head.pack(framing.MAGIC, 0, 0),
        "no such message": head.pack(framing.MAGIC, 0, 6) + msgspec.msgpack.encode({"type": 1})[:6],
        "an answer instead of a question": framing.pack(hello(run)) + framing.pack(p.Done("hi")),
        "no hello": framing.pack(p.WantStatus(ticket=1)),
        "deep nesting": head.pack(framing.MAGIC, 0, 60_000) + b"\x91" * 60_000,
    }
    for name, data in bad.items():
        with contextlib.closing(raw(run)) as sock:
            sock.sendall(data)
            assert is_hung_up(sock), name
    lives(run, pid, descriptors)


def test_half_frames_and_thousands_of_connections_do_not_stop_the_others(run: LocalRun) -> None:
    pid, descriptors = run.keeper_pid(), fds_of(run)
    for _ in range(2000):
        raw(run).close()
    crowd = []
    try:
        for number in range(200):
            crowd.append(raw(run))
            crowd[-1].sendall(framing.pack(hello(run))[: number % 12])
        assert run.status().keeper.pid == pid
        with contextlib.closing(KeeperClient(run.identity, "cli")) as client:
            for sock in crowd:  # others come and go in mid-frame
                sock.close()
            assert client.request(p.WantStatus(), p.StatusIs, timeout_s=10)
    finally:
        for sock in crowd:
            sock.close()
    lives(run, pid, descriptors)


def test_descriptors_that_come_with_rubbish_are_closed(run: LocalRun) -> None:
    """Also those of a good message behind a bad one, read in the same breath."""
    pid, descriptors = run.keeper_pid(), fds_of(run)
    null = os.open(os.devnull, os.O_RDONLY)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 60))]
    give = framing.pack(p.GiveBack([f"{n}" for n in range(60)], ticket=3), 60)
    try:
        for prefix in (
            b"",
            framing.pack(hello(run)),
            framing.pack(hello(run)) + framing.pack(p.Done("not a question")),
        ):
            for data in (give, give[:5], give[:-1], b"\0" * 64):
                for _ in range(5):
                    with contextlib.closing(raw(run)) as sock:
                        if prefix:
                            sock.sendall(prefix)
                        with contextlib.suppress(BrokenPipeError):
                            sock.sendmsg([data], rights)
                        sock.shutdown(socket.SHUT_WR)
                        is_hung_up(sock)
    finally:
        os.close(null)
    lives(run, pid, descriptors)


def test_a_keeper_that_runs_out_of_descriptors_lives_and_takes_connections_again() -> None:
    with LocalRun() as made:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
        try:
            start_keeper(made.identity, made.config())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        pid, descriptors = made.keeper_pid(), fds_of(made)
        null = os.open(os.devnull, os.O_RDONLY)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 50))]
        crowd = []
        try:
            for _ in range(150):
                with contextlib.suppress(OSError):
                    crowd.append(raw(made))
                    crowd[-1].sendmsg([b"\x53"], rights)
            wait_until(lambda: _answers(made), what="an answer while strangers crowd in")
        finally:
            os.close(null)
            for sock in crowd:
                sock.close()
        lives(made, pid, descriptors)


def _answers(run: LocalRun) -> bool:
    try:
        return run.status().keeper.pid > 0
    except keepstep.KeeperError:
        return False


ODD: dict[type, list[Any]] = {
    int: [0, 1, -1, 2, 3, 64, 255, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1],
    str: ["", "none", "a" * 300, "\0", "é" * 90, "0" * 32, "../../x"],
    bool: [True, False],
    bytes: [b"", b"\xff" * 1000],
}


def odd_value(kind: Any, rng: random.Random) -> Any:
    """A value of the right type that nobody expects."""
    if kind in ODD:
        return rng.choice(ODD[kind])
    if kind is Incarnation:
        return Incarnation(odd_value(int, rng), odd_value(int, rng))
    if kind is Version:
        return Version(odd_value(Incarnation, rng), odd_value(int, rng))
    if kind is p.SnapshotSize:
        return p.SnapshotSize(*(odd_value(int, rng) for _ in range(3)))
    if getattr(kind, "__origin__", None) is list:
        return [odd_value(kind.__args__[0], rng) for _ in range(rng.randrange(4))]
    options = [option for option in getattr(kind, "__args__", ()) if option is not type(None)]
    return odd_value(options[0], rng) if options and rng.random() < 0.8 else None


def odd_message(rng: random.Random) -> Any:
    asked = [p.Register, p.LauncherHello, p.WantArena, p.Held, p.GiveBack, p.Committed, p.Void, p.WantRestore, p.Loaded]
    kind: Any = rng.choice([*asked, p.Goodbye, p.WantStatus, p.WantVerify, p.WantArenas, p.Hello])
    fields = {field.name: odd_value(field.type, rng) for field in msgspec.structs.fields(kind)}
    if kind is p.Register:  # mostly one that is taken, so that what follows reaches further
        if rng.random() < 0.7:
            fields.update(rank=0, world_size=1, local_index=0, local_world_size=1, every=1, slots=2, progress=-1)
            fields.update(incarnation=None)
        fields.update(launcher_pid=0)
    if kind is p.WantArena and rng.random() < 0.7:
        fields.update(need=p.SnapshotSize(10, 10, 10_000), slots=2, memory_limit_bytes=0)
    if kind is p.Goodbye:  # a job that says it is finished may end its keeper
        fields.update(finished=False)
    if kind is p.Hello:
        fields.update(protocol=p.PROTOCOL, run_id="test-run", node_id="test-node", role="trainer")
    return kind(**fields)


@pytest.mark.parametrize("seed", range(4))
def test_well_formed_messages_with_odd_values_in_any_order_do_not_end_the_keeper(run: LocalRun, seed: int) -> None:
    rng, pid, descriptors = random.Random(seed), run.keeper_pid(), fds_of(run)
    for _ in range(60):
        with contextlib.closing(raw(run)) as sock, contextlib.suppress(OSError):
            sock.settimeout(0.05)
            framing.send(sock, hello(run))
            for _ in range(rng.randrange(1, 12)):
                framing.send(sock, odd_message(rng))
            with contextlib.suppress(TimeoutError):
                while sock.recv(65536):
                    pass
    status = run.status()
    assert status.keeper.pid == pid
    arenas = len(status.ranks)
    lives(run, pid, descriptors + 4 * max(1, arenas))
    log = (run.identity.directory / "keeper.log").read_text()
    assert "a fault of the keeper's own" not in log, log[-4000:]
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
