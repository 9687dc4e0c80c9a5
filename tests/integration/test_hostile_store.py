"""Somebody else reads and writes the rendezvous store, while the agents sign with a secret file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from rendezvous_agents import DEAD_S, Job
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from keepstep.control.membership import NodeClaim, RoundAgreement
from keepstep.control.messages import NodeCard
from keepstep.control.signed_store import DocumentSigner
from keepstep.launcher import agent as agent_module
from keepstep.launcher import rendezvous_store
from keepstep.launcher.agent import ForeignDocumentsError
from keepstep.launcher.rendezvous_store import open_store
from keepstep.launcher.rounds import AgentId, RoundState
from keepstep.launcher.store import serve, serve_as
from keepstep.types import Incarnation

SECRET = b"a secret of the job" * 2
RUNNING = [(1, 0), (1, 1), (1, 2)]


class Stranger:
    """Reaches the port of the store and knows the run id."""

    def __init__(self, port: int) -> None:
        client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        self.store = PrefixStore("job", client)

    def board(self) -> bytes:
        return bytes(self.store.get("board"))

    def replace_board(self, text: str) -> None:
        self.store.set("board", text)
        self.store.add("changes", 1)


def encoded(state: RoundState) -> str:
    return msgspec.json.encode(state).decode()


CLOSED = RoundState(round=1, closed=True, revision=1 << 62)
STRANGERS_ROUND = RoundState(
    round=9, members=[AgentId("x/1", "x")], agreement="agreement/9.1", broken="", revision=1 << 62
)
FORGERIES: dict[str, Callable[[], str]] = {
    "a forged end of the job": lambda: DocumentSigner("job", b"").sign("board", encoded(CLOSED)),
    "an end of the job under another secret": lambda: DocumentSigner("job", b"x" * 32).sign("board", encoded(CLOSED)),
    "an end of the job of another run": lambda: DocumentSigner("job2", SECRET).sign("board", encoded(CLOSED)),
    "a document of another key": lambda: DocumentSigner("job", SECRET).sign("card/a", encoded(CLOSED)),
    "a round of a stranger": lambda: DocumentSigner("job", b"").sign("board", encoded(STRANGERS_ROUND)),
    "garbage": lambda: "garbage",
    "a number of 5,000 digits": lambda: f"- {'9' * 5000} x",
    "8 MB": lambda: "- 1 " + "x" * (8_000_000),
    "deep nesting": lambda: "- 1 " + "[" * 200_000,
    "nothing": lambda: "",
}


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(secret=SECRET)
    try:
        yield made
    finally:
        made.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ignored(job: Job) -> int:
    return sum(agent.rendezvous.view.ignored for agent in job.agents.values())


def assert_untouched(job: Job) -> None:
    for agent in job.agents.values():
        assert agent.rendezvous.end_reason() == ""
        assert not agent.rendezvous.view.state.closed
        assert agent.problem is None
    assert job.places("a b c") == RUNNING


def test_no_document_of_a_stranger_ends_a_round_or_makes_a_member(job: Job) -> None:
    job.start("a", "b", "c")
    job.wait("a b c", RUNNING)
    stranger, signer = Stranger(job.port), DocumentSigner("job", SECRET)
    for name, forged in FORGERIES.items():
        before = ignored(job)
        stranger.replace_board(forged())
        wait_for(lambda: signer.verify("board", stranger.board()) is not None)  # The agents wrote theirs again.
        assert_untouched(job)
        if name != "nothing":
            wait_for(lambda before=before: ignored(job) > before)  # type: ignore[misc]


def test_an_older_document_of_the_run_is_not_believed(job: Job) -> None:
    job.start("a", "b", "c")
    job.wait("a b c", RUNNING)
    stranger = Stranger(job.port)
    first = stranger.board().decode()
    job.agents["b"].rendezvous.end_round(1, "its workers failed")
    job.wait("a b c", [(2, 0), (2, 1), (2, 2)])
    stranger.replace_board(first)  # In it round 1 stands, and all three are its members.
    wait_for(lambda: stranger.board().decode() != first)
    time.sleep(2 * DEAD_S)
    # Believed, it would send all of them into another second round.
    assert [len(agent.places) for agent in job.agents.values()] == [2, 2, 2]
    assert [agent.rendezvous.end_reason() for agent in job.agents.values()] == ["", "", ""]


def test_a_strangers_card_kills_no_node_whose_agent_is_silent(job: Job) -> None:
    """Its keeper answers: only a card that leads elsewhere could make it look dead. An old beat is no new one."""
    _, b, _ = job.start("a", "b", "c")
    job.wait("a b c", RUNNING)
    stranger, name = Stranger(job.port), b.rendezvous.agent.agent
    beat, nobody = stranger.store.get(f"beat/{name}").decode(), NodeCard("b", "i", "127.0.0.1", 1)
    b.die(keeper=False)
    deadline = time.monotonic() + 4 * DEAD_S
    while time.monotonic() < deadline:
        stranger.store.set(f"beat/{name}", beat)
        stranger.store.set(f"card/{name}", f"- {1 << 62} " + msgspec.json.encode(NodeClaim(nobody, 0)).decode())
        time.sleep(0.01)
    assert_untouched(job)
    assert ignored(job)


def test_a_replaced_agreement_delays_a_round_and_gives_no_secret(job: Job) -> None:
    job.start("a", "b")
    stranger = Stranger(job.port)
    agreement = RoundAgreement(Incarnation(1, 1), [NodeCard("a", "i", "127.0.0.1", 1)], [], b"a stranger's secret")
    forged = "- 1 " + msgspec.json.encode(agreement).decode()
    job.start("c")
    wait_for(lambda: b"agreement/" in stranger.board())
    stranger.store.set("agreement/" + stranger.board().decode().split("agreement/")[1].split('"')[0], forged)
    wait_for(lambda: None not in job.places("a b c"))
    assert all(agent.problem is None for agent in job.agents.values())
    assert {card.node_id for card in job.agents["a"].members} == {"a", "b", "c"}


def test_without_a_secret_garbage_is_ignored_too() -> None:
    job = Job()
    try:
        job.start("a", "b", "c")
        job.wait("a b c", RUNNING)
        stranger = Stranger(job.port)
        for name in ("garbage", "deep nesting", "8 MB", "a number of 5,000 digits"):
            forged = FORGERIES[name]()
            stranger.replace_board(forged)
            wait_for(lambda forged=forged: stranger.board().decode() != forged)  # type: ignore[misc]
            assert_untouched(job)
    finally:
        job.close()


def test_agents_with_different_secrets_say_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "FOREIGN_S", 3.0)
    job.start("a", "b")
    job.secret = b"another secret of 32 bytes......"
    job.start("c")
    wait_for(lambda: all(isinstance(agent.problem, ForeignDocumentsError) for agent in job.agents.values()))
    assert "its signature is wrong" in str(job.agents["c"].problem)


def test_a_port_that_another_runs_store_has_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "HOST_WRITES_S", 1.0)
    other = serve("127.0.0.1", 0)
    parameters = RendezvousParameters("keepstep", f"127.0.0.1:{other.port}", "run", 2, 2)
    with pytest.raises(RendezvousConnectionError, match="was not opened by an agent of run 'run'"):
        open_store(parameters, "run", DocumentSigner("run", SECRET))


def test_a_second_agent_on_the_machine_of_the_host_becomes_a_client() -> None:
    signer, parameters = DocumentSigner("run", SECRET), RendezvousParameters("keepstep", "127.0.0.1:0", "run", 2, 2)
    hosted = open_store(parameters, "run", signer)
    parameters.endpoint = f"127.0.0.1:{hosted.port}"
    assert open_store(parameters, "run", DocumentSigner("run", SECRET)).port == hosted.port
    with pytest.raises(RendezvousConnectionError, match="its signature is wrong"):
        open_store(parameters, "run", DocumentSigner("run", b"another secret of 32 bytes......"))


@pytest.mark.parametrize(("host", "one_node"), [("localhost", True), ("localhost", False), ("127.0.0.1", False)])
def test_a_store_listens_on_one_address(host: str, one_node: bool) -> None:
    store = serve_as(host, 0, timeout_s=5, one_node=one_node)
    table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    listening = [line.split()[1] for line in table.splitlines() if line.split()[3] == "0A"]
    port = f":{store.port:04X}"
    assert [address for address in listening if address.endswith(port)] == [f"0100007F{port}"]
