"""Fetch a keeper's status: GET /status over its unix socket."""

from __future__ import annotations

import http.client
from typing import Any

import msgspec

from keepstep.control.private_socket import open_socket
from keepstep.errors import KeeperError, printable
from keepstep.identity import Identity
from keepstep.types import Status

ANSWER_S = 10.0  # A status takes milliseconds; a keeper that needs longer is stopped, or its machine is stuck.


def fetch_status(identity: Identity, *, timeout_s: float = ANSWER_S) -> Status:
    """Fetch the status of one keeper. Raises KeeperError when it does not run, or does not answer with a status."""
    keeper = f"the keeper of run {identity.run_id!r} on node {identity.node_id!r}"
    connection = _HttpOverUnix(identity, timeout_s)
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
    return decode_status(body)


def decode_status(encoded: bytes) -> Status:
    """A status as a keeper sent it."""
    try:
        return msgspec.convert(without_controls(msgspec.json.decode(encoded)), Status)
    except (msgspec.DecodeError, RecursionError) as error:
        raise KeeperError(
            f"the keeper answered with a status that this keepstep cannot read: {error}",
            hint="use one version of keepstep on the node",
        ) from error


def without_controls(value: Any) -> Any:
    """The same value, with every string in it fit for a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key) if isinstance(key, str) else key: without_controls(item) for key, item in value.items()}
    return [without_controls(item) for item in value] if isinstance(value, list) else value


class _HttpOverUnix(http.client.HTTPConnection):
    def __init__(self, identity: Identity, timeout_s: float) -> None:
        super().__init__("keeper", timeout=timeout_s)
        self._identity, self._timeout_s = identity, timeout_s

    def connect(self) -> None:
        self.sock = open_socket(self._identity, self._identity.http_socket, self._timeout_s, operator=True)
