"""Others on the same machines: another job, keepers without the secret, peers that send nonsense. They do no harm."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from clones import rest
from nodes import Run, running, wait_for

from keepstep.config import PeersConfig
from keepstep.control.messages import NodeCard
from keepstep.errors import IntegrityError
from keepstep.keeper.coordinator import messages
from keepstep.keeper.coordinator.messages import (
    EarlierGrantProgress,
    ExchangeProgress,
    Failure,
    GrantOrder,
    Orders,
    Report,
)
from keepstep.keeper.transfer.chunk_store import CHECK, DATA, MANIFEST, META, PARITY, REBUILT, STREAM, ChunkRequest
from keepstep.keeper.workers import manifest as manifests
from keepstep.recovery.inventory import Holding, Inventory, ParitySet, SetKey
from keepstep.recovery.plan import Rebuild
from keepstep.transport.interface import Body, FetchError, FetchRequest, Peer
from keepstep.transport.links import MAX_INVALID_MESSAGES
from keepstep.transport.tcp import TcpTransport
from keepstep.types import Incarnation, Version

ABSURD = (-1, 0, 1, 7, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))


@contextlib.contextmanager
def three(place: Path) -> Iterator[Run]:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        run.protect()
        yield run


class SilentListener:
    """Ignores messages and links, and serves no bytes."""

    def on_message(self, node_id: str, message: bytes, instance: str) -> None:
        pass

    def on_link(self, node_id: str, up: bool, reason: str) -> None:
        pass

    def serve(self, node_id: str, query: bytes) -> Body:
        return Body.of_bytes(b"")


@contextlib.contextmanager
def stranger(run: Run, *, secret: bytes, run_id: str = "", node_id: str = "z") -> Iterator[TcpTransport]:
    """A keeper's voice without a keeper, that knows where the others are."""
    config = PeersConfig(address="127.0.0.1", dead_s=1.0)
    peers = TcpTransport(
        Peer(node_id, secrets.token_hex(8)), run_id or run.run_id, secret, config,
        SilentListener(),
    )  # fmt: skip
    cards = [node.card().card for node in run.nodes.values()]
    peers.set_peers([Peer(card.node_id, card.instance, card.address, card.port) for card in cards])
    try:
        yield peers
    finally:
        peers.close()


def test_two_jobs_on_the_same_nodes_do_not_touch_each_other(place: Path) -> None:
    with running(place, losses=1) as one, running(place, losses=1) as other:
        for run in (one, other):
            run.add("a", "b", "c")
            run.start(["a", "b", "c"])
        for _ in range(3):
            one.protect()
            other.protect()
        kept = rest(other)
        one.nodes["b"].kill()
        one.add("b'")
        one.start(["a", "b'", "c"])
        one.protect()
        assert rest(other) == kept
        assert other.protect() > kept
        assert not set(one.nodes["a"].memory.names()) & set(other.nodes["a"].memory.names())


@pytest.mark.parametrize("what", ["another secret", "another run's secret", "another run id"])
def test_a_keeper_that_does_not_belong_gets_nothing(what: str, place: Path) -> None:
    with three(place) as run:
        secret = run.secret if what == "another run id" else secrets.token_bytes(32)
        run_id = run.run_id if what == "another secret" else "run-of-somebody-else"
        with stranger(run, secret=secret, run_id=run_id) as peers:
            time.sleep(0.5)
            assert not any(peers.up(node_id) for node_id in "abc")
            assert not peers.send("a", b"hello")
            request = ChunkRequest(MANIFEST, run.trainers[0].protected).encode()
            with pytest.raises(FetchError):
                peers.fetch(FetchRequest("a", request, 1 << 20, 1.0)).result(5)
            run.protect()


def test_noise_on_the_port_is_turned_away(place: Path) -> None:
    draw = random.Random(0)
    with three(place) as run:
        card = run.nodes["a"].card().card
        for number in range(20):
            with contextlib.suppress(OSError), socket.create_connection((card.address, card.port), 2) as sock:
                sock.sendall(struct.pack("<I", 0xFFFFFFFF) if number % 3 == 0 else draw.randbytes(200))
                if number % 4 == 0:
                    time.sleep(0.02)
        run.protect()


def test_nonsense_from_an_authenticated_peer_is_ignored(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(1)
    with three(place) as run, stranger(run, secret=run.secret) as peers:
        wait_for(lambda: all(peers.up(node_id) for node_id in "abc"), "a guest is let in")
        honest = messages.encode(Report("z", "", run.trainers[0].incarnation, 1, "serving", card_of("z")))
        for number in range(150):
            noise, torn = draw.randbytes(draw.randrange(400)), mutilated(honest, draw)
            report, orders = messages.encode(absurd_report(run, draw)), messages.encode(absurd_orders(run, draw))
            other = msgspec.msgpack.encode({"type": "Report", "node_id": 1 << 63})
            peers.send("abc"[number % 3], draw.choice([noise, torn, report, orders, other]))
        run.protect()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR], caplog.text


@pytest.mark.parametrize("name", ["z", "b", "a"])
def test_no_order_of_a_guest_or_a_false_coordinator_kills_or_ends_anything(name: str, place: Path) -> None:
    """Not under a name of its own, nor a member's, nor the coordinator's, whose keeper is away for a while.

    The trainers live in this process: an order that was believed would kill it.
    """
    with three(place) as run:
        incarnation = run.trainers[0].incarnation
        later = Incarnation(incarnation.number + 1, 5)
        evil = [
            Orders(later, 1, 1),
            Orders(incarnation, 1 << 40, 1, finished=True),
            absurd_orders(run, random.Random(4)),
        ]
        victims = [node_id for node_id in "abc" if node_id != name]

        def attack(peers: TcpTransport) -> None:
            for orders in evil * 5:
                for victim in victims:
                    peers.send(victim, messages.encode(orders))
                run.train(1)

        with stranger(run, secret=run.secret, node_id=name) as peers:
            if name == "z":
                wait_for(lambda: all(peers.up(victim) for victim in victims), "a guest is let in")
            attack(peers)
            assert name == "z" or not any(peers.up(victim) for victim in victims)  # no living link is displaced
            if name != "z":
                run.nodes[name].keeper.network.transport.admit(secrets.token_bytes(32))  # type: ignore[union-attr]
                wait_for(lambda: any(peers.up(victim) for victim in victims), "the place is taken")
                attack(peers)
                run.nodes[name].keeper.network.transport.admit(run.secret)  # type: ignore[union-attr]
        assert all(node.thread.is_alive() for node in run.nodes.values())
        run.protect()


def test_a_guest_that_sends_nothing_but_rubbish_is_disconnected(place: Path) -> None:
    with three(place) as run, stranger(run, secret=run.secret) as peers:
        wait_for(lambda: peers.up("a"), "a guest is let in")
        links = peers.counters()["links"]
        for _ in range(MAX_INVALID_MESSAGES + 1):
            peers.send("a", b"rubbish")
        wait_for(lambda: peers.counters()["links"] > links, "it is cut off, and linked again")
        run.protect()


def test_absurd_reports_of_a_member_do_not_end_a_keeper(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A member that lies may stop the snapshots it takes part in; not more, and not longer than it lies."""
    draw = random.Random(2)
    with three(place) as run:
        member = run.nodes["b"].keeper
        assert member.network is not None
        for _ in range(100):
            report = absurd_report(run, draw, node_id="b", instance=member.instance, card=member.core.card)
            member.network.transport.send("a", messages.encode(report))
            run.train(1)
        run.protect()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR], caplog.text


def test_hostile_requests_are_refused(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(3)
    with three(place) as run, stranger(run, secret=run.secret) as peers:
        wait_for(lambda: peers.up("a"), "a guest is let in")
        for _ in range(3):  # both parity buffers are there, and every stream
            run.protect()
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(150):
            request = draw.choice([draw.randbytes(60), absurd_request(run, draw).encode()])
            future = peers.fetch(FetchRequest("a", request, 1 << 20, 2.0))
            with contextlib.suppress(FetchError):
                future.result(5)
        run.protect()
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= open_before + 4, "descriptors are given back")
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR], caplog.text


def test_hostile_manifests_are_refused_at_once(place: Path) -> None:
    draw = random.Random(4)
    with three(place) as run:
        version = rest(run)
        network = run.nodes["a"].keeper.network
        assert network is not None
        sound = network.store.manifest(version)
    encoded = manifests.encode(sound)
    assert manifests.decode(encoded, version) == sound
    started = time.monotonic()
    for _ in range(500):
        with contextlib.suppress(IntegrityError):
            manifests.decode(mutilated(encoded, draw), version)
    header = bytearray(sound.ranks[0].header)
    for at in range(0, len(header) - 8, 4):  # every field in turn says 2**60
        struct.pack_into("<Q", header, at, 1 << 60)
        lying = msgspec.structs.replace(sound.ranks[0], header=bytes(header))
        with contextlib.suppress(IntegrityError):
            manifests.decode(manifests.encode(manifests.NodeManifest("a", version, (lying,))), version)
        header = bytearray(sound.ranks[0].header)
    for ranks in ((), (sound.ranks[0], sound.ranks[0])):
        with pytest.raises(IntegrityError):
            manifests.decode(manifests.encode(manifests.NodeManifest("a", version, ranks)), version)
    assert time.monotonic() - started < 5


# Nonsense of all kinds


def card_of(node_id: str) -> NodeCard:
    return NodeCard(node_id, "x", "127.0.0.1", 1)


def mutilated(data: bytes, draw: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.randrange(1, 5)):
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    return bytes(damaged[: draw.randrange(1, len(damaged) + 1)]) if draw.random() < 0.3 else bytes(damaged)


def absurd_version(run: Run, draw: random.Random) -> Version:
    incarnation = draw.choice([run.trainers[0].incarnation, Incarnation(0, 0), Incarnation(1, 5)])
    return Version(incarnation, draw.choice(ABSURD))


def absurd_key(run: Run, draw: random.Random) -> SetKey:
    return SetKey(absurd_version(run, draw), run.trainers[0].incarnation, draw.choice(ABSURD))


def absurd_report(
    run: Run, draw: random.Random, *, node_id: str = "", instance: str = "x", card: NodeCard | None = None
) -> Report:
    node_id = node_id or draw.choice(["z", "a", "b", "nobody"])
    key, version = absurd_key(run, draw), absurd_version(run, draw)
    number = draw.choice([-1, 0, 1])  # as old as can be: the next honest one counts
    held = Holding(version, draw.choice(ABSURD), draw.choice(ABSURD), -5, 0, "", draw.choice(ABSURD), -1)
    parity = ParitySet(key, draw.choice(ABSURD), draw.choice(ABSURD), ("a", "nobody"), ((-1,), ()), -3)
    return Report(
        node_id, instance, run.trainers[0].incarnation, number, draw.choice(["serving", "restoring", "?"]),
        card or card_of(node_id), draw.random() < 0.5, (draw.choice(ABSURD),), draw.choice(ABSURD),
        slots=draw.choice(ABSURD), grants=(EarlierGrantProgress(draw.choice(ABSURD), -1, version, sealed=True),),
        opened=(GrantOrder(draw.choice(ABSURD), draw.choice(ABSURD)),), placed=(key,),
        exchange=ExchangeProgress(key, draw.choice(ABSURD), "?"), damaged=(version,), unreachable=("nobody",),
        losses=draw.choice(ABSURD), group_size=draw.choice(ABSURD),
        inventory=Inventory((held,), version, ("?",), (parity,), version),
        failures=(Failure(draw.choice(ABSURD), "nobody", -9, version, True, "?"),),
    )  # fmt: skip


def absurd_orders(run: Run, draw: random.Random) -> Orders:
    """Of this incarnation or an older one; only the coordinator's own count."""
    incarnation = draw.choice([run.trainers[0].incarnation, Incarnation(0, 0)])
    return Orders(
        incarnation, draw.choice(ABSURD), draw.choice(ABSURD), target=absurd_version(run, draw), finished=True,
        grants=(GrantOrder(draw.choice(ABSURD), draw.choice(ABSURD)),), cards=(card_of("a"), card_of("nobody")),
    )  # fmt: skip


def absurd_request(run: Run, draw: random.Random) -> ChunkRequest:
    real = run.trainers[0].protected or absurd_version(run, draw)
    key = draw.choice([SetKey(real, run.trainers[0].incarnation, 1), absurd_key(run, draw)])
    ranks = draw.choice([((0,), (1,), (2,)), ((-1,),), (), ((0,), (1,), (2,), (3,))])
    rebuild = Rebuild(
        key, draw.choice([1, 2, 0, -1, 1 << 40]), draw.choice([0, 1, -1, 99]), ranks,
        tuple(("nobody",) for _ in ranks), tuple("nobody" for _ in ranks),
    )  # fmt: skip
    return ChunkRequest(
        draw.choice([MANIFEST, DATA, PARITY, META, STREAM, CHECK, REBUILT, "?"]),
        draw.choice([real, absurd_version(run, draw), None]), draw.choice(ABSURD), draw.choice(ABSURD),
        draw.choice([key, None]), draw.choice(ABSURD), draw.choice(ABSURD), "x" * draw.choice([0, 5, 5000]),
        draw.choice([rebuild, None]),
    )  # fmt: skip
