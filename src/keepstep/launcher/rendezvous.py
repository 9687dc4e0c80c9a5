"""`torchrun --rdzv-backend=keepstep`: rounds that know of keepers. Imported only when chosen.

torch's own dynamic rendezvous is not used for more than the connection to the store: it compares the clocks
of nodes, gives every node another rank when one is replaced, and restarts for ever while a spare waits.

Invariants:
- The agent's thread never waits for the store while workers run, and with a deadline while they do not.
- Workers start only after all nodes of the round agreed on its incarnation, and every node's keeper knows
  the members.
- Every round has a store of its own, served by the node of rank 0: restarted workers must not read the keys
  of the dead ones.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from keepstep.config import Config
from keepstep.control.client import REQUEST_S
from keepstep.control.membership import NodeClaim, RoundAgreement, check_losses, membership, read_secret
from keepstep.control.messages import CardIs, NodeCard
from keepstep.control.spawn import START_S
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.launcher.agent import (
    ClosedError,
    DuplicateError,
    RendezvousAgent,
    RoundEndedError,
    SeatedAgent,
    StoreLostError,
)
from keepstep.launcher.keeper_supervisor import KeeperSupervisor
from keepstep.launcher.rounds import RoundRules

# Defaults for what --rdzv-conf may set.
JOIN_S, CLOSE_S, READ_S = 600, 30, 60  # as torch's
FIRST_CALL_S, LAST_CALL_S = 30, 3  # nodes boot at different times, once; later rounds know who lives
CONNECT_S = 5.0  # for one attempt to reach the store
STORE_S = 30.0  # an agent without workers waits this long for a store that does not answer: it may be restarting
RESTART_WINDOW_S = 3600.0  # of launch.restarts
SETTLE_S = 30.0  # a round stands this long before it is ended to let one more node in: nodes boot at different times

log = logging.getLogger("keepstep.launcher")


class KeepstepRendezvous(RendezvousHandler):
    """One agent's side. `store`: the connection that torch made, and the server itself on the node that serves it."""

    def __init__(self, store: TCPStore, params: RendezvousParameters, *, identity: Identity, config: Config) -> None:
        self._served, self._params = store, params
        self._identity, self._config = identity, config
        self._secret = read_secret(config.secret_file)
        self._alone = params.max_nodes == 1
        self._holder = KeeperSupervisor(identity, config)
        self._holder.moved = self._keeper_moved
        self._attendance = RendezvousAgent(
            identity.node_id, self._rules(), connect=lambda: self._connect(CONNECT_S), store_s=STORE_S
        )
        self._server: TCPStore | None = None
        self._member: SeatedAgent | None = None
        self._largest_number = 0
        self._restarts: deque[float] = deque()
        self._restarting = False

    def get_backend(self) -> str:
        return self._params.backend

    def get_run_id(self) -> str:
        return self._params.run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._spend_restart()
        while True:
            known, members = self._introduce_myself()  # brings the keeper up before other nodes wait for this one
            self._member = member = self._join(known, members)
            try:
                return self._settle(member)
            except (RoundEndedError, StoreLostError, ClosedError) as error:  # joining says which it was, and to whom
                log.warning("round %d ended before it began, joining the next one: %s", member.round, error)
            except RuntimeError as error:  # a store connection: torch raises nothing finer
                log.warning("round %d: %s", member.round, str(error).partition("\n")[0])

    def num_nodes_waiting(self) -> int:
        """1 when the round is over, for a reason that is logged. Never blocks, never raises."""
        reason = self._attendance.why_ended()
        if reason and not self._restarting:
            self._restarting = True
            log.warning("the workers of this node are restarted: %s", reason)
        return 1 if reason else 0

    def is_closed(self) -> bool:
        return self._attendance.view.board.closed

    def set_closed(self) -> None:
        self._attendance.end(close=True, timeout_s=self._seconds("close", CLOSE_S))

    def shutdown(self) -> bool:
        """End the job, if this node is part of it. The keeper stays when it holds state: its lease decides then."""
        try:
            return self._attendance.end(close=self._member is not None, timeout_s=self._seconds("close", CLOSE_S))
        finally:
            self._holder.close()
            self._server = None

    # The budget

    def _spend_restart(self) -> None:
        """Every round after the first is a restart; too many within the window end the job."""
        if self._member is None:
            return
        allowed, now = self._config.launch.restarts, time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) > allowed:
            raise _refusal(
                f"the job wants its restart number {len(self._restarts)} within {RESTART_WINDOW_S:g} s, "
                f"launch.restarts allows {allowed}",
                hint="the workers' first error says why they fail; KEEPSTEP_LAUNCH_RESTARTS allows more",
            )

    # A round

    def _introduce_myself(self) -> tuple[NodeClaim, list[NodeCard]]:
        """What this node brings; one that is alone needs no card, only a number that is new."""
        timeout_s, patient = START_S, self._member is not None
        try:
            if not self._alone:
                card = self._holder.card(timeout_s=timeout_s, patient=patient)
                return self._known(card), card.members
            number = self._holder.largest_number(timeout_s=timeout_s, patient=patient)
        except Error as error:
            raise _refusal(error.message, hint=error.hint) from error
        return NodeClaim(NodeCard(self._identity.node_id, "", "", 0), max(number, self._largest_number)), []

    def _known(self, card: CardIs) -> NodeClaim:
        return NodeClaim.from_card(card, largest_number=self._largest_number, has_secret=bool(self._secret))

    def _keeper_moved(self, card: CardIs) -> None:
        self._attendance.publish_card(self._known(card))

    def _join(self, known: NodeClaim, members: list[NodeCard]) -> SeatedAgent:
        try:
            return self._attendance.join(known, members, timeout_s=self._seconds("join", JOIN_S))
        except ClosedError as error:
            if self._member is None:
                log.warning("the job is over, this spare was not needed")
                # Meant for this is RendezvousGracefulExitError, which torch 2.13 turns into an AttributeError of its
                # own and exit code 1. This is the agent's process, and its work is done.
                raise SystemExit(0) from error
            raise RendezvousClosedError(str(error)) from error
        except StoreLostError as error:
            raise RendezvousConnectionError(
                f"no quorum: {error}. The rendezvous store at {self._place} is lost; the keepers hold the state "
                "(try: start the job again under the same run id; keepstep store serves a store elsewhere)"
            ) from error
        except DuplicateError as error:
            raise _refusal(str(error), hint="KEEPSTEP_NODE_ID, another one for each node") from error
        except TimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error

    def _settle(self, member: SeatedAgent) -> RendezvousInfo:
        """From a place in a round to workers that may start: agreement, keeper, store, and all nodes ready."""
        round_, rank, read_s = member.round, member.rank, self._seconds("read", READ_S)
        text = self._attendance.run(lambda store: store.get(member.board.agreement), timeout_s=read_s)
        agreed = msgspec.json.decode(text, type=RoundAgreement)
        self._largest_number = max(self._largest_number, agreed.incarnation.number)
        self._tell_keeper(agreed, round_, rank)
        server = None
        if rank == 0:
            address = self._address(agreed)
            server = _serve(address, timedelta(seconds=read_s))
            bootstrap = msgspec.json.encode((address, server.port)).decode()
            self._attendance.run(lambda store: store.set(f"store/{round_}", bootstrap), timeout_s=read_s)
        self._attendance.run(lambda store: store.set(f"ready/{round_}/{rank}", "1"), timeout_s=read_s)
        ready = [f"ready/{round_}/{other}" for other in range(len(agreed.nodes))]
        place, *_ = self._attendance.gather([f"store/{round_}", *ready], timeout_s=read_s)
        # The agent's own connection: it waits in it, and the other one must go on beating.
        store = self._attendance.run(lambda _: self._connect(read_s), timeout_s=read_s)
        self._attendance.begun()
        self._server, self._restarting = server, False  # the last round's store goes only now
        os.environ.update(
            KEEPSTEP_INCARNATION=str(agreed.incarnation),
            KEEPSTEP_RUN_ID=self._identity.run_id,
            KEEPSTEP_NODE_ID=self._identity.node_id,
            KEEPSTEP_RUNTIME_DIR=str(self._identity.runtime_dir),
        )
        log.info("round %d is incarnation %s, node %d of %d", round_, agreed.incarnation, rank, len(agreed.nodes))
        bootstrap_info = RendezvousStoreInfo(*msgspec.json.decode(place, type=tuple[str, int]))
        return RendezvousInfo(PrefixStore(f"round/{round_}", store), rank, len(agreed.nodes), bootstrap_info)

    def _tell_keeper(self, agreed: RoundAgreement, round_: int, rank: int) -> None:
        """A node that is alone and always was has no peers to tell its keeper of."""
        try:
            if agreed.refusal:
                raise KeeperError(agreed.refusal, hint="the same settings on all nodes")
            check_losses(self._config.parity.losses, len(agreed.nodes))
            if len(agreed.nodes) > 1 or agreed.former:
                told = membership(agreed, rank, self._secret)
                self._holder.introduce(told, timeout_s=REQUEST_S)
        except Error as error:
            self._attendance.give_up(round_, f"node {self._identity.node_id} refuses it: {error.message}")
            raise _refusal(error.message, hint=error.hint) from error

    # Where and how long

    def _address(self, agreed: RoundAgreement) -> str:
        """Where the other nodes reach this one."""
        if self._params.local_addr:
            return self._params.local_addr
        own = next(card.address for card in agreed.nodes if card.node_id == self._identity.node_id)
        return "localhost" if self._alone else own or socket.getfqdn()

    def _connect(self, timeout_s: float) -> TorchStore:
        # Nobody there is an error at once, and not after torch has tried for `timeout_s` and said so in 20 lines.
        socket.create_connection((self._served.host, self._served.port), timeout=CONNECT_S).close()
        client = TCPStore(
            self._served.host, self._served.port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        return PrefixStore(f"keepstep.{self._identity.run_id}", client)

    @property
    def _place(self) -> str:
        return f"{self._served.host}:{self._served.port}"

    def _rules(self) -> RoundRules:
        dead_s, params = self._config.peers.dead_s, self._params
        return RoundRules(
            params.min_nodes, params.max_nodes, dead_s, SETTLE_S,
            first_call_s=self._seconds("last_call", FIRST_CALL_S), last_call_s=self._seconds("last_call", LAST_CALL_S),
            grace_s=2 * dead_s,
        )  # fmt: skip

    def _seconds(self, name: str, default: int) -> int:
        return self._params.get_as_int(f"{name}_timeout", default) or default


def _serve(address: str, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(
            f"no store can be opened at {address} (try: --local-addr=<an address of this node>)"
        ) from error


def _refusal(message: str, *, hint: str) -> RendezvousError:
    return RendezvousError(str(Error(message, hint=hint)))
