"""The giving side of the bytes: one connection of a peer, one thread, one request at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from keepstep.transport.connection import PeerSocket, PeerSocketError
from keepstep.transport.frames import REFUSED, REQUEST_HEAD_BYTES, SERVED, AnswerHead, PeerFrameError, RequestHead
from keepstep.transport.interface import CHECKSUM_BYTES, MAX_REASON_BYTES, Body, Refusal, Serve
from keepstep.transport.traffic import Traffic

log = logging.getLogger("keepstep")


class RequestServer:
    """Answers what one peer asks, for as long as its session lasts."""

    def __init__(self, node_id: str, serve: Serve, traffic: Traffic, stopped: Callable[[], bool]) -> None:
        self._node_id = node_id
        self._serve = serve
        self._traffic = traffic
        self._stopped = stopped

    def run(self, wire: PeerSocket) -> None:
        """Returns when the connection is of no more use. Does not close it."""
        try:
            while not self._stopped():
                wire.limit(math.inf)
                head = RequestHead.unpack(wire.read_exact(REQUEST_HEAD_BYTES))
                wire.limit(self._traffic.timeout_s)
                request = wire.read_exact(head.length)
                self._answer(wire, head, request)
        except PeerFrameError as error:
            log.warning("a stream of %s is closed: %s", self._node_id, error)
        except PeerSocketError as error:
            log.debug("a stream of %s has ended: %s", self._node_id, error.reason)

    def _answer(self, wire: PeerSocket, head: RequestHead, request: bytes) -> None:
        body, reason = self._ask(request)
        if body is None:
            self._refuse(wire, head, reason)
            return
        try:
            if not head.fits(body.size_bytes):
                self._refuse(wire, head, f"there are {body.size_bytes} bytes, not {head.size_bytes}")
                return
            wire.write(AnswerHead(head.number, SERVED, body.size_bytes, body.checksum).pack(), more=body.size_bytes > 0)
            self._send(wire, body)
            self._traffic.counters.add("served")
        finally:
            if body.release is not None:
                body.release()

    def _ask(self, request: bytes) -> tuple[Body | None, str]:
        try:
            body = self._serve(self._node_id, request)
        except Refusal as refusal:
            return None, str(refusal)
        except Exception as error:
            log.exception("serving %s failed", self._node_id)
            return None, f"the server failed: {type(error).__name__}"
        return body, ""

    def _refuse(self, wire: PeerSocket, head: RequestHead, reason: str) -> None:
        self._traffic.counters.add("refused")
        said = reason.encode()[:MAX_REASON_BYTES]
        wire.write(AnswerHead(head.number, REFUSED, len(said), bytes(CHECKSUM_BYTES)).pack() + said)

    def _send(self, wire: PeerSocket, body: Body) -> None:
        cap, meter = self._traffic.cap_out, self._traffic.meter_out
        data = memoryview(body.data).cast("B") if body.data is not None and body.size_bytes else memoryview(b"")
        done = 0
        while done < body.size_bytes:
            want = min(cap.slice_bytes, body.size_bytes - done)
            if not cap.take(want, self._stopped):
                raise PeerSocketError("stopped")
            if body.data is not None:
                count = wire.write_some(data[done : done + want])
            else:
                count = wire.write_file(body.fd, body.offset + done, want)
            cap.give_back(want - count)
            meter.add(count)
            done += count
