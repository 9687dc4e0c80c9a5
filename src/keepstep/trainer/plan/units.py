"""What one copy moves: bytes of one tensor to one place in the payload."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keepstep.trainer.plan.tensor_blocks import Block


@dataclass(frozen=True)
class CopyOp:
    """Source bytes of one block, or of a part of one that belongs to a stream, and their place in the payload."""

    source: torch.Tensor
    offset: int
    size_bytes: int
    path: str
    owners: frozenset[int]
    """optimizers (by index) that write it; empty: nothing fences it"""
    block: Block

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def read_bytes(self) -> int:
        return self.size_bytes
