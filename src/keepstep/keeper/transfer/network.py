"""Everything of this keeper that involves other nodes: links, what peers may fetch, exchanges, fetched snapshots.

Threads of the transport and of transfers put their results into the keeper's queue; the loop takes them from there.
Before the first membership nothing is opened but the listening port: no peer is linked or served before `set_peers`
names the secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from keepstep.arena.slots import Arena
from keepstep.config import Config
from keepstep.control.messages import NodeCard
from keepstep.errors import ConfigError, Error
from keepstep.identity import Identity
from keepstep.keeper.coordinator import messages
from keepstep.keeper.node.effects import FetchSnapshot, FreeParity, SendToPeer, SetPeers, StartExchange, StopExchange
from keepstep.keeper.node.events import ParityPlaced, PeerLink, PeerMessage
from keepstep.keeper.transfer.chunk_store import CHECK, REBUILT, ChunkRequest, ChunkStore
from keepstep.keeper.transfer.fetch_replicas import ReplicaCache
from keepstep.keeper.transfer.fetch_snapshot import FetchEnded, SnapshotFetch
from keepstep.keeper.transfer.protect import ParityBufferPool, ParityBuilder, ParityBuilt
from keepstep.keeper.transfer.rebuild import Rebuilder
from keepstep.keeper.transfer.stripe_reads import ChunkClient, FetchSettings
from keepstep.keeper.workers.allocation import ArenaAllocator
from keepstep.keeper.workers.results import Result, Results, TransferThread
from keepstep.parity.cost_model import WINDOW_BYTES
from keepstep.parity.parity_buffer import ParityBuffer
from keepstep.recovery.inventory import ParitySet, SetKey
from keepstep.transport.interface import TIMEOUT_S, Body, InvalidMessageError, Peer, Refusal, Transport
from keepstep.transport.tcp import TcpOptions, TcpTransport
from keepstep.types import Version

log = logging.getLogger("keepstep.keeper")
JOIN_S = 5.0
ADDRESS_FILE = "peers.json"
MAX_UNLISTED_PEERS = 64

_request_decoder = msgspec.msgpack.Decoder(ChunkRequest)


class KeeperAddress(msgspec.Struct, frozen=True):
    """Where peers reach this node's keeper, kept beside its sockets: its successor listens on the same port.

    Peers receive the address once, at the beginning of the incarnation; two keepers that were both replaced and listen
    elsewhere would never find each other again.
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


@dataclass(frozen=True)
class SlotSuspected(Result):
    """A peer received bytes of this slot that do not match their checksum: verify it."""

    arena_id: str
    slot: int
    version: Version


@dataclass(frozen=True)
class CutEnded(Result):
    """The time of a drill's cut is over, unless another cut has replaced it."""

    timer: threading.Timer


class KeeperNetwork:
    """Links to other keepers, and all transfers. Used by the keeper's loop; listens to the transport."""

    def __init__(
        self, identity: Identity, instance: str, config: Config, allocator: ArenaAllocator, results: Results
    ) -> None:
        self._identity, self._config, self._allocator, self._results = identity, config, allocator, results
        self._pool = ParityBufferPool()
        self._exchange: ParityBuilder | None = None
        self._fetches: list[SnapshotFetch] = []
        self._stopping: list[TransferThread] = []  # stopped; what they hold or write is theirs until they have ended
        self._secret = b""
        self._cut: threading.Timer | None = None  # while a drill keeps this keeper from its peers
        self.parities: dict[str, ParityBuffer] = {}
        self._settings = FetchSettings(WINDOW_BYTES, TIMEOUT_S)
        self.store = ChunkStore(identity.node_id)

        last = KeeperAddress.read(identity.directory / ADDRESS_FILE)
        self.transport = self._listen(last or KeeperAddress(instance, config.peers.port), is_successor=last is not None)
        client = ChunkClient(self.store, self.transport)
        rebuilder = Rebuilder(client, timeout_s=TIMEOUT_S)
        self._client, self._rebuilder = client, rebuilder
        self.replicas = ReplicaCache(client, self._settings, results)

        host, port = self.transport.card_address()
        address = KeeperAddress(last.instance if last is not None else instance, port)
        address.write(identity.directory / ADDRESS_FILE)
        self.card = NodeCard(identity.node_id, address.instance, host, port, config.failure_domain)

    def _listen(self, address: KeeperAddress, *, is_successor: bool) -> Transport:
        config = self._config
        for port in (address.port, config.peers.port):
            try:
                return TcpTransport(
                    Peer(self._identity.node_id, address.instance), self._identity.run_id, b"",
                    replace(config.peers, port=port),
                    self,
                    options=TcpOptions(max_unlisted_peers=MAX_UNLISTED_PEERS, is_successor=is_successor),
                )  # fmt: skip
            except ConfigError:
                if port == config.peers.port:
                    raise
                log.warning("the port of the last keeper is taken: peers must receive the new one")
        raise AssertionError("the loop returns or raises")

    # TransportListener, called on the transport's threads

    def on_message(self, node_id: str, message: bytes, instance: str) -> None:
        try:
            decoded = messages.decode(message)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            log.warning("a message of a peer cannot be decoded", extra={"peer": node_id, "reason": str(error)})
            raise InvalidMessageError(str(error)) from error
        self._results.put(PeerMessage(node_id, decoded, instance))

    def on_link(self, node_id: str, up: bool, reason: str) -> None:
        self._results.put(PeerLink(node_id, up, reason))

    def serve(self, node_id: str, query: bytes) -> Body:
        """The bytes that a peer asks for, never before `set_peers`: no peer is authenticated without secret.

        Raises Refusal with the reason.
        """
        try:
            request = _request_decoder.decode(query)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Refusal(f"not a request: {error}") from error
        if request.kind == REBUILT:
            return self._rebuilder.rebuild(request)
        if request.kind == CHECK and request.version is not None:
            return self._suspect(request.version, request.rank)
        return self.store.read(request)

    def _suspect(self, version: Version, rank: int) -> Body:
        try:
            snapshot = self.store.snapshot(version, rank)
        except (OSError, Error) as error:
            raise Refusal(str(error)) from error
        self._results.put(SlotSuspected(snapshot.arena.arena_id, snapshot.slot, version))
        return Body.of_bytes(b"")

    # Links

    def set_peers(self, effect: SetPeers) -> None:
        if effect.secret and effect.secret != self._secret:
            self._secret = effect.secret
            if self._cut is None:
                self.transport.admit(effect.secret)
        self.transport.set_peers([Peer(c.node_id, c.instance, c.address, c.port) for c in effect.cards])

    def send(self, effect: SendToPeer) -> None:
        self.transport.send(effect.node_id, messages.encode(effect.message))

    def cut(self, seconds: float) -> None:
        """End all links for a drill, and authenticate no peer until the time is over. The last cut counts.

        With a secret of its own this keeper cannot authenticate to its peers, nor they to it.
        """
        if self._cut is None:
            self.transport.admit(secrets.token_bytes(32))
        else:
            self._cut.cancel()
        log.warning("links are cut, for a drill", extra={"seconds": seconds})
        timer = self._cut = threading.Timer(seconds, lambda: self._results.put(CutEnded(timer)))
        timer.daemon = True
        timer.start()

    def end_cut(self, ended: CutEnded) -> None:
        if self._cut is ended.timer:
            self._cut = None
            if self._secret:
                self.transport.admit(self._secret)

    # Parity

    def start_exchange(self, effect: StartExchange) -> None:
        self._exchange = ParityBuilder(
            effect, self._client, self._pool, run_id=self._identity.run_id, settings=self._settings,
            results=self._results,
        )  # fmt: skip

    def stop_exchange(self, effect: StopExchange) -> None:
        if self._exchange is not None and self._exchange.key == effect.key:
            self._stop(self._exchange)
            self._exchange = None

    def take_parity(self, built: ParityBuilt) -> ParityPlaced | None:
        """Keep parity that was built; None when its exchange was stopped meanwhile."""
        if self._exchange is None or self._exchange.key != built.event.parity_set.key:
            self._pool.give(built.buffer)
            return None
        self.add_parity(built.buffer)
        return built.event

    def add_parity(self, buffer: ParityBuffer) -> None:
        self.parities[buffer.buffer_id] = buffer
        self.store.add_parity(buffer)

    def free_parity(self, effect: FreeParity) -> bool:
        """Whether there was such a buffer; its memory is used for the next parity."""
        buffer = self.parities.pop(effect.buffer_id, None)
        if buffer is None:
            return False
        self.store.remove_parity(effect.buffer_id)
        self._pool.give(buffer)
        return True

    @property
    def parity_bytes(self) -> int:
        held = sum(parity.segment.size_bytes for parity in self.parities.values())
        return held + self._pool.size_bytes

    # Snapshots of other nodes

    def fetch_snapshot(self, effect: FetchSnapshot, target: Arena | None) -> None:
        """`target`: the arena that the effect names."""
        after = [thread for thread in self._stopping if isinstance(thread, SnapshotFetch)]
        window_bytes = WINDOW_BYTES // max(1, effect.local_world_size)
        fetch = SnapshotFetch(
            effect, self._client, target=target, allocator=self._allocator, after=after,
            settings=replace(self._settings, window_bytes=window_bytes), results=self._results,
        )  # fmt: skip
        self._fetches.append(fetch)

    def cancel_fetches(self) -> None:
        for fetch in self._fetches:
            self._stop(fetch)
        self._fetches = []

    def take_fetched(self, ended: FetchEnded) -> bool:
        """Whether the fetch still counts. One that was cancelled loses its arena; another may have its plan number."""
        if ended.fetch not in self._fetches:
            ended.close()
            return False
        self._fetches.remove(ended.fetch)
        return True

    def _stop(self, thread: TransferThread) -> None:
        thread.stop()
        self._stopping = [*(old for old in self._stopping if old.is_alive()), thread]

    def close(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
        self.cancel_fetches()
        if self._exchange is not None:
            self._stop(self._exchange)
        self.replicas.stop()
        self._rebuilder.close()
        self.transport.close()
        for thread in self._stopping:
            thread.join(JOIN_S)
        self.replicas.close(JOIN_S)
        self._pool.close()
        for buffer in self.parities.values():
            buffer.close()


def adopt_parity(fd: int, identity: Identity) -> tuple[ParityBuffer, ParitySet]:
    """A parity buffer that a holder gives back. The descriptor is duplicated."""
    own = os.dup(fd)
    try:
        buffer = ParityBuffer.adopt(own, run_id=identity.run_id, node_id=identity.node_id)
    except BaseException:
        os.close(own)
        raise
    header, meta = buffer.header, buffer.meta
    assert header is not None
    assert meta is not None
    key = SetKey(header.version, header.incarnation, header.attempt)
    members, ranks = meta.members, meta.ranks
    return buffer, ParitySet(key, header.m, header.position, members, ranks, meta.world_size, buffer.buffer_id)
