"""The training loops that are measured: a GPT in fp32, a larger one in bf16, and many small tensors.

A `Workload` never saves anything. A step is forward and backward, then `optimizer.step()`, which is where a saver's
hooks run; `HookClock` says how long they took, whichever way they were registered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from sizes import GptSize, SmallSize
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

NUM_BATCHES = 4
"""synthetic tokens, made once: drawing them is no part of a step"""
BUCKET_BYTES = 1 << 30
"""gradients that the bf16 model's optimizer holds in fp32 at one time"""


class Workload:
    """A model, its optimizer, and a step of training."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, compute: Callable[[], None]) -> None:
        self.model, self.optimizer, self.compute = model, optimizer, compute
        self.hooks = HookClock(optimizer)
        self.update_s = 0.0
        """host time of the last `optimizer.step()`"""
        self.keeps_grads = False

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, fence: Callable[[], None] | None = None) -> None:
        self.compute()
        if fence is not None:
            fence()
        self.update()

    def update(self) -> None:
        start = time.perf_counter()
        self.optimizer.step()
        self.update_s = time.perf_counter() - start
        if not self.keeps_grads:
            self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state, once: parameters, buffers, and what the optimizer keeps."""
        own = [*self.model.parameters(), *self.model.buffers()]
        kept = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [tensor.detach() for tensor in own] + [value for value in kept if isinstance(value, Tensor)]

    def describe(self) -> dict[str, Any]:
        tensors = self.tensors()
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "state_bytes": sum(tensor.nbytes for tensor in tensors),
            "state_tensors": len(tensors),
        }


class HookClock:
    """Host time between the first pre-hook of an optimizer's step and the last: all that savers do there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._began = 0.0
        self.seconds = 0.0
        """of the last step"""
        register_optimizer_step_pre_hook(self._begin)  # before any saver's; global ones run before an optimizer's own
        self._last = optimizer.register_step_pre_hook(self._end)

    def be_last(self) -> None:
        """Call after a saver was opened: hooks run in the order of registration."""
        self._last.remove()
        self._last = self._optimizer.register_step_pre_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began


# The GPTs


class Layer(nn.Module):
    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """As in GPT-2, head not tied: with 24 layers of width 2048 it has 293 parameters of 1.42 B elements."""

    def __init__(self, size: GptSize, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.places = nn.Embedding(size.vocab, size.width), nn.Embedding(size.context, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.tokens(batch) + self.places.weight[: batch.shape[1]]
        for layer in self.layers:
            again = self.checkpointed
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if again else layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_gpt(size: GptSize, device: str) -> Workload:
    """Part 1: fp32 parameters and moments, bf16 autocast, fused AdamW."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = _batches(size, device)

    def compute() -> None:
        batch = next(batches)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = _loss(model(batch), batch)
        loss.backward()

    return Workload(model, optimizer, compute)


class LargeGpt(Workload):
    """Part 2: bf16 parameters, fp32 master and moments in the optimizer, layers computed again in backward."""

    def __init__(self, size: GptSize, device: str) -> None:
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                model = Gpt(size, checkpointed=True)
        finally:
            torch.set_default_dtype(before)
        self._size, self._device = size, device
        self._batches = _batches(size, device)
        super().__init__(model, MasterAdamW(model.parameters()), self._compute)

    def set_batch(self, batch: int) -> None:
        self._batches = _batches(self._size, self._device, batch)

    def _compute(self) -> None:
        batch = next(self._batches)
        _loss(self.model(batch).float(), batch).backward()


def _batches(size: GptSize, device: str, batch: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    shape = (batch or size.batch, size.context)
    made = [torch.randint(size.vocab, shape, device=device, generator=generator) for _ in range(NUM_BATCHES)]
    while True:
        yield from made


def _loss(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


class MasterAdamW(torch.optim.Optimizer):
    """AdamW for bf16 parameters: master weights and both moments in fp32, 14 bytes of state per parameter."""

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.01, fused: bool = True) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "fused": fused})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for bucket in _buckets([p for p in group["params"] if p.grad is not None]):
                self._update(group, bucket)

    def _update(self, group: dict[str, Any], bucket: list[Tensor]) -> None:
        states = [self._state_of(parameter) for parameter in bucket]
        masters = [state["master"] for state in states]
        adamw(
            masters, [p.grad.float() for p in bucket if p.grad is not None],
            [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], [],
            [state["step"] for state in states], fused=True, amsgrad=False, beta1=0.9, beta2=0.95,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=1e-8, maximize=False,
        )  # fmt: skip
        torch._foreach_copy_(bucket, masters)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["master"] = parameter.detach().float().clone()
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
            state["step"] = torch.zeros((), device=parameter.device)
        return state


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(4 * one.numel() for one in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


# Many small tensors


def make_small(size: SmallSize, device: str) -> Workload:
    """Parameters with constant gradients, AdamW foreach, and matrix products in the place of forward and backward."""
    torch.manual_seed(0)
    shape = (size.side, size.side)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for _ in range(size.parameters))
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 1e-3)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right, product = (torch.randn(2 * (size.matmul_side,), device=device, dtype=dtype) for _ in range(3))

    def compute() -> None:
        for _ in range(size.num_matmuls):
            torch.mm(left, right, out=product)

    workload = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True), compute)
    workload.keeps_grads = True
    return workload
