"""`torchrun --rdzv-backend=keepstep`: rounds that include the nodes' keepers. Imported only when chosen.

torch's own dynamic rendezvous serves only for the connection to the store: it compares the clocks of nodes, gives every
node another rank when one is replaced, and restarts for ever while a spare waits.

Invariants:
- torch's agent thread never waits for the store while workers run, and waits with a deadline otherwise.
- Workers start only after all nodes of the round agreed on its incarnation and every node's keeper has the members.
- Every round has a store of its own, served by the node of rank 0: restarted workers must not read the keys of dead
  ones.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from typing import cast

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
from keepstep.control.membership import IncarnationEnd, NodeClaim, RoundAgreement, check_losses, membership
from keepstep.control.messages import CardIs, NodeCard
from keepstep.control.secret_file import read_secret, security_level
from keepstep.control.signed_store import DocumentSigner, SignedStore
from keepstep.control.spawn import START_S
from keepstep.errors import ConfigError, Error, KeeperError
from keepstep.identity import Identity
from keepstep.launcher.agent import (
    ClosedError,
    DuplicateError,
    ForeignDocumentsError,
    RendezvousAgent,
    RoundEndedError,
    StoreLostError,
)
from keepstep.launcher.crash_loops import CrashLoop, FailureHistory
from keepstep.launcher.keeper_supervisor import KeeperSupervisor
from keepstep.launcher.rendezvous_store import CONNECT_S, READ_S, connect, open_store
from keepstep.launcher.round_participant import RoundMember
from keepstep.launcher.rounds import RoundRules
from keepstep.launcher.store import serve_as
from keepstep.launcher.worker_exits import WorkerExits
from keepstep.types import Incarnation

# Defaults of the time-outs that --rdzv-conf sets.
JOIN_S, CLOSE_S = 600, 30  # The same as torch's.
FIRST_CALL_S, LAST_CALL_S = 30, 3  # Nodes boot at different times, once; later rounds know which agents live.
STORE_S = 30.0  # an agent without workers waits this long for a store that does not answer: it may be restarting
RESTART_WINDOW_S = 3600.0  # of launch.restarts
NOTE_EVERY_S = 5.0  # at most, to the keeper's status
SETTLE_S = 30.0  # a round stands this long before it is ended to let one more node in: nodes boot at different times

log = logging.getLogger("keepstep.launcher")


class KeepstepRendezvous(RendezvousHandler):
    """torch's rendezvous handler of one agent."""

    def __init__(self, params: RendezvousParameters, *, identity: Identity, config: Config) -> None:
        self._params, self._identity, self._config = params, identity, config
        self._secret = read_secret(config)
        self._signer = DocumentSigner(identity.run_id, self._secret)
        # The server itself on the node that serves the store, a connection on the others.
        self._served = open_store(params, identity.run_id, self._signer)
        self._alone = params.max_nodes == 1
        self._supervisor = KeeperSupervisor(identity, config, listener=self)
        self._agent = RendezvousAgent(
            identity.node_id, self._rules(), connect=lambda: self._connect(CONNECT_S), store_s=STORE_S
        )
        self._noted, self._noted_at = 0, float("-inf")
        self._server: TCPStore | None = None
        self._member: RoundMember | None = None
        self._largest_number = 0
        self._restarts: deque[float] = deque()
        self._restarting = False
        self._exits, self._history = WorkerExits(), FailureHistory()
        self._started: tuple[RoundMember, Incarnation] | None = None  # The last round whose workers were started.

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
            claim, members = self._claim_node()  # Starts the keeper before other nodes wait for this one.
            self._member = member = self._join(claim, members)
            try:
                return self._prepare_workers(member)
            except (RoundEndedError, StoreLostError, ClosedError) as error:
                # The next join raises what torch must know.
                log.warning("round %d ended before it began, joining the next one: %s", member.round, error)
            except RuntimeError as error:  # torch raises no subclass for a lost store connection.
                log.warning("round %d: %s", member.round, str(error).partition("\n")[0])

    def num_nodes_waiting(self) -> int:
        """1 when the round is over; the reason is logged. Never blocks, never raises."""
        self._note_ignored()
        reason = self._agent.end_reason()
        if reason and not self._restarting:
            self._restarting = True
            log.warning("the workers of this node are restarted: %s", reason)
        return 1 if reason else 0

    def _note_ignored(self) -> None:
        view, now = self._agent.view, time.monotonic()
        if view.ignored != self._noted and now - self._noted_at > NOTE_EVERY_S:
            self._noted, self._noted_at = view.ignored, now
            self._supervisor.note(
                f"{view.ignored} documents in the rendezvous store were ignored: somebody else writes there, or with "
                f"another secret_file; the last one was {view.last_ignored}"
            )

    def is_closed(self) -> bool:
        return self._agent.view.state.closed

    def set_closed(self) -> None:
        self._agent.close(close_job=True, timeout_s=self._seconds("close", CLOSE_S))

    def shutdown(self) -> bool:
        """End the job, if this node is a member of it. A keeper that holds state stays until its lease ends."""
        try:
            return self._agent.close(close_job=self._member is not None, timeout_s=self._seconds("close", CLOSE_S))
        finally:
            self._supervisor.close()
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
                f"restart number {len(self._restarts)} of the job within {RESTART_WINDOW_S:g} s: "
                f"launch.restarts allows {allowed}",
                hint="the workers' first error says why they fail; set KEEPSTEP_LAUNCH_RESTARTS to allow more",
            )

    # A round

    def _claim_node(self) -> tuple[NodeClaim, list[NodeCard]]:
        """This node's claim. A node that is alone needs no card, only a new incarnation number."""
        timeout_s, patient = START_S, self._member is not None
        try:
            if not self._alone:
                card = self._supervisor.card(timeout_s=timeout_s, patient=patient)
                return self._claim(card, self._last_end()), card.members
            number = max(self._supervisor.largest_number(timeout_s=timeout_s, patient=patient), self._largest_number)
            card_alone = NodeCard(self._identity.node_id, "", "", 0)
            return NodeClaim(card_alone, number, last_end=self._last_end()), []
        except Error as error:
            raise _refusal(error.message, hint=error.hint) from error

    def _claim(self, card: CardIs, last_end: IncarnationEnd | None = None) -> NodeClaim:
        claim = NodeClaim.from_card(card, largest_number=self._largest_number, has_secret=bool(self._secret))
        return msgspec.structs.replace(claim, last_end=last_end)

    def _last_end(self) -> IncarnationEnd | None:
        """How the workers that this launcher started last have ended."""
        if self._started is None:
            return None
        member, incarnation = self._started
        outcome, first = self._supervisor.outcome(timeout_s=REQUEST_S), self._exits.first()
        errors = {trainer.pid: trainer.failure for trainer in outcome.failures}
        error = errors.get(first.pid) if first is not None else None
        return IncarnationEnd(
            member.round, outcome.complete,
            progressed=outcome.complete is not None and outcome.complete.incarnation == incarnation,
            # Workers that the agent stopped because the round was over have not failed.
            exit=str(first) if first is not None and not first.killed else "",
            error=f"{error.kind}: {error.text}" if error is not None else "",
            restore_error=min((f"{e.kind}: {e.text}" for e in errors.values() if e.restoring), default=""),
            killed=first is not None and first.killed and not self._restarting,
        )  # fmt: skip

    def keeper_moved(self, card: CardIs) -> None:
        """The keeper was replaced while a round stands (KeeperListener)."""
        self._agent.publish_claim(self._claim(card))

    def _join(self, claim: NodeClaim, members: list[NodeCard]) -> RoundMember:
        try:
            return self._agent.join(claim, members, timeout_s=self._seconds("join", JOIN_S))
        except ClosedError as error:
            if self._member is None:
                log.warning("the job is over, this spare was not needed")
                # torch has RendezvousGracefulExitError for this, which torch 2.13 turns into an AttributeError and exit
                # code 1. This is the agent's process, and its work is done.
                raise SystemExit(0) from error
            raise RendezvousClosedError(str(error)) from error
        except StoreLostError as error:
            raise RendezvousConnectionError(
                f"no quorum: {error}. The rendezvous store at {self._store_address} is lost; the keepers hold "
                "the state (try: start the job again under the same run id; keepstep store serves a store elsewhere)"
            ) from error
        except ForeignDocumentsError as error:
            file = self._config.secret_file
            raise _refusal(
                str(error),
                hint=f"the same secret_file on all nodes; here it is {file}"
                if file
                else "no secret_file is set here: set it on all nodes or on none",
            ) from error
        except DuplicateError as error:
            raise _refusal(str(error), hint="set another KEEPSTEP_NODE_ID on each node") from error
        except TimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error

    def _prepare_workers(self, member: RoundMember) -> RendezvousInfo:
        """After a place was assigned: agreement, keeper, store, and all nodes ready. Then workers may start."""
        round_, rank, read_s = member.round, member.rank, self._seconds("read", READ_S)
        agreed = self._agent.read_agreement(member, timeout_s=read_s)
        self._largest_number = max(self._largest_number, agreed.incarnation.number)
        self._end_crash_loop(member, agreed)
        self._introduce_keeper(agreed, round_, rank)
        server = None
        if rank == 0:
            address = self._address(agreed)
            server = _serve(address, read_s, one_node=self._alone)
            bootstrap = msgspec.json.encode((address, server.port)).decode()
            self._agent.run(lambda store: store.write(member.key("store"), bootstrap), timeout_s=read_s)
        ready = member.key("ready")
        self._agent.run(lambda store: store.write(f"{ready}/{rank}", ""), timeout_s=read_s)
        keys = [member.key("store"), *(f"{ready}/{other}" for other in range(len(agreed.nodes)))]
        store_text, *_ = self._agent.wait_for_documents(keys, timeout_s=read_s)
        # A connection of torch's agent: it waits in it, and the other one must go on with heartbeats.
        store = cast(TorchStore, self._agent.run(lambda _: self._connect(read_s).raw, timeout_s=read_s))
        self._agent.workers_started()
        self._exits.begin()
        if self._started is None and rank == 0 and len(agreed.nodes) > 1 and not self._secret:
            log.warning(
                "the store of this job is open: whoever reaches %s is a member and can end the job "
                "(KEEPSTEP_SECRET_FILE, the same file on all nodes, closes it)", self._store_address,
            )  # fmt: skip
        self._started = (member, agreed.incarnation)
        self._server, self._restarting = server, False  # The last round's store ends only now.
        os.environ.update(
            KEEPSTEP_INCARNATION=str(agreed.incarnation),
            KEEPSTEP_RUN_ID=self._identity.run_id,
            KEEPSTEP_NODE_ID=self._identity.node_id,
            KEEPSTEP_RUNTIME_DIR=str(self._identity.runtime_dir),
        )
        log.info(
            "round %d is incarnation %s, node %d of %d; security: %s",
            round_, agreed.incarnation, rank, len(agreed.nodes), security_level(self._config),
        )  # fmt: skip
        bootstrap_info = RendezvousStoreInfo(*msgspec.json.decode(store_text, type=tuple[str, int]))
        return RendezvousInfo(PrefixStore(f"round/{round_}", store), rank, len(agreed.nodes), bootstrap_info)

    def _end_crash_loop(self, member: RoundMember, agreed: RoundAgreement) -> None:
        """End the job when its trainers fail again and again without getting on."""
        if self._started is None:
            return
        agents, before = ({agent.agent for agent in m.state.members} for m in (member, self._started[0]))
        self._history.add(agreed.last_ends, agents=agents, agents_before=before)
        loop = self._history.crash_loop()
        if loop is not None:
            self._agent.end_round(member.round, loop.problem)
            raise _refusal(loop.problem, hint=_after_crash_loop(loop, self._identity.run_id))

    def _introduce_keeper(self, agreed: RoundAgreement, round_: int, rank: int) -> None:
        """Send the members to this node's keeper. A node that is alone and always was has none to send."""
        try:
            if agreed.refusal:
                raise KeeperError(agreed.refusal, hint="the same settings on all nodes")
            check_losses(self._config.parity.losses, len(agreed.nodes))
            if len(agreed.nodes) > 1 or agreed.former:
                members = membership(agreed, rank, self._secret)
                self._supervisor.introduce(members, timeout_s=REQUEST_S)
        except Error as error:
            self._agent.end_round(round_, f"node {self._identity.node_id} cannot take part: {error.message}")
            raise _refusal(error.message, hint=error.hint) from error

    # Addresses and time-outs

    def _address(self, agreed: RoundAgreement) -> str:
        """Address where the other nodes reach this one."""
        if self._params.local_addr:
            return self._params.local_addr
        own = next(card.address for card in agreed.nodes if card.node_id == self._identity.node_id)
        return "localhost" if self._alone else own or socket.getfqdn()

    def _connect(self, timeout_s: float) -> SignedStore:
        return connect(self._served, self._identity.run_id, self._signer, timeout_s=timeout_s)

    @property
    def _store_address(self) -> str:
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


def _serve(address: str, timeout_s: float, *, one_node: bool) -> TCPStore:
    try:
        return serve_as(address, 0, timeout_s=timeout_s, one_node=one_node)
    except ConfigError as error:
        raise RendezvousConnectionError(
            f"no store can be opened at {address} (try: --local-addr=<an address of this node>)"
        ) from error


def _refusal(message: str, *, hint: str) -> RendezvousError:
    return RendezvousError(str(Error(message, hint=hint)))


def _after_crash_loop(loop: CrashLoop, run_id: str) -> str:
    repair = "repair what the workers' first error names"
    if loop.version is None:
        return f"{repair}, and start the job again"
    return (
        f"{repair}, and start the job again: it goes on from step {loop.version.step} while its keepers hold it; "
        f"`keepstep release --run-id {run_id}` on every node gives the state up, and the job begins anew"
    )
