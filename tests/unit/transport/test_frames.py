"""Frames between keepers: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.transport.frames import (
    ANSWER_HEAD_BYTES,
    HEARTBEAT,
    MESSAGE,
    REFUSED,
    REQUEST_HEAD_BYTES,
    SERVED,
    AnswerHead,
    FrameSigner,
    FrameVerifier,
    PeerFrameError,
    RequestHead,
)
from keepstep.transport.interface import MAX_MESSAGE_BYTES

KEY = b"k" * 32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_arrive_however_they_are_cut(bodies: list[bytes], step: int) -> None:
    sealer, opener = FrameSigner(KEY), FrameVerifier(KEY)
    stream = b"".join(sealer.seal(MESSAGE, body) for body in bodies) + sealer.seal(HEARTBEAT)
    found = [frame for at in range(0, len(stream), step) for frame in opener.feed(stream[at : at + step])]
    assert found == [(MESSAGE, body) for body in bodies] + [(HEARTBEAT, b"")]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_changed_frame_is_never_handed_out(data: st.DataObject) -> None:
    sealer, opener = FrameSigner(KEY), FrameVerifier(KEY)
    stream = bytearray(sealer.seal(MESSAGE, b"one") + sealer.seal(MESSAGE, b"two"))
    at = data.draw(st.integers(0, len(stream) - 1).filter(lambda at: at % (24 + 3) != 3))  # padding
    stream[at] ^= data.draw(st.integers(1, 255))
    found: list[tuple[int, bytes]] = []
    try:
        for byte in stream:
            found += opener.feed(bytes([byte]))
    except PeerFrameError:
        pass
    assert found in ([], [(MESSAGE, b"one")])


def test_frames_cannot_be_repeated_left_out_moved_or_sent_back() -> None:
    sealer = FrameSigner(KEY)
    first, second, third = (sealer.seal(MESSAGE, body) for body in (b"1", b"2", b"3"))
    for wrong in ([first, first], [first, third], [second]):
        with pytest.raises(PeerFrameError, match="forged"):
            FrameVerifier(KEY).feed(b"".join(wrong))
    with pytest.raises(PeerFrameError):
        FrameVerifier(b"the key of the other way".ljust(32)).feed(first)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_frame_error_or_no_frame(data: bytes) -> None:
    try:
        assert FrameVerifier(KEY).feed(data) == []
    except PeerFrameError:
        pass


def test_a_length_beyond_the_limit_is_refused_from_its_head() -> None:
    frame = bytearray(FrameSigner(KEY).seal(MESSAGE, b"x"))
    frame[4:8] = (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(PeerFrameError, match="bad frame head"):
        FrameVerifier(KEY).feed(bytes(frame[:24]))


def test_heads_are_decoded_as_they_were_encoded() -> None:
    asked = RequestHead(7, 12, 4096, True)
    assert len(asked.pack()) == REQUEST_HEAD_BYTES
    assert RequestHead.unpack(asked.pack()) == asked
    answer = AnswerHead(7, SERVED, 4096, b"c" * 16)
    assert len(answer.pack()) == ANSWER_HEAD_BYTES
    assert AnswerHead.unpack(answer.pack(), asked) == answer


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (RequestHead(7, 0, 100, True), AnswerHead(8, SERVED, 100, bytes(16))),
        (RequestHead(7, 0, 100, True), AnswerHead(7, SERVED, 99, bytes(16))),
        (RequestHead(7, 0, 100, True), AnswerHead(7, SERVED, 101, bytes(16))),
        (RequestHead(7, 0, 100, False), AnswerHead(7, SERVED, 101, bytes(16))),
        (RequestHead(7, 0, 100, False), AnswerHead(7, SERVED, 1 << 60, bytes(16))),
        (RequestHead(7, 0, 1 << 20, False), AnswerHead(7, REFUSED, 1 << 20, bytes(16))),
        (RequestHead(7, 0, 100, True), AnswerHead(7, 9, 100, bytes(16))),
    ],
)
def test_an_answer_that_does_not_fit_is_not_read(asked: RequestHead, answer: AnswerHead) -> None:
    with pytest.raises(PeerFrameError):
        AnswerHead.unpack(answer.pack(), asked)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=REQUEST_HEAD_BYTES, max_size=REQUEST_HEAD_BYTES))
def test_a_request_head_is_bounded_or_refused(data: bytes) -> None:
    try:
        head = RequestHead.unpack(data)
    except PeerFrameError:
        return
    assert head.length <= 64 << 10
    assert head.size_bytes <= 1 << 40
