"""take → change everything → restore: the same bits come back, in the same objects, or nothing is touched.

One process and a real keeper: a Snapshotter closed with `finished=False` leaves its state there, and
the next one of this process finds it as a restarted trainer would.
"""

from __future__ import annotations

import copy
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep import CaptureError, Config, RecoveryError, Restored, Snapshotter, Survives
from keepstep.arena import records as h
from keepstep.testing.run import LocalRun, wait_until
from keepstep.trainer.plan import tensor_blocks
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.reader import StateReader

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

GEOMETRIES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda dtype: noise((4, 6), dtype),
    "scalar": lambda dtype: noise((), dtype),
    "empty": lambda dtype: noise((0, 3), dtype),
    "one": lambda dtype: noise((1, 1, 1), dtype),
    "transposed": lambda dtype: noise((4, 6), dtype).t(),
    "channels_last": lambda dtype: noise((2, 4, 5, 3), dtype).permute(0, 3, 1, 2),
    "with gaps": lambda dtype: noise((4, 6), dtype)[:, ::2],
    "inside": lambda dtype: noise((9,), dtype)[3:5],
    "expanded": lambda dtype: noise((3, 1), dtype).expand(3, 5),
    "large": lambda dtype: noise((9000,), dtype),
}


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes seen as `dtype`: NaNs with payloads, denormals and negative zeros among them."""
    count = int(np.prod(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).view(torch.bool)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """What makes two tensors the same: NaN equals NaN and -0.0 is not 0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(plain.dtype), tuple(plain.shape), data


def frozen(value: Any) -> Any:
    """A value that compares by exact type, order and bits."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return type(value), [(frozen(key), frozen(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [frozen(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), str(value.dtype), value.shape, value.tobytes()
    return type(value), value.hex() if type(value) is float else value


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite every element, whatever the geometry."""
    target = tensor.detach()
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target = target.narrow(dim, 0, 1)
    before = bits(target)
    target.copy_(noise(tuple(target.shape), target.dtype))
    if target.numel() > 64:
        assert bits(target) != before


class Run:
    """The lives of one run in this process."""

    def __init__(self, local: LocalRun) -> None:
        self.local = local
        self.last: Snapshotter | None = None

    def save(self, state: dict[str, Any], *, step: int = 0, config: Config | None = None) -> None:
        """A life that restores, takes one snapshot and dies."""
        snapshots = self.begin(state, config=config)
        snapshots.restore()
        self.take(snapshots, step)
        snapshots.close(finished=False)

    def load(self, state: dict[str, Any], *, config: Config | None = None) -> Restored:
        """A life that restores and dies."""
        snapshots = self.begin(state, config=config)
        try:
            restored = snapshots.restore()
        finally:
            snapshots.close(finished=False)
        assert restored is not None
        return restored

    def begin(self, state: dict[str, Any], *, config: Config | None = None) -> Snapshotter:
        self.last = Snapshotter(state, config)
        return self.last

    def take(self, snapshots: Snapshotter, step: int) -> None:
        pending = snapshots.take(step)
        assert pending.wait(timeout_s=30) is Survives.PROCESS, pending

    def finish(self) -> None:
        """A life that ends normally: nothing is left."""
        if self.last is not None:
            self.last.close(finished=False)
            Snapshotter({"nothing": {}}).close()
            wait_until(
                lambda: not self.local.processes() and not self.local.files(),
                what=lambda: f"the end of {self.local.processes()} and {self.local.files()} after a normal end",
            )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    torch.manual_seed(7)
    with LocalRun() as local:
        for name, value in local.environ.items():
            monkeypatch.setenv(name, value)
        this = Run(local)
        yield this
        this.finish()


# Tensors


def test_every_dtype_and_geometry_comes_back_bit_for_bit(run: Run) -> None:
    live = {f"{dtype} {name}": make(dtype) for dtype in DTYPES for name, make in GEOMETRIES.items()}
    expected = {name: bits(tensor) for name, tensor in live.items()}
    objects = dict(live)
    run.save({"tensors": live})
    for tensor in live.values():
        scribble(tensor)
    run.load({"tensors": live})
    assert {name: bits(tensor) for name, tensor in live.items()} == expected
    assert all(live[name] is tensor for name, tensor in objects.items()), "a tensor was replaced, not written"

    empty: dict[str, torch.Tensor] = {}
    run.load({"tensors": empty})
    assert {name: bits(tensor) for name, tensor in empty.items()} == expected
    assert list(empty) == list(live)
    for name in ("contiguous", "transposed", "channels_last"):
        for dtype in DTYPES:
            assert empty[f"{dtype} {name}"].stride() == live[f"{dtype} {name}"].stride()


def test_conjugated_and_negated_views_come_back_as_values(run: Run) -> None:
    z = noise((3, 4), torch.int16).to(torch.complex64)
    other = noise((5,), torch.int16).to(torch.complex64)
    live = {"z": z, "conj": z.conj(), "other": other.conj(), "neg": z.conj().imag}
    expected = frozen(live)
    run.save({"tensors": live})
    scribble(z)
    scribble(live["other"])
    run.load({"tensors": live})
    assert frozen(live) == expected
    fresh: dict[str, torch.Tensor] = {}
    run.load({"tensors": fresh})
    assert frozen(fresh) == expected


def test_views_of_one_storage_are_stored_once_and_come_back(run: Run) -> None:
    base = noise((64, 1024), torch.float32)
    live = {
        "rows": base[3:40],
        "columns": base[:, 5:900:3],
        "turned": base.t(),
        "bytes": base.view(torch.uint8)[1:3, 1:],
        "again": base,
        "apart": noise((3,), torch.float32),
        "wide": base[7, 9].expand(6),
    }
    expected = frozen(live)
    built = tensor_blocks.build(list(live.values()), dict(enumerate(live)))
    assert len(built.layout.entries) == 2, "one entry for the storage, one for the tensor apart"
    run.save({"tensors": live})
    scribble(base)
    scribble(live["apart"])
    run.load({"tensors": live})
    assert frozen(live) == expected
    fresh: dict[str, torch.Tensor] = {}
    run.load({"tensors": fresh})
    assert frozen(fresh) == expected


def test_tied_parameters_stay_tied(run: Run) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(300, 300, bias=False)
            self.outer = nn.Linear(300, 300, bias=False)
            self.outer.weight = self.inner.weight

    model = Tied()
    expected = bits(model.inner.weight)
    run.save({"model": model})
    other = Tied()
    run.load({"model": other})
    assert other.outer.weight is other.inner.weight
    assert bits(other.inner.weight) == expected


def test_restored_tensors_do_not_alias_the_arena(run: Run) -> None:
    """What training writes after a restore must not reach the snapshot that the next restore reads."""
    model, optimizer = stepped_model(torch.optim.AdamW)
    keep = {"big": noise((300, 300), torch.float32), "small": noise((3,), torch.float32)}
    state = {"model": model, "optimizer": optimizer, "keep": keep}
    expected = whole(state)
    run.save(state)
    for _ in range(2):
        fresh_model, fresh_optimizer = fresh_pair(torch.optim.AdamW)
        fresh: dict[str, Any] = {"model": fresh_model, "optimizer": fresh_optimizer, "keep": {}}
        run.load(fresh)
        assert whole(fresh) == expected
        train(fresh_model, fresh_optimizer)
        for tensor in fresh["keep"].values():
            scribble(tensor)
        assert whole(fresh) != expected


# Values


class Counting:
    """A Stateful of the user's: gives back whatever it was told."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def odd_values() -> dict[Any, Any]:
    return {
        "tuple": (1, 2.5, ("a", (), [])), "none": None, "bool": True, "text": "häh \udc80", "bytes": b"\0\xff",
        "bytearray": bytearray(b"xy"), "big": 1 << 200, "negative": -(1 << 63), "nan": float("inf"), "zero": -0.0,
        "complex": complex(-0.0, 1e-300), "set": {1, 2, 3}, "frozenset": frozenset({"a"}), "range": range(3, 9, 2),
        "counter": Counter({3: 2, 7: 1}), "ordered": OrderedDict(b=1, a=2), "deque": deque([1, 2], maxlen=5),
        "defaultdict": defaultdict(list, {1: [2]}), "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float64(0.1), 1: "int key", -1.5: "float key", None: "none key", False: "bool key",
        (1, "a"): "tuple key", b"k": "bytes key", "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "size": torch.Size([2, 3]), "empty": {}, "deep": [[[[{"x": (torch.tensor([1.5]), [torch.zeros(2, 0)])}]]]],
        "": "empty key", "a.b": {"c": 1},
    }  # fmt: skip


def test_values_of_any_nesting_come_back_with_their_types_and_keys(run: Run) -> None:
    plain, stateful = odd_values(), Counting(odd_values())
    expected = frozen(plain)
    run.save({"plain": plain, "stateful": stateful})
    restored_plain: dict[Any, Any] = {}
    restored_stateful = Counting(None)
    run.load({"plain": restored_plain, "stateful": restored_stateful})
    assert frozen(restored_plain) == expected
    assert frozen(restored_stateful.value) == expected


def test_plain_containers_are_restored_in_place(run: Run) -> None:
    weight, buffer = noise((200, 200), torch.float32), noise((3,), torch.int64)
    pair = (noise((5,), torch.float32), noise((2,), torch.float32), 7)
    inner = {"weight": weight, "pair": pair, "count": 1}
    history = [buffer, {"loss": 0.5}, "text"]
    live: dict[str, Any] = {"inner": inner, "history": history, "step": 3, "gone": 1}
    expected = frozen(live)
    run.save({"plain": live})

    for tensor in (weight, buffer, pair[0], pair[1]):
        scribble(tensor)
    inner["count"] = 99
    history += ["more", "and more"]
    history[1]["loss"] = 0.25
    live["step"], live["new"] = 4, "x"
    del live["gone"]
    run.load({"plain": live})
    assert frozen(live) == expected
    assert live["inner"] is inner
    assert live["history"] is history
    assert inner["weight"] is weight
    assert history[0] is buffer
    assert inner["pair"][0] is pair[0], "a tensor inside a tuple is written in place too"


def test_restored_keys_stand_in_the_order_in_which_they_were_saved(run: Run) -> None:
    run.save({"plain": {"b": 1, "a": 2, "c": {"y": 1, "x": 2}}})
    live: dict[str, Any] = {"c": {"x": 0, "y": 0}, "a": 0, "b": 0}
    run.load({"plain": live})
    assert list(live) == ["b", "a", "c"]
    assert list(live["c"]) == ["y", "x"]


def test_generators_in_the_state_go_on_where_they_were(run: Run) -> None:
    def make() -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(3),
            "python": random.Random(3),
            "numpy": [np.random.Generator(kind(3)) for kind in BIT_GENERATORS],
        }

    def draws(state: dict[str, Any]) -> Any:
        global_ones = (torch.rand(3).tolist(), random.random(), np.random.rand())
        own = (torch.rand(3, generator=state["torch"]).tolist(), state["python"].gauss(0, 1))
        return global_ones, own, [generator.normal(size=3).tolist() for generator in state["numpy"]]

    live = make()
    draws(live)
    live["numpy"][0].integers(0, 2**31, dtype=np.int32)  # leaves half a word behind
    live["python"].gauss(0, 1)  # leaves the second of a pair behind
    np.random.randn()
    torch.randn(3)
    run.save({"generators": live})
    expected = draws(live)
    draws(live)
    restored = run.load({"generators": live})
    assert draws(live) == expected
    fresh = make()
    run.load({"generators": fresh})
    assert draws(fresh) == expected
    restored.restore_rng()
    assert draws(live) == expected


BIT_GENERATORS = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)


def test_rng_stays_alone_when_it_is_turned_off(run: Run) -> None:
    config = Config(rng=False)
    run.save({"plain": {"x": 1}}, config=config)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    run.load({"plain": {"x": 1}}, config=config)
    assert torch.equal(torch.rand(3), expected)


# Layouts that change in mid-run


def test_state_that_grows_at_every_step_outgrows_its_arena_and_is_kept_again(run: Run) -> None:
    state: dict[str, Any] = {"log": [], "rows": torch.zeros(0), "text": ""}
    snapshots = run.begin({"plain": state})
    assert snapshots.restore() is None
    kept = []
    for step in range(60):
        state["log"].append((step, float(step), "x" * 100))
        state["rows"] = torch.arange(float(step * 4000))
        state["text"] = "y" * (step * 60_000)
        pending = snapshots.take(step)
        if pending.wait(timeout_s=30) is Survives.PROCESS:
            kept.append(step)
            expected = frozen(state)
        else:
            assert any(word in pending.reason for word in ("arena", "memory", "grant")), pending.reason
            time.sleep(0.05)
    assert len(kept) > 20, kept
    assert kept[-1] > 50
    snapshots.close(finished=False)
    fresh: dict[str, Any] = {}
    assert run.load({"plain": fresh}).step == kept[-1]
    assert frozen(fresh) == expected


def test_tensors_may_appear_vanish_and_change_between_takes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"a": noise((300, 300), torch.float32), "b": noise((4,), torch.float32), "list": []}
    monkeypatch.setattr("keepstep.trainer.plan.state_planner.SMALL_BYTES", 0)
    snapshots = run.begin({"plain": state})
    snapshots.restore()
    changes: list[Callable[[], object]] = [
        lambda: state.update(c=noise((10, 10), torch.bfloat16)),
        lambda: state.pop("b"),
        lambda: state.update(a=noise((299, 300), torch.float32)),
        lambda: state.update(a=state["a"].half()),
        lambda: state["list"].extend([noise((7,), torch.int64), noise((), torch.float64)]),
        lambda: state.update(view=state["a"][3:9]),
        lambda: state["a"].set_(noise((299, 300), torch.float16)),
        lambda: state["a"].t_(),
        lambda: state.update(z=noise((5,), torch.int16).to(torch.complex64)),
        lambda: state.update(z=state["z"].conj()),
        lambda: state.update(c=state["c"].view(torch.int16)),
        lambda: state.clear(),
    ]
    for step, change in enumerate(changes):
        change()
        run.take(snapshots, step)
        expected = frozen(state)
        snapshots.close(finished=False)
        fresh: dict[str, Any] = {}
        assert run.load({"plain": fresh}).step == step
        assert frozen(fresh) == expected, f"after change {step}"
        snapshots = run.begin({"plain": state})
        snapshots.restore()
        assert frozen(state) == expected, f"after change {step}"


# Modules and optimizers


def fresh_pair(kind: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(150, 150), nn.BatchNorm1d(150), nn.Linear(150, 4))
    return model, kind(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 150)).square().mean().backward()
        optimizer.step()


def stepped_model(kind: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = fresh_pair(kind, **options)
    train(model, optimizer)
    return model, optimizer


def whole(state: dict[str, Any]) -> Any:
    """Everything in the state, comparable."""
    return {
        name: frozen(thing.state_dict() if hasattr(thing, "state_dict") else thing)
        for name, thing in state.items()
        if name != "generator"
    }


def test_optimizer_tensors_are_written_in_place_and_never_cast(run: Run) -> None:
    model, optimizer = fresh_pair(torch.optim.SGD, momentum=0.9)
    model.bfloat16()
    for index, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "master": noise(tuple(parameter.shape), torch.float32),
            "index": torch.tensor([1 << 40, index]),
            "nested": {"rows": [noise((3,), torch.float64)], 4: "x"},
            "flag": True,
        }
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    optimizer.param_groups[0]["lazy"] = (1, 2)
    state = {"model": model, "optimizer": optimizer}
    expected = whole(state)
    run.save(state)

    masters = [optimizer.state[parameter]["master"] for parameter in model.parameters()]
    lr = optimizer.param_groups[0]["lr"]
    for tensor in [*masters, lr, *model.parameters()]:
        scribble(tensor)
    run.load(state)
    assert whole(state) == expected
    assert all(optimizer.state[p]["master"] is t for p, t in zip(model.parameters(), masters, strict=True))
    assert optimizer.param_groups[0]["lr"] is lr

    other, other_optimizer = fresh_pair(torch.optim.SGD, momentum=0.9)
    other.bfloat16()
    other_optimizer.param_groups[0]["lr"] = torch.tensor(0.5)  # of another dtype than what was saved
    run.load({"model": other, "optimizer": other_optimizer})
    assert whole({"model": other, "optimizer": other_optimizer}) == expected


def test_optimizer_goes_back_to_having_no_state(run: Run) -> None:
    model, optimizer = fresh_pair(torch.optim.AdamW)
    state = {"model": model, "optimizer": optimizer}
    expected = whole(state)
    run.save(state)
    train(model, optimizer)
    run.load(state)
    assert whole(state) == expected
    assert not optimizer.state


def test_optimizer_with_more_in_its_state_dict_gets_it_back(run: Run) -> None:
    class Counted(torch.optim.SGD):
        seen = 0
        table: torch.Tensor

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": self.seen, "table": self.table}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            state_dict = dict(state_dict)
            self.seen, self.table = state_dict.pop("seen"), state_dict.pop("table")
            super().load_state_dict(state_dict)

    def make() -> dict[str, Any]:
        model, optimizer = fresh_pair(Counted, momentum=0.9)
        optimizer.table = torch.zeros(3)
        model.bfloat16()
        return {"model": model, "optimizer": optimizer}

    state = make()
    for parameter in state["model"].parameters():
        state["optimizer"].state[parameter]["momentum_buffer"] = noise(tuple(parameter.shape), torch.float32)
    state["optimizer"].seen, state["optimizer"].table = 5, noise((3,), torch.float32)
    expected = whole(state)
    run.save(state)
    fresh = make()
    run.load(fresh)
    assert whole(fresh) == expected, "its own load_state_dict casts momentum to bfloat16; that must not stay"


def test_a_reader_that_remembers_sees_what_a_new_one_sees() -> None:
    """Changes that `state_dict()` shows and that leave the object's parts where they were."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(150, 150)
            self.register_buffer("late", None)
            self.register_parameter("scale", None)

    model = Lazy()
    groups = [{"params": [parameter]} for parameter in model.linear.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    state = {"model": model, "optimizer": optimizer}

    def train_linear() -> None:
        optimizer.zero_grad()
        model.linear(torch.randn(3, 150)).square().mean().backward()
        optimizer.step()

    changes: dict[str, Callable[[], object]] = {
        "first step": train_linear,
        "step": train_linear,
        "buffer appears": lambda: setattr(model, "late", noise((5,), torch.float32)),
        "parameter appears": lambda: setattr(model, "scale", nn.Parameter(torch.ones(150, 150))),
        "buffer is replaced": lambda: setattr(model, "late", noise((5,), torch.float32)),
        "optimizer is loaded": lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        "step after it": train_linear,
        "lr": lambda: optimizer.param_groups[0].update(lr=0.5, new=(1, 2)),
        "data is replaced": lambda: setattr(model.linear.weight, "data", noise((150, 150), torch.float32)),
        "groups are swapped": lambda: optimizer.param_groups.reverse(),
        "a state goes": lambda: optimizer.state.pop(model.linear.bias),
        "a value comes": lambda: optimizer.state[model.linear.weight].update(flag=3),
        "a value changes": lambda: optimizer.state[model.linear.weight].update(flag=4),
        "buffer vanishes": lambda: setattr(model, "late", None),
        "parameter vanishes": lambda: delattr(model, "scale"),
        "buffer is not persistent": lambda: model.register_buffer("late", torch.ones(3), persistent=False),
        "state_dict is hooked": lambda: model.register_state_dict_post_hook(lambda m, found, *_: found.update(x=3)),
    }
    remembering = StateReader(StateObjects(state), rng=False, grads=False)
    for what, change in changes.items():
        for _ in range(2):
            remembering.read()
        change()
        seen, truth = remembering.read(), StateReader(StateObjects(state), rng=False, grads=False).read()
        assert seen.values == truth.values, what
        assert [t.data_ptr() for t in seen.tensors] == [t.data_ptr() for t in truth.tensors], what
        assert seen.paths() == truth.paths(), what


@pytest.mark.parametrize("grads", [False, True])
def test_an_item_may_have_any_name(run: Run, grads: bool) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(3, 3)
        return {"grads": nn.Linear(2, 2), "rng": {"a": 1}, "items": [1, 2], "model": model, "loaders": {"b": 2}}

    before, after = make(), make()
    before["items"].append(3)
    config = Config(grads=grads)
    run.save(before, step=1, config=config)
    run.load(after, config=config)
    assert torch.equal(after["grads"].weight, before["grads"].weight)
    assert after["items"] == [1, 2, 3]


def test_a_value_that_cannot_be_kept_is_refused_inside_take_however_late_it_comes(run: Run) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.begin({"model": model, "optimizer": optimizer}) as snapshots:
        snapshots.restore()
        for step in range(1, 6):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            run.take(snapshots, step)
        optimizer.param_groups[0]["odd"] = object()
        pending = snapshots.take(6)
        assert pending.skipped
        assert "odd" in pending.reason


def test_what_is_encoded_behind_take_is_what_was_there_at_the_time() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    group = optimizer.param_groups[0]
    kept = {
        "history": deque([1]),
        "seen": {1},
        "table": np.ones(2),
        "nested": ([1], {"a": [2]}),
        "raw": bytearray(b"a"),
    }
    group.update(kept)
    reader = StateReader(StateObjects({"model": model, "optimizer": optimizer}), rng=True, grads=False)
    reader.read()
    reading, expected = (
        reader.read(),
        StateReader(StateObjects({"model": model, "optimizer": optimizer}), True, False).read().values,
    )
    group["history"].append(2)
    group["seen"].add(2)
    group["table"][0] = 7
    group["nested"][0].append(3)
    group["nested"][1]["a"].append(3)
    group["raw"].extend(b"b")
    group["lr"] = 17.0
    random.random()
    np.random.rand()
    torch.rand(1)
    assert reading.values == expected


def test_module_that_shows_copies_of_its_tensors_is_restored(run: Run) -> None:
    class Copies(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"].clone()

    model = Copies(200, 200)
    expected = bits(model.weight), bits(model.bias)
    run.save({"model": model})
    fresh = Copies(200, 200)
    run.load({"model": fresh})
    assert (bits(fresh.weight), bits(fresh.bias)) == expected


def test_module_with_extra_state_and_a_tensor_under_another_name_is_restored(run: Run) -> None:
    class Odd(nn.Module):
        """Keeps a value beside its tensors, and shows a tensor only as a copy under another name."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(300, 300))
            self.hidden = torch.randn(4)
            self.calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "shown"] = self.hidden.clone()

        def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
            self.hidden = state.pop(prefix + "shown").clone()
            super()._load_from_state_dict(state, prefix, *args)

    model = Odd()
    model.calls = 7
    expected = whole({"model": model})
    run.save({"model": model})
    fresh = Odd()
    weight = fresh.weight
    run.load({"model": fresh})
    assert whole({"model": fresh}) == expected
    assert fresh.weight is weight


# What does not fit


def mismatches() -> list[tuple[str, Callable[[dict[str, Any]], object], str]]:
    """(what is other now, how it becomes so, what the error says)"""
    return [
        ("another shape", lambda s: setattr(s["model"], "2", nn.Linear(150, 5)), "model.2.weight"),
        ("another dtype", lambda s: s["model"][0].half(), "model.0.weight"),
        ("a layer more", lambda s: s["model"].append(nn.Linear(4, 4)), "3.weight"),
        ("a layer less", lambda s: s["model"].pop(2), "2.weight"),
        ("a name more", lambda s: s.update(ema=nn.Linear(2, 2)), "ema"),
        ("a name less", lambda s: s.pop("plain"), "plain"),
        (
            "another group",
            lambda s: s["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
            "groups of",
        ),
        ("another kind of generator", lambda s: s.update(generator=random.Random(4)), "generator"),
        ("a module instead", lambda s: s.update(plain=nn.Linear(2, 2)), "plain"),
        ("a tensor instead", lambda s: s.update(plain=torch.ones(2)), "plain"),
        ("an optimizer instead", lambda s: s.update(plain=torch.optim.SGD([torch.ones(2)], lr=0.1)), "plain"),
        ("another optimizer", lambda s: s.update(optimizer=sgd_of(s)), "optimizer"),
        ("another kind", lambda s: s.update(plain=[1, 2]), "plain"),
        ("another parameter", lambda s: s.update(own=nn.Parameter(torch.ones(3))), "own"),
        ("a parameter inside", lambda s: s["plain"].update(own=nn.Parameter(torch.ones(3))), "plain.own"),
    ]


def sgd_of(state: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(state["optimizer"].param_groups[0]["params"], lr=0.1, momentum=0.9)


def random_state(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state().tolist()


def make_whole_state() -> dict[str, Any]:
    model, optimizer = stepped_model(torch.optim.AdamW)
    return {
        "model": model,
        "optimizer": optimizer,
        "plain": {"x": noise((4,), torch.float32), "n": 1, "own": nn.Parameter(torch.ones(4))},
        "own": nn.Parameter(torch.ones(2)),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "generator": torch.Generator().manual_seed(4),
    }


def test_mismatching_objects_are_named_and_nothing_is_written(run: Run) -> None:
    saved = make_whole_state()
    expected = whole(saved)
    run.save(saved)
    for what, change, message in mismatches():
        live = make_whole_state()
        change(live)
        before = (whole(live), random_state(live["generator"]))
        rng = torch.get_rng_state().tolist(), random.getstate()
        with pytest.raises(RecoveryError, match="does not fit the live objects") as caught:
            run.load(live)
        assert message in str(caught.value), what
        assert caught.value.hint, what
        after = (whole(live), random_state(live["generator"]))
        assert after == before, f"{what}: something was written"
        assert rng == (torch.get_rng_state().tolist(), random.getstate()), what
    fitting = make_whole_state()
    run.load(fitting)
    assert whole(fitting) == expected, "a refusal spends nothing"


def test_a_stateful_that_refuses_its_state_is_named(run: Run) -> None:
    class Picky(Counting):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not this one")

    run.save({"picky": Picky(3)})
    with pytest.raises(RecoveryError, match=r"picky.load_state_dict\(\) refused .*not this one"):
        run.load({"picky": Picky(3)})


# What cannot be captured


def lay_out(state: dict[str, Any]) -> tensor_blocks.Blocks:
    reading = StateReader(StateObjects(state), rng=False, grads=False).read()
    return tensor_blocks.build(reading.tensors, reading.paths())


class Labelled(torch.Tensor):
    """A tensor subclass that keepstep cannot know."""


def labelled() -> torch.Tensor:
    return torch.ones(3).as_subclass(Labelled)


def cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


OWN_ITEM = "module inside a stateful"
REFUSED: dict[str, Callable[[], Any]] = {
    "subclass": labelled,
    "parameter of a subclass": lambda: nn.Parameter(labelled()),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_coo(),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8),
    "lambda": lambda: lambda x: x,
    "object": object,
    "class": lambda: Labelled,
    "tensor in a set": lambda: {torch.ones(2)},
    "tensor in a defaultdict": lambda: defaultdict(list, a=[torch.ones(2)]),
    "cycle": cycle,
    OWN_ITEM: lambda: nn.Linear(2, 2),
}


@pytest.mark.filterwarnings("ignore:.*quantize.*:DeprecationWarning", "ignore:.*quantize.*:UserWarning")
@pytest.mark.parametrize(
    ("what", "where"),
    # A module in a plain dict is an object of the state by itself, and welcome.
    [pair for pair in product(REFUSED, ["plain", "stateful", "optimizer"]) if pair != (OWN_ITEM, "plain")],
)
def test_what_has_no_plain_bytes_is_refused_by_path(what: str, where: str) -> None:
    value = {"in": [0, {"here": REFUSED[what]()}]}
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["odd"] = value
    state = {"plain": value, "stateful": Counting(value), "optimizer": optimizer}[where]
    with pytest.raises(CaptureError, match=rf"{where}\..*in\.1\.here|contains itself") as caught:
        lay_out({where: state})
    assert caught.value.hint
    assert where in str(caught.value)


@pytest.mark.parametrize("thing", [3, "text", (1, 2), None, lambda x: x, {1, 2}])
def test_an_object_that_cannot_be_written_in_place_is_refused_by_name(thing: Any) -> None:
    with pytest.raises(CaptureError, match=r"odd .*cannot be restored in place") as caught:
        StateObjects({"odd": thing})
    assert caught.value.hint


def test_refusal_comes_from_restore_before_training_and_as_a_reason_from_take(run: Run) -> None:
    snapshots = run.begin({"plain": {"x": torch.ones(2), "f": print}})
    with pytest.raises(CaptureError, match=r"plain\.f"):
        snapshots.restore()
    snapshots.close(finished=False)

    state: dict[str, Any] = {"x": torch.ones(2)}
    snapshots = run.begin({"plain": state})
    snapshots.restore()
    run.take(snapshots, 0)
    state["x"] = torch.eye(2).to_sparse()
    for step in (1, 2):
        pending = snapshots.take(step)
        assert pending.skipped
        assert "plain.x" in pending.reason or "grant" in pending.reason
    state["x"] = torch.zeros(2)
    deadline = time.monotonic() + 10
    step = 3
    while snapshots.take(step).wait(timeout_s=10) is not Survives.PROCESS:
        assert time.monotonic() < deadline
        step += 1
        time.sleep(0.02)


def test_take_between_micro_batches_is_marked_inexact_though_the_last_one_was_not_due(run: Run) -> None:
    """The optimizer has stepped since the last capture, but not since the last take: gradients are state then."""
    model, optimizer = fresh_pair(torch.optim.SGD)
    snapshots = run.begin({"model": model, "optimizer": optimizer}, config=Config(every=2))
    snapshots.restore()
    train(model, optimizer, steps=1)
    run.take(snapshots, 0)
    train(model, optimizer, steps=1)
    assert snapshots.take(1).skipped
    model(torch.randn(8, 150)).square().mean().backward()
    run.take(snapshots, 2)
    with run.local.arenas() as (arena,):
        headers = [arena.trainer_header(slot) for slot in range(arena.num_slots)]
    flags = {header.version.step: header.flags for _, header in filter(None, headers)}
    assert not flags[0] & h.INEXACT
    assert flags[2] & h.INEXACT


def test_saving_changes_nothing(run: Run) -> None:
    """Not the tensors, not the optimizer, not the random states: a run with keepstep is the run without."""
    state = make_whole_state()
    before, rng = whole(state), torch.get_rng_state()
    python, numpy_state = random.getstate(), copy.deepcopy(np.random.get_state())
    run.save(state)
    assert whole(state) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == python
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))
