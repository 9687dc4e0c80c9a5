"""The command line against a job of several nodes: real keepers in one process (tests/many), and a training thread."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from nodes import Run, running

from keepstep.cli.drills import outages
from keepstep.cli.main import main
from keepstep.cli.risk import headline, unprotected
from keepstep.recovery.plan import ranks_text
from keepstep.types import KeeperStatus, PeerStatus, RankStatus, Status

WAIT_S = 20.0
NAMES = ["a", "b", "c", "d"]


class Job:
    """Four nodes that train in a thread until the test is over."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> Job:
        self.run.add(*NAMES)
        self.run.start(NAMES)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def _train(self) -> None:
        while not self._stop.is_set():
            self.run.train(1, 0.01)

    def pause(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)

    def cli(self, *arguments: str, node: str = "") -> subprocess.CompletedProcess[str]:
        which = ["--run-id", self.run.run_id, "--runtime-dir", str(self.run.directory)]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*arguments, *which, *(["--node-id", node] if node else [])])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def json(self, *arguments: str, node: str = "") -> Any:
        return json.loads(self.cli(*arguments, "--json", node=node).stdout)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("KEEPSTEP_NODE_ID", raising=False)
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def job(place: Path) -> Iterator[Job]:
    with running(place, losses=2) as run, Job(run) as job:
        eventually(lambda: job.cli("status", node="b").returncode == 0)
        yield job


def eventually(holds: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


# status


def test_status_says_first_what_a_dead_node_costs_and_then_shows_the_group(job: Job) -> None:
    done = job.cli("status", node="b")
    first, second, *_ = done.stdout.splitlines()
    assert re.match(r"A dead node now costs (no finished step|\d+ steps?) \(protected step \d+, newest \d+\)", first)
    assert first.endswith("up to 2 nodes of this group may die.")
    assert second.startswith("A crash of the trainers now would cost")
    assert "4 nodes, coordinated by a · group a, b, c, d" in done.stdout
    assert "losses covered 2" in done.stdout
    status = job.json("status", node="b")
    assert (status["num_nodes"], status["coordinator"], status["exposed"]) == (4, "a", False)
    assert [peer["up"] for peer in status["group"]] == [True] * 4


def test_a_peer_that_is_away_is_named_and_counted_against_what_may_die(job: Job) -> None:
    job.pause()
    job.run.nodes["d"].kill()
    done = eventually(lambda: found if (found := job.cli("status", node="b")).returncode == 3 else None)
    assert "up to 1 node more of this group may die." in done.stdout
    assert "d (away)" in done.stdout
    assert "the keepers of d cannot be reached" in done.stdout


def make_status(*, protected: int | None = 118, progress: int = 120, away: int = 0, **changed: Any) -> Status:
    keeper = KeeperStatus(1, "i", "v", 1.0, "serving", True, None, 1)
    rank = RankStatus(0, 0, 2, True, progress, 119, 0.1, "process", 0, [])
    group = [PeerStatus(name, i, i >= away) for i, name in enumerate(NAMES)]
    status = Status(
        "r", "d", keeper, 1, 119, 0.1, "process", 0 if protected is None else 2, False, None, [rank], 0, {}, [],
        protected_step=protected, num_nodes=4, group=group,
    )  # fmt: skip
    return msgspec.structs.replace(status, **changed)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (make_status(), "A dead node now costs 2 steps (protected step 118, newest 120); up to 2 nodes of this group"),
        (make_status(progress=119), "A dead node now costs 1 step ("),
        (make_status(progress=118), "A dead node now costs no finished step (protected step 118, newest 118);"),
        (make_status(protected=None), "A dead node now costs all steps up to 120: no version is protected yet."),
        (make_status(protected=None, progress=-1), "costs the start of the run: no version is protected yet."),
        (make_status(away=1), "up to 1 node more of this group may die."),
        (make_status(away=2), "A dead node now costs the run (protected step 118, newest 120): 2 nodes of its group"),
        (make_status(group=[], losses_covered=0), "no other node protects it"),
    ],
)
def test_the_headline_says_what_a_dead_node_would_cost(status: Status, sentence: str) -> None:
    assert sentence in headline(status)


def test_each_lack_of_protection_against_a_dead_node_is_named() -> None:
    assert unprotected(make_status()) == []
    assert unprotected(make_status(protected=None)) == ["no version is protected: a dead node would cost the run"]
    assert unprotected(make_status(away=1)) == ["the keepers of a cannot be reached"]
    assert unprotected(make_status(away=1, problems=["a is gone"])) == ["a is gone"], "not said twice"
    assert unprotected(make_status(group=[])) == ["this node has no group: no other node protects it"]
    assert unprotected(make_status(exposed=True)) == ["fewer losses are covered than the settings ask for"]


# plan


def test_plan_says_where_every_rank_would_come_from(job: Job) -> None:
    found = job.json("plan", "--lost", "b")
    assert found["recoverable"]
    assert found["steps_lost"] == found["newest_step"] - found["step"]
    pieces = {tuple(piece["ranks"]): (piece["node_id"], piece["source"]) for piece in found["pieces"]}
    assert pieces == {
        (0,): ("a", "own slots"), (1,): ("b", "parity"), (2,): ("c", "own slots"), (3,): ("d", "own slots"),
    }  # fmt: skip
    done = job.cli("plan", "--lost", "b", "--lost", "d")
    assert done.returncode == 0
    assert done.stdout.startswith("With b, d lost now, a restart would cost")
    assert "rebuilt in the place of b from the snapshots of a, c and the parity of a, c" in done.stdout
    assert "its group of 4 may lose 2" in " ".join(done.stdout.split())


def test_plan_foretells_what_a_restore_then_does(job: Job) -> None:
    job.pause()
    time.sleep(0.5)  # what is being protected now is protected
    told = job.json("plan", "--lost", "c")
    job.run.nodes["c"].kill()
    job.run.add("e")
    answers = job.run.start(["a", "b", "e", "d"])
    version = answers[0].version
    assert version is not None
    assert version.step == told["step"]
    assert [answer.source for answer in answers] == ["memory", "memory", "parity", "memory"]


def test_more_losses_than_are_covered_are_exit_code_3_with_the_reason(job: Job) -> None:
    done = job.cli("plan", "--lost", "b", "--lost", "c", "--lost", "d")
    assert done.returncode == 3
    assert "the state in memory would be lost" in done.stdout
    assert "covers 2 lost, and b, c, d are lost" in done.stdout
    everything = job.cli("plan", *(f"--lost={name}" for name in NAMES))
    assert everything.returncode == 3
    assert "no node would be left" in everything.stdout


def test_plan_asks_the_coordinator_where_it_lives_here_and_names_it_where_not(job: Job) -> None:
    assert job.cli("plan", "--lost", "b", node="c").returncode == 0, "a's keeper was asked"
    with mock.patch("keepstep.cli.commands.plan.choose_coordinator", return_value=job.run.nodes["c"].identity):
        refused = job.cli("plan", "--lost", "b", node="c")
    assert refused.returncode == 1
    assert "the keeper of node 'a' coordinates this run" in refused.stderr
    assert "keepstep plan --node-id a" in refused.stderr


def test_plan_refuses_names_that_it_does_not_know_and_no_names(job: Job) -> None:
    unknown = job.cli("plan", "--lost", "x")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no node 'x'" in unknown.stderr
    assert "its nodes are a, b, c, d" in unknown.stderr
    nothing = job.cli("plan")
    assert nothing.returncode == 2
    assert "not in this release" in nothing.stderr


def test_neighbouring_ranks_are_told_as_ranges() -> None:
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# drill


def test_kill_node_refuses_to_kill_the_process_that_it_runs_in(job: Job) -> None:
    done = job.cli("drill", "kill-node", "--yes", node="b")
    assert done.returncode == 1
    assert "inside the job" in done.stderr


def test_a_cut_link_stops_protection_for_a_while_and_nothing_else(job: Job) -> None:
    before = job.json("status", node="a")
    done = job.cli("drill", "cut-link", "--yes", "--seconds", "1.5", node="c")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "did not end" not in done.stdout
    assert re.search(r"lag before the outage \d+, after it \d+", done.stdout)
    assert re.search(r"healed [\d.]+ s later: all peers are up, step \d+ is protected", done.stdout)
    after = job.json("status", node="a")
    assert after["incarnation"] == before["incarnation"]
    assert after["protected_step"] > before["step"]


def test_an_outage_that_does_not_heal_is_exit_code_3(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "HEAL_S", 1.0)
    job.pause()  # nothing new is ever protected
    job.run.nodes["d"].kill()
    done = job.cli("drill", "cut-link", "--yes", "--seconds", "0.2", node="c")
    assert done.returncode == 3
    assert "NOT HEALED within 1 s" in done.stdout
