"""The rendezvous store as one agent reaches it: hosts it or connects to it, and makes sure that it is this run's."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from keepstep.control.signed_store import DocumentSigner, SignedStore
from keepstep.errors import Error
from keepstep.launcher.store import PortTakenError, is_own, serve_as

DEFAULT_PORT = 29400  # torch's
READ_S = 60
CONNECT_S = 5.0  # for one attempt to reach the store
HOST_KEY = "host"  # written by the agent that hosts the store
HOST_WRITES_S = 10.0  # Another agent of this machine may have opened the store a moment ago.
POLL_S = 0.1


def open_store(params: RendezvousParameters, run_id: str, signer: DocumentSigner) -> TCPStore:
    """Host the store, or connect to it: the server itself, or a connection.

    As with torch's own rendezvous `is_host` decides who hosts it, else whether the endpoint is an address of this
    machine. An agent that finds the port taken becomes a client, of this run's store only.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    timeout_s = params.get_as_int("read_timeout", READ_S) or READ_S
    chosen = params.get_as_bool("is_host")
    if not (is_own(host) if chosen is None else chosen):
        return _connect(host, port, timeout_s)
    try:
        store = serve_as(host, port, timeout_s=timeout_s, one_node=params.max_nodes == 1)
    except PortTakenError:
        if chosen:
            raise
        store = _connect(host, port, timeout_s)
        _check_host(connect_through(store, run_id, signer), f"{host}:{port}", run_id)
        return store
    connect_through(store, run_id, signer).write(HOST_KEY, "")
    return store


def connect(store: TCPStore, run_id: str, signer: DocumentSigner, *, timeout_s: float) -> SignedStore:
    """A new connection to the same store."""
    # A refused connection is an error at once, not after torch has tried for `timeout_s` and logged 20 lines.
    socket.create_connection((store.host, store.port), timeout=CONNECT_S).close()
    client = TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )  # fmt: skip
    return connect_through(client, run_id, signer)


def connect_through(store: TCPStore, run_id: str, signer: DocumentSigner) -> SignedStore:
    return SignedStore(PrefixStore(f"keepstep.{run_id}", store), signer)


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RendezvousConnectionError(f"no rendezvous store answers at {host}:{port}: {reason}") from error


def _check_host(store: SignedStore, address: str, run_id: str) -> None:
    deadline = time.monotonic() + HOST_WRITES_S
    while store.read([HOST_KEY])[0] is None:
        if time.monotonic() > deadline:
            text = f"the port of {address} is taken, and the store there was not opened by an agent of run {run_id!r}"
            hint = "another port in --rdzv-endpoint, or --rdzv-conf is_host=0 if that store is meant (keepstep store)"
            raise RendezvousConnectionError(str(Error(text + store.signer.summary(), hint=hint)))
        time.sleep(POLL_S)
