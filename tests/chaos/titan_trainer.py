"""torchtitan's own training on the CPU, recorded and killed at chosen instants. Not a test.

    titan_trainer.py OUT CASE [--kill=RANK@STEP:INSTANT ...] [--raise=STEP] [flags of torchtitan]

A case is one of CASES. Files in OUT, which grow: steps-RANK has each step's losses, gradient norm and batches,
validated-RANK each validation, restored-RANK what was restored. final-RANK has digests of the whole state at the end.

Instants: `forward`, `second` (the second forward pass of a step), `update` (between optimizer and scheduler), `writing`
(a checkpoint on disk begins), `written` (`take` is called), `taking` (the copy has begun), `saved` (its version is
complete), `validation`. `--raise`: all ranks fail by an exception in that step, once.

torchtitan needs a GPU. Replaced here: device, memory statistics, FlexAttention, fused AdamW, tokenizer, dataset.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]  # before torchtitan asks

import datasets  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.utils as distributed  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig, derive  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models import deepseek_v3, llama3  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.train import main  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

STEPS = 12
OUT = Path()
KILLS: set[str] = set()
RAISE_AT = -1
TAKEN: list[Any] = []
RUNNING: Any = None


@dataclasses.dataclass(frozen=True)
class Case:
    """What differs between the cases."""

    parallelism: dict[str, Any]
    model: str = "llama3"
    accumulate: int = 1
    rows: int = 2
    workers: int = 0


CASES = {
    "fsdp": Case({}),
    "accumulate": Case({}, accumulate=3),
    "workers": Case({}, workers=2),
    "tp": Case({"tensor_parallel_degree": 2}),
    "pp": Case({"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}, rows=4),
    "ep": Case({"expert_parallel_degree": 2}, model="deepseek_v3"),
}


def configure(name: str) -> Any:
    """torchtitan's configuration of a case."""
    case = CASES[name]
    world = int(os.environ["WORLD_SIZE"])
    degrees = ("tensor_parallel_degree", "pipeline_parallel_degree")
    replicas = world // math.prod(case.parallelism.get(degree, 1) for degree in degrees)
    optimizer = default_adamw(lr=8e-3)
    optimizer.implementation = "for-loop"
    plain = Trainer.Config(
        model_spec=tiny(case.model),
        loss=CrossEntropyLoss.Config(global_vocab_size=256),
        dump_folder=str(OUT / "dump"),
        tokenizer=ByteTokenizer.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="numbers", num_workers=case.workers),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4),
        training=TrainingConfig(
            local_batch_size=case.rows, global_batch_size=case.rows * replicas * case.accumulate, seq_len=64,
            steps=STEPS, mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **case.parallelism),  # torch 2.13 has no other
    )  # fmt: skip
    plain.metrics.log_freq = 1
    plain.debug.seed = 3
    plain.debug.enable_structured_logging = False
    plain.validator.dataloader.dataset = "numbers"
    return derive(plain, RecordedTrainer.Config)


def tiny(model: str) -> Any:
    """A model of torchtitan with fewer layers."""
    registry = {"llama3": llama3, "deepseek_v3": deepseek_v3}[model]
    spec = registry.model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:4]
    return spec


class ByteTokenizer(BaseTokenizer):
    """Each byte is a token."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1, *text.encode(), 0]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class RecordedTrainer(Trainer):
    """Records what happens, and dies where a kill was ordered."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.passes = 0
        self.lr_schedulers.step = before(self.lr_schedulers.step, lambda: self.instant("update"))
        self.metrics_processor.log = before(self.metrics_processor.log, self.write_step)
        self.metrics_processor.log_validation = before(self.metrics_processor.log_validation, self.write_validation)
        self.checkpointer.save = after(self.checkpointer.save, lambda: (self.instant("taking"), self.instant("saved")))
        if config.validator.enable:
            self.validator.post_dataloading_process = before(
                self.validator.post_dataloading_process, lambda *_, **__: self.instant("validation")
            )
        global RUNNING
        RUNNING = self

    def train_step(self, data_iterator: Any) -> None:
        self.passes = 0
        self.batches = hashlib.sha256()
        super().train_step(data_iterator)

    def forward_backward_step(self, **arguments: Any) -> Any:
        self.passes += 1
        self.instant("forward" if self.passes == 1 else "second")
        mark = self.file("raised")
        if self.step == RAISE_AT and not mark.exists():
            if TAKEN:
                TAKEN[-1].wait(timeout_s=60)
            mark.touch()
            raise RuntimeError("an exception of this step")
        return super().forward_backward_step(**arguments)

    def post_dataloading_process(self, input_dict: Any, labels: Any) -> Any:
        for tensor in (*input_dict.values(), labels):
            self.batches.update(digest(tensor).encode())
        return super().post_dataloading_process(input_dict, labels)

    def close(self) -> None:
        if sys.exception() is None:
            self.file("final").write_text("\n".join(f"{name} {digest}" for name, digest in self.digests()) + "\n")
        super().close()

    def write_step(self, step: int, loss: float, max_loss: float, norm: float, extra_metrics: Any) -> None:
        with self.file("steps").open("a") as file:
            values = [loss, max_loss, norm, *(float(extra_metrics[name]) for name in sorted(extra_metrics))]
            file.write(f"{step} {' '.join(value.hex() for value in values)} {self.batches.hexdigest()}\n")

    def write_validation(self, loss: float, step: int, extra_metrics: Any = None) -> None:
        with self.file("validated").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")

    def digests(self) -> Iterator[tuple[str, str]]:
        """Every bit that a run ends with, by name."""
        for number, part in enumerate(self.model_parts):
            for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
                yield f"{number}.{name}", digest(tensor)
        for number, optimizer in enumerate(self.optimizers.optimizers):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(parameters):
                for name, value in optimizer.state[parameter].items():
                    yield f"optimizer.{number}.{index}.{name}", digest(value)
            for index, group in enumerate(optimizer.param_groups):
                yield f"group.{number}.{index}", repr(sorted((k, v) for k, v in group.items() if k not in ("params",)))
        for number, scheduler in enumerate(self.lr_schedulers.schedulers):
            yield f"scheduler.{number}", repr((scheduler.last_epoch, scheduler._last_lr))
        yield "trainer", repr((self.step, self.ntokens_seen))
        yield "rng", digest(torch.get_rng_state())
        yield "python", hashlib.sha256(repr(random.getstate()).encode()).hexdigest()

    def file(self, name: str) -> Path:
        return OUT / f"{name}-{torch.distributed.get_rank()}"

    def instant(self, name: str) -> None:
        """Die here, once, if this is where a kill was ordered; but for `taking`, when the last version is complete."""
        kill = f"{torch.distributed.get_rank()}@{self.step}:{name}"
        mark = OUT / f"killed-{kill}"
        if kill not in KILLS or mark.exists():
            return
        if name != "taking" and TAKEN:
            assert TAKEN[-1].wait(timeout_s=60), TAKEN[-1]
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


# What torchtitan has for GPUs only


class NoMemoryMonitor:
    """There is no device whose memory could be measured."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def attend(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **options: Any) -> torch.Tensor:
    """Causal attention without masks between documents, in place of FlexAttention's kernel; its names are checked."""
    heads = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
    scale, grouped = options.get("scale"), options.get("enable_gqa", False)
    return F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)


def step_microbatches(
    self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any = None, **_: Any
) -> None:
    """`step` of a pipeline schedule with microbatches, which torch has after 2.13."""
    for stage in getattr(self, "_stages", None) or [self._stage]:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)


def numbers(path: str) -> Any:
    """Short texts, few enough for a run to see several epochs of them."""
    return datasets.Dataset.from_list([{"text": f"{n} {n * n} {n * n * n} " * (2 + n % 5)} for n in range(40)])


def adapt() -> None:
    metrics.build_device_memory_monitor = NoMemoryMonitor
    distributed.set_pg_timeouts = lambda **_: None
    FlexAttention.forward = attend
    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_sum(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = divide_after_sum
    Decoder.get_attention_masks = lambda self, positions: None
    if "arg_mbs" not in inspect.signature(PipelineScheduleMulti.step).parameters:
        PipelineScheduleMulti.step = PipelineScheduleSingle.step = step_microbatches
    CheckpointManager.dcp_save = before(CheckpointManager.dcp_save, lambda *_, **__: RUNNING.instant("writing"))
    DATASETS["numbers"] = DatasetConfig(path="", loader=numbers, sample_processor=lambda sample: sample["text"])


# Helpers


def digest(tensor: Any) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, torch.Tensor):
        return repr(local)
    return hashlib.sha256(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def before(call: Any, action: Any) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        action(*arguments, **options)
        return call(*arguments, **options)

    return called


def after(call: Any, action: Any) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        action()
        return result

    return called


def watch_takes() -> None:
    """Every step is to be captured here: wait for the memory, and keep what `take` returns."""
    from granted import wait_for_grant

    from keepstep.trainer.snapshotter import Snapshotter

    take, restore = Snapshotter.take, Snapshotter.restore

    def take_granted(self: Snapshotter, step: int) -> Any:
        wait_for_grant(self, 60)
        RUNNING.instant("written")
        pending = take(self, step)
        if not pending.skipped:
            TAKEN.append(pending)
        return pending

    def restore_recorded(self: Snapshotter) -> Any:
        restored = restore(self)
        with (OUT / f"restored-{torch.distributed.get_rank()}").open("a") as file:
            file.write(f"{restored.step if restored else None}\n")
        return restored

    Snapshotter.take, Snapshotter.restore = take_granted, restore_recorded  # type: ignore[method-assign]


def start(arguments: list[str]) -> None:
    global OUT, RAISE_AT
    OUT = Path(arguments.pop(0))
    case = arguments.pop(0)
    KILLS.update(option.removeprefix("--kill=") for option in arguments if option.startswith("--kill="))
    RAISE_AT = max((int(option[8:]) for option in arguments if option.startswith("--raise=")), default=-1)
    flags = [option for option in arguments if not option.startswith(("--kill=", "--raise="))]
    adapt()
    random.seed(7)  # torchtitan seeds torch only
    if any("keepstep" in flag for flag in flags):
        sys.path.append(str(Path(__file__).parents[1] / "integration"))
        watch_takes()
    sys.modules["titan_trainer"] = sys.modules["__main__"]
    sys.modules["__main__"].case = lambda: configure(case)  # type: ignore[attr-defined]
    sys.argv[1:] = ["--module", "titan_trainer", "--config", "case", *flags]
    main()


if __name__ == "__main__":
    start(sys.argv[1:])
