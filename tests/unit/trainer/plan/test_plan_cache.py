"""What is looked at inside `take`, what behind it, and what becomes of a snapshot whose tensors had moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from keepstep.trainer.plan.stillness import LOOKS, MAX_BREACHES, MAX_SHARES, MOVED, SpotCheck, Stillness, deal
from keepstep.trainer.plan.tensor_blocks import Signature
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.reader import StateReader


def moved() -> bool:
    return False


def still() -> bool:
    return True


def trusted() -> Stillness:
    stillness = Stillness()
    look_in_full(stillness)
    assert stillness.glance().share is not None
    return stillness


def look_in_full(stillness: Stillness, times: int = LOOKS) -> None:
    for _ in range(times):
        glance = stillness.glance()
        assert glance.share is None
        assert stillness.look([still], glance) == ""


@pytest.mark.parametrize("count", [0, 1, 15, 16, 100, 1172, 40_000])
def test_every_item_is_in_one_share(count: int) -> None:
    shares = deal(range(count))
    assert sorted(item for share in shares for item in share) == list(range(count))
    assert 1 <= len(shares) <= MAX_SHARES
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_share_sees_something_of_every_kind_of_a_model_that_repeats_itself() -> None:
    kinds = [number % 16 for number in range(16 * 64)]
    for share in deal(list(enumerate(kinds))):
        assert len({kind for _, kind in share}) >= 12


def test_shares_come_round() -> None:
    stillness = trusted()
    turns = []
    for _ in range(2 * MAX_SHARES):
        share = stillness.glance().share
        assert share is not None
        turns.append(share % MAX_SHARES)
    assert set(turns) == set(range(MAX_SHARES))


def test_what_has_moved_unnoticed_voids_the_snapshot_and_trust_is_earned_again() -> None:
    stillness = trusted()
    assert stillness.look([still, moved], stillness.glance()) == MOVED
    look_in_full(stillness)
    assert stillness.glance().share is not None


def test_trust_that_is_broken_again_and_again_is_not_given_any_more() -> None:
    stillness = Stillness()
    for _ in range(MAX_BREACHES):
        look_in_full(stillness)
        assert stillness.look([moved], stillness.glance()) == MOVED
    look_in_full(stillness, 3 * LOOKS)


def test_a_state_that_moves_while_training_goes_on_is_looked_at_in_full_and_nothing_is_void() -> None:
    stillness = Stillness()
    assert stillness.look([moved], stillness.glance()) == ""
    look_in_full(stillness, 3 * LOOKS)


@pytest.mark.parametrize("restless_by", ["a third breach", "a full look"])
def test_a_share_that_was_looked_at_before_the_state_was_found_restless_is_still_checked(restless_by: str) -> None:
    """Two are in flight: the look behind the first one says that this state is never trusted again."""
    stillness = trusted()
    second = stillness.glance()
    if restless_by == "a full look":
        stillness.look([moved], SpotCheck(None, second.era))
    else:
        for _ in range(MAX_BREACHES):
            stillness.look([moved], SpotCheck(1, second.era))
    assert stillness.glance().share is None
    assert stillness.look([moved], second) == MOVED


def test_what_nothing_that_trains_changes_is_looked_at_behind_though_the_state_is_restless() -> None:
    stillness = Stillness(restless=True)
    assert stillness.look([moved], stillness.glance(), [still]) == ""
    assert stillness.look([still], stillness.glance(), [still, moved]) == MOVED


def test_a_look_behind_an_older_layout_earns_no_trust_for_the_new_one() -> None:
    stillness = Stillness()
    older = stillness.glance()
    stillness.start_again()
    for _ in range(2 * LOOKS):
        stillness.look([still], older)
    assert stillness.glance().share is None


# What is looked at


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
        self.signature = Signature(reading.tensors, reading.found.runs)
        reading = self.reader.read()  # the first one was of what state_dict() gave, which are other objects
        assert self.signature.matches(reading.found.runs)
        self.checks = [
            *self.signature.checks(),
            *self.signature.close_checks(),
            *(check for one in reading.relied_on for check in one.checks()),
        ]

    @property
    def some(self) -> torch.nn.Parameter:
        layer = self.model.layers[17]
        assert isinstance(layer, torch.nn.Linear)
        return layer.weight

    def seen_behind(self) -> bool:
        return not all(check() for check in self.checks)

    def seen_in_full(self) -> bool:
        reading = self.reader.read()
        return not self.signature.matches(reading.found.runs)


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
def test_any_change_in_any_place_is_seen_behind(change: Callable[[State], None]) -> None:
    state = State()
    assert not state.seen_behind()
    assert not state.seen_in_full()
    change(state)
    assert state.seen_behind()


@pytest.mark.parametrize("share", range(MAX_SHARES))
def test_what_moves_every_parameter_is_seen_inside_take_by_any_share(share: int) -> None:
    state = State()
    assert state.signature.matches(state.reader.read(share).found.runs, share)
    for parameter in state.model.parameters():
        parameter.data = parameter.data.clone()
    assert not state.signature.matches(state.reader.read(share).found.runs, share)


@pytest.mark.parametrize("share", range(MAX_SHARES))
def test_a_model_that_is_made_anew_is_seen_inside_take_by_any_share(share: int) -> None:
    state = State()
    for index in range(40):
        state.model.layers[index] = torch.nn.Linear(3, 3)
    assert not state.signature.matches(state.reader.read(share).found.runs, share)
