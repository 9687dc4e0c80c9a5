"""One connection of the keeper, over a real socket pair."""

from __future__ import annotations

import socket

import pytest

from keepstep.control.framing import FrameError, send
from keepstep.control.messages import (
    Complete,
    Goodbye,
    StatusIs,
)
from keepstep.keeper.connection import MAX_QUEUED_BYTES, Connection
from keepstep.types import Incarnation, Version


def test_the_last_word_of_a_peer_that_hung_up_is_heard_though_something_was_still_to_be_said() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(1, ours)
    try:
        send(theirs, Goodbye(finished=True))
        theirs.close()
        connection.queue(Complete(Version(Incarnation(1, 2), 3)))
        assert not connection.wants_to_send
        messages = connection.read()
        assert messages is not None
        assert [message for message, _ in messages] == [Goodbye(finished=True)]
        assert connection.read() is None
    finally:
        connection.close()


def say_twice(connection: Connection, message: StatusIs) -> None:
    connection.queue(message)
    connection.queue(message)


def test_a_peer_that_does_not_read_is_cut_off() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(1, ours)
    message = StatusIs(json=bytes(1 << 19))
    try:
        for _ in range(MAX_QUEUED_BYTES // (1 << 19) - 1):
            connection.queue(message)
        with pytest.raises(FrameError, match="does not read"):
            say_twice(connection, message)
    finally:
        connection.close()
        theirs.close()
