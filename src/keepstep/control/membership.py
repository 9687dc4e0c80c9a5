"""Who is in an incarnation, and in which order: pure, for launchers and for trainers under a plain torchrun.

Invariants:
- Positions are sticky. A node that was a member keeps its rank, a newcomer takes a rank that is free;
  only another number of nodes moves anybody, and then the survivors keep their order.
- Numbers only grow: one more than any keeper of the round knows. Who agrees draws the nonce.
- A keeper that was a member and has no place now is named in `former`: it may still hold state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from keepstep.control.messages import CardIs, Membership, NodeCard
from keepstep.errors import ConfigError
from keepstep.types import Incarnation

SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096


class NodeClaim(msgspec.Struct, frozen=True):
    """What a node brings into a round. Its list of former members travels apart: one of them is enough."""

    card: NodeCard
    largest_number: int
    members_number: int = 0
    """the incarnation that the keeper's list of members is of; 0: it has none"""
    holds_state: bool = False
    has_secret: bool = False
    """whether this node reads the job's secret from a file"""
    secret: bytes = b""
    """what this node's keeper and its peers authenticate each other with already, where there is no file"""

    @classmethod
    def from_card(cls, card: CardIs, *, largest_number: int = 0, has_secret: bool = False) -> NodeClaim:
        return cls(
            card.card, max(card.largest_number, largest_number), card.members_number, card.holds_state, has_secret,
            b"" if has_secret else card.secret,
        )  # fmt: skip


class RoundAgreement(msgspec.Struct, frozen=True):
    """What all nodes of a round read before it begins."""

    incarnation: Incarnation
    nodes: list[NodeCard]
    """by node rank"""
    former: list[NodeCard]
    secret: bytes
    """empty when every node has it in a file"""
    refusal: str = ""
    """why this round cannot begin; all nodes raise it"""


def seats(present: Sequence[str], last: Sequence[str]) -> list[str]:
    """Node ids by rank. `last`: by rank, of the incarnation before; empty on a first start."""
    here, before = set(present), set(last)
    newcomers = iter(sorted((node for node in present if node not in before), key=_natural))
    if len(present) == len(last):
        return [node if node in here else next(newcomers) for node in last]
    return [*(node for node in last if node in here), *newcomers]


def agree(
    nodes: Sequence[NodeClaim], last: Sequence[NodeCard], *, nonce: int, secret: bytes, known_number: int = 0
) -> RoundAgreement:
    """`nodes` by rank. The secret is left out where all nodes have a file; a mixture is refused.

    A run keeps the secret that its keepers have: one that has no place in this round knows no other, and
    may hold what is needed.
    """
    said = max((node for node in nodes if node.secret), key=lambda node: node.members_number, default=None)
    secret = said.secret if said is not None else secret
    present = {node.card.node_id for node in nodes}
    number = 1 + max(known_number, *(node.largest_number for node in nodes))
    without = [node.card.node_id for node in nodes if not node.has_secret]
    refusal = ""
    if len(present) < len(nodes):
        refusal = "two nodes have one name: KEEPSTEP_NODE_ID must be another one on each"
    elif 0 < len(without) < len(nodes):
        refusal = f"secret_file is set on some nodes, but not on {', '.join(without[:5])}"
    return RoundAgreement(
        Incarnation(number, nonce),
        [node.card for node in nodes],
        [card for card in last if card.node_id not in present],
        secret if without else b"",
        refusal,
    )


def membership(agreement: RoundAgreement, node_rank: int, own_secret: bytes) -> Membership:
    """What one node tells its own keeper."""
    return Membership(
        agreement.incarnation, agreement.nodes, node_rank, agreement.secret or own_secret, agreement.former
    )


def with_own_card(told: Membership, card: NodeCard) -> Membership:
    """The same for a keeper that took the place of a dead one: it has another instance, maybe another port."""
    nodes = [card if rank == told.node_rank else node for rank, node in enumerate(told.nodes)]
    return msgspec.structs.replace(told, nodes=nodes)


def newest_members(known: Mapping[str, NodeClaim]) -> str:
    """Whose list of members counts: the one of the highest incarnation; "" when nobody has one."""
    best = max(known, key=lambda name: known[name].members_number, default="")
    return best if best and known[best].members_number > 0 else ""


def check_losses(losses: int, num_nodes: int) -> None:
    """One node alone has no group; two or more must be able to lose `losses` of them."""
    if num_nodes >= 2 and losses > num_nodes - 1:
        raise ConfigError(
            f"parity.losses = {losses} nodes cannot be lost out of {num_nodes}",
            hint=f"the largest possible value is {num_nodes - 1}: KEEPSTEP_PARITY_LOSSES={num_nodes - 1}",
        )


def read_secret(secret_file: str) -> bytes:
    """The job's secret, b"" when it has no file."""
    if not secret_file:
        return b""
    try:
        with Path(secret_file).open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"secret_file {secret_file} cannot be read: {error.strerror}") from error
    if not secret or len(secret) > MAX_SECRET_BYTES:
        raise ConfigError(
            f"secret_file {secret_file} is empty or longer than {MAX_SECRET_BYTES} bytes",
            hint=f"head -c {SECRET_BYTES} /dev/urandom | base64 > {secret_file}",
        )
    return secret


def _natural(node_id: str) -> list[tuple[int, str]]:
    """node2 before node10."""
    return [(int(digits), "") if digits else (-1, text) for digits, text in re.findall(r"(\d+)|(\D+)", node_id)]
