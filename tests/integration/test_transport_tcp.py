"""The TCP transport with real sockets and processes: dead and stopped peers, garbage, limits, addresses, rates."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transport_nodes import (
    LIMIT_S,
    RUN_ID,
    SECRET,
    Node,
    Process,
    TcpNet,
    num_sockets,
    our_threads,
    transport_limits,
    until,
)

from keepstep import faults
from keepstep.config import PeersConfig
from keepstep.errors import ConfigError
from keepstep.transport import Body, FetchError, FetchRequest, Peer, TcpOptions, TcpTransport
from keepstep.transport.address import resolve_address
from keepstep.transport.connection import PeerSocket, PeerSocketError
from keepstep.transport.frames import MESSAGE, REQUEST_HEAD_BYTES, SERVED, AnswerHead, FrameSigner, RequestHead
from keepstep.transport.handshake import (
    ACCEPTED,
    CONTROL,
    DATA,
    AuthError,
    DialingHandshake,
    KeeperSelf,
    ListeningHandshake,
    run_key,
)
from keepstep.transport.links import PeerLinks
from keepstep.transport.serve import MAX_UNAUTHENTICATED
from keepstep.transport.session import PeerSession
from keepstep.transport.throttle import TokenBucket, Traffic

pytestmark = pytest.mark.computing

THING_BYTES = 1 << 20


class Direct:
    """Nodes on loopback addresses of their own, with nothing in between."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def make(
        self, node_id: str, address: str = "127.0.0.1", *, secret: bytes = SECRET, run_id: str = RUN_ID, **config: Any
    ) -> Node:
        node = Node(node_id, "1")
        limits = transport_limits(config)
        settings = PeersConfig(**({"dead_s": 0.8, "address": address} | config))
        node.peers = TcpTransport(node.card, run_id, secret, settings, node, options=TcpOptions(**limits))
        node.card = Peer(node_id, "1", *node.peers.card_address())
        self.nodes.append(node)
        return node

    def pair(self, **config: Any) -> tuple[Node, Node]:
        a, b = self.make("a", **config), self.make("b", **config)
        self.acquaint(a, b)
        return a, b

    acquaint = TcpNet.acquaint

    def close(self) -> None:
        for node in self.nodes:
            node.peers.close()
            for fd in getattr(node, "fds", []):
                os.close(fd)


@pytest.fixture
def net() -> Iterator[Direct]:
    before = num_sockets()
    made = Direct()
    try:
        yield made
    finally:
        made.close()
    until(lambda: not our_threads(), f"the end of {our_threads()}")
    assert num_sockets() == before


# --- processes that die and stop -------------------------------------------------------------------------------------


def test_a_stopped_process_is_silent_and_is_linked_again(net: Direct) -> None:
    a = net.make("a", dead_s=1.0, timeout_s=60.0)
    with Process("b", "127.0.0.1", dead_s=1.0) as b:
        a.peers.set_peers([b.card])
        b.meet(a.card)
        until(lambda: a.peers.up("b"))
        until(lambda: a.peers.send("b", b"1") and ("b", b"echo 1") in a.messages)
        os.kill(b.pid, signal.SIGSTOP)
        future, _ = a.get(b_like(b), b"thing", THING_BYTES, timeout_s=60)
        until(lambda: "silent" in "".join(a.downs(b_like(b))), "word of the silence")
        assert not a.peers.up("b")
        assert future.exception(LIMIT_S).lost
        os.kill(b.pid, signal.SIGCONT)
        until(lambda: a.peers.up("b"), "the return")
        until(lambda: a.peers.send("b", b"2") and ("b", b"echo 2") in a.messages)
        assert a.get(b_like(b), b"thing", THING_BYTES)[0].result(10)


def test_a_session_ends_after_dead_s_of_silence_and_not_before() -> None:
    traffic = Traffic(PeersConfig(dead_s=1000.0), num_streams=1, timeout_s=1.0)
    dialer = SimpleNamespace(start_dial=lambda peer: None)
    links = PeerLinks("a", traffic, Node("a", "1"), dialer=dialer, max_unlisted_peers=0)
    lost: list[float] = []
    links.lose = lambda session, why: lost.append(session.silent_s)  # type: ignore[method-assign,attr-defined]
    now = time.monotonic()
    for silent_s in (0.0, 500.0, 900.0, 1001.0, 2000.0):
        session = SimpleNamespace(
            ended=False, silent_s=silent_s, received_at=now - silent_s, sent_at=now,
            streams=SimpleNamespace(expire=lambda now: None),
        )  # fmt: skip
        links._maintain(session)  # type: ignore[arg-type]
    links.close()
    links.run()  # gives its descriptors back
    assert lost == [1001.0, 2000.0]


def test_a_process_killed_in_the_middle_of_a_transfer_is_noticed_at_once(net: Direct) -> None:
    a = net.make("a", dead_s=60.0, timeout_s=60.0)  # nothing but the end of the connection can say so within LIMIT_S
    with Process("b", "127.0.0.1", rate_bytes_s=200_000) as b:
        a.peers.set_peers([b.card])
        b.meet(a.card)
        until(lambda: a.peers.up("b"))
        futures = [a.get(b_like(b), b"thing", THING_BYTES, timeout_s=60)[0] for _ in range(4)]
        until(lambda: a.peers.counters()["bytes_in"] > 0)
        b.kill()
        for future in futures:
            assert future.exception(LIMIT_S).lost
        until(lambda: not a.peers.up("b"))


def b_like(process: Process) -> Node:
    return Node(process.card.node_id, process.card.instance)


# --- who gets in -----------------------------------------------------------------------------------------------------


def test_no_peer_is_authenticated_before_there_is_a_secret(net: Direct) -> None:
    a, b = net.make("a", secret=b""), net.make("b")
    for node in (a, b):
        node.peers.set_peers([a.card, b.card])
    time.sleep(0.8)
    assert not a.peers.up("b")
    assert not b.peers.up("a")
    a.peers.admit(SECRET)
    until(lambda: a.peers.up("b") and b.peers.up("a"), "the link")


@pytest.mark.parametrize("other", [{"secret": b"the secret of another run"}, {"run_id": "run-2"}])
def test_another_run_is_kept_out(net: Direct, other: dict[str, Any]) -> None:
    a, b, c = net.make("a"), net.make("b", **other), net.make("c")
    for node in (a, b, c):
        node.peers.set_peers([a.card, b.card, c.card])
    until(lambda: a.peers.up("c") and b.peers.counters()["strangers"] > 1 and a.peers.counters()["strangers"] > 1)
    assert "b" not in [node_id for node_id, _, _ in a.links]
    assert not b.links


def test_a_new_secret_ends_links_made_with_the_old_one(net: Direct) -> None:
    a, b = net.pair()
    a.peers.admit(SECRET)
    time.sleep(0.2)
    assert not a.downs(b)
    a.peers.admit(b"quite another secret")
    until(lambda: a.downs(b))
    assert "secret" in a.downs(b)[0]
    with pytest.raises(ConfigError, match="too short"):
        a.peers.admit(b"short")


def test_idle_connections_do_not_keep_peers_out(net: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.transport.tcp.HANDSHAKE_S", 3 * LIMIT_S)  # no stranger goes away by itself
    a = net.make("a")
    idle = [socket.create_connection((a.card.address, a.card.port)) for _ in range(3 * MAX_UNAUTHENTICATED)]
    try:
        until(lambda: a.peers.counters()["strangers"] >= 2 * MAX_UNAUTHENTICATED, "the oldest to be closed")
        assert len([name for name in our_threads() if "accept" in name]) <= MAX_UNAUTHENTICATED + 4
        b = net.make("b", "127.0.0.2")
        net.acquaint(a, b)
    finally:
        for sock in idle:
            sock.close()


def test_a_connection_that_sends_nothing_is_closed_in_time(net: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.transport.tcp.HANDSHAKE_S", 0.5)
    a = net.make("a")
    silent = socket.create_connection((a.card.address, a.card.port))
    drip = socket.create_connection((a.card.address, a.card.port))
    with silent, drip:
        for byte in b"KSPR\x01\x01\0\0" + bytes(48):  # a byte now and then does not buy more time
            try:
                drip.send(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the connection is open as long as bytes come")
        silent.settimeout(LIMIT_S)
        assert silent.recv(100) == b""


def test_garbage_before_the_handshake_ends_no_link(net: Direct) -> None:
    a, b = net.pair()
    b.keep(b"thing", bytes(1000))
    rng = random.Random(7)
    hello = b"KSPR\x01\x01\0\0" + rng.randbytes(48)
    for _ in range(120):
        start = rng.choice(
            [b"", hello, hello[:4], b"KSPR\x01\x02\0\0", b"KSPR\x01\x02\0\0" + rng.randbytes(48), b"GET / HTTP/1.1\r\n"]
        )
        with socket.create_connection((a.card.address, a.card.port)) as sock:
            sock.settimeout(2)
            try:
                sock.sendall(start + rng.randbytes(rng.choice([0, 1, 34, 500, 70_000])))
                if rng.random() < 0.5:
                    sock.shutdown(socket.SHUT_WR)
                    heard = sock.recv(1000)
                    assert RUN_ID.encode() not in heard
                    assert len(heard) in (0, 64)
            except TimeoutError:
                pytest.fail("neither answered nor rejected")
            except OSError:
                pass  # rejected while it was still sending
    assert a.get(b, b"thing", 1000)[0].result(5)
    assert a.peers.send("b", b"fine")
    until(lambda: b.messages == [("a", b"fine")])
    assert not a.downs(b) + b.downs(a)
    until(lambda: a.peers.counters()["strangers"] >= 100)


def test_rejected_connections_do_not_fill_the_log(net: Direct, caplog: pytest.LogCaptureFixture) -> None:
    a = net.make("a")
    with caplog.at_level(logging.INFO, "keepstep"):
        for _ in range(50):
            with socket.create_connection((a.card.address, a.card.port)) as sock:
                sock.sendall(b"x" * 100)
        until(lambda: a.peers.counters()["strangers"] == 50)
    assert len([record for record in caplog.records if "rejected" in record.message]) == 1


# --- a peer that knows the secret and misbehaves ---------------------------------------------------------------------


class Rogue:
    """Node `b`, by hand."""

    def __init__(self, a: Node, bystander: Node) -> None:
        self.me = KeeperSelf("b", "1", RUN_ID)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.card = Peer("b", "1", *self.listener.getsockname())
        self.a = a.card
        a.peers.set_peers([self.card, bystander.card])
        until(self.dial_control)
        until(lambda: a.peers.up("b"))

    def dial_control(self) -> bool:
        wire = self.connect()
        dialing = DialingHandshake(wire, self.me, CONTROL, binding=b"", deadline=time.monotonic() + 5)
        try:
            dialing.authenticate(run_key(SECRET, RUN_ID), self.a)
        except (AuthError, PeerSocketError):  # a was dialling us
            wire.close()
            return False
        dialing.send_confirmation(True)
        self.control = wire
        keys = dialing.keys()
        self.ident, self.key, self.mine = keys.ident, keys.key, keys.from_dialer
        return True

    def dial_data(self) -> PeerSocket:
        wire = self.connect()
        dialing = DialingHandshake(wire, self.me, DATA, binding=b"", deadline=time.monotonic() + 5)
        try:
            dialing.authenticate(self.key, self.a, self.ident)
        except (AuthError, PeerSocketError):
            wire.close()
            raise
        return wire

    def serve_data(self) -> PeerSocket:
        """The next stream that a opens to us. Its attempts to make a link of its own are not answered."""
        self.listener.settimeout(5)
        while True:
            sock, _ = self.listener.accept()
            wire = PeerSocket(sock, timeout_s=5)
            try:
                heard = ListeningHandshake.accept(
                    wire, self.me, key_of=lambda kind, _: self.key if kind == DATA else None, binding=b"",
                    deadline=time.monotonic() + 5,
                )  # fmt: skip
            except (AuthError, PeerSocketError):
                wire.close()
                continue
            heard.send_verdict(ACCEPTED)
            return wire

    def connect(self) -> PeerSocket:
        return PeerSocket(socket.create_connection((self.a.address, self.a.port)), timeout_s=5)

    def close(self) -> None:
        self.control.close()
        self.listener.close()


@pytest.fixture
def rogue(net: Direct) -> Iterator[tuple[Rogue, Node, Node]]:
    a, c = net.make("a", dead_s=10.0), net.make("c", dead_s=10.0)
    c.keep(b"thing", bytes(1000))
    net.acquaint(a, c)
    made = Rogue(a, c)
    c.peers.set_peers([a.card])
    until(lambda: ("b", True) in [link[:2] for link in a.links])
    try:
        yield made, a, c
    finally:
        made.close()
    assert a.peers.up("c")
    assert not a.downs(c)
    assert a.get(c, b"thing", 1000)[0].result(5)


@pytest.mark.parametrize("seed", range(6))
def test_garbage_on_a_control_connection_ends_that_link_only(rogue: tuple[Rogue, Node, Node], seed: int) -> None:
    b, a, _ = rogue
    rng = random.Random(seed)
    sealer = FrameSigner(b.mine)
    b.control.write(sealer.seal(MESSAGE, b"a good one first"))
    b.control.write(
        rng.choice(
            [
                rng.randbytes(500),
                b"\x43\x4b\x01\0\xff\xff\xff\xff" + bytes(16),
                FrameSigner(b.mine).seal(MESSAGE, b"again"),
            ]
        )
    )
    until(lambda: "b" in [node_id for node_id, up, _ in a.links if not up], "the end of it")
    assert a.messages in ([], [("b", b"a good one first")])


@pytest.mark.parametrize("seed", range(6))
def test_garbage_on_a_stream_ends_that_stream_only(rogue: tuple[Rogue, Node, Node], seed: int) -> None:
    b, a, _ = rogue
    a.keep(b"thing", bytes(100))
    rng = random.Random(seed)
    bad = b.dial_data()
    bad.write(
        rng.choice(
            [
                rng.randbytes(REQUEST_HEAD_BYTES * 3),
                RequestHead(1, 1 << 31, 5, True).pack(),
                RequestHead(1, 0, 1 << 60, True).pack(),
            ]
        )
    )
    with pytest.raises(PeerSocketError):
        bad.read_exact(1, deadline=time.monotonic() + 5)
    bad.close()
    good = b.dial_data()
    good.write(RequestHead(1, 5, 100, True).pack() + b"thing")
    assert (
        AnswerHead.unpack(good.read_exact(40, deadline=time.monotonic() + 5), RequestHead(1, 5, 100, True)).length
        == 100
    )
    good.close()
    assert a.peers.up("b")


def test_streams_of_one_peer_are_limited(rogue: tuple[Rogue, Node, Node]) -> None:
    b, _, _ = rogue
    wires = [b.dial_data() for _ in range(16)]
    with pytest.raises(AuthError):
        b.dial_data()
    for wire in wires:
        wire.close()


def test_a_stream_needs_the_key_of_a_living_session(rogue: tuple[Rogue, Node, Node]) -> None:
    b, a, _ = rogue
    wire = b.dial_data()
    key = b.key
    b.key = b"guessed key".ljust(32)
    with pytest.raises((AuthError, PeerSocketError)):
        b.dial_data()
    b.key = key
    b.control.close()
    until(lambda: not a.peers.up("b"))
    with pytest.raises(PeerSocketError):
        wire.read_exact(1, deadline=time.monotonic() + 5)
    wire.close()
    with pytest.raises((AuthError, PeerSocketError)):
        b.dial_data()


@pytest.mark.parametrize(
    "answer",
    [
        AnswerHead(1, SERVED, 99, bytes(16)).pack() + bytes(99),
        AnswerHead(2, SERVED, 100, bytes(16)).pack() + bytes(100),
        AnswerHead(1, SERVED, 1 << 62, bytes(16)).pack(),
        AnswerHead(1, 77, 100, bytes(16)).pack(),
        AnswerHead(1, 1, 1 << 40, bytes(16)).pack(),
        os.urandom(2000),
    ],
    ids=["short", "other number", "huge", "status", "endless reason", "random"],
)
def test_garbage_from_a_server_fails_the_fetch(rogue: tuple[Rogue, Node, Node], answer: bytes) -> None:
    b, a, _ = rogue
    future, buffer = a.get(Node("b", "1"), b"thing", 100)
    wire = b.serve_data()
    wire.read_exact(REQUEST_HEAD_BYTES + 5, deadline=time.monotonic() + 5)
    wire.write(answer)
    with pytest.raises(FetchError) as caught:
        future.result(5)
    assert not caught.value.lost
    assert bytes(buffer) == bytes(100)
    wire.close()
    assert a.peers.up("b")


def test_a_server_that_stops_in_the_middle_is_given_up_after_timeout_s(net: Direct) -> None:
    a, c = net.make("a", timeout_s=0.5, dead_s=60.0), net.make("c")
    net.acquaint(a, c)
    b = Rogue(a, c)
    future, _ = a.get(Node("b", "1"), b"thing", 100, timeout_s=60)
    wire = b.serve_data()
    wire.write(AnswerHead(1, SERVED, 100, bytes(16)).pack() + b"half of it")
    start = time.monotonic()
    assert future.exception(LIMIT_S).lost
    assert time.monotonic() - start > 0.3
    wire.close()
    b.close()


# --- links -----------------------------------------------------------------------------------------------------------


def test_of_two_connections_one_is_kept(net: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides dial at once, again and again; every pair ends up with one link, and both know the same one."""
    monkeypatch.setattr("keepstep.transport.links.GIVE_WAY_S", 0.0)
    nodes = [net.make(name, dead_s=10.0) for name in "abcdef"]
    threads = [threading.Thread(target=node.peers.set_peers, args=([n.card for n in nodes],)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def settled() -> bool:
        return all(
            (one := node.peers._links.session(other.node_id)) is not None
            and (two := other.peers._links.session(node.node_id)) is not None
            and one.keys.ident == two.keys.ident
            for node in nodes
            for other in nodes
            if node is not other
        )

    until(settled)
    time.sleep(0.5)
    assert settled()
    for node in nodes:
        for other in nodes:
            if node is not other:
                assert node.peers.send(other.node_id, b"to " + other.node_id.encode())
    until(lambda: all(len(node.messages) == 5 for node in nodes))


def test_a_keeper_that_was_itself_stopped_does_not_take_all_others_for_dead(net: Direct) -> None:
    """What came meanwhile is read before the clock is looked at."""
    a, b = net.pair(dead_s=0.8)
    gate = threading.Event()
    # The control thread stands still, as in a long pause.
    b.on_message = lambda *_: gate.wait(0.7)
    a.peers.send("b", b"x")
    time.sleep(1.0)
    del b.on_message
    assert not b.downs(a)
    assert not a.downs(b)


def test_a_fault_of_our_own_costs_one_link_for_a_moment(net: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = (net.make(name, dead_s=5.0) for name in "abc")
    net.acquaint(a, b, c)
    monkeypatch.setattr(a.peers._links.session("b"), "read", lambda: 1 / 0)
    b.peers.send("a", b"x")
    until(lambda: a.downs(b))
    assert "ZeroDivisionError" in a.downs(b)[0]
    until(lambda: a.peers.up("b") and b.peers.up("a"))
    assert not a.downs(c)


def test_work_goes_on_when_any_one_effect_fails(net: Direct) -> None:
    """The Nth system call on a socket fails, for N = 1, 2, 3 ..., and everything heals by itself."""
    a, b = net.pair(dead_s=10.0)
    data = os.urandom(100_000)
    b.keep(b"thing", data)
    for nth in range(1, 200):
        passed = [0]

        def plan(name: str, nth: int = nth, passed: list[int] = passed) -> None:
            if name.startswith("peers."):
                passed[0] += 1
                if passed[0] == nth:
                    raise OSError(errno.ENOMEM, "ordered")

        faults.install(plan)
        try:
            future, buffer = a.get(b, b"thing", len(data), timeout_s=5)
            failure = future.exception(10)
        finally:
            faults.install(None)
        assert failure is None or isinstance(failure, FetchError)
        if failure is None:
            assert bytes(buffer) == data
        if passed[0] < nth:
            assert failure is None
            break
        until(lambda: a.peers.up("b") and b.peers.up("a"))
        until(lambda: a.get(b, b"thing", len(data))[0].exception(5) is None)
    assert nth > 3


# --- addresses and rates ---------------------------------------------------------------------------------------------


def test_a_keeper_listens_and_dials_on_its_own_address_only(net: Direct) -> None:
    a, b = net.make("a", "127.0.0.2"), net.make("b", "127.0.0.3")
    assert (a.card.address, b.card.address) == ("127.0.0.2", "127.0.0.3")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", a.card.port))
    net.acquaint(a, b)
    session = a.peers._links.session("b")
    ends = {session.connection.sock.getsockname()[0], session.connection.sock.getpeername()[0]}
    assert ends == {"127.0.0.2", "127.0.0.3"}


def test_an_interface_names_its_address(net: Direct, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "keepstep"):
        assert net.make("a", "lo").card.address == "127.0.0.1"
    assert "127.0.0.1" in caplog.text
    assert "'lo'" in caplog.text
    assert resolve_address("", towards="127.0.0.9") == "127.0.0.1"
    assert resolve_address("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match="no address, interface or host name"):
        resolve_address("no-such-interface0")
    with pytest.raises(ConfigError, match="cannot listen"):
        net.make("b", "192.0.2.77")


def test_a_port_can_be_chosen(net: Direct) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen"):
            net.make("a", port=port)
    assert net.make("a", port=port).card.port == port


class Clock:
    """Time that passes only while somebody sleeps: those who sleep at once do not add up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0.0
        self._own = threading.local()

    def now(self) -> float:
        self._own.seen = self._now
        return self._own.seen

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now = max(self._now, self._own.seen + seconds)


@pytest.mark.parametrize("capped", ["receiver", "sender", "both"])
def test_the_rate_is_capped_over_all_streams(net: Direct, capped: str) -> None:
    rate = 20_000_000
    a = net.make("a", num_streams=3, rate_bytes_s=rate if capped != "sender" else 0)
    b = net.make("b", num_streams=3, rate_bytes_s=rate if capped != "receiver" else 0)
    net.acquaint(a, b)
    clock = Clock()
    for traffic in (a.peers._traffic, b.peers._traffic):
        traffic.cap_in = TokenBucket(traffic.cap_in.rate_bytes_s, now=clock.now, sleep=clock.sleep)
        traffic.cap_out = TokenBucket(traffic.cap_out.rate_bytes_s, now=clock.now, sleep=clock.sleep)
    size, count = 1_000_000, 25
    b.keep(b"thing", bytes(size))
    for future, _ in [a.get(b, b"thing", size, timeout_s=60) for _ in range(count)]:
        future.result(60)
    spent = size * count / clock.now() / rate
    assert spent < 1.05
    # With a cap at each end a stream may wait at one while its turn at the other goes by.
    assert spent > (0.95 if capped != "both" else 0.4)


def test_an_unlisted_peer_that_authenticates_is_linked_where_the_limit_allows_it() -> None:
    """A keeper of an incarnation before does not know who coordinates the next one; the secret is enough."""
    listener = Node("any", "1")
    listener.things[b"?"] = Body.of_bytes(b"yours")
    settings = PeersConfig(address="127.0.0.1", dead_s=1.0)

    def peers(node_id: str, max_unlisted_peers: int, instance: str = "1") -> TcpTransport:
        return TcpTransport(
            Peer(node_id, instance), "run", bytes(32), settings, listener,
            options=TcpOptions(max_unlisted_peers=max_unlisted_peers),
        )  # fmt: skip

    closed, open_, guest = peers("closed", 0), peers("open", 1), peers("guest", 0)
    try:
        addresses = [Peer(name, "1", *one.card_address()) for name, one in (("closed", closed), ("open", open_))]
        guest.set_peers(addresses)
        until(lambda: guest.up("open"), "the guest is in")
        asked = guest.fetch(FetchRequest("open", b"?", 10, 3.0))
        assert asked.result(5).data == b"yours"
        assert guest.send("open", b"hello")
        until(lambda: listener.messages == [("guest", b"hello")], "its word was heard")
        assert not guest.up("closed")
        # Another instance does not displace a link that is up; it takes the place when that one has ended.
        again = peers("guest", 0, "2")
        try:
            again.set_peers(addresses[1:])
            time.sleep(0.5)
            assert guest.up("open")
            assert not again.up("open")
            guest.close()
            until(lambda: again.up("open"), "the next instance is in")
        finally:
            again.close()
    finally:
        for one in (closed, open_, guest):
            one.close()


# --- many peers -------------------------------------------------------------------------------------------------------


def test_a_message_of_one_peer_does_not_cost_a_pass_over_all_links(
    net: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand peers somebody is heard every millisecond."""
    looks: list[tuple[int, str]] = []
    tend = PeerLinks._maintain

    def counted(self: PeerLinks, session: PeerSession) -> None:
        looks.append((id(self), session.peer.node_id))
        tend(self, session)

    monkeypatch.setattr(PeerLinks, "_maintain", counted)
    nodes = [net.make(name, dead_s=8.0) for name in "abcd"]
    net.acquaint(*nodes)
    a, b = nodes[:2]
    started = len(looks), time.monotonic()
    for number in range(300):
        until(lambda: b.peers.send("a", b"%d" % number))  # noqa: B023
        until(lambda: len(a.messages) > number)  # noqa: B023
    assert [message for _, message in a.messages] == [b"%d" % number for number in range(300)]
    turns = 1 + (time.monotonic() - started[1]) / (8.0 / 4 / 4)
    assert len(looks) - started[0] <= len(nodes) * (len(nodes) - 1) * (turns + 1)
