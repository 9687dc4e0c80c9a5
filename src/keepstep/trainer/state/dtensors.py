"""torch's DTensor, recognised without importing it.

To import `torch.distributed.tensor` takes more than half a second (sympy is most of it), and a program that has not
imported it has no DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, or of a class derived from it."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor
