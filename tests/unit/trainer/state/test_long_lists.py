"""Long lists of plain values are encoded by what is new, and exactly as any other value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from counting import counted_lines
from keepstep import values as codec
from keepstep.errors import CaptureError
from keepstep.trainer.state import reader as readers
from keepstep.trainer.state.long_lists import BLOCK, LONG, LongLists
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.reader import StateReader, decode

COUNT = LONG + 3 * BLOCK + 7


def record(number: int) -> dict[str, Any]:
    return {"step": number, "loss": number / 7, "name": f"train {number}", "rates": [number * 0.1, (number, None)]}


class History:
    def __init__(self, count: int = COUNT) -> None:
        self.records: list[Any] = [record(number) for number in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"best": 0.5, "inner": {"records": self.records}, "copy": list(self.records)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records = state["inner"]["records"]


def make_reader(history: Any) -> StateReader:
    return StateReader(StateObjects({"history": history}), rng=False, grads=False)


def exactly(value: Any) -> str:
    """Text in which 1, 1.0 and True differ."""
    return repr(value)


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "append": lambda records: records.append(record(-1)),
    "append many": lambda records: records.extend(map(record, range(2 * BLOCK))),
    "replace": lambda records: records.__setitem__(3, record(-3)),
    "value of another type": lambda records: records[BLOCK].update(step=float(records[BLOCK]["step"])),
    "value": lambda records: records[5].update(loss=-1.0),
    "new key": lambda records: records[5].update(new=1),
    "other key": lambda records: records[6].update({"key": records[6].pop("name")}),
    "order of keys": lambda records: records[7].update({"step": records[7].pop("step")}),
    "deep in a list": lambda records: records[-1]["rates"].__setitem__(0, 5),
    "longer inside": lambda records: records[8]["rates"].append(2),
    "insert": lambda records: records.insert(0, record(-2)),
    "remove": lambda records: records.pop(BLOCK),
    "shorter": lambda records: records.__delitem__(slice(LONG // 2, None)),
    "something that may change": lambda records: records.insert(1, {"array": np.arange(3)}),
    "a tensor": lambda records: records.insert(2, torch.ones(2)),
    "nothing": lambda records: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_encodings_are_those_of_a_reader_that_remembers_nothing(name: str) -> None:
    history = History()
    reader = make_reader(history)
    for change in (CHANGES["nothing"], CHANGES[name], CHANGES["append"], CHANGES["nothing"]):
        change(history.records)
        assert reader.read().values == make_reader(history).read().values


def test_decoded_lists_have_the_same_types() -> None:
    history = History()
    history.records[4] = {"kinds": [True, 1, 1.0, -0.0, None, b"x", "y", np.float32(2), (1, [2])], 5: 6}
    tree = decode(make_reader(history).read().values)["items"]["history"]
    assert exactly(tree["inner"]["records"]) == exactly(history.records)
    assert exactly(tree["copy"]) == exactly(history.records)


def test_what_changes_after_the_reading_is_not_in_it() -> None:
    history = History()
    reader = make_reader(history)
    reading, expected = reader.read(), exactly(history.records)
    history.records[0]["loss"] = 17.0
    history.records[-1]["rates"].append(5)
    history.records.append(record(-1))
    assert exactly(decode(reading.values)["items"]["history"]["copy"]) == expected


def test_only_what_is_new_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    reader = make_reader(history)
    assert reader.read().values
    encoded: list[int] = []
    encode = codec.encode

    def counting(tree: Any, path: str = "") -> bytes:
        if isinstance(tree, list):
            encoded.append(len(tree))
        return encode(tree, path)

    monkeypatch.setattr(codec, "encode", counting)
    history.records.append(record(-1))
    assert reader.read().values
    assert encoded == [COUNT % BLOCK + 1] * 2, "the last block of both lists"


def test_unchanged_records_cost_next_to_nothing_inside_take() -> None:
    history = History(20_000)
    reader = make_reader(history)
    assert reader.read().values
    history.records.append(record(-1))
    with counted_lines() as count:
        reader.read()
    assert count.lines < 20_000, "lines of Python for 40,000 records"


def test_a_key_of_this_process_inside_a_record_is_refused() -> None:
    history = History()
    history.records[9] = {id(history): 1}
    with pytest.raises(CaptureError, match=r"history\[0:\].*id\(\) of a History"):
        _ = make_reader(history).read().values


def test_an_object_that_costs_much_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readers, "SLOW_S", 0.0)
    history = History()
    history.records[0] = {1, 2, 3}
    reader = make_reader(history)
    for _ in range(5):
        reader.read()
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert warning.startswith("reading history takes ")
    assert f"its longest part is history.inner.records, with {COUNT} items" in warning


def test_lists_that_are_gone_are_released() -> None:
    lists = LongLists("path", lambda encoded, path: None)
    for items in ([1] * LONG, None):
        lists.begin()
        if items is not None:
            assert lists.read(items) is not None
        lists.end()
    assert lists._lists == []
