"""One round of torch's dynamic rendezvous, with a keeper beside it. Imported only when chosen.

Invariants:
- The agent's thread never calls the inner rendezvous: a frozen store host would block it there. One
  helper thread makes all such calls, in order; every wait for it has a deadline.
- Workers start only after this node's keeper is up and all nodes agreed on the round's incarnation.
- Every round has a store of its own, on a port of its own: torch 2.13 hands the first one out again,
  and restarted workers then read the keys of the dead ones.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from keepstep.config import Config
from keepstep.errors import Error
from keepstep.identity import Identity
from keepstep.integrations.holder import Holder
from keepstep.types import Incarnation

# Read by torch's rendezvous. Unset, torch caches the first round's address for ever, and an agent that joins later
# waits for keys that nobody writes any more; set, it builds one per round (which we replace by ours).
UNSHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

# torch's own defaults for what --rdzv-conf may set; the inner rendezvous keeps these deadlines, ours come after.
JOIN_S, LAST_CALL_S, CLOSE_S, READ_S = 600, 30, 30, 60

log = logging.getLogger("keepstep.launcher")
T = TypeVar("T")


class Agreement(msgspec.Struct, frozen=True):
    """What node rank 0 publishes for a round."""

    incarnation: str
    address: str
    port: int


class KeptRendezvous(RendezvousHandler):
    """torch's dynamic rendezvous (`inner`); the keeper, the incarnation and the store are ours."""

    def __init__(
        self, inner: RendezvousHandler, params: RendezvousParameters, *, identity: Identity, config: Config
    ) -> None:
        os.environ[UNSHARED_STORE] = "1"
        self._inner, self._params = inner, params
        self._identity, self._config = identity, config
        self._holder = Holder(identity, config)
        self._errands = Errands()
        self._server: TCPStore | None = None
        self._largest_number = 0
        self._rounds = 0
        self._restarts: deque[float] = deque()
        self._num_waiting = 0
        self._looking = False

    def get_backend(self) -> str:
        return self._params.backend

    def get_run_id(self) -> str:
        return self._params.run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._spend_restart()
        self._known_number()  # brings the keeper up before other nodes wait for this one
        timeout_s = self._seconds("join", JOIN_S) + self._seconds("last_call", LAST_CALL_S) + 2 * self._read_s
        info, agreed = self._errands.run(self._join, timeout_s=timeout_s)
        self._rounds += 1
        os.environ.update(
            KEEPSTEP_INCARNATION=agreed.incarnation,
            KEEPSTEP_RUN_ID=self._identity.run_id,
            KEEPSTEP_NODE_ID=self._identity.node_id,
            KEEPSTEP_RUNTIME_DIR=str(self._identity.runtime_dir),
        )
        log.info(
            "round %d is incarnation %s, node %d of %d", self._rounds, agreed.incarnation, info.rank, info.world_size
        )
        bootstrap = RendezvousStoreInfo(agreed.address, agreed.port)
        return RendezvousInfo(info.store, info.rank, info.world_size, bootstrap)

    def num_nodes_waiting(self) -> int:
        """The figure that the helper thread found last; asks it to look again. Never blocks, never raises."""
        if not self._looking:
            self._looking = True
            self._errands.start(self._look)
        return self._num_waiting

    def is_closed(self) -> bool:
        return self._errands.run(self._inner.is_closed, timeout_s=self._read_s)

    def set_closed(self) -> None:
        self._errands.run(self._inner.set_closed, timeout_s=self._seconds("close", CLOSE_S) + self._read_s)

    def shutdown(self) -> bool:
        """Close the rendezvous. The keeper stays when it holds state: its lease decides then."""
        try:
            return self._errands.run(self._inner.shutdown, timeout_s=self._seconds("close", CLOSE_S))
        except RendezvousTimeoutError as error:
            log.warning("the rendezvous could not be closed: %s", error)
            return False
        finally:
            self._errands.stop()
            self._holder.close()
            self._server = None

    # The budget

    def _spend_restart(self) -> None:
        """Every round after the first is a restart; too many within the window end the job."""
        if self._rounds == 0:
            return
        budget, now = self._config.launch, time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - budget.window_s:
            self._restarts.popleft()
        if len(self._restarts) > budget.restarts:
            raise _refusal(
                f"the job wants its restart number {len(self._restarts)} within {budget.window_s:g} s, "
                f"launch.restarts allows {budget.restarts}",
                hint="the workers' first error says why they fail; KEEPSTEP_LAUNCH_RESTARTS allows more",
            )

    # On the helper thread

    def _join(self) -> tuple[RendezvousInfo, Agreement]:
        """Join a round and agree in it; a round that loses a node in between is left for the next one."""
        deadline = time.monotonic() + self._seconds("join", JOIN_S)
        while True:
            info = self._inner.next_rendezvous()
            self._num_waiting = 0
            try:
                return info, self._agree(info)
            except (RuntimeError, ValueError, TimeoutError, msgspec.DecodeError) as error:
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError(f"the nodes did not agree on an incarnation: {error}") from error
                log.warning("this round did not agree on an incarnation, joining the next one: %s", error)

    def _agree(self, info: RendezvousInfo) -> Agreement:
        """Number: one more than any keeper of this round knows. Nonce and store: node rank 0's."""
        ours, patience = PrefixStore("keepstep", info.store), timedelta(seconds=self._read_s)
        ours.set(f"number/{info.rank}", str(self._known_number()))
        server = None
        if info.rank == 0:
            keys = [f"number/{rank}" for rank in range(info.world_size)]
            ours.wait(keys, patience)
            incarnation = Incarnation(1 + max(int(ours.get(key)) for key in keys), secrets.randbits(63))
            address = self._params.local_addr or ("localhost" if info.world_size == 1 else socket.getfqdn())
            server = _serve(address, patience)
            record = Agreement(str(incarnation), address, server.port)
            ours.set("agreement", msgspec.json.encode(record).decode())
        ours.wait(["agreement"], patience)
        agreed = msgspec.json.decode(ours.get("agreement"), type=Agreement)
        self._largest_number = max(self._largest_number, Incarnation.parse(agreed.incarnation).number)
        self._server = server  # the last round's store goes only now
        return agreed

    def _known_number(self) -> int:
        """The largest incarnation number that this node's keeper or this agent knows."""
        try:
            known = self._holder.largest_number(timeout_s=self._config.keeper.start_s, patient=self._rounds > 0)
        except Error as error:
            raise _refusal(error.message, hint=error.hint) from error
        return max(known, self._largest_number)

    def _look(self) -> None:
        try:
            self._num_waiting = self._inner.num_nodes_waiting()
        except Exception as error:
            # A lost store host is no reason to stop workers that work: the next round will find out.
            log.debug("the rendezvous store does not answer: %s", error)
        finally:
            self._looking = False

    # Deadlines, by --rdzv-conf

    def _seconds(self, name: str, default: int) -> int:
        return self._params.get_as_int(f"{name}_timeout", default) or default

    @property
    def _read_s(self) -> int:
        return self._seconds("read", READ_S)


class Errands:
    """One daemon thread that runs calls in order. A call that never returns holds up the later ones only."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="keepstep-rendezvous", daemon=True).start()

    def start(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def run(self, call: Callable[[], T], *, timeout_s: float) -> T:
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self.start(answer)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            raise RendezvousTimeoutError(f"the rendezvous did not answer within {timeout_s:g} s") from None

    def stop(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _serve(address: str, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(
            f"no store can be opened at {address} (try: --local-addr=<an address of this node>)"
        ) from error


def _refusal(message: str, *, hint: str) -> RendezvousError:
    return RendezvousError(str(Error(message, hint=hint)))
