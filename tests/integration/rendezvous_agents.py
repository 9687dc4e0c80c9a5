"""Agents with a real store, in one process, without workers, and sockets that stand for their keepers."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from keepstep.control.membership import NodeClaim
from keepstep.control.messages import NodeCard
from keepstep.control.signed_store import DocumentSigner, SignedStore
from keepstep.launcher.agent import RendezvousAgent, RoundEndedError
from keepstep.launcher.round_participant import RoundMember
from keepstep.launcher.rounds import RoundRules
from keepstep.launcher.store import serve

DEAD_S = 1.5  # beats come every 0.5 s
THREE = RoundRules(3, 3, dead_s=DEAD_S, settle_s=1, first_call_s=2, last_call_s=1, grace_s=2)


class Agent:
    """What a launcher does around its rendezvous agent, and a socket that stands for its keeper."""

    def __init__(self, node_id: str, rules: RoundRules, port: Callable[[], int], secret: bytes = b"") -> None:
        self.keeper: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._hang_up, args=[self.keeper], daemon=True).start()
        self.card = NodeCard(node_id, "i", "127.0.0.1", self.keeper.getsockname()[1])
        self.members: list[NodeCard] = []
        self.number = 0
        self.places: list[RoundMember] = []
        self.problem: BaseException | None = None
        self.over = False
        self.rendezvous = RendezvousAgent(node_id, rules, connect=lambda: connect(port(), secret), store_s=5)
        self.thread = threading.Thread(target=self._live, daemon=True)

    def _live(self) -> None:
        """Join, begin, wait for the end of the round, join again: like an agent whose workers stop at once."""
        try:
            while not self.over:
                known = NodeClaim(self.card, self.number, members_number=self.number)
                member = self.rendezvous.join(known, self.members, timeout_s=20)
                with contextlib.suppress(RoundEndedError):
                    self._settle(member)
                    self.places.append(member)
                while not self.over and not self.rendezvous.end_reason():
                    time.sleep(0.02)
        except BaseException as error:
            self.problem = error

    def _settle(self, member: RoundMember) -> None:
        agreed = self.rendezvous.read_agreement(member, timeout_s=5)
        self.members, self.number = agreed.nodes, agreed.incarnation.number
        ready = member.key("ready")
        self.rendezvous.run(lambda store: store.write(f"{ready}/{member.rank}", ""), timeout_s=5)
        keys = [f"{ready}/{rank}" for rank in range(len(agreed.nodes))]
        self.rendezvous.wait_for_documents(keys, timeout_s=10)
        self.rendezvous.workers_started()

    @property
    def place(self) -> tuple[int, int] | None:
        return (self.places[-1].round, self.places[-1].rank) if self.places else None

    def die(self, *, keeper: bool = True) -> None:
        """Stop beating without a word."""
        self.over = self.rendezvous._ended = True
        if keeper:
            self.close_keeper()

    def _hang_up(self, keeper: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                keeper.accept()[0].close()

    def close_keeper(self) -> None:
        if self.keeper is not None:
            self.keeper.shutdown(socket.SHUT_RDWR)
            self.keeper.close()
            self.keeper = None


@dataclass
class Job:
    rules: RoundRules = THREE
    store: TCPStore | None = field(default_factory=lambda: serve("127.0.0.1", 0))
    port: int = 0
    secret: bytes = b""
    agents: dict[str, Agent] = field(default_factory=dict)

    def start(self, *names: str) -> list[Agent]:
        """`b` is node b; `b+` another agent of the same node."""
        if self.store is not None:
            self.port = self.store.port
        for name in names:
            self.agents[name] = Agent(name.rstrip("+"), self.rules, lambda: self.port, self.secret)
            self.agents[name].thread.start()
        return [self.agents[name] for name in names]

    def close(self) -> None:
        """End all agents, and what they hold: tests that follow count descriptors."""
        for agent in self.agents.values():
            agent.die()
        for agent in self.agents.values():
            agent.thread.join(20)
            if agent.rendezvous._thread.ident is not None:
                agent.rendezvous._thread.join(20)
        self.agents.clear()
        self.store = None
        gc.collect()

    def places(self, names: str) -> list[tuple[int, int] | None]:
        return [self.agents[name].place for name in names.split()]

    def wait(self, names: str, places: list[tuple[int, int] | None], timeout_s: float = 20.0) -> None:
        started = time.monotonic()
        while self.places(names) != places:
            problems = {name: agent.problem for name, agent in self.agents.items() if agent.problem}
            boards = {name: agent.rendezvous.view for name, agent in self.agents.items()}
            assert time.monotonic() - started < timeout_s, f"{self.places(names)} {problems} {boards}"
            time.sleep(0.02)


def connect(port: int, secret: bytes = b"") -> SignedStore:
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    return SignedStore(PrefixStore("job", client), DocumentSigner("job", secret))
