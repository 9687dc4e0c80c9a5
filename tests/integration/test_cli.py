"""The command line against real keepers, with real processes as trainers.

This file is also the trainer: `python test_cli.py RANK WORLD_SIZE` registers, asks for an arena and writes snapshots
into it as a trainer would, by the commands that come on its standard input. It knows no torch, so it starts fast.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from keepstep.arena import records as h
from keepstep.arena.records import Progress, TrainerHeader
from keepstep.arena.slots import Arena
from keepstep.cli import doctor_checks
from keepstep.cli.commands import doctor, verify
from keepstep.cli.commands.inspect import ArenaSummary, Inspection, LayoutSummary, SlotSummary
from keepstep.cli.commands.plan import Forecast
from keepstep.cli.commands.release import Released
from keepstep.cli.commands.status import RunStatus
from keepstep.cli.commands.store import parse_address
from keepstep.cli.drills.bit_flips import REGIONS, choose_target
from keepstep.cli.keepers import BorrowedArenas, read_status
from keepstep.cli.main import COMMANDS, main
from keepstep.cli.risk import headline, unprotected
from keepstep.config import Config, resolve
from keepstep.control.client import KeeperClient
from keepstep.control.messages import (
    ArenaGiven,
    Committed,
    Complete,
    Done,
    Goodbye,
    Held,
    Hold,
    Loaded,
    PlannedPiece,
    Register,
    Registered,
    RestoreFrom,
    VerifyResult,
    WantArena,
    WantArenas,
    WantRestore,
)
from keepstep.control.spawn import start_keeper
from keepstep.control.status import fetch_status
from keepstep.errors import KeeperError
from keepstep.identity import Identity, identify
from keepstep.layout import Entry, Layout, SnapshotSize, TensorView, digest
from keepstep.types import KeeperStatus, PeerStatus, RankStatus, SlotStatus, Status, Version

WAIT_S = 20.0
NODE = "node-a"
PAYLOAD_BYTES = 96 << 10
VALUES = b"values that are not tensors"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
LAYOUT = Layout(
    (
        Entry(
            0, 64 << 10, (TensorView("model.weight", "float32", (128, 128), (128, 1), 0, (256, 128), (128, 0), True),)
        ),
        Entry(64 << 10, 32 << 10, (TensorView("model.[bias]", "bfloat16", (16384,), (1,), 0, (16384,), (0,), False),)),
    ),
    ((0, 0), (1, 0)),
)


# The trainer process


class ActingTrainer:
    """Speaks the keeper's protocol by hand; one command per line of standard input, one answer per line of output."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.pushes: queue.SimpleQueue[tuple[Any, list[int]]] = queue.SimpleQueue()
        self.complete: queue.SimpleQueue[Version] = queue.SimpleQueue()
        self.used_serial = 0
        self.link = KeeperClient(identify(resolve()), "trainer", listener=self)
        threading.Thread(target=self._hear, daemon=True).start()

    def on_push(self, message: Any, fds: list[int]) -> None:
        self.pushes.put((message, fds))

    def on_lost(self) -> None:
        pass

    def join(self, payload_bytes: int) -> None:
        label = os.environ.get("KEEPSTEP_TEST_LABEL", "round 1")
        register = Register(self.rank, self.world_size, self.rank, self.world_size, None, label, 0, 1, 2, -1)
        self.incarnation = self.link.request(register, Registered, timeout_s=WAIT_S)[0].incarnation
        restore, fds = self.link.request(WantRestore(), RestoreFrom, timeout_s=WAIT_S)
        for fd in fds:
            os.close(fd)
        self.encoded = LAYOUT.encode()
        need = SnapshotSize(len(self.encoded), len(VALUES), payload_bytes)
        _, fds = self.link.request(WantArena(need, 2), ArenaGiven, timeout_s=WAIT_S)
        identity = self.link.identity
        self.arena = Arena.adopt(fds[0], run_id=identity.run_id, node_id=identity.node_id)
        self.payload_bytes = payload_bytes
        step = restore.version.step if restore.version else None
        self.progress(-1 if step is None else step)  # the memory is ready
        self.link.request(Loaded(step), Done, timeout_s=WAIT_S)

    def take(self, step: int) -> None:
        grant = _eventually(lambda: self._grant_for(step))
        self.used_serial = grant.serial
        version = Version(self.incarnation, step)
        self._write_header(grant.slot, h.WRITING, version)
        payload = bytes([step % 251]) * self.payload_bytes
        for span, data in (
            (self.arena.layout_span(grant.slot), self.encoded),
            (self.arena.values_span(grant.slot), VALUES),
            (self.arena.payload_span(grant.slot), payload),
        ):
            self.arena.segment.write(span.offset, data)
        self._write_header(grant.slot, h.COMMITTED, version)
        self.progress(step)
        self.link.post(Committed(self.arena.arena_id, grant.slot, version))
        assert self.complete.get(timeout=WAIT_S) == version

    def progress(self, step: int) -> None:
        self.arena.write_progress(Progress(self.incarnation, step))

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.take(step)

    def _grant_for(self, step: int) -> h.Grant | None:
        granted = self.arena.grant()
        grant = granted.after(self.used_serial) if granted is not None else None
        return grant if grant is not None and grant.step <= step else None

    def _write_header(self, slot: int, state: int, version: Version) -> None:
        header = TrainerHeader(
            state=state, rank=self.rank, world_size=self.world_size, local_index=self.rank,
            local_world_size=self.world_size, flags=0, version=version, layout_bytes=len(self.encoded),
            values_bytes=len(VALUES), payload_bytes=self.payload_bytes, layout_digest=digest(self.encoded),
            written_at=time.time(),
        )  # fmt: skip
        self.arena.write_trainer_header(slot, header)

    def _hear(self) -> None:
        while True:
            message, fds = self.pushes.get()
            if isinstance(message, Hold):
                self.link.post(Held(message.arena_ids))  # the descriptors stay open: that is the holding
            elif isinstance(message, Complete):
                self.complete.put(message.version)
            assert isinstance(message, Hold) or not fds


def act_as_trainer(rank: int, world_size: int) -> None:
    trainer = ActingTrainer(rank, world_size)
    calls: dict[str, Callable[..., None]] = {
        "join": trainer.join, "take": trainer.take, "progress": trainer.progress, "train": trainer.train,
        "finish": lambda: trainer.link.post(Goodbye(True)),
        "spawn": lambda: _spawn_child(),
    }  # fmt: skip
    for line in sys.stdin:
        name, *numbers = line.split()
        calls[name](*map(int, numbers))
        print("done", flush=True)


def _spawn_child() -> None:
    """As a data loader has: a process that only its parent knows."""
    subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _eventually(find: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := find()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
    return found


# The tests' side of it


class Trainers:
    """The trainer processes of one job."""

    def __init__(self, environ: dict[str, str], world_size: int) -> None:
        command = [sys.executable, __file__]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size)], env=environ, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(world_size)
        ]  # fmt: skip

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def do(self, *command: object) -> None:
        """Tell all ranks, then wait for all: they need each other to get on."""
        self.tell(*command)
        self.wait()

    def tell(self, *command: object) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(" ".join(map(str, command)) + "\n")
            process.stdin.flush()

    def wait(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


class Node:
    """A runtime directory of its own, and everything that is started in it."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "TORCHELASTIC_", "SLURM_"))}
        self.environ = {**clean, "KEEPSTEP_RUNTIME_DIR": str(runtime_dir), "KEEPSTEP_NODE_ID": NODE}
        self.jobs: list[Trainers] = []

    def identity(self, run_id: str = "run-a") -> Identity:
        return Identity(run_id, NODE, self.runtime_dir, outlives_launch=True)

    def keeper(self, run_id: str = "run-a") -> int:
        start_keeper(self.identity(run_id), Config())
        return fetch_status(self.identity(run_id)).keeper.pid

    def job(self, run_id: str = "run-a", *, world_size: int = 1, payload_bytes: int = PAYLOAD_BYTES) -> Trainers:
        self.keeper(run_id)
        trainers = Trainers({**self.environ, "KEEPSTEP_RUN_ID": run_id}, world_size)
        self.jobs.append(trainers)
        trainers.do("join", payload_bytes)
        return trainers

    def cli(self, *arguments: str, given: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command in this process: it is the same code, and starts ten times as fast."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {**self.environ, **environ}, clear=True),
            mock.patch("sys.stdin", io.StringIO(given)),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                code: Any = main(list(arguments))
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def process(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command as its users do, in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "keepstep.cli.main", *arguments], env={**self.environ, **environ}, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
        )  # fmt: skip

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self.cli(*arguments, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def close(self) -> None:
        for job in self.jobs:
            job.end()
        for card in self.runtime_dir.glob("*/keeper.json"):
            self._end_keeper(json.loads(card.read_text())["pid"])
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _end_keeper(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            pidfd = os.pidfd_open(pid)
            with os.fdopen(pidfd):
                if str(self.runtime_dir).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    for name in [name for name in os.environ if name.startswith(("KEEPSTEP_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    place = Node(Path(tempfile.mkdtemp(prefix="ks-cli-", dir="/tmp")))
    yield place
    place.close()


def is_gone(pid: int) -> bool:
    """Dead; a zombie that nobody reaps in a container without an init is dead too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 1, nothing on standard output, `error:` with the words and `try:` on the other."""
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    first, second = done.stderr.strip().splitlines()
    assert first.startswith("error: ")
    assert second.startswith("try: ")
    for word in words:
        assert word in done.stderr


# The command itself


def test_help_names_every_command_and_imports_no_torch(node: Node) -> None:
    done = node.cli("--help")
    assert done.returncode == 0
    assert all(f"    {name} " in done.stdout for name in COMMANDS)
    assert imported_by(node, "--help").isdisjoint({"torch", "numpy", "rich", "keepstep.trainer"})


@pytest.mark.parametrize("command", ["status", "inspect", "verify", "release", "doctor"])
def test_commands_that_ask_a_keeper_import_no_torch(node: Node, command: str) -> None:
    assert imported_by(node, command).isdisjoint({"torch", "numpy", "keepstep.trainer"})


def imported_by(node: Node, *arguments: str) -> set[str]:
    code = (
        "import sys\nfrom keepstep.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=node.environ, capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [[], ["sing"], ["status", "--jsno"], ["status", "--watch", "-1"], ["drill"], ["run"], ["drill", "flip"]],
)
def test_wrong_usage_is_exit_code_2(node: Node, arguments: list[str]) -> None:
    done = node.cli(*arguments)
    assert done.returncode == 2
    assert "usage: keepstep" in done.stderr


def test_the_installed_script_tells_its_version() -> None:
    done = subprocess.run([Path(sys.executable).parent / "keepstep", "--version"], capture_output=True, check=True)
    assert done.stdout.startswith(b"keepstep ")


def test_a_reader_that_has_enough_gets_no_traceback(node: Node) -> None:
    node.job().do("take", 0)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "status", "--json"], env=node.environ, stdout=write,
        stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_every_command_and_option_is_in_the_documentation() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"## keepstep {name}" in text
    for source in (Path(doctor.__file__).parent).glob("*.py"):
        for option in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source.read_text()):
            assert f"`{option}" in text, f"{option} of {source.name}"


@pytest.mark.parametrize(
    "kind",
    [Status, KeeperStatus, RankStatus, SlotStatus, PeerStatus, Forecast, PlannedPiece, RunStatus, Inspection,
     ArenaSummary, SlotSummary, LayoutSummary, verify.Verification, verify.SnapshotVerdict, doctor.DoctorReport,
     doctor_checks.Finding],
)  # fmt: skip
def test_every_field_of_the_json_is_in_the_documentation(kind: type[msgspec.Struct]) -> None:
    text = DOCS.read_text(encoding="utf-8")
    missing = [name for name in kind.__struct_fields__ if f"| `{name}` |" not in text]
    assert not missing, f"docs/cli.md says nothing about {kind.__name__}.{missing}"


# Which run


@pytest.mark.parametrize(
    "command",
    [["status"], ["status", "--all"], ["inspect"], ["verify"], ["release"], ["drill", "kill-trainer", "--yes"],
     ["drill", "kill-keeper", "--yes"], ["drill", "flip-bits", "--yes"], ["drill", "kill-node", "--yes"],
     ["drill", "freeze-peer", "--yes"], ["drill", "cut-link", "--yes"], ["plan", "--lost", "node-b"]],
)  # fmt: skip
def test_without_a_keeper_every_command_says_so(node: Node, command: list[str]) -> None:
    assert_error(node.cli(*command), "no keeper")


def test_a_run_that_is_not_there_is_refused_by_naming_those_that_are(node: Node) -> None:
    node.keeper("run-a")
    assert_error(node.cli("status", "--run-id", "run-x"), "'run-x'", "'run-a'", "--run-id run-a")


def test_release_never_suggests_another_run(node: Node) -> None:
    node.keeper("run-a")
    del node.environ["KEEPSTEP_NODE_ID"]
    unknown = node.cli("release", "--run-id", "run-x")
    assert_error(unknown, "no keeper serves run 'run-x' here", "keepstep status --all lists the runs")
    assert "run-a" not in unknown.stderr
    elsewhere = node.cli("release", "--run-id", "run-a", "--node-id", "node-b")
    assert_error(elsewhere, "no keeper serves run 'run-a' on node 'node-b' here")
    node.keeper("run-b")
    assert "try: --run-id NAME (and --node-id NAME)" in node.cli("release").stderr


def test_with_several_runs_one_must_be_named(node: Node) -> None:
    node.keeper("run-a")
    node.keeper("run-b")
    assert_error(node.cli("status"), "2 runs", "'run-a'", "'run-b'", "--run-id")
    assert node.json("status", "--run-id", "run-b", code=3)["run_id"] == "run-b"
    by_environment = node.cli("status", "--json", KEEPSTEP_RUN_ID="run-a")
    assert json.loads(by_environment.stdout)["run_id"] == "run-a"
    by_launcher = node.cli("status", "--json", TORCHELASTIC_RUN_ID="run-b")
    assert json.loads(by_launcher.stdout)["run_id"] == "run-b"


def test_two_nodes_of_one_run_on_one_machine_are_told_apart(node: Node) -> None:
    node.keeper()
    other = Identity("run-a", "node-b", node.runtime_dir, outlives_launch=True)
    start_keeper(other, Config())
    del node.environ["KEEPSTEP_NODE_ID"]
    assert_error(node.cli("status", "--run-id", "run-a"), "'node-a'", "'node-b'", "--node-id")
    assert node.json("status", "--run-id", "run-a", "--node-id", "node-b", code=3)["node_id"] == "node-b"


def test_a_killed_keeper_is_called_dead(node: Node) -> None:
    os.kill(node.keeper(), signal.SIGKILL)
    _eventually(lambda: "is dead" in node.cli("status").stderr)
    assert_error(node.cli("status"), "the keeper of run 'run-a'", "keepstep release")
    assert node.json("status", "--all", code=3)[0]["error"] == "its keeper is dead"


def test_a_runtime_directory_that_others_can_enter_is_refused(node: Node) -> None:
    node.keeper()
    node.runtime_dir.chmod(0o755)
    assert_error(node.cli("status"), "mode 0700")


def test_a_card_in_the_wrong_place_is_not_believed(node: Node) -> None:
    node.keeper()
    forged = node.runtime_dir / "0123456789abcdef"
    forged.mkdir()
    shutil.copy(node.identity().card, forged / "keeper.json")
    (forged / "keeper.new").write_text("{")
    assert len(node.json("status", "--all", code=3)) == 1


def test_read_status_takes_the_run_by_name(node: Node) -> None:
    pid = node.keeper()
    assert read_status(run_id="run-a", node_id=NODE, runtime_dir=node.runtime_dir).keeper.pid == pid
    assert read_status(runtime_dir=str(node.runtime_dir)).run_id == "run-a"
    with pytest.raises(KeeperError, match="'run-x'"):
        read_status(run_id="run-x", runtime_dir=node.runtime_dir)


def test_a_keeper_that_stands_still_is_not_waited_for(node: Node) -> None:
    pid = node.keeper()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(KeeperError, match=r"did not answer within 0\.3 s"):
        fetch_status(node.identity(), timeout_s=0.3)
    os.kill(pid, signal.SIGCONT)
    assert fetch_status(node.identity()).keeper.pid == pid


# status


def test_status_follows_a_job_from_its_first_trainer_to_its_death(node: Node) -> None:
    node.keeper()
    assert node.cli("status").returncode == 3
    job = node.job(world_size=2)
    waiting = node.json("status", code=3)
    assert waiting["step"] is None
    assert waiting["problems"]
    job.do("take", 0)
    job.do("take", 1)
    status = _eventually(lambda: found if (found := node.json("status"))["keeper"]["holders"] == 2 else None)
    assert (status["step"], status["survives"]) == (1, "process")
    assert [rank["pid"] for rank in status["ranks"]] == job.pids
    assert all(rank["alive"] and rank["progress"] == 1 for rank in status["ranks"])
    done = node.cli("status")
    assert done.returncode == 0
    assert "would cost no finished step: step 1 is complete" in done.stdout
    job.do("progress", 4)
    assert "would cost 3 steps: 4 is done, 1 is complete" in node.cli("status").stdout
    job.processes[1].kill()
    _eventually(lambda: node.cli("status").returncode == 3)
    assert "no trainer lives for rank 1" in node.cli("status").stdout
    job.end()
    _eventually(lambda: "No trainer and no launcher lives; step 1 is held for another" in node.cli("status").stdout)


def test_json_of_status_is_the_struct(node: Node) -> None:
    node.job().do("take", 7)
    done = node.cli("status", "--json")
    status = msgspec.json.decode(done.stdout, type=Status)
    assert status.step == 7
    assert set(json.loads(done.stdout)) == set(Status.__struct_fields__)
    assert set(json.loads(done.stdout)["ranks"][0]) == set(RankStatus.__struct_fields__)


def test_status_of_all_runs_has_a_line_each(node: Node) -> None:
    node.job("run-a").do("take", 3)
    node.keeper("run-b")
    done = node.cli("status", "--all")
    assert done.returncode == 3
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["run", "run-a", "run-b"]
    runs = node.json("status", "--all", code=3)
    assert [(run["run_id"], run["alive"], run["status"]["step"]) for run in runs] == [
        ("run-a", True, 3),
        ("run-b", True, None),
    ]


@pytest.mark.parametrize("form", [["--json"], []])
def test_watch_looks_until_interrupted_and_outlives_the_keeper(node: Node, form: list[str]) -> None:
    pid = node.keeper()
    watching = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "status", "--watch", "0.1", *form], env=node.environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert watching.stdout is not None
    first = watching.stdout.readline()
    assert (json.loads(first)["run_id"] == "run-a") if form else first.startswith("No trainer has registered")
    os.kill(pid, signal.SIGKILL)
    _eventually(lambda: "error: " in watching.stdout.readline())
    node.keeper()
    _eventually(lambda: "run-a" in (line := watching.stdout.readline()) and "error" not in line)
    watching.send_signal(signal.SIGINT)
    rest, _ = watching.communicate(timeout=WAIT_S)
    assert watching.returncode == 0
    assert "Traceback" not in rest


def test_watch_draws_on_a_terminal_until_interrupted(node: Node) -> None:
    node.keeper()
    ours, theirs = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "status", "--watch", "0.1"],
        env={**node.environ, "TERM": "xterm"}, stdout=theirs, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as screen:
        seen = b""
        while seen.count(b"No trainer has registered") < 3:
            seen += screen.read(4096)
        watching.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: the other side has closed
            while rest := screen.read(4096):
                seen += rest
    assert watching.wait(WAIT_S) == 0
    assert b"Traceback" not in seen


def make_status(*, step: int | None = 5, progress: int = 5, alive: bool = True, lease: float | None = None) -> Status:
    keeper = KeeperStatus(1, "i", "v", 1.0, "serving", True, lease, 1)
    rank = RankStatus(0, 0, 2, alive, progress, step, 0.1, "process", 0, [])
    return Status("r", "n", keeper, 1, step, 0.1, "process", 0, False, None, [rank], 0, {}, [])


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (make_status(), "A crash of the trainers now would cost no finished step: step 5 is complete."),
        (make_status(progress=6), "A crash of the trainers now would cost 1 step: 6 is done, 5 is complete."),
        (make_status(step=None), "A crash of the trainers now would cost all steps up to 5: no version is complete"),
        (make_status(step=None, progress=-1), "would cost the start of the run"),
        (make_status(alive=False, lease=9), "No trainer and no launcher lives; step 5 is held for another 9 s."),
        (make_status(alive=False), "No trainer lives; step 5 is held until the launcher starts them again."),
        (msgspec.structs.replace(make_status(), ranks=[]), "No trainer has registered yet"),
    ],
)
def test_the_headline_says_what_a_crash_would_cost(status: Status, sentence: str) -> None:
    assert sentence in headline(status)


def test_each_lack_of_protection_is_named() -> None:
    assert unprotected(make_status()) == []
    exposed = msgspec.structs.replace(make_status(), exposed=True, problems=["a slot is corrupt"])
    assert unprotected(exposed) == ["fewer losses are covered than the settings ask for", "a slot is corrupt"]
    assert unprotected(make_status(step=None, alive=False)) == [
        "no version is complete",
        "no trainer lives for rank 0",
    ]


# inspect


def test_inspect_shows_arenas_slots_and_versions(node: Node) -> None:
    job = node.job(world_size=2)
    job.do("train", 0, 2)
    found = node.json("inspect")
    assert sorted(arena["local_index"] for arena in found["arenas"]) == [0, 1]
    for arena in found["arenas"]:
        assert [(slot["state"], slot["step"]) for slot in arena["slots"]] == [("sealed", 0), ("sealed", 1)]
        assert {slot["payload_bytes"] for slot in arena["slots"]} == {PAYLOAD_BYTES}
        assert arena["allocated_bytes"] >= arena["size_bytes"] > 2 * PAYLOAD_BYTES
        assert (arena["progress"], arena["granted_step"], arena["granted_slot"]) == (1, 2, 0)
    done = node.cli("inspect")
    assert done.returncode == 0
    assert done.stdout.count("sealed") == 4


def test_inspect_lists_the_tensors_of_a_snapshot(node: Node) -> None:
    node.job().do("train", 0, 2)
    entries = node.json("inspect", "--entries")["entries"]
    assert (entries["rank"], entries["step"]) == (0, 1)
    weight, bias = entries["entries"]
    assert (weight["path"], weight["dtype"], weight["shape"]) == ("model.weight", "float32", [128, 128])
    assert (weight["global_shape"], weight["region"]) == ([256, 128], [128, 0])
    assert (bias["offset"], bias["bytes"]) == (64 << 10, 32 << 10)
    done = node.cli("inspect", "--entries", "--step", "0")
    assert "step 0" in done.stdout
    assert "model.[bias]" in done.stdout
    assert_error(node.cli("inspect", "--entries", "--rank", "5"), "no such sealed snapshot")


def test_inspect_of_a_keeper_without_trainers_says_that_nothing_is_held(node: Node) -> None:
    node.keeper()
    assert "nothing is held" in node.cli("inspect").stdout


def test_inspect_shows_a_header_that_is_damaged_twice(node: Node) -> None:
    node.job().do("take", 0)
    with arenas_of(node) as (arena,):
        arena.segment.write(arena.slot_offset(0), b"\xff" * 2 * h.RECORD_BYTES)
    assert [slot["state"] for slot in node.json("inspect")["arenas"][0]["slots"]] == ["damaged", "free"]


def test_inspect_refuses_a_layout_that_does_not_match_its_digest(node: Node) -> None:
    node.job().do("take", 0)
    assert node.cli("drill", "flip-bits", "--region", "layout", "--yes").returncode == 0
    assert_error(node.cli("inspect", "--entries"), "does not match its digest", "keepstep verify")


@contextlib.contextmanager
def arenas_of(node: Node) -> Iterator[list[Arena]]:
    link = KeeperClient(node.identity(), "cli")
    _, fds = link.request(WantArenas(), Hold, timeout_s=WAIT_S)
    yield [Arena.adopt(fd, run_id="run-a", node_id=NODE) for fd in fds]
    for fd in fds:
        os.close(fd)
    link.close()


# verify and flip-bits


def test_verify_finds_sound_snapshots_sound(node: Node) -> None:
    node.job(world_size=2).do("train", 0, 3)
    found = node.json("verify")
    assert found["sound"]
    assert {result["rank"] for result in found["results"]} == {0, 1}
    assert {result["verdict"] for result in found["results"]} == {"sound"}
    assert "none corrupt" in node.cli("verify").stdout


def test_verify_has_nothing_to_say_before_the_first_snapshot(node: Node) -> None:
    node.job()
    done = node.cli("verify")
    assert done.returncode == 3
    assert "nothing to check" in done.stdout


@pytest.mark.parametrize("region", REGIONS)
def test_flipped_bits_are_found_in_every_region(node: Node, region: str) -> None:
    node.job(world_size=2).do("train", 0, 2)
    assert node.cli("verify").returncode == 0
    done = node.cli("drill", "flip-bits", "--rank", "1", "--region", region, "--seed", "3", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"flipped 1 bit in the {region} of rank 1, step 1" in done.stdout
    found = node.json("verify", code=3)
    assert [(bad["rank"], bad["step"]) for bad in found["results"] if bad["verdict"] == "corrupt"] == [(1, 1)]
    done = node.cli("status")
    assert done.returncode == 3
    assert "would go back beyond step 1: it is corrupt on rank 1" in done.stdout


def test_verify_goes_on_naming_a_snapshot_that_it_found_corrupt_before(node: Node) -> None:
    node.job().do("take", 0)
    assert node.cli("drill", "flip-bits", "--yes").returncode == 0
    assert node.cli("verify").returncode == 3
    done = node.cli("verify")
    assert done.returncode == 3
    assert "1 snapshot corrupt" in done.stdout


def test_the_same_seed_flips_the_same_bits_back(node: Node) -> None:
    node.job().do("take", 0)
    drill = ["drill", "flip-bits", "--count", "200", "--seed", "11", "--yes"]
    with arenas_of(node) as arenas:
        target = choose_target(BorrowedArenas(arenas), rank=None, region="payload")
        before = target.arena.segment.read(target.span.offset, target.span.size_bytes)
        assert node.cli(*drill).returncode == 0
        struck = target.arena.segment.read(target.span.offset, target.span.size_bytes)
        assert sum((a ^ b).bit_count() for a, b in zip(before, struck, strict=True)) == 200
    assert node.cli(*drill).returncode == 0
    assert node.cli("verify").returncode == 0


def test_more_bits_than_there_are_cannot_be_flipped(node: Node) -> None:
    node.job().do("take", 0)
    assert_error(node.cli("drill", "flip-bits", "--region", "values", "--count", "9999", "--yes"), "9999 bits")


def test_verify_while_training_goes_on_neither_lies_nor_hurts_the_keeper(node: Node) -> None:
    job = node.job(payload_bytes=48 << 20)
    job.do("take", 0)
    pid = fetch_status(node.identity()).keeper.pid
    job.tell("train", 1, 40)
    while (fetch_status(node.identity()).step or 0) < 39:
        done = node.cli("verify")
        assert done.returncode == 0, done.stdout + done.stderr
    job.wait()
    assert fetch_status(node.identity()).keeper.pid == pid


@pytest.mark.parametrize(
    ("slot", "verdict"),
    [
        (SlotStatus(0, "sealed", 5), "corrupt"),
        (SlotStatus(0, "corrupt", 5), "corrupt"),
        (SlotStatus(0, "granted"), "replaced"),
        (SlotStatus(0, "sealed", 7), "replaced"),
        (SlotStatus(0, "committed", 7), "replaced"),
    ],
)
def test_a_slot_that_was_replaced_while_it_was_read_is_not_called_corrupt(slot: SlotStatus, verdict: str) -> None:
    status = make_status()
    rank = msgspec.structs.replace(status.ranks[0], slots=[slot])
    found = verify.judge([VerifyResult(0, 0, 5, 1, "differs")], msgspec.structs.replace(status, ranks=[rank]))
    assert [result.verdict for result in found.results] == [verdict]
    assert found.sound is (verdict == "replaced")


# release


def test_release_leaves_no_process_and_no_file(node: Node) -> None:
    job = node.job()
    job.do("take", 0)
    status = node.json("status")
    job.end()
    done = node.cli("release")
    assert done.returncode == 0, done.stderr
    assert "0.2 MiB" in done.stdout or "KiB of memory are free" in done.stdout
    assert is_gone(status["keeper"]["pid"])
    assert not node.runtime_dir.exists()


def test_release_is_refused_while_a_trainer_lives_unless_forced(node: Node) -> None:
    job = node.job()
    job.do("take", 0)
    _eventually(lambda: node.json("status")["keeper"]["holders"] == 1)
    pid = node.json("status")["keeper"]["pid"]
    assert_error(node.cli("release"), str(job.pids[0]), "--force")
    done = node.cli("release", "--force")
    assert done.returncode == 0
    assert "when 1 other process closes it" in done.stdout
    assert is_gone(pid)


def test_release_of_all_leaves_runs_alone_that_are_in_use(node: Node) -> None:
    node.job("run-a").do("take", 0)
    leased = node.keeper("run-b")
    killed = node.keeper("run-c")
    os.kill(killed, signal.SIGKILL)
    _eventually(lambda: is_gone(killed))
    _eventually(lambda: fetch_status(node.identity("run-b")).keeper.state == "leased")
    done = node.cli("release", "--all")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"run 'run-{x}' (node 'node-a')" for x in "abc"]
    assert "in use, not released" in lines[0]
    assert is_gone(leased)
    assert "its files are removed" in lines[2]
    assert [run["run_id"] for run in node.json("status", "--all")] == ["run-a"]


def test_release_sweeps_what_a_killed_keeper_left(node: Node) -> None:
    pid = node.keeper()
    os.kill(pid, signal.SIGKILL)
    _eventually(lambda: is_gone(pid))
    done = node.cli("release", "--run-id", "run-a")
    assert done.returncode == 0
    assert "dead already" in done.stdout
    assert not node.runtime_dir.exists()


def test_release_says_who_still_holds_the_memory() -> None:
    assert str(Released(3 << 30, 0)) == "its keeper has ended, 3.0 GiB of memory are free"
    assert str(Released(3 << 30, 2)).endswith("are free when 2 other processes close it")


# drill: processes


def test_kill_trainer_kills_the_one_rank_that_was_named(node: Node) -> None:
    job = node.job(world_size=2)
    job.do("take", 0)
    done = node.cli("drill", "kill-trainer", "--rank", "1", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"killed rank 1 (pid {job.pids[1]})" in done.stdout
    assert "restore() restores step 0" in done.stdout
    assert job.processes[1].wait(WAIT_S) == -signal.SIGKILL
    assert job.processes[0].poll() is None
    assert_error(node.cli("drill", "kill-trainer", "--rank", "1", "--yes"), "no trainer of rank 1")


def test_kill_trainer_can_kill_all_of_a_node(node: Node) -> None:
    job = node.job(world_size=2)
    assert node.cli("drill", "kill-trainer", "--all", "--yes").returncode == 0
    assert [process.wait(WAIT_S) for process in job.processes] == [-signal.SIGKILL] * 2
    assert_error(node.cli("drill", "kill-trainer", "--yes"), "no trainer lives")


def test_a_drill_asks_first(node: Node) -> None:
    job = node.job()
    job.do("take", 0)
    for drill in (["kill-trainer"], ["kill-keeper"], ["kill-node", "--force"], ["flip-bits"]):
        declined = node.cli("drill", *drill, given="n\n")
        assert declined.returncode == 1
        assert "nothing was done" in declined.stderr
        assert_error_ends_with_yes(node.cli("drill", *drill))
    assert node.cli("verify").returncode == 0
    assert job.processes[0].poll() is None
    assert node.cli("drill", "kill-trainer", given="y\n").returncode == 0
    assert job.processes[0].wait(WAIT_S) == -signal.SIGKILL


def assert_error_ends_with_yes(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "error: the drill needs a confirmation, and there is no terminal",
        "try: --yes",
    ]


def test_kill_keeper_kills_the_keeper_only(node: Node) -> None:
    job = node.job()
    job.do("take", 0)
    status = _eventually(lambda: found if (found := node.json("status"))["keeper"]["holders"] == 1 else None)
    done = node.cli("drill", "kill-keeper", "--yes")
    assert done.returncode == 0, done.stderr
    assert is_gone(status["keeper"]["pid"])
    assert "starts a new keeper, which adopts it" in done.stdout
    assert job.processes[0].poll() is None


def test_kill_keeper_warns_when_nobody_else_holds_the_memory(node: Node) -> None:
    node.keeper()
    assert "NO OTHER PROCESS HOLDS THE MEMORY" in node.cli("drill", "kill-keeper", given="n\n").stdout


def test_kill_node_is_refused_while_nothing_of_it_would_be_left(node: Node) -> None:
    job = node.job()
    job.do("take", 0)
    done = node.cli("drill", "kill-node", "--yes")
    assert_error(done, "would lose its state", "no version is protected", "--force")
    assert job.processes[0].poll() is None


def test_kill_node_kills_trainers_their_children_and_the_keeper(node: Node) -> None:
    job = node.job(world_size=2)
    job.do("take", 0)
    job.do("spawn")
    child = _eventually(lambda: Path(f"/proc/{job.pids[0]}/task/{job.pids[0]}/children").read_text().split())
    pid = node.json("status")["keeper"]["pid"]
    done = node.cli("drill", "kill-node", "--yes", "--force")
    assert done.returncode == 0, done.stderr
    assert "killed all 5 processes of node node-a" in done.stdout  # keeper, two trainers, a child of each
    assert [process.wait(WAIT_S) for process in job.processes] == [-signal.SIGKILL] * 2
    assert is_gone(pid)
    assert is_gone(int(child[0]))


def test_outages_need_a_group(node: Node) -> None:
    node.job().do("take", 0)
    for drill in ("freeze-peer", "cut-link"):
        assert_error(node.cli("drill", drill, "--yes", "--seconds", "1"), "no peers")


# keeper


def test_keeper_in_the_foreground_serves_until_it_is_told_to_end(node: Node) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "keeper", "--run-id", "run-a"], env=node.environ, text=True,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert keeper.stderr is not None
        assert json.loads(keeper.stderr.readline())["event"] == "keeper serves"
        assert node.json("status", code=3)["keeper"]["pid"] == keeper.pid
        assert_error(node.process("keeper", "--run-id", "run-a"), "already", "keepstep release --run-id run-a")
        keeper.terminate()
        assert keeper.wait(WAIT_S) == 0
        assert '"reason": "signal SIGTERM"' in keeper.stderr.read()
    finally:
        keeper.kill()
        keeper.communicate()
    assert not node.runtime_dir.exists()


def test_a_keeper_without_a_run_id_is_refused(node: Node) -> None:
    assert_error(node.process("keeper"), "has no run id", "--run-id")
    assert_error(node.process("keeper", "--run-id", "none"), "torchrun's default")


# doctor


def test_doctor_finds_this_machine_fit(node: Node) -> None:
    done = node.cli("doctor")
    assert done.returncode == 0, done.stdout
    assert "no problem was found" in done.stdout
    report = node.json("doctor")
    assert report["ok"]
    names = [finding["name"] for finding in report["findings"]]
    assert {"versions", "entry point", "memory", "shared memory", "pidfd", "runtime directory", "cuda"} <= set(names)
    assert {finding["level"] for finding in report["findings"]} <= {"ok", "warning", "problem"}


def test_doctor_names_each_setting_and_where_it_comes_from(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("every = 3\n")
    done = node.cli(
        "doctor", "--run-id", "run-z", KEEPSTEP_CONFIG_FILE=str(file), KEEPSTEP_ARENA_SLOTS="3", COLUMNS="200"
    )
    assert f"KEEPSTEP_EVERY=3, from {file}" in done.stdout
    assert "KEEPSTEP_ARENA_SLOTS=3, from the environment" in done.stdout
    assert "KEEPSTEP_RUN_ID=run-z, from the command line" in done.stdout


def test_doctor_calls_a_wrong_setting_a_problem_and_looks_on(node: Node) -> None:
    done = node.cli("doctor", "--json", KEEPSTEP_ARENA_SLOTS="9")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert "arena.slots" in report["findings"][0]["text"]
    assert len(report["findings"]) > 10


def test_doctor_calls_a_runtime_directory_that_is_too_long_a_problem(node: Node) -> None:
    done = node.cli("doctor", "--runtime-dir", f"{node.runtime_dir}/{'x' * 80}")
    assert done.returncode == 3
    assert "too long for a unix socket" in done.stdout


def test_doctor_leaves_no_runtime_directory_behind(node: Node) -> None:
    assert node.cli("doctor", "--runtime-dir", f"{node.runtime_dir}/new").returncode == 0
    assert list(node.runtime_dir.iterdir()) == []


def test_doctor_says_what_other_runs_hold_and_how_to_free_it(node: Node) -> None:
    job = node.job("run-b")
    job.do("take", 0)
    job.end()
    _eventually(lambda: fetch_status(node.identity("run-b")).keeper.state == "leased")
    (finding,) = [f for f in node.json("doctor")["findings"] if f["name"] == "other runs"]
    assert finding["level"] == "warning"
    assert "holds" in finding["text"]
    assert "keepstep release --run-id run-b" in finding["todo"]


def test_doctor_sees_that_an_oom_kill_takes_the_whole_group(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/trainer\n")
    group = tmp_path / "sys/fs/cgroup/pod/trainer"
    group.mkdir(parents=True)
    (group / "memory.oom.group").write_text("0\n")
    assert [finding.level for finding in doctor_checks.check_oom_group(tmp_path)] == ["ok"]
    (group.parent / "memory.oom.group").write_text("1\n")
    (finding,) = doctor_checks.check_oom_group(tmp_path)
    assert finding.level == "warning"
    assert "together" in finding.text


def test_a_check_that_fails_is_a_finding_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    findings = {finding.name: finding for finding in doctor_checks.examine(Config(), torch=False)}
    assert findings["pidfd"].level == "problem"
    assert "torchrun restarts" in findings


def test_doctor_asks_torch_in_a_process_of_its_own(node: Node) -> None:
    findings = {finding["name"]: finding for finding in node.json("doctor", "--torch")["findings"]}
    assert "torch" in findings["cuda"]["text"]


# run and demo


def test_run_hands_everything_to_torchrun(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "words = [*sys.argv[1:], os.environ['KEEPSTEP_RUN_ID']]\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK']).write_text(' '.join(words))\n"
    )
    done = node.process("run", "--nproc-per-node=2", str(script), "--help", "-x", KEEPSTEP_RUN_ID="run-r")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["--help -x run-r"] * 2


def test_the_store_is_served_until_it_is_told_to_end(node: Node) -> None:
    store = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "store", "--bind", "127.0.0.1:0"], env=node.environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert store.stdout is not None
    place = re.search(r"served at 127\.0\.0\.1:(\d+)", store.stdout.readline())
    assert place is not None
    assert f"--rdzv-endpoint=127.0.0.1:{place[1]} --rdzv-conf=is_host=0" in store.stdout.readline()
    socket.create_connection(("127.0.0.1", int(place[1])), timeout=WAIT_S).close()
    store.send_signal(signal.SIGTERM)
    rest, _ = store.communicate(timeout=WAIT_S)
    assert (store.returncode, rest) == (0, "the store ends\n")


@pytest.mark.parametrize("address", ["29400", "host:", "host:x", ":29400", "host:65536"])
def test_an_address_of_the_store_that_makes_no_sense_is_refused(node: Node, address: str) -> None:
    assert_error(node.cli("store", "--bind", address), "is not HOST:PORT")


def test_the_store_takes_an_ipv6_address_in_brackets() -> None:
    assert parse_address("[::1]:29400") == ("::1", 29400)


def test_demo_passes_its_errors_on(node: Node) -> None:
    assert_error(node.process("demo", "--steps", "3", "--out", str(node.runtime_dir / "out")), "--steps is 3")


if __name__ == "__main__":
    act_as_trainer(int(sys.argv[1]), int(sys.argv[2]))
