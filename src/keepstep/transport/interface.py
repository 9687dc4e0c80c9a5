"""What a keeper needs of the network: links to its peers, messages, and bytes from their memory.

    set_peers(peers)   who the peers are; links are made, remade and ended in the background
    send               a small message, in order, at most once: dropped when the link is down or its queue is full
    fetch              bytes from a peer's memory into ours, verified; the future ends in every case
    serve              (of the listener) what a peer may fetch from this keeper

Rules for both sides of this interface:

1. Listener. `on_message` and `on_link` are called on one thread, in order, never concurrently. They must return at
   once (put the event into a queue), because heartbeats wait for them. `serve` is called on stream threads, several at
   a time, and may block for as long as the fetching side's deadline. An exception of the listener is logged and
   dropped.
2. `on_link` reports connections only. A link that is down does not mean that its node is.
3. `send` never blocks. True means queued, not received: the protocol above it is idempotent and resends.
4. `fetch` only reads from the peer, so it may be repeated. A future ends by its deadline at the latest. Until it ends
   the buffer `into` belongs to the transport; afterwards the transport does not touch it. After a failure the content
   of the buffer is undefined. Done-callbacks run on a stream thread, or on the thread that ended the future.
5. A checksum detects accidents, not attacks. TLS protects against an attacker on the network.
6. Everything is bounded: messages, queues, requests, bodies, waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import xxhash

MAX_MESSAGE_BYTES = 4 << 20  # of one control message
MAX_QUEUED_BYTES = 16 << 20  # of control messages that one peer has not read yet
MAX_QUEUED_MESSAGES = 4096
MAX_REQUEST_BYTES = 64 << 10
MAX_BODY_BYTES = 1 << 40
MAX_RETURNED_BODY_BYTES = 1 << 30  # of a body that is returned as bytes, not received into the caller's buffer
MAX_QUEUED_FETCHES = 4096  # per peer; one more fails at once
MAX_REASON_BYTES = 1024
MAX_STREAMS = 16
NUM_STREAMS = 2  # connections for bytes, per peer and direction: one alone idles between a request and its answer
TIMEOUT_S = 10.0  # a connection that moves no byte for this long is given up
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Peer:
    """Another node's keeper. A new instance of the same node is another peer, because its memory is empty."""

    node_id: str
    instance: str
    address: str = ""
    port: int = 0


@dataclass(frozen=True)
class Body:
    """A server's answer to a request: a range of a descriptor, or bytes."""

    size_bytes: int
    checksum: bytes  # xxh3_128 of the bytes as they should be: the fetching side verifies them.
    fd: int = -1  # Sent by os.sendfile after `serve` has returned; neither duplicated nor closed (see `release`).
    offset: int = 0
    data: bytes | memoryview | None = None
    # Called once, when the bytes are sent or will not be: until then `fd` must stay open and `data` valid.
    release: Callable[[], None] | None = None

    @classmethod
    def of_file(cls, fd: int, offset: int, size_bytes: int, checksum: bytes) -> Body:
        """A range of a duplicate of `fd`: the caller may close its own at any time."""
        duplicate = os.dup(fd)
        return cls(size_bytes, checksum, fd=duplicate, offset=offset, release=partial(os.close, duplicate))

    @classmethod
    def of_bytes(cls, data: bytes | memoryview) -> Body:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        return cls(size, xxhash.xxh3_128_digest(data), data=data)


@dataclass(frozen=True)
class FetchRequest:
    """One body wanted from one peer.

    With `into` (of `size_bytes`) the body must have exactly that size; without, at most that size, and it is returned
    as bytes. It is checked against `expect`, else against the checksum that the server sends with it.
    """

    node_id: str
    query: bytes  # for the server: what is wanted
    size_bytes: int
    timeout_s: float
    into: memoryview | None = None
    expect: bytes | None = None


@dataclass(frozen=True)
class Fetched:
    """Result of a fetch: verified, and of the right size."""

    size_bytes: int
    checksum: bytes
    data: bytes | None = None  # The bytes, unless they were received into the caller's buffer.


class Refusal(Exception):
    """The server declines a request and gives the reason. No connection is closed."""


class InvalidMessageError(Exception):
    """A message that no keeper sends."""


class FetchError(Exception):
    """The bytes were not received, or do not match their checksum."""

    def __init__(self, node_id: str, reason: str, *, lost: bool) -> None:
        super().__init__(f"{node_id}: {reason}")
        self.node_id = node_id
        self.reason = reason
        # True: the connection or the deadline was lost. False: the peer lives, and refused or sent wrong bytes.
        self.lost = lost


class TransportListener(Protocol):
    """Receives what peers send and serves what they fetch. Called on the transport's threads: see rule 1."""

    def on_message(self, node_id: str, message: bytes, instance: str) -> None:
        """A peer sent a message. `instance`: that of its handshake, which is not always the one of `set_peers`.

        Raises InvalidMessageError for one that no keeper sends: too many of them end the link.
        """

    def on_link(self, node_id: str, up: bool, reason: str) -> None:
        """The link to a peer is up, or down."""

    def serve(self, node_id: str, query: bytes) -> Body:
        """The bytes that a peer requests. Raises Refusal to decline."""


class Transport(Protocol):
    """Links to the other keepers of the run. Thread-safe; the listener is given at construction."""

    def card_address(self) -> tuple[str, int]:
        """Address and port where peers reach this keeper."""

    def admit(self, secret: bytes) -> None:
        """Authenticate peers with this secret from now on. Links made with another one end."""

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Replace the list of peers. Others lose their link; a new instance or address replaces the old connection."""

    def send(self, node_id: str, message: bytes) -> bool:
        """Queue a message. False: nothing was queued, because the link is down or the peer does not read."""

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        """Request a body from that peer's server.

        Ends with Fetched, FetchError, or CancelledError after `cancel()`, which also stops a fetch that is under way.
        """

    def up(self, node_id: str) -> bool:
        """Whether the link is up now."""

    def counters(self) -> dict[str, float]:
        """Totals since the start (bytes_in, bytes_out, refused, bad_checksums, reconnects ...), and recent rates."""

    def close(self) -> None:
        """End every link, future and thread. The listener is not called afterwards."""
