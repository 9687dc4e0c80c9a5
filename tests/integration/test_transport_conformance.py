"""What every transport between keepers must do, on TCP and on its twin in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait

import pytest
import xxhash
from transport_nodes import LIMIT_S, MemoryNet, Net, Node, TcpNet, num_sockets, our_threads, until

from keepstep.transport import Body, FetchError, FetchRequest, Peer
from keepstep.transport.interface import MAX_MESSAGE_BYTES, MAX_QUEUED_BYTES

pytestmark = pytest.mark.computing

SLOW = 100_000
"""bytes per second, for transfers that are to be caught in the middle"""
LONG_S = 3 * LIMIT_S
"""for every timer but the one that a test is about: nothing happens because of it while the test waits"""
LONG_BYTES = int(SLOW * LONG_S)


@pytest.fixture(params=[MemoryNet, TcpNet], ids=lambda kind: kind.name)
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """Leaves no thread, socket or descriptor."""
    before = num_sockets()
    made = request.param()
    try:
        yield made
    finally:
        made.close()
    until(lambda: not our_threads(), f"the end of {our_threads()}")
    assert num_sockets() == before


def test_messages_arrive_in_order(net: Net) -> None:
    a, b = net.pair()
    for i in range(500):
        assert a.peers.send("b", b"%d" % i)
        assert b.peers.send("a", b"back %d" % i)
    until(lambda: len(b.messages) == 500 and len(a.messages) == 500, "1000 messages")
    assert b.messages == [("a", b"%d" % i) for i in range(500)]
    assert a.messages == [("b", b"back %d" % i) for i in range(500)]


def test_a_message_may_be_long_but_not_longer_than_the_limit(net: Net) -> None:
    a, b = net.pair()
    for message in (b"", bytes(MAX_MESSAGE_BYTES)):
        assert a.peers.send("b", message)
    until(lambda: len(b.messages) == 2)
    assert [len(message) for _, message in b.messages] == [0, MAX_MESSAGE_BYTES]
    with pytest.raises(ValueError, match="too long"):
        a.peers.send("b", bytes(MAX_MESSAGE_BYTES + 1))


def test_nothing_is_sent_to_a_peer_that_is_not_listed(net: Net) -> None:
    a = net.make("a")
    assert not a.peers.send("b", b"hello")
    assert not a.peers.up("b")
    future, _ = a.get(a, b"x", 10)
    with pytest.raises(FetchError) as caught:
        future.result(1)
    assert caught.value.lost


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) + 7, 9 << 20])
def test_bytes_are_received_into_the_callers_buffer(net: Net, size: int) -> None:
    a, b = net.pair()
    data = os.urandom(size)
    b.keep(b"thing", data)
    future, buffer = a.get(b, b"thing", size, expect=xxhash.xxh3_128_digest(data))
    fetched = future.result(10)
    assert bytes(buffer) == data
    assert (fetched.size_bytes, fetched.checksum, fetched.data) == (size, xxhash.xxh3_128_digest(data), None)
    until(lambda: a.peers.counters()["bytes_in"] == b.peers.counters()["bytes_out"] == size)


def test_without_a_buffer_the_bytes_are_returned_up_to_the_limit(net: Net) -> None:
    a, b = net.pair()
    b.things[b"few"] = Body.of_bytes(b"seven77")
    b.things[b"none"] = Body.of_bytes(b"")
    for request, expected in ((b"few", b"seven77"), (b"none", b"")):
        future = a.peers.fetch(FetchRequest("b", request, 100, 5.0))
        assert future.result(10).data == expected
    future = a.peers.fetch(FetchRequest("b", b"few", 6, 5.0))
    with pytest.raises(FetchError, match="7 bytes, not 6") as caught:
        future.result(10)
    assert not caught.value.lost


def test_bytes_of_the_wrong_size_are_refused(net: Net) -> None:
    a, b = net.pair()
    b.keep(b"thing", bytes(1000))
    for size in (999, 1001):
        with pytest.raises(FetchError, match="1000 bytes"):
            a.get(b, b"thing", size)[0].result(10)
    assert a.get(b, b"thing", 1000)[0].result(10).size_bytes == 1000


def test_bytes_that_do_not_match_their_checksum_are_an_error(net: Net) -> None:
    a, b = net.pair()
    data = os.urandom(100_000)
    b.things[b"wrong"] = Body(len(data), b"\0" * 16, data=data)
    b.things[b"right"] = Body.of_bytes(data)
    cases = [(b"wrong", None), (b"right", b"\1" * 16)]
    for request, expect in cases:
        future, _ = a.get(b, request, len(data), expect=expect)
        with pytest.raises(FetchError, match="do not match") as caught:
            future.result(10)
        assert not caught.value.lost
    # What the caller expects counts, not what the server says.
    assert a.get(b, b"wrong", len(data), expect=xxhash.xxh3_128_digest(data))[0].result(10)
    assert a.peers.counters()["bad_checksums"] == 2


def test_a_bit_flipped_on_the_way_is_noticed(net: Net) -> None:
    a, b = net.pair()
    data = os.urandom(200_000)
    b.keep(b"thing", data)
    net.corrupt(b, a)
    with pytest.raises(FetchError, match="do not match"):
        a.get(b, b"thing", len(data))[0].result(10)
    future, buffer = a.get(b, b"thing", len(data))
    assert future.result(10)
    assert bytes(buffer) == data


def test_a_refusal_has_its_reason_and_closes_nothing(net: Net) -> None:
    a, b = net.pair()
    b.keep(b"thing", b"12345")
    b.things[b"broken"] = lambda: 1 / 0  # type: ignore[dict-item,return-value]
    for request, reason in ((b"other", "no other here"), (b"broken", "ZeroDivisionError")):
        with pytest.raises(FetchError, match=reason) as caught:
            a.get(b, request, 5)[0].result(10)
        assert (caught.value.node_id, caught.value.lost) == ("b", False)
    assert a.get(b, b"thing", 5)[0].result(10)
    assert a.peers.up("b")
    until(lambda: a.peers.counters()["refused"] == b.peers.counters()["refused"] == 2)
    assert a.links == [("b", True, a.links[0][2])]


def test_many_fetches_at_once_all_end(net: Net) -> None:
    a, b = net.pair(num_streams=3)
    things = {b"thing %d" % i: os.urandom(1 + 997 * i) for i in range(60)}
    for name, data in things.items():
        b.keep(name, data)
        a.keep(name, data)
    asked = [
        (node.get(other, name, len(data)), data) for name, data in things.items() for node, other in ((a, b), (b, a))
    ]
    for (future, buffer), data in asked:
        assert future.result(10)
        assert bytes(buffer) == data
    assert sum(name.startswith("keepstep-peer-fetch") for name in our_threads()) <= 6


def test_a_fetch_that_waits_can_be_cancelled(net: Net) -> None:
    a, b = net.pair(num_streams=1)
    gate = threading.Event()
    b.things[b"slow"] = lambda: gate.wait(10) and Body.of_bytes(b"!")  # type: ignore[return-value,dict-item]
    first, _ = a.get(b, b"slow", 1)
    until(lambda: b.num_served == 1)
    second, _ = a.get(b, b"slow", 1)
    assert second.cancel()
    assert wait([second], 5).done
    gate.set()
    assert first.result(10)
    assert second.cancelled()
    assert b.num_served == 1


def test_a_fetch_under_way_can_be_cancelled_and_lets_go_of_the_buffer(net: Net) -> None:
    a, b = net.pair(rate_bytes_s=SLOW)
    b.keep(b"thing", bytes(LONG_BYTES))
    future, buffer = a.get(b, b"thing", LONG_BYTES, timeout_s=2 * LONG_S)
    until(lambda: a.peers.counters()["bytes_in"] > 0)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(LIMIT_S)
    buffer += b"x"  # BufferError while anybody holds a view
    a.get(b, b"other", 1)[0].exception(5)
    assert a.peers.up("b")


def test_a_failed_fetch_lets_go_of_the_buffer(net: Net) -> None:
    a, b = net.pair(rate_bytes_s=SLOW)
    b.keep(b"thing", bytes(LONG_BYTES))
    late, one = a.get(b, b"thing", LONG_BYTES, timeout_s=0.3)
    wrong, other = a.get(b, b"thing", 5, timeout_s=LONG_S)
    assert late.exception(LIMIT_S).lost
    assert not wrong.exception(LIMIT_S).lost
    one += b"x"
    other += b"x"


def test_a_peer_that_dies_in_the_middle_ends_the_fetch(net: Net) -> None:
    a, b = net.pair(rate_bytes_s=SLOW, dead_s=LONG_S, timeout_s=LONG_S)
    b.keep(b"thing", bytes(LONG_BYTES))
    futures = [a.get(b, b"thing", LONG_BYTES, timeout_s=LONG_S)[0] for _ in range(5)]
    until(lambda: a.peers.counters()["bytes_in"] > 0)
    net.kill(b)
    for future in futures:
        with pytest.raises(FetchError) as caught:
            future.result(LIMIT_S)
        assert caught.value.lost
    until(lambda: a.downs(b), "word of the death")
    assert not a.peers.up("b")


def test_a_peer_that_freezes_in_the_middle_ends_the_fetch_within_dead_s(net: Net) -> None:
    a, b = net.pair(rate_bytes_s=SLOW, dead_s=0.6, timeout_s=LONG_S)
    b.keep(b"thing", bytes(LONG_BYTES))
    future, _ = a.get(b, b"thing", LONG_BYTES, timeout_s=LONG_S)
    until(lambda: a.peers.counters()["bytes_in"] > 0)
    net.freeze(b)
    with pytest.raises(FetchError) as caught:
        future.result(LIMIT_S)
    assert caught.value.lost
    until(lambda: a.downs(b))
    assert "silent" in a.downs(b)[0]


def test_a_deadline_is_kept_whatever_the_peer_does(net: Net) -> None:
    a, b = net.pair(dead_s=LONG_S, timeout_s=LONG_S, num_streams=1)
    gate = threading.Event()
    b.things[b"slow"] = lambda: gate.wait(LONG_S) and Body.of_bytes(b"!")  # type: ignore[return-value,dict-item]
    thinking, _ = a.get(b, b"slow", 1, timeout_s=0.4)
    behind_it, _ = a.get(b, b"slow", 1, timeout_s=0.2)
    assert behind_it.exception(LIMIT_S).lost
    assert thinking.exception(LIMIT_S).lost
    gate.set()
    b.keep(b"thing", bytes(10))
    assert a.get(b, b"thing", 10)[0].result(10)
    net.freeze(b)
    assert a.get(b, b"thing", 10, timeout_s=0.4)[0].exception(LIMIT_S).lost
    net.thaw(b)


def test_a_silent_peer_is_down_within_dead_s_and_up_when_it_is_back(net: Net) -> None:
    a, b = net.pair(dead_s=0.6, timeout_s=LONG_S)
    time.sleep(0.8)
    assert [up for _, up, _ in a.links] == [True]  # idle is not silent
    net.freeze(b)
    until(lambda: a.downs(b), "down")
    assert "silent" in a.downs(b)[0]
    assert not a.peers.send("b", b"lost")
    net.thaw(b)
    until(lambda: a.peers.up("b") and b.peers.up("a") and a.links[-1][1] and b.links[-1][1], "up again")
    until(lambda: a.peers.send("b", b"again") and ("a", b"again") in b.messages)
    assert a.peers.counters()["reconnects"] >= 1


def test_a_cut_is_reported_on_both_sides_and_nowhere_else(net: Net) -> None:
    a, b, c = net.make("a"), net.make("b"), net.make("c")
    net.acquaint(a, b, c)
    net.cut(a, b)
    until(lambda: a.downs(b) and b.downs(a), "both sides")
    assert a.peers.up("c")
    assert b.peers.up("c")
    assert not c.downs(a) + c.downs(b)
    net.heal(a, b)
    until(lambda: a.peers.up("b") and b.peers.up("a"))


def test_a_short_silence_ends_no_link(net: Net) -> None:
    a, b = net.pair(dead_s=2.0)
    net.freeze(b)
    assert a.peers.send("b", b"while it slept")
    time.sleep(0.3)
    assert not b.messages
    net.thaw(b)
    until(lambda: b.messages == [("a", b"while it slept")])
    assert not a.downs(b) + b.downs(a)


def test_a_new_instance_replaces_the_old_one(net: Net) -> None:
    a, b = net.pair()
    net.kill(b)
    until(lambda: a.downs(b))
    again = net.make("b", instance="2")
    again.peers.set_peers([a.card, again.card])
    time.sleep(0.4)
    assert not a.peers.up("b")  # not whom we were told of
    net.acquaint(a, again)
    assert a.peers.send("b", b"hello, new one")
    until(lambda: again.messages == [("a", b"hello, new one")])
    assert not b.messages


def test_a_new_instance_replaces_one_that_still_lives(net: Net) -> None:
    a, b = net.pair()
    b.keep(b"thing", bytes(10))
    again = net.make("b", instance="2")
    again.keep(b"thing", bytes(10))
    a.peers.set_peers([again.card])
    again.peers.set_peers([a.card])
    until(lambda: a.peers.up("b") and again.peers.up("a"))
    assert a.get(b, b"thing", 10)[0].result(5)
    assert (again.num_served, b.num_served) == (1, 0)
    until(lambda: b.downs(a), "the old one to know")


def test_a_peer_that_is_left_out_loses_its_link(net: Net) -> None:
    a, b, c = net.make("a"), net.make("b"), net.make("c")
    net.acquaint(a, b, c)
    a.peers.set_peers([a.card, c.card])
    until(lambda: a.downs(b) and b.downs(a))
    time.sleep(0.5)
    assert not a.peers.up("b")
    assert not b.peers.up("a")
    assert a.peers.up("c")
    a.peers.set_peers([Peer("b", "1", b.card.address, b.card.port), c.card])
    until(lambda: a.peers.up("b") and b.peers.up("a"))
    assert not a.downs(c)


def test_a_peer_that_does_not_read_fills_a_bounded_queue_and_blocks_no_caller(net: Net) -> None:
    a, b, c = (net.make(name, dead_s=LONG_S) for name in "abc")
    net.acquaint(a, b, c)
    net.freeze(b)
    message = bytes(1 << 20)
    accepted = 0
    for _ in range(200):
        if not a.peers.send("b", message):
            break
        accepted += len(message)
    assert not a.downs(b)  # what waited for room would have waited until b was given up
    assert accepted < MAX_QUEUED_BYTES + (80 << 20)  # and what the kernel's buffers take
    assert a.peers.counters()["messages_dropped"] == 1
    assert a.peers.send("c", b"still here")
    until(lambda: c.messages == [("a", b"still here")])
    net.thaw(b)
    until(lambda: len(b.messages) * len(message) == accepted, "everything that was accepted")


def test_handlers_that_raise_end_no_link(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "on_message", lambda self, *_: self.messages.append(_[:2]) or 1 / 0)
    a, b = net.pair()
    assert a.peers.send("b", b"x")
    assert b.peers.send("a", b"y")
    until(lambda: a.messages == [("b", b"y")])
    time.sleep(0.8)
    assert a.peers.up("b")
    assert b.peers.up("a")


def test_close_ends_what_is_under_way_and_can_be_called_twice(net: Net) -> None:
    a, b = net.pair(rate_bytes_s=SLOW)
    b.keep(b"thing", bytes(LONG_BYTES))
    futures = [a.get(b, b"thing", LONG_BYTES, timeout_s=2 * LONG_S)[0] for _ in range(4)]
    until(lambda: a.peers.counters()["bytes_in"] > 0)
    a.peers.close()  # what is under way is not waited for: it would end well
    a.peers.close()
    for future in futures:
        with pytest.raises(FetchError):
            future.result(0)
    num_links = len(a.links)
    assert not a.peers.send("b", b"x")
    assert a.get(b, b"thing", 1)[0].exception(1).lost
    until(lambda: b.downs(a))
    assert len(a.links) == num_links  # no callback comes afterwards


def test_a_served_body_is_released_once_whatever_happens(net: Net) -> None:
    a, b = net.pair(rate_bytes_s=SLOW)
    released: list[int] = []

    def body(size: int) -> Body:
        made = Body.of_bytes(bytes(size))
        return Body(made.size_bytes, made.checksum, data=made.data, release=lambda: released.append(size))

    b.things = {b"good": lambda: body(10), b"wrong size": lambda: body(11), b"cut short": lambda: body(SLOW * 10)}
    assert a.get(b, b"good", 10)[0].result(5)
    assert a.get(b, b"wrong size", 10)[0].exception(5)
    future, _ = a.get(b, b"cut short", SLOW * 10)
    until(lambda: a.peers.counters()["bytes_in"] > 100)
    future.cancel()
    until(lambda: len(released) == 3, "three releases")
    assert sorted(released) == [10, 11, SLOW * 10]
