"""When `take` checks the whole state and when a subset, and what becomes of a snapshot whose tensors had moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from keepstep.trainer.plan.plan_cache import MAX_MISSED, MOVED, SETTLED_AFTER, CachedPlan, PlanCache
from keepstep.trainer.plan.replication import ReplicaProver
from keepstep.trainer.plan.tensor_blocks import TensorAddresses
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.optimizer_fence import OptimizerFence
from keepstep.trainer.state.reader import StateReader
from keepstep.trainer.state.structure import MAX_SUBSETS, spread


class Cached:
    """A small state, and the cache of its plans."""

    def __init__(self, *, unstable: bool = False) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(200)))
        objects = StateObjects({"model": self.model})
        self.fence = OptimizerFence([])
        reader = StateReader(objects, rng=False, grads=False)
        self.plans = PlanCache(reader, self.fence, ReplicaProver(objects, None), small_bytes=0, unstable=unstable)
        self.plans.prepare()

    def move_one(self) -> None:
        """So little that a spot check may miss it."""
        parameter = next(self.model.parameters())
        parameter.data = parameter.data.clone()

    def transpose_one(self) -> None:
        parameter = next(self.model.parameters())
        parameter.data = parameter.data.t()

    def lookup_that_misses(self, change: Callable[[], None]) -> CachedPlan:
        """A spot check just before a change has not seen it."""
        cached = self.plans.lookup(0)
        assert cached.subset is not None
        change()
        return cached

    def check_in_full(self, times: int = SETTLED_AFTER) -> None:
        for _ in range(times):
            cached = self.plans.lookup(0)
            assert cached.subset is None
            assert self.plans.validate(cached) == ""


@pytest.fixture
def state() -> Iterator[Cached]:
    cached = Cached()
    yield cached
    cached.fence.close()


@pytest.fixture
def settled(state: Cached) -> Cached:
    state.check_in_full()
    assert state.plans.lookup(0).subset is not None
    return state


@pytest.mark.parametrize("count", [0, 1, 15, 16, 100, 1172, 40_000])
def test_every_item_is_in_one_subset(count: int) -> None:
    subsets = spread(range(count))
    assert sorted(item for subset in subsets for item in subset) == list(range(count))
    assert 1 <= len(subsets) <= MAX_SUBSETS
    assert max(map(len, subsets)) - min(map(len, subsets)) <= 1


def test_a_subset_has_items_of_every_kind_of_a_model_that_repeats_itself() -> None:
    kinds = [number % 16 for number in range(16 * 64)]
    for subset in spread(list(enumerate(kinds))):
        assert len({kind for _, kind in subset}) >= 12


def test_every_subset_is_checked_in_time(settled: Cached) -> None:
    assert {settled.plans.lookup(0).subset for _ in range(40 * MAX_SUBSETS)} == set(range(MAX_SUBSETS))


def test_the_plan_stays_while_nothing_moves_and_is_made_again_after_a_change(settled: Cached) -> None:
    plan = settled.plans.lookup(0).plan
    assert settled.plans.lookup(1).plan is plan
    for parameter in settled.model.parameters():
        parameter.data = parameter.data.clone()
    moved = settled.plans.lookup(2)
    assert moved.subset is None
    assert moved.plan is not plan


def test_a_change_that_take_missed_voids_the_snapshot_and_full_checks_begin_again(settled: Cached) -> None:
    missed = settled.lookup_that_misses(settled.move_one)
    assert settled.plans.validate(missed) == MOVED
    settled.check_in_full()
    assert settled.plans.lookup(0).plan is not missed.plan
    assert settled.plans.lookup(0).subset is not None


def test_a_state_whose_changes_are_missed_again_and_again_is_never_spot_checked_any_more(state: Cached) -> None:
    for _ in range(MAX_MISSED):
        state.check_in_full()
        assert state.plans.validate(state.lookup_that_misses(state.move_one)) == MOVED
    state.check_in_full(3 * SETTLED_AFTER)


def test_a_state_that_moves_after_a_full_check_is_checked_in_full_and_nothing_is_void(state: Cached) -> None:
    cached = state.plans.lookup(0)
    state.move_one()
    assert state.plans.validate(cached) == ""
    state.check_in_full(3 * SETTLED_AFTER)


@pytest.mark.parametrize("found_by", ["missed changes", "a full check"])
def test_a_spot_check_before_the_state_was_found_unstable_is_still_validated(state: Cached, found_by: str) -> None:
    """Two snapshots are in flight: the validation of the first one finds the state unstable."""
    earlier = state.plans.lookup(0)
    state.check_in_full()
    for _ in range(MAX_MISSED if found_by == "missed changes" else 1):
        later = state.lookup_that_misses(state.move_one)
        if found_by == "missed changes":
            assert state.plans.validate(later) == MOVED
            if not state.plans.unstable:
                state.check_in_full()
        else:
            assert state.plans.validate(earlier) == ""
    assert state.plans.unstable
    assert state.plans.validate(later) == MOVED


def test_another_meaning_of_the_same_bytes_is_found_though_the_state_is_unstable() -> None:
    state = Cached(unstable=True)
    moved = state.plans.lookup(0)
    state.move_one()
    assert state.plans.validate(moved) == ""
    cached = state.plans.lookup(0)
    state.transpose_one()
    assert state.plans.validate(cached) == MOVED
    state.fence.close()


def test_validations_of_an_older_layout_do_not_count_for_the_new_one(state: Cached) -> None:
    older = state.plans.lookup(0)
    state.plans.outdate()
    assert state.plans.lookup(0).plan is not older.plan
    for _ in range(2 * SETTLED_AFTER):
        assert state.plans.validate(older) == ""
    assert state.plans.lookup(0).subset is None


# What is checked


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(40)])
        self.norm = torch.nn.BatchNorm1d(3)
        self.wave = torch.nn.Buffer(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.register_buffer("shown", torch.zeros(1))


class State:
    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.reader = StateReader(
            StateObjects({"model": self.model, "optimizer": self.optimizer}), rng=False, grads=False
        )
        reading = self.reader.read()
        self.addresses = TensorAddresses(reading.tensors, reading.found.runs)
        reading = self.reader.read()  # the first one was of what state_dict() gave, which are other objects
        assert self.addresses.unchanged(reading.found.runs)
        self.checks = [
            *self.addresses.checks(),
            *self.addresses.geometry_checks(),
            *(check for structure in reading.relied_on for check in structure.checks()),
        ]

    @property
    def some(self) -> torch.nn.Parameter:
        layer = self.model.layers[17]
        assert isinstance(layer, torch.nn.Linear)
        return layer.weight

    def fails_validation(self) -> bool:
        return not all(check() for check in self.checks)

    def fails_full_check(self) -> bool:
        reading = self.reader.read()
        return not self.addresses.unchanged(reading.found.runs)


def move_data(state: State) -> None:
    state.some.data = state.some.data.clone()


def grow_in_place(state: State) -> None:
    state.optimizer.state[state.some]["exp_avg"].resize_(4, 3)


def replace_parameter(state: State) -> None:
    state.model.layers[17].weight = torch.nn.Parameter(state.some.detach().clone())


def replace_moment(state: State) -> None:
    state.optimizer.state[state.some]["exp_avg"] = torch.zeros(3, 3)


def replace_state_of_one(state: State) -> None:
    state.optimizer.state[state.some] = {**state.optimizer.state[state.some]}


def add_moment(state: State) -> None:
    state.optimizer.state[state.some]["max"] = torch.zeros(3, 3)


def load_optimizer(state: State) -> None:
    state.optimizer.load_state_dict(state.optimizer.state_dict())


def replace_module(state: State) -> None:
    state.model.layers[17] = torch.nn.Linear(3, 3)


def add_buffer(state: State) -> None:
    state.model.layers[17].register_buffer("extra", torch.zeros(1))


def rename(state: State) -> None:
    layers = state.model.layers
    layer = layers[17]
    layer._parameters["other"] = layer._parameters.pop("weight")
    layer._parameters["bias"] = layer._parameters.pop("bias")


def hook(state: State) -> None:
    state.model.layers[17].register_state_dict_post_hook(lambda *args: None)


def transpose(state: State) -> None:
    state.some.data = state.some.data.t()


def reinterpret(state: State) -> None:
    state.model.norm.running_mean.data = state.model.norm.running_mean.view(torch.int32)


def conjugate(state: State) -> None:
    state.model.wave.data = state.model.wave.data.conj()


def hide_another_buffer(state: State) -> None:
    state.model._non_persistent_buffers_set.clear()
    state.model._non_persistent_buffers_set.add("shown")


def replace_the_dict_of_buffers(state: State) -> None:
    norm = state.model.norm
    norm.__dict__["_buffers"] = {**norm._buffers, "running_mean": torch.ones(3)}


class OtherLinear(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"more": 1}


def become_another_class(state: State) -> None:
    state.model.layers[17].__class__ = OtherLinear


def patch_a_method(state: State) -> None:
    state.model.layers[17]._save_to_state_dict = lambda *args: None  # type: ignore[method-assign, assignment]


def patch_the_optimizer(state: State) -> None:
    state.optimizer.state_dict = dict  # type: ignore[method-assign, assignment]


CHANGES = [
    transpose, reinterpret, conjugate, hide_another_buffer, replace_the_dict_of_buffers, become_another_class,
    patch_a_method, patch_the_optimizer,
    move_data, grow_in_place, replace_parameter, replace_moment, replace_state_of_one, add_moment, load_optimizer,
    replace_module, add_buffer, rename, hook,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_validation_finds_any_change_in_any_place(change: Callable[[State], None]) -> None:
    state = State()
    assert not state.fails_validation()
    assert not state.fails_full_check()
    change(state)
    assert state.fails_validation()


@pytest.mark.parametrize("subset", range(MAX_SUBSETS))
def test_a_move_of_every_parameter_shows_in_every_subset(subset: int) -> None:
    state = State()
    assert state.addresses.unchanged(state.reader.read(subset).found.runs, subset)
    for parameter in state.model.parameters():
        parameter.data = parameter.data.clone()
    assert not state.addresses.unchanged(state.reader.read(subset).found.runs, subset)


@pytest.mark.parametrize("subset", range(MAX_SUBSETS))
def test_a_model_that_is_built_again_shows_in_every_subset(subset: int) -> None:
    state = State()
    for index in range(40):
        state.model.layers[index] = torch.nn.Linear(3, 3)
    assert not state.addresses.unchanged(state.reader.read(subset).found.runs, subset)
