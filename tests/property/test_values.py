"""Values come back with the types and bits they had, or are refused by name; damaged bytes never become a value."""

from __future__ import annotations

import datetime
import enum
import functools
import math
import random
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep import values
from keepstep.errors import CaptureError, IntegrityError
from keepstep.values import (
    MAX_DEPTH,
    InlineTensor,
    TensorRef,
    TorchDevice,
    TorchDtype,
    TorchSize,
    decode,
    encode,
)

examples = settings(deadline=None, max_examples=100)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, all the way down. `==` would take True for 1, -0.0 for 0.0 and refuse nan."""
    if type(a) is not type(b):
        return False
    match a:
        case np.ndarray() | np.generic():
            return numpy_facts(a) == numpy_facts(b)
        case float():
            return struct.pack(">d", a) == struct.pack(">d", b)
        case complex():
            return same((a.real, a.imag), (b.real, b.imag))
        case dict():
            factories = [getattr(x, "default_factory", None) for x in (a, b)]
            return factories[0] is factories[1] and same(list(a), list(b)) and same(list(a.values()), list(b.values()))
        case set() | frozenset():  # without order, and nan is not even equal to itself
            return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
        case list() | tuple() | deque():
            limits = [getattr(x, "maxlen", None) for x in (a, b)]
            return limits[0] == limits[1] and len(a) == len(b) and all(map(same, a, b))
        case range() | slice():
            return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def numpy_facts(value: Any) -> tuple[Any, ...]:
    return value.dtype.str, value.dtype.char, value.dtype.type, value.shape, value.tobytes()


NUMPY_DTYPES = "|b1 |i1 >i2 <u4 >u8 <i8 <q >q <Q >f2 <f4 <f8 >f8 <f16 >c16 <c32 <M8[ns] >M8[7s] <m8 |S3 <U2 >U2 |V5"


@st.composite
def numpy_arrays(draw: st.DrawFn, max_dims: int = 3) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES.split())))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=max_dims)))
    if dtype.kind in "Ub":  # not all bytes are characters, or truth values
        return np.full(shape, draw(st.text(max_size=2)), dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, buffer=draw(st.binary(min_size=size, max_size=size))).copy()


any_float = st.floats() | st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack(">d", bits)[0])
any_int = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 3**999])
any_text = st.text(max_size=5) | st.text(st.characters(categories=["Cs", "Ll"]), max_size=3)
any_bytes = st.binary(max_size=5)
sizes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)


# Composites, because Hypothesis prints strategies now and then, and nested unions of them print as a hundred kilobytes.
@st.composite
def atoms(draw: st.DrawFn) -> Any:
    text = st.text(max_size=5)
    kinds = [
        st.none() | st.booleans(),
        any_int,
        any_float,
        st.builds(complex, any_float, any_float),
        any_text,
        any_bytes,
        st.integers(0, 2**40).map(TensorRef),
        st.builds(InlineTensor, text, sizes, any_bytes),
        text.map(TorchDtype) | text.map(TorchDevice) | sizes.map(TorchSize),
    ]
    return draw(draw(st.sampled_from(kinds)))


@st.composite
def keys(draw: st.DrawFn, levels: int = 2) -> Any:
    kind = draw(st.sampled_from(["atom"] * 3 + ["tuple", "frozenset"] * (levels > 0)))
    if kind == "atom":
        return draw(atoms())
    items = [draw(keys(levels=levels - 1)) for _ in range(draw(st.integers(0, 2)))]
    return tuple(items) if kind == "tuple" else frozenset(items)


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    kinds = [
        keys(),
        atoms(),
        any_bytes.map(bytearray),
        st.builds(range, any_int, any_int, st.integers(1, 2**65)),
        st.builds(slice, any_int, atoms(), st.none()),
        numpy_arrays(),
        numpy_arrays(max_dims=0).map(lambda array: array[()]),
    ]
    return draw(draw(st.sampled_from(kinds)))


FACTORIES = [None, int, float, list, dict, set, str, bool, tuple]


@st.composite
def trees(draw: st.DrawFn, levels: int = 3) -> Any:
    if levels == 0 or draw(st.integers(0, 9)) == 0:
        return draw(leaves())
    kind = draw(st.sampled_from([list, tuple, set, "text keys", dict, OrderedDict, Counter, defaultdict, deque]))
    size = draw(st.integers(0, 3))
    if kind is set:
        return {draw(keys()) for _ in range(size)}
    items = [draw(trees(levels=levels - 1)) for _ in range(size)]
    if kind in (list, tuple):
        return kind(items)
    if kind is deque:
        return deque(items, draw(st.none() | st.integers(0, 4)))
    pairs = {draw(any_text if kind == "text keys" else keys()): item for item in items}
    if kind is defaultdict:
        return defaultdict(draw(st.sampled_from(FACTORIES)), pairs)
    return pairs if kind == "text keys" else kind(pairs)


ADAMW_GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "foreach": None,
    "fused": True,
    "initial_lr": TensorRef(7),
    "params": [0, 1, 2, 3],
}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0.0, -0.0),
        ([1], (1,)),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        (deque([1]), deque([1], 1)),
        (defaultdict(int), defaultdict(float)),
        ({(1,)}, {(1.0,)}),
        (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
        (np.longlong(1), np.int64(1)),
    ],
)
def test_the_comparison_of_these_tests_is_stricter_than_equality(a: Any, b: Any) -> None:
    assert same(a, a)
    assert not same(a, b)


@examples
@given(trees())
def test_every_value_comes_back_with_its_types_and_bits(tree: Any) -> None:
    data = encode(tree)
    assert same(decode(data), tree)
    assert same(decode(memoryview(data)), tree)
    assert encode(decode(data)) == data


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (None, b"\xc0"),
        (-0.0, b"\xcb\x80\0\0\0\0\0\0\0"),
        (2**64 - 1, b"\xcf" + b"\xff" * 8),
        (2**64, b"\xc7\x0c\x01\x91\xc4\x09\x01" + b"\0" * 8),
        ("\ud800", b"\xc7\x06\x02\x91\xc4\x03\xed\xa0\x80"),
        (bytearray(b"a"), b"\xd6\x03\x91\xc4\x01a"),
        ([1, "a", b"b"], b"\x93\x01\xa1a\xc4\x01b"),
        ((), b"\xd4\x05\x90"),
        ((0.5,), b"\xc7\x0a\x05\x91\xcb\x3f\xe0\0\0\0\0\0\0"),
        ({3, 2, 1}, b"\xd6\x06\x93\x01\x02\x03"),
        ({"a": 1}, b"\x81\xa1a\x01"),
        ({}, b"\x80"),
        ({1: 2}, b"\xc7\x03\x08\x92\x01\x02"),
        (Counter({30: 1}), b"\xc7\x03\x0a\x92\x1e\x01"),
        (defaultdict(int, {1: 2}), b"\xc7\x07\x0b\x93\xa3int\x01\x02"),
        (deque([1], 2), b"\xc7\x03\x0c\x92\x02\x01"),
        (np.float32(1), b"\xc7\x0b\x10\x92\xa3<f4\xc4\x04\0\0\x80\x3f"),
        (np.array([[1], [2]], ">i2"), b"\xc7\x0d\x11\x94\xa3>i2\xc4\x04\0\x01\0\x02\x02\x01"),
        (TensorRef(3), b"\xd5\x20\x91\x03"),
        (InlineTensor("bool", (2,), b"\0\x01"), b"\xc7\x0b\x21\x93\xa4bool\xc4\x02\0\x01\x02"),
        (TorchDtype("int8"), b"\xc7\x06\x22\x91\xa4int8"),
        (TorchDevice("cpu"), b"\xc7\x05\x23\x91\xa3cpu"),
        (TorchSize((4, 5)), b"\xc7\x03\x24\x92\x04\x05"),
    ],
    ids=repr,
)
def test_the_format_is_these_bytes(value: Any, data: bytes) -> None:
    assert encode(value) == data
    assert same(decode(data), value)


@pytest.mark.parametrize(
    "value",
    [
        {"state": {0: {"step": InlineTensor("float32", (), b"\0\0\x80?")}}, "param_groups": [ADAMW_GROUP] * 10},
        {"milestones": Counter({30: 1, 80: 1}), "gamma": 0.1, "_last_lr": [np.float64(0.1)], "_step_count": 1},
        np.random.RandomState(3).get_state(),
        np.random.default_rng(3).bit_generator.state,
        [np.str_("a\0"), np.str_(""), np.str_("\ud800"), np.bytes_(b"a\0"), np.bytes_(b"")],
        [np.void(b""), np.void(b"\0"), np.array(b"")],
        [np.datetime64("NaT"), np.datetime64("2024-01-01T00", "h"), np.timedelta64(3), np.array(["", "a"])],
        [np.longlong(-1), np.int64(-1), np.ulonglong(1), np.longdouble("0.1"), np.bool_(True), np.complex64(1j)],
        {(1, (None, True)): 1, None: 2, 1.5: 3, True: 4, frozenset({1}): 5, 2**80: 6, TorchDtype("bfloat16"): 7},
        {"\udcff": 2**80, "a": 1},
        slice(None),
    ],
)
def test_real_state_comes_back(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_python_rng_goes_on_where_it_was_after_the_round_trip() -> None:
    source, target = random.Random(5), random.Random()
    source.gauss(0, 1)
    state = source.getstate()
    assert same(decode(encode(state)), state)
    target.setstate(decode(encode(state)))
    assert [source.gauss(0, 1) for _ in range(3)] == [target.gauss(0, 1) for _ in range(3)]


def test_a_fortran_array_comes_back_in_c_order_writable_and_owning_its_data() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))
    back = decode(encode(array))
    assert same(back, np.ascontiguousarray(array))
    assert back.flags.c_contiguous
    assert back.flags.writeable
    assert back.flags.owndata


def test_sets_are_written_alike_whatever_their_history() -> None:
    grown = set(range(1000))
    grown.difference_update(range(3, 1000))
    assert encode(grown) == encode({2, 0, 1})


class Colour(enum.IntEnum):
    RED = 1


class Celsius(float):
    pass


class Scaler:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"must not be asked for {name}")

    def __repr__(self) -> str:
        raise RuntimeError("must not be printed")


class Table(dict[str, int]):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("tree", "path", "hint"),
    [
        ({"scheduler": {"lambdas": [lambda epoch: epoch]}}, "scheduler.lambdas.0", "functions"),
        ({"a": [0, {"b": print}]}, "a.1.b", "functions"),
        ([functools.partial(int)], "0", "functions"),
        ([Scaler], "0", "functions"),
        ({"scaler": Scaler()}, "scaler", "state_dict"),
        ({"a": (1, Colour.RED)}, "a.1", ".value"),
        ([Celsius(1)], "0", "float(value)"),
        ([Point(1, 2)], "0", "tuple(value)"),
        ({"table": Table(a=1)}, "table", "dict(value)"),
        ([datetime.datetime(2024, 1, 1)], "0", "isoformat"),
        ([Path("x")], "0", "str(path)"),
        ({"a": {3: {None: object()}}}, "a.3.None", "state_dict"),
        ({"a": {Colour.RED: 1}}, "a.<Colour.RED: 1>(key)", ".value"),
        ({"a": {(1, Path("x")): 1}}, "a.(1, PosixPath('x'))(key).1", "str(path)"),
        ({10**5000: object()}, "<int>", "state_dict"),
        ({"first": {1, 2}, "second": {Scaler()}}, "second.0", "state_dict"),
        (deque([1, object()]), "1", "state_dict"),
        ({"d": defaultdict(lambda: 0)}, "d", "default_factory"),
        ({"d": defaultdict(Scaler)}, "d", "default_factory"),
        ([np.array([None])], "0", "tolist"),
        ([np.zeros(1, [("a", "f4")])], "0", "tolist"),
        ([np.zeros(1, [("a", "f4")])[0]], "0", "tolist"),
        ([np.zeros(1, np.dtype("f4", metadata={"unit": "m"}))], "0", "tolist"),
        ([np.array(["a"], np.dtypes.StringDType())], "0", "tolist"),
        ([np.ma.masked_array([1], [True])], "0", "plain numbers"),
        ([memoryview(b"")], "0", "plain numbers"),
        ([2**80, "\ud800", object()], "2", "state_dict"),
        ({"ref": TensorRef(-1)}, "ref", "tensor"),
        ({"size": TorchSize((1, True))}, "size", "tensor"),
        ({"name": TorchDtype(3)}, "name", "tensor"),  # type: ignore[arg-type]
        ({"small": InlineTensor("int8", (1,), bytearray(1))}, "small", "tensor"),  # type: ignore[arg-type]
    ],
)
def test_a_refusal_names_the_path_and_says_what_to_do(tree: Any, path: str, hint: str) -> None:
    with pytest.raises(CaptureError) as caught:
        encode(tree)
    assert caught.value.message.startswith(f"{path} ")
    assert hint in caught.value.hint


def test_a_refusal_puts_the_root_path_in_front() -> None:
    with pytest.raises(CaptureError, match=r"^optimizer\.0\.lr is of type object, which"):
        encode([{"lr": object()}], "optimizer")
    with pytest.raises(CaptureError, match=r"^optimizer is of type object"):
        encode(object(), "optimizer")
    with pytest.raises(CaptureError, match=r"^the value is of type object"):
        encode(object())


def test_a_value_that_changed_meanwhile_is_said_to_have_changed() -> None:
    # By the time the fault is looked for it is gone: that is all the encoder can know of the other thread.
    assert "state changed while it was captured" in str(values._explain({}, "state"))


def test_a_cycle_is_refused_where_it_closes() -> None:
    inner: dict[Any, Any] = {"ok": 1}
    inner["back"] = [inner]
    with pytest.raises(CaptureError, match=r"^root\.x\.back\.0 contains itself") as caught:
        encode({"x": inner}, "root")
    assert "cycle" in caught.value.hint


def test_a_cycle_with_many_ways_round_is_refused_at_once() -> None:
    knot: list[Any] = []
    knot.extend([knot, knot, (knot, {1: knot})])
    with pytest.raises(CaptureError, match="contains itself"):
        encode(knot)


def nested(kind: type, levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = {"a": inner} if kind is dict else {0: inner} if kind is Counter else kind([inner])
    return inner


@pytest.mark.parametrize("kind", [list, tuple, dict, Counter, frozenset, deque])
def test_depth_is_limited_alike_for_writer_and_reader(kind: type) -> None:
    deepest = nested(kind, MAX_DEPTH)
    assert same(decode(encode(deepest)), deepest)
    assert decode(encode(nested(kind, MAX_DEPTH - 1, TensorRef(1)))) is not None
    for inner in (nested(kind, 1), TensorRef(1) if kind is not deque else 1j):
        with pytest.raises(CaptureError, match=f"more than {MAX_DEPTH} levels"):
            encode(nested(kind, MAX_DEPTH, inner))


def test_a_very_deep_value_is_refused_with_a_short_message() -> None:
    with pytest.raises(CaptureError) as caught:
        encode(nested(list, 500), "state")
    assert "levels deep" in caught.value.message
    assert len(caught.value.message) < 300


def test_running_out_of_stack_is_a_capture_error() -> None:
    def call_from(level: int) -> bytes:
        return encode(nested(tuple, MAX_DEPTH)) if level == 0 else call_from(level - 1)

    with pytest.raises(CaptureError, match="recursion"):
        call_from(sys.getrecursionlimit() - 200)


def decoded_or_refused(data: bytes) -> None:
    """What any bytes must give: a value that is theirs alone, or IntegrityError."""
    try:
        value = decode(data)
    except IntegrityError:
        return
    assert encode(value) == data


@examples
@given(st.binary(max_size=64))
def test_random_bytes_are_a_value_or_an_integrity_error(data: bytes) -> None:
    decoded_or_refused(data)


@examples
@given(st.integers(0, 40), st.binary(max_size=40))
def test_random_bodies_under_our_codes_are_a_value_or_an_integrity_error(code: int, body: bytes) -> None:
    decoded_or_refused(b"\xc7" + bytes([len(body), code]) + body)


@examples
@given(st.integers(0, 40), trees())
def test_wellformed_bodies_under_the_wrong_code_are_a_value_or_an_integrity_error(code: int, tree: Any) -> None:
    for body in (encode(tree), encode([tree]), encode(list(tree)) if isinstance(tree, tuple | dict) else b"\x90"):
        decoded_or_refused(b"\xc9" + struct.pack(">IB", len(body), code) + body)
        if len(body) < 256:
            decoded_or_refused(b"\xc7" + bytes([len(body), code]) + body)


@examples
@given(trees(), st.data())
def test_mutated_bytes_are_a_value_or_an_integrity_error(tree: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode(tree))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(bytes(damaged))


def test_every_single_byte_flip_of_a_real_state_is_a_value_or_an_integrity_error() -> None:
    tree = {"g": [ADAMW_GROUP], "m": Counter({3: 1}), "r": (3, np.arange(3), np.float32(1)), "s": {1, (2,)}, "b": 2**70}
    whole = encode(tree)
    for position in range(len(whole)):
        for flip in (1, 0x80, 0xFF, whole[position] ^ 0xC1, whole[position] ^ 0xDD):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            decoded_or_refused(bytes(damaged))


@examples
@given(trees(), st.data())
def test_truncated_or_extended_bytes_are_an_integrity_error(tree: Any, data: st.DataObject) -> None:
    whole = encode(tree)
    with pytest.raises(IntegrityError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(IntegrityError):
        decode(whole + b"\xc0")


def ext(code: int, body: bytes) -> bytes:
    return b"\xc9" + struct.pack(">IB", len(body), code) + body


def numpy_body(dtype: str, data: bytes, *shape: int) -> bytes:
    """An array as an attacker would write it, around the checks of the encoder."""
    return values._dump([dtype, data, *shape])


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
        b"\xdc\xff\xff" * 5000,
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa1a" * 100_000 + b"\xc0",
        b"\x91" * (MAX_DEPTH + 1) + b"\xc0",
        functools.reduce(lambda inner, _: ext(5, b"\x91" + inner), range(3000), b"\xc0"),
        b"\xd6\xff\0\0\0\0",  # a msgpack timestamp, which msgspec would make a datetime
        b"\xcd\0\x01",  # 1, in two bytes more than needed
        b"\x82\xa1a\x01\xa1a\x02",  # a key twice
        ext(6, b"\x92\x02\x01"),  # a set out of order
        ext(11, b"\x91\xa4eval"),
        ext(17, numpy_body("<f8", b"", 2**40)),
        ext(17, numpy_body("<f8", b"", 0, 2**62, 2**62)),
        ext(17, numpy_body("<f8", b"", *[0] * 100)),
        ext(17, numpy_body("|V0", b"", 2**40)),
        ext(17, numpy_body("|V999999999", b"", 1)),
        ext(17, numpy_body("|O", b"\0" * 8, 1)),
        ext(17, numpy_body("<f8,<f8", b"\0" * 16, 1)),
        ext(17, numpy_body("|T16", b"\0" * 16, 1)),
        ext(17, numpy_body("(2,)<f8", b"\0" * 16, 1)),
        ext(17, numpy_body("<f7", b"\0" * 7, 1)),
        ext(16, numpy_body("<f8", b"\0" * 800)),
        ext(33, values._dump(["int8", b"\0", -1])),
        ext(33, b"\x90"),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_an_attack_is_an_integrity_error_and_takes_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError) as caught:
            decode(data)
        assert caught.value.hint
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4_000_000


def test_importing_the_codec_and_writing_plain_values_imports_neither_numpy_nor_torch() -> None:
    script = (
        "import sys; from keepstep.values import encode, decode; decode(encode({'a': (1, 2j)}));"
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
