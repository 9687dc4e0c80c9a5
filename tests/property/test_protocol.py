"""Framing: any split of a valid stream gives the same messages, all else raises FrameError, and no fd leaks."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.control import messages as protocol
from keepstep.control.framing import MAGIC, MAX_FDS, MAX_FRAME_BYTES, FrameError, FrameReader, pack, receive, send
from keepstep.control.messages import (
    Done,
    GiveBack,
    Hold,
    Refused,
    StatusIs,
)
from keepstep.errors import KINDS, IntegrityError, KeeperError

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MESSAGES: tuple[type[msgspec.Struct], ...] = typing.get_args(protocol.Message)

Received = list[tuple[Any, list[int]]]
"""Messages, and the inode behind each descriptor that came with them."""


# Any message


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9),
        str: st.text(max_size=12),
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
    }
    if kind in plain:
        return plain[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        limits = arguments[1]
        return st.integers(limits.ge, limits.le)
    if origin is tuple:
        if arguments[-1] is ...:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    return structs_of(kind)


def structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})


messages = st.one_of(*map(structs_of, MESSAGES))
streams = st.lists(st.tuples(messages, st.integers(0, 3) | st.just(MAX_FDS)), max_size=5)
big = st.integers(60_000, 200_000).map(lambda size: StatusIs(b"\7" * size))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_read_back_as_itself(kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=8, deadline=None, database=None)
    @given(structs_of(kind))
    def check(message: msgspec.Struct) -> None:
        with reading() as reader:
            assert reader.feed(pack(message), []) == [(message, [])]

    check()


def test_every_struct_with_a_tag_of_its_own_is_a_message() -> None:
    defined = {
        value
        for value in vars(protocol).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__struct_config__.tag is not None
    }
    assert defined == set(MESSAGES)


# Descriptors


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_leak() -> Iterator[None]:
    before = num_fds()
    yield
    assert num_fds() == before


@pytest.fixture(autouse=True)
def _no_test_leaks() -> Iterator[None]:
    with no_leak():
        yield


@contextlib.contextmanager
def reading() -> Iterator[FrameReader]:
    reader = FrameReader()
    try:
        yield reader
    finally:
        reader.close()


def new_fds(count: int) -> list[int]:
    """Descriptors that can be told apart by their inode."""
    return [os.memfd_create("test", os.MFD_CLOEXEC) for _ in range(count)]


def inodes(fds: list[int]) -> list[int]:
    return [os.fstat(fd).st_ino for fd in fds]


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def by_inode(received: Received) -> Received:
    """The same with inodes for descriptors, which are closed."""
    result = []
    for message, fds in received:
        result.append((message, inodes(fds)))
        close_all(fds)
    return result


# Valid streams


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    points = sorted({0, len(stream), *(point % (len(stream) + 1) for point in at)})
    return [stream[a:b] for a, b in itertools.pairwise(points)]


@fuzz
@given(streams, st.lists(st.integers(0, 2**20), max_size=20))
def test_any_split_of_a_stream_gives_the_same_messages(stream: list[tuple[Any, int]], points: list[int]) -> None:
    """Descriptors come with the first byte of their frame, as the kernel delivers them."""
    with no_leak(), reading() as reader:
        due: dict[int, list[int]] = {}
        expected, data = [], b""
        for message, count in stream:
            due[len(data)] = new_fds(count)
            expected.append((message, inodes(due[len(data)])))
            data += pack(message, count)
        got: Received = []
        position = 0
        for part in cut(data, points):
            fds = [fd for at in range(position, position + len(part)) for fd in due.get(at, [])]
            got += by_inode(reader.feed(part, fds))
            position += len(part)
        assert got == expected


def test_every_single_cut_of_a_stream_gives_the_same_messages() -> None:
    sent: list[Any] = [Done("one", 1), Hold(["a", "b"], [], 2), Done("", 3)]
    stream = b"".join(map(pack, sent))
    for point in range(len(stream) + 1):
        with reading() as reader:
            got = reader.feed(stream[:point], []) + reader.feed(stream[point:], [])
        assert got == [(message, []) for message in sent]
    with reading() as reader:
        bytewise = [message for byte in stream for message in reader.feed(bytes([byte]), [])]
        assert bytewise == [(message, []) for message in sent]


def drain(sock: socket.socket, reader: FrameReader) -> Received:
    """Everything that has arrived, to the last byte."""
    got: Received = []
    sock.setblocking(False)
    while True:
        try:
            data, fds = receive(sock)
        except BlockingIOError:
            return got
        if not data:
            return got
        got += by_inode(reader.feed(data, fds))


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        yield left, right


@fuzz
@given(streams, st.lists(st.integers(0, 2**20), max_size=4), st.lists(st.booleans(), min_size=30, max_size=30))
def test_any_split_over_a_real_socket_gives_the_same_messages_and_descriptors(
    stream: list[tuple[Any, int]], points: list[int], reads: list[bool]
) -> None:
    """The sender's pieces and the moments at which the receiver reads are both up to the adversary."""
    with no_leak(), connected() as (left, right), reading() as reader:
        expected, got = [], []
        read_now = iter(reads)
        for message, count in stream:
            fds = new_fds(count)
            expected.append((message, inodes(fds)))
            for part in cut(pack(message, count), points):
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                assert left.sendmsg([part], rights) == len(part)
                close_all(fds)
                fds = []
                if next(read_now):
                    got += drain(right, reader)
        got += drain(right, reader)
        assert got == expected


@settings(fuzz, max_examples=15)
@given(st.lists(st.tuples(messages | big, st.integers(0, 40)), min_size=1, max_size=6))
def test_sender_and_receiver_that_never_wait_for_each_other_agree(stream: list[tuple[Any, int]]) -> None:
    """`send` on a blocking socket, large frames, a reader that takes what the kernel has merged meanwhile."""
    with no_leak(), connected() as (left, right), reading() as reader:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        prepared = [(message, new_fds(count)) for message, count in stream]
        expected = [(message, inodes(fds)) for message, fds in prepared]

        def sender() -> None:
            for message, fds in prepared:
                send(left, message, fds)
                close_all(fds)
            left.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=sender)
        thread.start()
        got: Received = []
        while True:
            data, fds = receive(right)
            if not data:
                break
            got += by_inode(reader.feed(data, fds))
        thread.join()
        assert got == expected


def test_descriptors_of_two_frames_may_wait_together_when_one_frame_is_still_unread() -> None:
    """The end of one frame with 40 descriptors and the start of the next can come in one piece: 80 at once."""
    first, second = pack(Done("first"), 40), pack(Done("second"), 40)
    with reading() as reader:
        assert reader.feed(first[:10], new_fds(40)) == []
        got = by_inode(reader.feed(first[10:] + second, new_fds(40)))
        assert [(message.text, len(fds)) for message, fds in got] == [("first", 40), ("second", 40)]


def test_descriptors_arrive_closed_on_exec() -> None:
    with connected() as (left, right), reading() as reader:
        fds = new_fds(1)
        send(left, Done(), fds)
        close_all(fds)
        ((_, received),) = reader.feed(*receive(right))
        assert not os.get_inheritable(received[0])
        close_all(received)


# Hostile streams

mutations = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 2**20), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, 2**20), st.integers(1, 40)),
    st.tuples(st.just("insert"), st.integers(0, 2**20), st.integers(0, 255)),
    st.tuples(st.just("length"), st.integers(0, 4), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("fds"), st.integers(0, 4), st.integers(0, 2**16 - 1)),
)


def mutate(stream: bytearray, starts: list[int], mutation: tuple[str, int, int]) -> None:
    kind, where, value = mutation
    if not stream:
        return
    at = where % len(stream)
    start = starts[where % len(starts)]
    if kind == "set":
        stream[at] = value
    elif kind == "cut":
        del stream[at : at + value]
    elif kind == "insert":
        stream[at:at] = bytes([value])
    elif kind == "length":
        stream[start + 4 : start + 8] = struct.pack("<I", value)
    else:
        stream[start + 2 : start + 4] = struct.pack("<H", value)


@settings(fuzz, max_examples=150)
@given(
    st.lists(st.tuples(messages, st.integers(0, 3)), min_size=1, max_size=4),
    st.lists(mutations, min_size=1, max_size=3),
    st.lists(st.integers(0, 2**20), max_size=6),
    st.integers(0, 3),
)
def test_mutated_stream_raises_nothing_but_frame_errors_and_leaks_nothing(
    stream: list[tuple[Any, int]], changes: list[tuple[str, int, int]], points: list[int], extra_fds: int
) -> None:
    with no_leak(), reading() as reader:
        data, starts, num_due = bytearray(), [], extra_fds
        for message, count in stream:
            starts.append(len(data))
            num_due += count
            data += pack(message, count)
        for change in changes:
            mutate(data, [start for start in starts if start + 8 <= len(data)] or [0], change)
        fds = new_fds(num_due)
        for part in cut(bytes(data), points):
            now, fds = fds[:2], fds[2:]
            try:
                by_inode(reader.feed(part, now))
            except FrameError:
                break
        close_all(fds)


@settings(fuzz, max_examples=150)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_random_bytes_raise_nothing_but_frame_errors(data: bytes, num_extra: int) -> None:
    with no_leak(), reading() as reader, contextlib.suppress(FrameError):
        by_inode(reader.feed(data, new_fds(num_extra)))


@settings(fuzz, max_examples=150)
@given(st.binary(max_size=200))
def test_random_bodies_in_a_sound_frame_raise_nothing_but_frame_errors(body: bytes) -> None:
    with no_leak(), reading() as reader, contextlib.suppress(FrameError):
        reader.feed(struct.pack("<HHI", MAGIC, 0, len(body)) + body, [])


@fuzz
@given(messages, st.data())
def test_message_with_one_damaged_byte_is_another_message_or_a_frame_error(message: Any, data: st.DataObject) -> None:
    frame = bytearray(pack(message))
    at = data.draw(st.integers(8, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with reading() as reader:
        try:
            ((got, fds),) = reader.feed(bytes(frame), [])
        except FrameError:
            return
    assert isinstance(got, MESSAGES)
    assert fds == []


def test_every_truncation_of_a_frame_waits_for_more() -> None:
    frame = pack(Hold(["a" * 30], ["b"], 7))
    for length in range(len(frame)):
        with reading() as reader:
            assert reader.feed(frame[:length], []) == []


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_giant_length_is_refused_from_the_head_alone(length: int) -> None:
    with reading() as reader, pytest.raises(FrameError, match="bad frame head"):
        reader.feed(struct.pack("<HHI", MAGIC, 0, length), [])


@pytest.mark.parametrize("magic", [0, 0x534B, 0xFFFF])
def test_wrong_magic_is_refused(magic: int) -> None:
    with reading() as reader, pytest.raises(FrameError, match="bad frame head"):
        reader.feed(struct.pack("<HHI", magic, 0, 1), [])


def test_more_descriptors_than_a_message_may_carry_are_refused() -> None:
    with reading() as reader, pytest.raises(FrameError, match="bad frame head"):
        reader.feed(struct.pack("<HHI", MAGIC, MAX_FDS + 1, 1), [])
    with reading() as reader, pytest.raises(FrameError, match="65 descriptors"):
        reader.feed(pack(Done(), MAX_FDS)[:9], new_fds(MAX_FDS + 1))


def framed(body: bytes) -> bytes:
    return struct.pack("<HHI", MAGIC, 0, len(body)) + body


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc0", b"\x80", b"\x81\xa4type\xa6Nobody", b"\x81\xa4type\xa4Hold", b"\x81\xa4type\x01",
        b"\x82\xa4type\xa4Hold\xa9arena_ids\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa7Adopted\xa7refused\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Done\xa4text\xdb\xff\xff\xff\xff", b"\x82\xa4type\xa4Done\xa4text\xa1\xff",
        b"\x82\xa4type\xa4Done\xa1x" + b"\x91" * 100_000, b"\x81\xa4type\xa4Done\x00", b"\xc1",
    ],
    ids=lambda body: f"{bytes(body[:12])!r} of {len(body)}",
)  # fmt: skip
def test_body_that_is_no_message_is_refused(body: bytes) -> None:
    with reading() as reader, pytest.raises(FrameError, match="bad message"):
        reader.feed(framed(body), [])


def test_body_that_announces_four_billion_items_takes_no_memory() -> None:
    code = (
        "import resource, struct, sys; from keepstep.control.framing import *\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "for head in (b'\\x82\\xa4type\\xa4Hold\\xa9arena_ids\\xdd', b'\\x82\\xa4type\\xa4Done\\xa1x\\xdd'):\n"
        "    body = head + b'\\xff\\xff\\xff\\xff' + bytes(1000)\n"
        "    try: FrameReader().feed(struct.pack('<HHI', MAGIC, 0, len(body)) + body, [])\n"
        "    except FrameError: pass\n"
        "    else: sys.exit('accepted')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# Descriptors of hostile or broken peers

BREAKS: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: b"\xff" * 8,
    "bad message": lambda: framed(b"\xc0"),
    "missing descriptors": lambda: pack(Done(), 1),
}


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
def test_descriptors_of_messages_before_a_broken_one_do_not_leak(broken: Callable[[], bytes]) -> None:
    """They came in one piece: nobody was handed the first message, so nobody else can close its descriptors."""
    with no_leak():
        reader = FrameReader()
        with pytest.raises(FrameError):
            reader.feed(pack(Done(), 2) + pack(Done(), 1) + broken(), new_fds(3))


def test_descriptors_of_a_message_that_cannot_be_read_are_closed() -> None:
    with no_leak():
        frame = bytearray(framed(b"\xc0"))
        frame[2] = 2
        with pytest.raises(FrameError, match="bad message"):
            FrameReader().feed(bytes(frame), new_fds(2))


def test_announced_descriptors_that_are_missing_are_a_frame_error() -> None:
    with reading() as reader, pytest.raises(FrameError, match="3 descriptors announced, 2 received"):
        reader.feed(pack(Done(), 3), new_fds(2))


@pytest.mark.parametrize("announced", [0, 1])
def test_descriptors_that_no_message_announces_are_a_frame_error(announced: int) -> None:
    """Else they would be handed out with the next message, in place of its own."""
    with reading() as reader, pytest.raises(FrameError, match="no message announces"):
        reader.feed(pack(Done(), announced), new_fds(announced + 1))


def test_descriptors_of_an_unfinished_frame_are_closed_with_the_reader() -> None:
    with no_leak():
        reader = FrameReader()
        assert reader.feed(pack(Done("long enough"), 5)[:10], new_fds(5)) == []
        reader.close()
        reader.close()


def test_more_descriptors_than_fit_are_cut_off_and_closed() -> None:
    with no_leak(), connected() as (left, right):
        fds = new_fds(100)
        left.sendmsg([pack(Done())], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        close_all(fds)
        with pytest.raises(FrameError, match="were lost"):
            receive(right)


def test_receiver_without_free_descriptors_raises_and_keeps_none() -> None:
    with no_leak(), connected() as (left, right):
        fds = new_fds(8)
        send(left, Done(), fds)
        close_all(fds)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
        try:
            with pytest.raises(FrameError, match="were lost"):
                _exhaust_then(lambda: receive(right))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _exhaust_then(action: Callable[[], Any]) -> None:
    """Leave three free descriptors, then act."""
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(min(3, len(taken))):
            os.close(taken.pop())
        action()
    finally:
        close_all(taken)


# Sending


def test_message_too_large_to_send_is_a_keeper_error() -> None:
    assert len(pack(StatusIs(bytes(MAX_FRAME_BYTES - 100)))) < MAX_FRAME_BYTES + 8
    with pytest.raises(KeeperError, match="too large to send"):
        pack(StatusIs(bytes(MAX_FRAME_BYTES)))
    with pytest.raises(KeeperError, match="too large to send"):
        pack(GiveBack([]), MAX_FDS + 1)


def test_largest_frame_and_most_descriptors_go_through_a_real_socket() -> None:
    with no_leak(), connected() as (left, right), reading() as reader:
        message = StatusIs(bytes(MAX_FRAME_BYTES - 64))
        fds = new_fds(MAX_FDS)
        expected = inodes(fds)
        thread = threading.Thread(target=send, args=(left, message, fds))
        thread.start()
        got: Received = []
        while not got:
            got += by_inode(reader.feed(*receive(right)))
        thread.join()
        close_all(fds)
        assert got == [(message, expected)]


def test_send_to_a_closed_peer_is_an_oserror_even_where_sigpipe_would_kill() -> None:
    code = (
        "import signal, socket; from keepstep.control.framing import *; from keepstep.control.messages import *\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "left, right = socket.socketpair(); right.close()\n"
        "try: send(left, Done())\n"
        "except BrokenPipeError: print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != -signal.SIGPIPE
    assert done.stdout == "alive\n"


def test_refusal_is_raised_again_as_the_error_it_was() -> None:
    for name, kind in KINDS.items():
        error = Refused(name, "what happened", "what to do").error()
        assert type(error) is kind
        assert (error.message, error.hint) == ("what happened", "what to do")
    assert type(Refused("IntegrityError", "x").error()) is IntegrityError
    assert type(Refused("SystemExit", "x").error()) is KeeperError
