"""Digests of the state."""

from __future__ import annotations

import random

import torch

import keepstep
from keepstep.trainer.check.digests import read_state, tensor_digest, value_text
from keepstep.trainer.state.objects import MODULE, StateObjects


def test_tensors_of_other_type_or_shape_have_other_digests() -> None:
    values = torch.arange(4)
    digests = {tensor_digest(each) for each in (values, values.reshape(2, 2), values.int(), values + 1)}
    assert len(digests) == 4
    assert tensor_digest(torch.tensor(0.5)) == "0.5"
    column = torch.tensor([[3, 0]], dtype=torch.int16)[:, 0]
    assert tensor_digest(column) == tensor_digest(torch.tensor([3], dtype=torch.int16))


def test_path_of_a_file_is_shown_whatever_its_length() -> None:
    path = "/home/user/project/lightning_logs/version_1/checkpoints/epoch=0-step=3.ckpt"
    assert value_text(path) == repr(path)
    assert value_text("x" * len(path)).startswith("#")


def test_kinds_can_be_chosen() -> None:
    model = torch.nn.Linear(2, 1)
    state = {"model": model, "counts": {"best": 1.5}}
    assert read_state(StateObjects(state))["counts.best"] == "1.5"
    assert "counts.best" not in read_state(StateObjects(state), (MODULE,))


def test_tensors_of_floating_point_have_their_type() -> None:
    state = {"model": torch.nn.Linear(2, 1), "counts": {"seen": torch.ones(40, dtype=torch.int64), "mean": 0.5}}
    digests = read_state(StateObjects(state))
    assert digests["model.weight"].endswith(" float32")
    assert digests["model.bias"] == f"{state['model'].bias.item()!r} float32"  # type: ignore[union-attr]
    assert " " not in digests["counts.seen"]
    assert digests["counts.mean"] == "0.5"


def test_random_states_that_a_loader_notes_are_random_states() -> None:
    loader = keepstep.Loader(torch.utils.data.DataLoader(range(4), shuffle=True))
    objects = StateObjects({"loader": loader})
    next(iter(loader))
    before = read_state(objects)
    noted = [path for path in before if path.startswith("rng.loader.")]
    assert {path.rpartition(".")[2] for path in noted} >= {"python", "numpy", "torch"}
    assert "loader.source.order" not in before
    random.random()
    assert read_state(objects)[noted[0]] == before[noted[0]]
