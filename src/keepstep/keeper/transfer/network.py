"""The keeper's side of the network: peers, what they may have of ours, exchanges and snapshots on their way.

Threads of the transport, of an exchange and of fetched snapshots come back through `later` and are
handled by the loop. Nothing is opened before the first membership but the listening port.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec

from keepstep.arena.manifest import RankManifest
from keepstep.arena.slots import Arena
from keepstep.config import Config
from keepstep.control.messages import NodeCard, RestoreFrom
from keepstep.errors import ConfigError, Error
from keepstep.identity import Identity
from keepstep.keeper.coordinator import messages
from keepstep.keeper.node.effects import (
    CancelFetches,
    FetchSnapshot,
    FreeParity,
    SendToPeer,
    SetPeers,
    StartExchange,
    StopExchange,
)
from keepstep.keeper.node.events import Event, ParityPlaced, PeerLink, PeerMessage, SnapshotFetched
from keepstep.keeper.transfer.chunk_store import ChunkStore
from keepstep.keeper.transfer.fetch_replicas import FetchedReplicas, gather
from keepstep.keeper.transfer.fetch_snapshot import SnapshotFetch
from keepstep.keeper.transfer.protect import ParityBufferPool, ParityBuilder
from keepstep.keeper.transfer.reach import ChunkClient
from keepstep.keeper.transfer.rebuild import Rebuilder
from keepstep.keeper.transfer.stripe_reads import SourceFailedError, StoppedError
from keepstep.layout import ReplicaSet
from keepstep.parity.cost_model import WINDOW_BYTES
from keepstep.parity.parity_buffer import ParityBuffer
from keepstep.recovery.inventory import ParitySet, SetKey
from keepstep.transport.interface import TIMEOUT_S, Peer, Transport, TransportHandlers
from keepstep.transport.tcp import TcpOptions, TcpTransport
from keepstep.types import Version

log = logging.getLogger("keepstep.keeper")
JOIN_S = 5.0
SEAT = "peers.json"
MAX_UNLISTED_PEERS = 64


class KeeperAddress(msgspec.Struct, frozen=True):
    """Where this node's keeper is met, kept beside its sockets: the keeper that takes its place sits down there.

    Peers were told once, at the beginning of the incarnation; two keepers that both came back somewhere
    else would never find each other again.
    """

    instance: str
    port: int

    @classmethod
    def read(cls, path: Path) -> KeeperAddress | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.write_bytes(msgspec.json.encode(self))


class KeeperNetwork:
    """Everything of this keeper that has to do with other nodes."""

    def __init__(
        self,
        identity: Identity,
        instance: str,
        config: Config,
        *,
        later: Callable[..., None],
        handle: Callable[[Event], None],
        holds_changed: Callable[[], None],
    ) -> None:
        self._identity, self._config = identity, config
        self._later, self._handle, self._holds_changed = later, handle, holds_changed
        self.shelf = ChunkStore(identity.node_id, self._damaged)
        self.parities: dict[str, ParityBuffer] = {}
        self._pool = ParityBufferPool()
        self._exchange: ParityBuilder | None = None
        self._bringing: list[SnapshotFetch] = []
        self._ending: list[ParityBuilder | SnapshotFetch] = []
        """stopped, and maybe not through with it: what they hold or write is theirs until then"""
        self._secret = b""
        self.gathered: FetchedReplicas | None = None
        """replicated state that other nodes hold, while ranks restore"""
        self._gathering: Version | None = None
        self._gather_waiters: list[tuple[Callable[[], None], Callable[[str], None]]] = []
        self._closing = threading.Event()
        self._cut: threading.Timer | None = None
        """set while a drill keeps this keeper from its peers"""
        known = KeeperAddress.read(identity.directory / SEAT)
        self.peers = (
            self._listen(known) if known is not None else self._listen(KeeperAddress(instance, config.peers.port))
        )
        address, port = self.peers.card_address()
        self._reach = ChunkClient(identity.node_id, self.shelf, self.peers)
        self._helper = Rebuilder(self._reach, timeout_s=TIMEOUT_S)
        self.shelf.rebuilt = self._helper.serve
        seat = KeeperAddress(known.instance if known is not None else instance, port)
        seat.write(identity.directory / SEAT)
        self.card = NodeCard(identity.node_id, seat.instance, address, port, config.failure_domain)

    def _listen(self, seat: KeeperAddress) -> Transport:
        config = self._config
        for port in (seat.port, config.peers.port):
            try:
                return TcpTransport(
                    Peer(self._identity.node_id, seat.instance), self._identity.run_id, b"",
                    replace(config.peers, port=port),
                    TransportHandlers(on_message=self._message, on_link=self._link, serve=self.shelf.serve),
                    options=TcpOptions(max_unlisted_peers=MAX_UNLISTED_PEERS),
                )  # fmt: skip
            except ConfigError:
                if port == config.peers.port:
                    raise
                log.warning("the port of the keeper before this one is taken: peers must be told of another")
        raise AssertionError("the loop returns or raises")

    # From the transport's threads

    def _message(self, node_id: str, data: bytes) -> None:
        try:
            word = messages.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("a peer's word was not understood", extra={"peer": node_id, "reason": str(error)})
            return
        self._later(self._handle, PeerMessage(node_id, word))

    def _link(self, node_id: str, up: bool, reason: str) -> None:
        self._later(self._handle, PeerLink(node_id, up, reason))

    def _damaged(self, arena_id: str, slot: int, version: Version, problem: str) -> None:
        self._later(self._check, arena_id, slot, version)

    check: Callable[[str, int, Version], None] = staticmethod(lambda arena_id, slot, version: None)
    """set by the keeper: verify this slot, a peer had bytes from it that do not match"""

    def _check(self, arena_id: str, slot: int, version: Version) -> None:
        self.check(arena_id, slot, version)

    # Effects of the core

    def meet(self, effect: SetPeers) -> None:
        if effect.secret and effect.secret != self._secret:
            self._secret = effect.secret
            if self._cut is None:
                self.peers.admit(effect.secret)
        self.peers.set_peers([Peer(c.node_id, c.instance, c.address, c.port) for c in effect.cards])

    def cut(self, seconds: float) -> None:
        """A drill: all links end, and no peer is known again until the time is over. The last cut counts.

        Under a secret of its own this keeper is a stranger to everybody, and everybody to it.
        """
        if self._cut is None:
            self.peers.admit(secrets.token_bytes(32))
        else:
            self._cut.cancel()
        log.warning("links are cut, for a drill", extra={"seconds": seconds})
        self._cut = threading.Timer(seconds, lambda: self._later(self._mend))
        self._cut.daemon = True
        self._cut.start()

    def _mend(self) -> None:
        self._cut = None
        if self._secret:
            self.peers.admit(self._secret)

    def tell(self, effect: SendToPeer) -> None:
        self.peers.send(effect.node_id, messages.encode(effect.message))

    def start_exchange(self, effect: StartExchange) -> None:
        self._exchange = ParityBuilder(
            effect, run_id=self._identity.run_id, node_id=self._identity.node_id, shelf=self.shelf, peers=self._reach,
            pool=self._pool, window_bytes=WINDOW_BYTES, timeout_s=TIMEOUT_S,
            placed=lambda event, held: self._later(self._placed, event, held),
            say=lambda event: self._later(self._handle, event),
        )  # fmt: skip

    def stop_exchange(self, effect: StopExchange) -> None:
        if self._exchange is not None and self._exchange.key == effect.key:
            self._retire(self._exchange)
            self._exchange = None

    def free_parity(self, effect: FreeParity) -> None:
        held = self.parities.pop(effect.buffer_id, None)
        if held is not None:
            self.shelf.take_parity_away(effect.buffer_id)
            self._holds_changed()
            self._pool.give(held)

    def _placed(self, event: ParityPlaced, held: ParityBuffer) -> None:
        if self._exchange is None or self._exchange.key != event.parity_set.key:
            self._pool.give(held)  # it was stopped when this was on its way
            return
        self.put_parity(held)
        self._handle(event)

    def put_parity(self, held: ParityBuffer) -> None:
        self.parities[held.buffer_id] = held
        self.shelf.put_parity(held)
        self._holds_changed()

    def bring_in(
        self, effect: FetchSnapshot, arena: Arena | None,
        make: Callable[[FetchSnapshot, RankManifest], tuple[Arena, Future[None]]],
        done: Callable[[SnapshotFetched, Arena | None], None],
    ) -> None:  # fmt: skip
        def ended(event: SnapshotFetched, made: Arena | None) -> None:
            if bringing in self._bringing:
                self._bringing.remove(bringing)
                done(event, made)
            elif made is not None:  # given up meanwhile, and another one may have its number
                made.close()

        bringing = SnapshotFetch(
            effect, node_id=self._identity.node_id, peers=self._reach, arena=arena,
            make=lambda manifest: make(effect, manifest),
            window_bytes=WINDOW_BYTES // max(1, effect.local_world_size), timeout_s=TIMEOUT_S,
            done=lambda event, made: self._later(ended, event, made),
            after=[one for one in self._ending if isinstance(one, SnapshotFetch)],
        )  # fmt: skip
        self._bringing.append(bringing)

    def give_up_bringing(self, effect: CancelFetches) -> None:
        for one in self._bringing:
            self._retire(one)
        self._bringing = []

    def _retire(self, one: ParityBuilder | SnapshotFetch) -> None:
        one.stop()
        self._ending = [*(old for old in self._ending if old.alive), one]

    def gather(
        self, answer: RestoreFrom, holders: tuple[str, ...], missing: list[tuple[ReplicaSet, int]], *,
        again: Callable[[], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Fetch chunks of replicated state that no slot of this node holds; local ranks share what comes."""
        assert answer.version is not None
        if answer.version != self._gathering:
            self.forget_gathered()
            self._gathering = answer.version
            self._gather_waiters = []
            threading.Thread(
                target=self._gather, args=(answer.version, holders, missing), name="keepstep-gather", daemon=True
            ).start()
        elif self.gathered is not None:  # they are here, and this rank misses others: its layout is another one
            failed(f"{len(missing)} chunks of replicated state are on no node that can be reached")
            return
        self._gather_waiters.append((again, failed))

    def _gather(self, version: Version, holders: tuple[str, ...], missing: list[tuple[ReplicaSet, int]]) -> None:
        try:
            found: FetchedReplicas | str = gather(
                self._reach, version, holders, missing, window_bytes=WINDOW_BYTES, timeout_s=TIMEOUT_S,
                stopped=self._closing,
            )  # fmt: skip
        except (SourceFailedError, StoppedError, Error, OSError) as error:
            found = f"replicated state cannot be gathered: {error}"
        self._later(self._gathered_all, version, found)

    def _gathered_all(self, version: Version, found: FetchedReplicas | str) -> None:
        waiters, self._gather_waiters = self._gather_waiters, []
        if isinstance(found, FetchedReplicas) and version != self._gathering:
            found.segment.close()
            return
        if isinstance(found, FetchedReplicas):
            self.gathered = found
        else:
            self._gathering = None
        for again, failed in waiters:
            failed(found) if isinstance(found, str) else again()

    def forget_gathered(self) -> None:
        """All ranks have loaded: nobody needs the chunks of other nodes any more."""
        if self.gathered is not None:
            self.gathered.segment.close()
            self.gathered, self._gathering = None, None

    @property
    def parity_bytes(self) -> int:
        held = sum(parity.segment.size_bytes for parity in self.parities.values())
        return held + self._pool.size_bytes

    def close(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
        self._closing.set()
        running: list[ParityBuilder | SnapshotFetch] = [*self._bringing, *([self._exchange] if self._exchange else [])]
        for one in running:
            self._retire(one)
        self._helper.close()
        self.peers.close()
        for one in self._ending:
            one.join(JOIN_S)
        self.forget_gathered()
        self._pool.close()
        for held in self.parities.values():
            held.close()


def adopt_parity(fd: int, identity: Identity) -> tuple[ParityBuffer, ParitySet]:
    """A parity buffer that a holder gives back. The descriptor is duplicated."""
    own = os.dup(fd)
    try:
        held = ParityBuffer.adopt(own, run_id=identity.run_id, node_id=identity.node_id)
    except BaseException:
        os.close(own)
        raise
    header, meta = held.header, held.meta
    assert header is not None
    assert meta is not None
    key = SetKey(header.version, header.incarnation, header.attempt)
    found = ParitySet(key, header.m, header.position, meta.members, meta.ranks, meta.world_size, held.buffer_id)
    return held, found
