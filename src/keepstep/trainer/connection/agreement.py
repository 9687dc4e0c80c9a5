"""Agreement of all trainers on an incarnation, through the job's store, where the launcher does not provide one.

Plain torchrun and srun do not. Rank 0 calls, all ranks answer, the first trainer of each node with its keeper's card;
rank 0 decides on the incarnation and sends it to each. The store may hold keys of an earlier round: torchrun gives its
restarts a used store, and TORCHELASTIC_RESTART_COUNT differs between nodes of one round. So a call is a fresh token, an
answer carries a token of its own, and a rank accepts only an agreement that repeats it. Ranks are never changed here.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from keepstep.config import Config
from keepstep.control.client import REQUEST_S, KeeperClient
from keepstep.control.membership import (
    NodeClaim,
    RoundAgreement,
    agree,
    check_losses,
    membership,
    newest_members,
)
from keepstep.control.messages import CardIs, Done, Membership, NodeCard, WantCard
from keepstep.control.secret_file import SECRET_BYTES, read_secret
from keepstep.control.signed_store import DocumentSigner, SignedStore
from keepstep.control.spawn import START_S, start_keeper
from keepstep.errors import ConfigError, KeeperError
from keepstep.identity import ForeignDirectoryError, Identity
from keepstep.trainer.connection.environment import RankPlace
from keepstep.types import Incarnation

log = logging.getLogger("keepstep")
POLL_S = 0.05

# The store that rank 0 serves when there is none: init_process_group finds and shares it.
_served: list[Any] = []


class RankAnswer(msgspec.Struct, frozen=True):
    """Answer of a rank to a call; that of the first trainer of a node has its keeper's card."""

    token: str
    known: NodeClaim | None = None
    members: list[NodeCard] = []


@dataclass(frozen=True)
class AgreedIncarnation:
    incarnation: Incarnation
    membership: Membership | None  # Sent to this node's keeper, and again to one that replaces it.


def meet_if_needed(identity: Identity, config: Config, place: RankPlace) -> AgreedIncarnation | None:
    """Agree where the job has several nodes and their launcher agreed on nothing."""
    if "KEEPSTEP_INCARNATION" in os.environ or place.world_size == place.local_world_size:
        return None
    return meet(identity, config, place)


def meet(identity: Identity, config: Config, place: RankPlace) -> AgreedIncarnation:
    """Agree with all other trainers of the round. Every wait ends after `REQUEST_S`."""
    deadline = time.monotonic() + REQUEST_S
    secret = read_secret(config)
    store = SignedStore(_store(place, REQUEST_S), DocumentSigner(identity.run_id, secret))
    answer = RankAnswer(secrets.token_hex(8))
    client = None
    try:
        if place.local_index == 0:
            client = _keeper(identity, config)
            card, _ = client.request(WantCard(), CardIs, timeout_s=REQUEST_S)
            known = NodeClaim.from_card(card, has_secret=bool(secret))
            answer = RankAnswer(answer.token, known, card.members)
        take_part = _preside if place.rank == 0 else _attend
        call = take_part(store, place, answer, deadline)
        agreed = store.read_as([f"agreement/{call}"], RoundAgreement)[0]
        if agreed is None:
            raise KeeperError("the job's store has lost the agreement on an incarnation")
        sent = _introduce(client, agreed, identity, config, secret) if client is not None else None
    finally:
        if client is not None:
            client.close()
    first = place.rank - place.local_index
    if sent is not None:
        store.write(f"told/{call}/{first}", "")
    _wait(store, [f"told/{call}/{first}"], deadline, "this node's first trainer")
    return AgreedIncarnation(agreed.incarnation, sent)


def _preside(store: SignedStore, place: RankPlace, answer: RankAnswer, deadline: float) -> str:
    call = secrets.token_hex(8)
    store.write(f"answer/{call}/0", msgspec.json.encode(answer).decode())
    store.write("call", call)
    keys = [f"answer/{call}/{rank}" for rank in range(place.world_size)]
    _wait(store, keys, deadline, "the trainers of all nodes")
    answers = [answer for answer in store.read_as(keys, RankAnswer) if answer is not None]
    if len(answers) < len(keys):
        raise KeeperError("the job's store has lost answers of trainers to the call of rank 0")
    nodes = {answer.token: answer.known for answer in answers if answer.known is not None}  # in the order of ranks
    best = newest_members(nodes)
    last = next((answer.members for answer in answers if answer.token == best), [])
    secret = secrets.token_bytes(SECRET_BYTES)
    agreed = agree(list(nodes.values()), last, nonce=secrets.randbits(63), secret=secret)
    store.write(f"agreement/{call}", msgspec.json.encode(agreed).decode())
    for rank, answer in enumerate(answers):
        store.write(f"agreed/{call}/{rank}", answer.token)
    return call


def _attend(store: SignedStore, place: RankPlace, answer: RankAnswer, deadline: float) -> str:
    answered, text = "", msgspec.json.encode(answer).decode()
    while True:
        (called,) = store.read(["call"])
        call = called.text if called is not None else answered
        if call != answered:
            store.write(f"answer/{call}/{place.rank}", text)
            answered = call
        agreed = store.read([f"agreed/{call}/{place.rank}"])[0] if call else None
        if agreed is not None and agreed.text == answer.token:
            return call
        if time.monotonic() > deadline:
            raise KeeperError(
                "the trainers did not agree on an incarnation in time" + store.signer.summary(),
                hint="the log of rank 0 says why; start all nodes of the job, with the same secret_file",
            )
        time.sleep(POLL_S)


def _introduce(
    client: KeeperClient, agreed: RoundAgreement, identity: Identity, config: Config, secret: bytes
) -> Membership:
    if agreed.refusal:
        raise ConfigError(agreed.refusal, hint="the same settings on all nodes")
    check_losses(config.parity.losses, len(agreed.nodes))
    rank = next(rank for rank, card in enumerate(agreed.nodes) if card.node_id == identity.node_id)
    message = membership(agreed, rank, secret)
    client.request(message, Done, timeout_s=REQUEST_S)
    return message


def _keeper(identity: Identity, config: Config) -> KeeperClient:
    """The keeper of this node, started if there is none."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return KeeperClient(identity, "trainer")
        except ForeignDirectoryError:
            raise
        except KeeperError:
            if time.monotonic() > deadline:
                raise
        start_keeper(identity, config)


def _store(place: RankPlace, timeout_s: float) -> Any:
    if torch.distributed.is_initialized():
        from torch.distributed.distributed_c10d import _get_default_store

        return PrefixStore("keepstep.meeting", _get_default_store())
    environ = os.environ
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        raise ConfigError(
            "this job has several nodes, and nothing says where they meet",
            hint="init_process_group before the Snapshotter, or set MASTER_ADDR and MASTER_PORT",
        )
    serves = place.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=serves, wait_for_workers=False,
        multi_tenant=True, timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    if serves:
        _served.append(store)
    return PrefixStore("keepstep.meeting", store)


def _wait(store: SignedStore, keys: list[str], deadline: float, what: str) -> None:
    while not store.raw.check(keys) or None in store.read(keys):
        if time.monotonic() > deadline:
            raise KeeperError(
                f"{what} did not arrive within {REQUEST_S:g} s{store.signer.summary()}",
                hint="start all nodes of the job, with the same secret_file",
            )
        time.sleep(POLL_S)
