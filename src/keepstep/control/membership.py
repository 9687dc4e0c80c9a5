"""Members of an incarnation and their node ranks. Pure, for launchers and for trainers under plain torchrun.

Invariants:
- Node ranks are sticky. A former member keeps its rank, a newcomer takes a free one. Only another number of nodes moves
  ranks, and then the survivors keep their order.
- Incarnation numbers only grow: one more than any keeper of the round knows. The caller draws the nonce.
- A keeper that was a member and has no place now is listed in `former`: it may still hold state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from keepstep.control.messages import CardIs, Membership, NodeCard
from keepstep.errors import ConfigError
from keepstep.types import Incarnation, Version


class IncarnationEnd(msgspec.Struct, frozen=True):
    """How the trainers of one node ended, from one start to the next. Empty texts: nothing is known of it."""

    round: int
    complete: Version | None  # The newest complete version when they had ended.
    progressed: bool  # That version was captured in this incarnation.
    exit: str = ""  # How the first of them ended by itself: `exit code 1`, `SIGSEGV`.
    error: str = ""  # The error that this trainer reported.
    restore_error: str = ""  # An error of `restore()` that another attempt cannot cure.
    killed: bool = False  # The first of them was killed from outside: the program did not fail.


class NodeClaim(msgspec.Struct, frozen=True):
    """What one node brings into a round. Its list of former members is sent apart, because one such list is enough."""

    card: NodeCard
    largest_number: int
    members_number: int = 0  # Incarnation number of the keeper's list of members; 0: it has none.
    holds_state: bool = False
    has_secret: bool = False  # This node reads the job's secret from a file.
    secret: bytes = b""  # Where there is no file: the secret that this node's keeper has already.
    last_end: IncarnationEnd | None = None  # None: this launcher has started no trainers yet.

    @classmethod
    def from_card(cls, card: CardIs, *, largest_number: int = 0, has_secret: bool = False) -> NodeClaim:
        return cls(
            card.card, max(card.largest_number, largest_number), card.members_number, card.holds_state, has_secret,
            b"" if has_secret else card.secret,
        )  # fmt: skip


class RoundAgreement(msgspec.Struct, frozen=True):
    """The decision that all nodes of a round read before it begins."""

    incarnation: Incarnation
    nodes: list[NodeCard]  # by node rank
    former: list[NodeCard]
    secret: bytes  # Empty when every node has it in a file.
    refusal: str = ""  # Why this round cannot begin; all nodes raise it.
    last_ends: list[IncarnationEnd] = []  # How the trainers of these nodes ended.


def assign_ranks(present: Sequence[str], last: Sequence[str]) -> list[str]:
    """Node ids by rank. `last`: node ids of the last incarnation by rank; empty on a first start."""
    available, former = set(present), set(last)
    newcomers = iter(sorted((node for node in present if node not in former), key=_natural))
    if len(present) == len(last):
        return [node if node in available else next(newcomers) for node in last]
    return [*(node for node in last if node in available), *newcomers]


def agree(
    nodes: Sequence[NodeClaim], last: Sequence[NodeCard], *, nonce: int, secret: bytes, known_number: int = 0
) -> RoundAgreement:
    """Decide on incarnation and members. `nodes`: claims by rank; `last`: members of the last incarnation.

    The secret is omitted where all nodes have a file; a mixture is refused. Else a run keeps the secret that its
    keepers have: a keeper without a place in this round knows no other, and may hold needed state.
    """
    keeper = max((node for node in nodes if node.secret), key=lambda node: node.members_number, default=None)
    secret = keeper.secret if keeper is not None else secret
    present = {node.card.node_id for node in nodes}
    number = 1 + max(known_number, *(node.largest_number for node in nodes))
    without = [node.card.node_id for node in nodes if not node.has_secret]
    refusal = ""
    if len(present) < len(nodes):
        refusal = "two nodes have the same id: set another KEEPSTEP_NODE_ID on each node"
    elif 0 < len(without) < len(nodes):
        refusal = f"secret_file is set on some nodes, but not on {', '.join(without[:5])}"
    return RoundAgreement(
        Incarnation(number, nonce),
        [node.card for node in nodes],
        [card for card in last if card.node_id not in present],
        secret if without else b"",
        refusal,
        [node.last_end for node in nodes if node.last_end is not None],
    )


def membership(agreement: RoundAgreement, node_rank: int, own_secret: bytes) -> Membership:
    """The message of one node to its own keeper. With a secret of its own it takes none from the store."""
    if own_secret and agreement.secret not in (b"", own_secret):
        raise ConfigError(
            "the rendezvous store holds another secret than secret_file, and somebody may have written it there",
            hint="the same secret_file on all nodes; else find out who can write the store",
        )
    secret = own_secret or agreement.secret
    return Membership(agreement.incarnation, agreement.nodes, node_rank, secret, agreement.former)


def with_own_card(membership: Membership, card: NodeCard) -> Membership:
    """The same membership for a keeper that replaced a dead one: it has another instance, maybe another port."""
    nodes = [card if rank == membership.node_rank else node for rank, node in enumerate(membership.nodes)]
    return msgspec.structs.replace(membership, nodes=nodes)


def newest_members(claims: Mapping[str, NodeClaim]) -> str:
    """Key of the claim with the newest list of members; "" when none has a list."""
    newest = max(claims, key=lambda name: claims[name].members_number, default="")
    return newest if newest and claims[newest].members_number > 0 else ""


def check_losses(losses: int, num_nodes: int) -> None:
    """Refuse `parity.losses` that this number of nodes cannot bear. One node alone has no parity."""
    if num_nodes >= 2 and losses > num_nodes - 1:
        raise ConfigError(
            f"parity.losses = {losses} nodes cannot be lost out of {num_nodes}",
            hint=f"the largest possible value is {num_nodes - 1}: KEEPSTEP_PARITY_LOSSES={num_nodes - 1}",
        )


def _natural(node_id: str) -> list[tuple[int, str]]:
    """Sort key: node2 before node10."""
    return [(int(digits), "") if digits else (-1, text) for digits, text in re.findall(r"(\d+)|(\D+)", node_id)]
