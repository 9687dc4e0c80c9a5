"""Fetch a keeper's status: GET /status over its unix socket."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import msgspec

from keepstep.errors import KeeperError
from keepstep.identity import Identity
from keepstep.types import Status

ANSWER_S = 10.0  # A status takes milliseconds; a keeper that needs longer is stopped, or its machine is stuck.


def fetch_status(identity: Identity, *, timeout_s: float = ANSWER_S) -> Status:
    """Fetch the status of one keeper. Raises KeeperError when it does not run, or does not answer with a status."""
    keeper = f"the keeper of run {identity.run_id!r} on node {identity.node_id!r}"
    connection = _HttpOverUnix(identity.http_socket, timeout_s)
    try:
        connection.request("GET", "/status")
        response = connection.getresponse()
        body = response.read()
    except TimeoutError as error:
        raise KeeperError(
            f"{keeper} did not answer within {timeout_s:g} s", hint=f"its log is {identity.directory}/keeper.log"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or error
        raise KeeperError(f"{keeper} does not answer: {reason}", hint="keepstep status --all lists the runs") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise KeeperError(f"{keeper} answered {response.status}: {body[:200].decode(errors='replace').strip()}")
    try:
        return msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError as error:
        raise KeeperError(
            f"{keeper} answered with a status that this keepstep cannot read: {error}",
            hint="use one version of keepstep on the node",
        ) from error


class _HttpOverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("keeper", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
