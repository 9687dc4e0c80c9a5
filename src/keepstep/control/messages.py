"""What trainers, launchers and the command line say to a keeper, and how it is framed.

A frame is 8 bytes (magic, number of file descriptors, length) and a msgpack body; descriptors travel
beside it by SCM_RIGHTS. Every length and count is checked before anything is allocated. A request
carries a `ticket`; the answer repeats it; ticket 0 is a message that nobody answers.

Both sides are of one user on one machine: the socket is 0600 and the peer's uid is checked. What
comes in is still treated as hostile: a malformed frame closes that connection and nothing else.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from typing import Any, TypeVar

import msgspec

from keepstep.errors import KINDS, Error, KeeperError
from keepstep.layout import SnapshotSize
from keepstep.types import Incarnation, Version

PROTOCOL = 2
MAGIC = 0x4B53
MAX_FRAME_BYTES = 1 << 20
MAX_FDS = 64
_HEAD = struct.Struct("<HHI")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of every connection."""

    protocol: int
    run_id: str
    node_id: str
    role: str
    """trainer, launcher or cli"""
    ticket: int = 0


class Welcome(msgspec.Struct, frozen=True, tag=True):
    instance: str
    keeper_pid: int
    largest_number: int
    """the largest incarnation number this keeper knows of"""
    ticket: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The error that the asking side raises."""

    kind: str
    message: str
    hint: str = ""
    ticket: int = 0

    def error(self) -> Error:
        return KINDS.get(self.kind, KeeperError)(self.message, hint=self.hint)


class Register(msgspec.Struct, frozen=True, tag=True):
    """A trainer joins (or, after the keeper's own death, comes back to) an incarnation."""

    rank: int
    world_size: int
    local_index: int
    local_world_size: int
    incarnation: Incarnation | None
    """agreed by the launcher, or the one this trainer was given before; None: the keeper decides"""
    label: str
    """what the trainers of one round share under a launcher that agrees on nothing"""
    launcher_pid: int
    every: int
    slots: int
    progress: int
    """the step of the last `take`, or -1"""
    rejoin: bool = False
    ticket: int = 0
    arena_id: str = ""
    """the arena that a trainer which comes back is writing: not always the newest one of its rank"""
    no_holder: bool = False
    """no launcher agreed on the incarnation: there is none that holds this node's memory and gives it back"""


class Registered(msgspec.Struct, frozen=True, tag=True):
    incarnation: Incarnation
    ticket: int = 0


class LauncherHello(msgspec.Struct, frozen=True, tag=True):
    """An agent that will start trainers, and holds their memory meanwhile."""

    pid: int
    ticket: int = 0


class NodeCard(msgspec.Struct, frozen=True):
    """Who a node's keeper is and where its peers reach it."""

    node_id: str
    instance: str
    """of the keeper: a node that comes back with empty memory has the same id and another instance"""
    address: str
    port: int
    domain: str = ""
    """what fails together, for example the rack"""


class WantCard(msgspec.Struct, frozen=True, tag=True):
    """A launcher (or, under another launcher, the first trainer of a node) asks who this keeper is."""

    ticket: int = 0


class CardIs(msgspec.Struct, frozen=True, tag=True):
    card: NodeCard
    largest_number: int
    members: list[NodeCard]
    """of the last incarnation this keeper was a member of, by position; empty: it never was"""
    members_number: int = 0
    """the number of that incarnation"""
    holds_state: bool = False
    ticket: int = 0
    secret: bytes = b""
    """what the keepers of this run authenticate each other with, if this one has been told"""


class Membership(msgspec.Struct, frozen=True, tag=True):
    """The nodes of an incarnation, in the order of their ranks. Answered (Done) once the keeper knows."""

    incarnation: Incarnation
    nodes: list[NodeCard]
    node_rank: int
    secret: bytes
    """what keepers of this run authenticate each other with"""
    former: list[NodeCard] = []
    """keepers of the incarnation before that have no place in this one: they may still hold state"""
    ticket: int = 0


class WantArena(msgspec.Struct, frozen=True, tag=True):
    need: SnapshotSize
    slots: int
    memory_limit_bytes: int = 0
    ticket: int = 0


class ArenaGiven(msgspec.Struct, frozen=True, tag=True):
    """The rank's own arena; its descriptor travels beside this message."""

    arena_id: str
    size_bytes: int
    fresh: bool
    ticket: int = 0


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Keep these memfds (in the order of the descriptors beside) for the node; forget all others."""

    arena_ids: list[str]
    forget: list[str]
    ticket: int = 0


class Held(msgspec.Struct, frozen=True, tag=True):
    arena_ids: list[str]


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Memfds held for a keeper that died, offered to the one that took its place."""

    arena_ids: list[str]
    ticket: int = 0


class Adopted(msgspec.Struct, frozen=True, tag=True):
    arena_ids: list[str]
    refused: dict[str, str]
    ticket: int = 0


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The trainer has finished writing a slot and will not touch it until it is granted again."""

    arena_id: str
    slot: int
    version: Version


class Void(msgspec.Struct, frozen=True, tag=True):
    """A grant that this rank cannot honour: nothing will be written into its slot."""

    arena_id: str
    slot: int
    version: Version
    reason: str


class Complete(msgspec.Struct, frozen=True, tag=True):
    """The version is sealed on all ranks."""

    version: Version
    final: bool = True
    """nothing more will be done for it: this job has no other node that could protect it"""


class Protected(msgspec.Struct, frozen=True, tag=True):
    """The version is protected: it survives the loss of a node."""

    version: Version


class Voided(msgspec.Struct, frozen=True, tag=True):
    """The version will never be complete: this rank could not honour its grant."""

    version: Version
    rank: int
    reason: str
    diverged: list[str] = []
    """paths whose replicas are not the same on all nodes: protected per rank from the next layout on"""


class WantRestore(msgspec.Struct, frozen=True, tag=True):
    ticket: int = 0


class ReplicaSetSource(msgspec.Struct, frozen=True):
    """Where the verified bytes of a stream lie, chunk by chunk; how long each is follows from the stream's size."""

    class_id: str
    fd_index: list[int]
    """per chunk: which of the descriptors beside the message holds it"""
    offsets: list[int]
    """per chunk: where it begins there"""


class RestoreFrom(msgspec.Struct, frozen=True, tag=True):
    """What this rank restores: a verified slot of its arena, or nothing at all.

    The first descriptor beside it is the rank's arena; the others are what `streams` points into.
    """

    version: Version | None
    arena_id: str
    slot: int
    size_bytes: int
    plan: list[str]
    """the reasons, one sentence each"""
    ticket: int = 0
    source: str = "memory"
    """memory or parity: where this rank's bytes came from"""
    streams: list[ReplicaSetSource] = []


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """This rank is ready for its first step. Answered (Done) when all ranks are."""

    step: int | None
    ticket: int = 0


class Ending(msgspec.Struct, frozen=True, tag=True):
    """The keeper ends on purpose: nobody should start another one."""

    reason: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The last message of a trainer. `finished`: the training is over and its state may go."""

    finished: bool
    ticket: int = 0


class WantStatus(msgspec.Struct, frozen=True, tag=True):
    ticket: int = 0


class StatusIs(msgspec.Struct, frozen=True, tag=True):
    json: bytes
    ticket: int = 0


class WantVerify(msgspec.Struct, frozen=True, tag=True):
    """Check every sealed slot against its checksums now."""

    ticket: int = 0


class VerifyResult(msgspec.Struct, frozen=True):
    rank: int
    slot: int
    step: int
    size_bytes: int
    problem: str


class Verified(msgspec.Struct, frozen=True, tag=True):
    results: list[VerifyResult]
    ticket: int = 0


class WantArenas(msgspec.Struct, frozen=True, tag=True):
    """The command line asks for the memfds (inspect, drill)."""

    ticket: int = 0


class Release(msgspec.Struct, frozen=True, tag=True):
    """Give the state up and end. Refused while trainers live, unless forced."""

    force: bool = False
    ticket: int = 0


class WantPlan(msgspec.Struct, frozen=True, tag=True):
    """What would a restore do if these nodes were lost now? Only the keeper that coordinates the job can say."""

    lost: list[str]
    ticket: int = 0


class PlannedPiece(msgspec.Struct, frozen=True):
    """Where the ranks of one node would get their state."""

    ranks: list[int]
    node_id: str
    """where they run now"""
    source: str
    reason: str


class PlanIs(msgspec.Struct, frozen=True, tag=True):
    """Grouped by node: a plan for thousands of ranks must fit into a frame."""

    step: int | None
    """of the version that would come back; None: none would"""
    newest_step: int
    """the newest that any rank has done"""
    pieces: list[PlannedPiece]
    reasons: list[str]
    failure: str = ""
    """why the state would be lost"""
    ticket: int = 0


class WantProcesses(msgspec.Struct, frozen=True, tag=True):
    """The command line asks which processes make up this node (drill)."""

    ticket: int = 0


class ProcessesAre(msgspec.Struct, frozen=True, tag=True):
    """Living ones only, watched by pidfd: a pid in here has not changed hands."""

    launchers: list[int]
    trainers: list[int]
    ticket: int = 0


class CutLinks(msgspec.Struct, frozen=True, tag=True):
    """A drill: this keeper has no link to any peer for so long."""

    seconds: float
    ticket: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    text: str = ""
    ticket: int = 0


Message = (
    Hello | Welcome | Refused | Register | Registered | LauncherHello | WantCard | CardIs | Membership
    | WantArena | ArenaGiven | Hold | Held | GiveBack
    | Adopted | Committed | Void | Complete | Protected | Voided | WantRestore | RestoreFrom | Loaded
    | Ending | Goodbye
    | WantStatus | StatusIs | WantVerify | Verified | WantArenas | Release | Done
    | WantPlan | PlanIs | WantProcesses | ProcessesAre | CutLinks
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
M = TypeVar("M")


class FrameError(Exception):
    """The peer sent something that is not a frame of this protocol."""


def pack(message: Any, num_fds: int = 0) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES or num_fds > MAX_FDS:
        raise KeeperError(f"a {type(message).__name__} of {len(body)} bytes and {num_fds} fds is too large to send")
    return _HEAD.pack(MAGIC, num_fds, len(body)) + body


class FrameReader:
    """Turns bytes and descriptors, as they arrive, into messages. Closes what it does not hand out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: list[int]) -> list[tuple[Any, list[int]]]:
        self._buffer += data
        self._fds.extend(fds)
        messages: list[tuple[Any, list[int]]] = []
        try:
            while (message := self._next()) is not None:
                messages.append(message)
            # What is left belongs to one unfinished frame: descriptors travel with its first byte.
            if len(self._fds) > (MAX_FDS if self._buffer else 0):
                raise FrameError(f"{len(self._fds)} descriptors that no message announces")
        except FrameError:
            for _, unread in messages:
                self._fds.extend(unread)
            self.close()
            raise
        return messages

    def _next(self) -> tuple[Any, list[int]] | None:
        if len(self._buffer) < _HEAD.size:
            return None
        magic, num_fds, length = _HEAD.unpack_from(self._buffer)
        if magic != MAGIC or length > MAX_FRAME_BYTES or num_fds > MAX_FDS:
            raise FrameError(f"bad frame head (magic {magic:#x}, {num_fds} fds, {length} bytes)")
        if len(self._buffer) < _HEAD.size + length:
            return None
        body = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
        del self._buffer[: _HEAD.size + length]
        if len(self._fds) < num_fds:
            raise FrameError(f"{num_fds} descriptors announced, {len(self._fds)} came")
        try:
            message = _decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FrameError(f"bad message: {error}") from error
        return message, [self._fds.popleft() for _ in range(num_fds)]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())


def send(sock: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    """Send one whole frame on a blocking socket; descriptors go with its first bytes."""
    frame = memoryview(pack(message, len(fds or [])))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    # Without MSG_NOSIGNAL a dead keeper would kill a trainer that has set SIGPIPE back to its default.
    sent = sock.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL)
    while sent < len(frame):
        sent += sock.send(frame[sent:], socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Whatever has arrived: bytes and descriptors. No bytes: the peer closed."""
    data, ancillary, flags, _ = sock.recvmsg(65536, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise FrameError("descriptors were cut off")
    return data, fds
