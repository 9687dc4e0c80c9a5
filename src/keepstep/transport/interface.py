"""What a keeper may ask of the network, and nothing more.

    meet(peers)   say who they are; links are made, remade and given up in the background
    send          a small message, in order, at most once: dropped when the link is down or its queue is full
    fetch         bytes from a peer's memory into ours, checked; the future ends, whatever happens
    serve         (a callback) what a peer may have of ours

Rules for both sides of this interface:

1. Callbacks. `on_message` and `on_link` are called on one thread, in order, never concurrently; they must return
   at once (put it into a queue): heartbeats wait for them. `serve` is called on a stream thread, several at once,
   and may block as long as the asking side's deadline. What a callback raises is logged and goes no further.
2. `on_link` is about the connection only. A link that is down says nothing about the node behind it.
3. `send` never blocks. True means queued, not received: the protocol above is idempotent and resends.
4. `fetch` only reads from the peer, so it may be asked again. A future ends by its deadline at the latest, and when
   it has ended the transport no longer touches `into`; until then the buffer is the transport's. After a failure the
   buffer holds rubbish. A future's done-callbacks run on a stream thread, or on the thread that ended it.
5. A checksum tells accident from truth, not from malice. Against somebody on the wire there is TLS.
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

MAX_MESSAGE_BYTES = 4 << 20
"""of one control message"""
MAX_QUEUED_BYTES = 16 << 20
"""of control messages that wait for one peer to read them"""
MAX_QUEUED_MESSAGES = 4096
MAX_REQUEST_BYTES = 64 << 10
MAX_BODY_BYTES = 1 << 40
MAX_LOOSE_BODY_BYTES = 1 << 30
"""of a body that is returned as bytes, not received into a buffer of the caller's"""
MAX_QUEUED_FETCHES = 4096
"""per peer; one more fails at once"""
MAX_REASON_BYTES = 1024
MAX_STREAMS = 16
NUM_STREAMS = 2  # connections for bytes, per peer and direction: one alone idles between a request and its answer
TIMEOUT_S = 10.0  # a connection that moves no byte for this long is given up
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Peer:
    """Whom to talk to. Another instance of the same node is another peer: its memory is empty."""

    node_id: str
    instance: str
    address: str = ""
    port: int = 0


@dataclass(frozen=True)
class Body:
    """What a server answers a request with: a range of a descriptor, or bytes."""

    size_bytes: int
    checksum: bytes
    """xxh3_128 of the bytes as they should be; the asking side finds out when they are not"""
    fd: int = -1
    """sent by os.sendfile. Used after `serve` has returned, neither duplicated nor closed: see `release`"""
    offset: int = 0
    data: bytes | memoryview | None = None
    release: Callable[[], None] | None = None
    """called once when the bytes are sent or will not be: until then `fd` must stay open and `data` valid"""

    @classmethod
    def of_file(cls, fd: int, offset: int, size_bytes: int, checksum: bytes) -> Body:
        """A range of a descriptor that the caller may close at any time: this holds a duplicate."""
        own = os.dup(fd)
        return cls(size_bytes, checksum, fd=own, offset=offset, release=partial(os.close, own))

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
    """What came: checked, and of the right size."""

    size_bytes: int
    checksum: bytes
    data: bytes | None = None
    """the bytes, when they were not received into the caller's buffer"""


class Refusal(Exception):
    """The server says no, with a reason. Harmless: nothing is closed."""


class FetchError(Exception):
    """The bytes did not come, or are not to be believed."""

    def __init__(self, node_id: str, reason: str, *, lost: bool) -> None:
        super().__init__(f"{node_id}: {reason}")
        self.node_id = node_id
        self.reason = reason
        self.lost = lost
        """the connection or the deadline. False: the peer lives, and refused or sent rubbish"""


OnMessage = Callable[[str, bytes], None]
"""node id, message"""
OnLink = Callable[[str, bool, str], None]
"""node id, up, reason"""
Serve = Callable[[str, bytes], Body]
"""node id, request; raises Refusal to decline"""


class Transport(Protocol):
    """Links to the other keepers of the run. Thread-safe; callbacks are given at construction."""

    def card_address(self) -> tuple[str, int]:
        """Address and port where peers reach this keeper."""

    def admit(self, secret: bytes) -> None:
        """Authenticate peers with this secret from now on. Links made with another one end."""

    def meet(self, peers: Sequence[Peer]) -> None:
        """These are the peers now. Others lose their link; a new instance or address replaces the old connection."""

    def send(self, node_id: str, message: bytes) -> bool:
        """Queue a message. False: the link is down, or the peer does not read; nothing was queued."""

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        """Request a body from that peer's server.

        Ends with Fetched, FetchError, or CancelledError after `cancel()`, which also stops a fetch that is under way.
        """

    def up(self, node_id: str) -> bool:
        """Whether the link is up now."""

    def counters(self) -> dict[str, float]:
        """Totals since the start (bytes_in, bytes_out, refused, bad_checksums, reconnects ...), and recent rates."""

    def close(self) -> None:
        """End every link, future and thread. No callback comes afterwards."""
