"""The keeper's side of the network: peers, what they may have of ours, exchanges and snapshots on their way.

Threads of the transport, of an exchange and of fetched snapshots come back through `later` and are
handled by the loop. Nothing is opened before the first membership but the listening port.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from keepstep.arena.slots import Arena
from keepstep.config import Config
from keepstep.errors import ConfigError
from keepstep.identity import Identity
from keepstep.keeper import events as e
from keepstep.keeper import words
from keepstep.keeper.bringing import Bringing
from keepstep.keeper.exchange import Exchange, Pool
from keepstep.keeper.manifest import RankManifest
from keepstep.keeper.reach import Reach
from keepstep.keeper.rebuilding import Helper
from keepstep.keeper.shelf import Shelf
from keepstep.parity.held import HeldParity
from keepstep.peers.base import Peer
from keepstep.peers.tcp import TcpPeers
from keepstep.protocol import NodeCard
from keepstep.recovery.inventory import ParitySet, SetKey
from keepstep.types import Version

log = logging.getLogger("keepstep.keeper")
JOIN_S = 5.0
SEAT = "peers.json"


class _Seat(msgspec.Struct, frozen=True):
    """Where this node's keeper is met, kept beside its sockets: the keeper that takes its place sits down there.

    Peers were told once, at the beginning of the incarnation; two keepers that both came back somewhere
    else would never find each other again.
    """

    instance: str
    port: int

    @classmethod
    def read(cls, path: Path) -> _Seat | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.write_bytes(msgspec.json.encode(self))


class Network:
    """Everything of this keeper that has to do with other nodes."""

    def __init__(
        self,
        identity: Identity,
        instance: str,
        config: Config,
        *,
        later: Callable[..., None],
        handle: Callable[[e.Event], None],
        holds_changed: Callable[[], None],
    ) -> None:
        self._identity, self._config = identity, config
        self._later, self._handle, self._holds_changed = later, handle, holds_changed
        self.shelf = Shelf(identity.node_id, self._damaged)
        self.parities: dict[str, HeldParity] = {}
        self._pool = Pool()
        self._exchange: Exchange | None = None
        self._bringing: list[Bringing] = []
        self._secret = b""
        known = _Seat.read(identity.directory / SEAT)
        self.peers = self._listen(known) if known is not None else self._listen(_Seat(instance, config.peers.port))
        address, port = self.peers.card_address()
        self._reach = Reach(identity.node_id, self.shelf, self.peers)
        self.shelf.rebuilt = Helper(self._reach, timeout_s=config.peers.timeout_s).serve
        seat = _Seat(known.instance if known is not None else instance, port)
        seat.write(identity.directory / SEAT)
        self.card = NodeCard(identity.node_id, seat.instance, address, port, config.failure_domain)

    def _listen(self, seat: _Seat) -> TcpPeers:
        config = self._config
        for port in (seat.port, config.peers.port):
            try:
                return TcpPeers(
                    Peer(self._identity.node_id, seat.instance), self._identity.run_id, b"",
                    replace(config.peers, address=config.peers.address or config.address, port=port),
                    on_message=self._message, on_link=self._link, serve=self.shelf.serve,
                )  # fmt: skip
            except ConfigError:
                if port == config.peers.port:
                    raise
                log.warning("the port of the keeper before this one is taken: peers must be told of another")
        raise AssertionError("the loop returns or raises")

    # From the transport's threads

    def _message(self, node_id: str, data: bytes) -> None:
        try:
            word = words.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("a peer's word was not understood", extra={"peer": node_id, "reason": str(error)})
            return
        self._later(self._handle, e.PeerSaid(node_id, word))

    def _link(self, node_id: str, up: bool, reason: str) -> None:
        self._later(self._handle, e.PeerLink(node_id, up, reason))

    def _damaged(self, arena_id: str, slot: int, version: Version, problem: str) -> None:
        self._later(self._check, arena_id, slot, version)

    check: Callable[[str, int, Version], None] = staticmethod(lambda arena_id, slot, version: None)
    """set by the keeper: verify this slot, a peer had bytes from it that do not match"""

    def _check(self, arena_id: str, slot: int, version: Version) -> None:
        self.check(arena_id, slot, version)

    # Effects of the core

    def meet(self, effect: e.Meet) -> None:
        if effect.secret and effect.secret != self._secret:
            self._secret = effect.secret
            self.peers.admit(effect.secret)
        self.peers.meet([Peer(c.node_id, c.instance, c.address, c.port) for c in effect.cards])

    def tell(self, effect: e.Tell) -> None:
        self.peers.send(effect.node_id, words.encode(effect.word))

    def start_exchange(self, effect: e.StartExchange) -> None:
        self._exchange = Exchange(
            effect, run_id=self._identity.run_id, node_id=self._identity.node_id, shelf=self.shelf, peers=self._reach,
            pool=self._pool, window_bytes=self._config.peers.window_bytes, timeout_s=self._config.peers.timeout_s,
            placed=lambda event, held: self._later(self._placed, event, held),
            say=lambda event: self._later(self._handle, event),
        )  # fmt: skip

    def stop_exchange(self, effect: e.StopExchange) -> None:
        if self._exchange is not None and self._exchange.key == effect.key:
            self._exchange.stop()
            self._exchange = None

    def free_parity(self, effect: e.FreeParity) -> None:
        held = self.parities.pop(effect.buffer_id, None)
        if held is not None:
            self.shelf.take_parity_away(effect.buffer_id)
            self._holds_changed()
            self._pool.give(held)

    def _placed(self, event: e.ParityPlaced, held: HeldParity) -> None:
        if self._exchange is None or self._exchange.key != event.found.key:
            self._pool.give(held)  # it was stopped when this was on its way
            return
        self.put_parity(held)
        self._handle(event)

    def put_parity(self, held: HeldParity) -> None:
        self.parities[held.buffer_id] = held
        self.shelf.put_parity(held)
        self._holds_changed()

    def bring_in(
        self, effect: e.BringIn, arena: Arena | None, make: Callable[[e.BringIn, RankManifest], Arena],
        done: Callable[[e.BroughtIn, Arena | None], None],
    ) -> None:  # fmt: skip
        self._bringing = [one for one in self._bringing if one.plan == effect.plan]
        self._bringing.append(
            Bringing(
                effect, node_id=self._identity.node_id, peers=self._reach, arena=arena,
                make=lambda manifest: make(effect, manifest), window_bytes=self._config.peers.window_bytes,
                timeout_s=self._config.peers.timeout_s,
                done=lambda event, made: self._later(done, event, made),
            )
        )  # fmt: skip

    def give_up_bringing(self, effect: e.GiveUpBringing) -> None:
        for one in self._bringing:
            if one.plan <= effect.plan:
                one.stop()

    @property
    def parity_bytes(self) -> int:
        held = sum(parity.segment.size_bytes for parity in self.parities.values())
        return held + self._pool.size_bytes

    def close(self) -> None:
        running: list[Exchange | Bringing] = [*self._bringing, *([self._exchange] if self._exchange else [])]
        for one in running:
            one.stop()
        self.peers.close()
        for one in running:
            one.join(JOIN_S)
        self._pool.close()
        for held in self.parities.values():
            held.close()


def adopt_parity(fd: int, identity: Identity) -> tuple[HeldParity, ParitySet]:
    """A parity buffer that a holder gives back. The descriptor is duplicated."""
    own = os.dup(fd)
    try:
        held = HeldParity.adopt(own, run_id=identity.run_id, node_id=identity.node_id)
    except BaseException:
        os.close(own)
        raise
    header, meta = held.header, held.meta
    assert header is not None
    assert meta is not None
    key = SetKey(header.version, header.incarnation, header.attempt)
    found = ParitySet(key, header.m, header.position, meta.members, meta.ranks, meta.world_size, held.buffer_id)
    return held, found
