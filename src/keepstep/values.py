"""Encode plain Python values as bytes; decode them with exactly the same types and bits.

The trainer encodes everything that is not a large tensor (param_groups, schedulers, RNG and data loader state);
restore decodes it. msgpack alone would silently turn tuples into lists and a Counter into a dict, so values that it
cannot represent are wrapped in an Ext of our own, chosen by exact type. Invariants:

- `decode(encode(x))` has the types, order and bits of `x`. A value for which that fails is refused, never approximated.
- One value has one encoding: sets are written in the order of their encoded elements.
- `decode` accepts only what `encode` writes (it writes the value again and compares), so damaged bytes cannot become
  a value that no trainer had. It runs no code named by the data: no pickle, no classes looked up by name.
- torch is never imported: tensors and their kin arrive as the marker classes below. numpy is imported only to decode
  a numpy value.

Two things are not kept: shared references become copies, and attributes set on a container (torch's `_metadata` on
the OrderedDict of a module) are dropped.
"""

from __future__ import annotations

import datetime
import enum
import math
import os
import re
import reprlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Raw, msgpack

from keepstep.errors import CaptureError, IntegrityError

if TYPE_CHECKING:
    import numpy as np

# Containers inside containers. Real states are far below; a level takes about four Python frames, so that the deepest
# value fits below the interpreter's own limit of 1000 with room for the caller.
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Reference to a tensor whose bytes are stored in the payload, by its index in the layout's `refs`."""

    index: int


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """A tensor too small for a layout entry. The reader checks whether `data` fits dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """Stands for `torch.<name>`."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """Stands for `torch.device(name)`."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchSize:
    """Stands for `torch.Size(dims)`."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ItemBlocks:
    """Stands for a list of `count` items; each block gives the encodings of some, one after the other."""

    count: int
    blocks: tuple[Callable[[], bytes], ...]


def list_head(count: int) -> bytes:
    """What stands before the items of an encoded list of this length."""
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def encode(tree: Any, path: str = "") -> bytes:
    """The bytes of `tree`, or a CaptureError that names the value at fault by its path below `path`."""
    try:
        return _write(tree)
    except _FAILURES:
        raise _explain(tree, path) from None


def decode(data: bytes | memoryview) -> Any:
    """The value whose encoding is `data`. Anything else raises IntegrityError."""
    try:
        value = _read(data, 0)
        if _write(value) != data:
            raise ValueError("not the encoding of any value")
    except MemoryError:  # says something about this machine, not about the bytes
        raise
    except Exception as error:
        raise IntegrityError(
            f"stored values cannot be decoded: {error}",
            hint="use another copy or an older snapshot; these bytes were damaged or not written by this version",
        ) from error
    return value


class _Refused(Exception):
    """A value cannot be kept. Raised without a path: building paths on the way down would slow every snapshot."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


# ValueError: longer than the 4 GiB of a msgpack item. RuntimeError: stack overflow, or changed by another thread.
_FAILURES = (_Refused, ValueError, OverflowError, RuntimeError)
_QUICK = frozenset({type(None), bool, int, float, str, bytes})
_CAREFUL = _QUICK - {int, str}
_AS_IS = "surrogatepass"
_TEXT = frozenset({str})
_UNORDERED = frozenset({set, frozenset})
_dump = msgpack.Encoder().encode


def _write(tree: Any) -> bytes:
    """Encode without checking ints and text first: ints beyond 64 bits and text that is no UTF-8 are very rare."""
    try:
        return _dump(_pack(tree, 1, _QUICK))
    except (OverflowError, UnicodeEncodeError):
        return _dump(_pack(tree, 1, _CAREFUL))


def _pack(value: Any, depth: int, plain: frozenset[type]) -> Any:
    """`value` in types that msgpack decodes exactly. Types in `plain` are passed on without a check."""
    kind = type(value)
    if kind in plain or (kind is int and -(2**63) <= value < 2**64) or (kind is str and _is_utf8(value)):
        return value
    if depth > MAX_DEPTH:
        raise _Refused(f"is nested more than {MAX_DEPTH} levels deep", "flatten it, for example into one list")
    if kind is TensorRef:
        return _pack_ref(value.index)
    if kind is ItemBlocks:
        return Raw(b"".join([list_head(value.count), *(block() for block in value.blocks)]))
    if kind is list:
        return _pack_items(value, depth, plain)
    if kind is dict and _is_native_map(value, plain):
        return {key: item if type(item) in plain else _pack(item, depth + 1, plain) for key, item in value.items()}
    form = _BY_TYPE.get(kind) or _numpy_form(value)
    items = _pack_items(form.parts(value), depth, plain)
    return msgpack.Ext(form.code, _dump(sorted(items, key=_dump) if kind in _UNORDERED else items))


def _pack_items(items: Sequence[Any], depth: int, plain: frozenset[type]) -> Sequence[Any]:
    if plain.issuperset(map(type, items)):
        return items
    return [item if type(item) in plain else _pack(item, depth + 1, plain) for item in items]


@lru_cache(maxsize=1 << 16, typed=True)
def _pack_ref(index: int) -> msgpack.Ext:
    """Cached: references are most of an optimizer's state and are the same at every step."""
    form = _BY_TYPE[TensorRef]
    return msgpack.Ext(form.code, _dump(form.parts(TensorRef(index))))


def _is_native_map(value: dict[Any, Any], plain: frozenset[type]) -> bool:
    return _TEXT.issuperset(map(type, value)) and (str in plain or all(map(_is_utf8, value)))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(data: bytes | memoryview, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return msgpack.decode(data, ext_hook=partial(_build, depth))


def _build(depth: int, code: int, body: memoryview) -> Any:
    form = _BY_CODE.get(code)
    items = _read(body, depth + 1)
    if form is None or type(items) is not list:
        raise ValueError(f"unknown extension {code} of {_type_name(type(items))}")
    return form.build(items)


class _Form(NamedTuple):
    """How one type is written and read: an Ext with this code, whose body is the msgpack array of `parts`."""

    code: int
    parts: Callable[[Any], Sequence[Any]]
    build: Callable[[list[Any]], Any]


def _sizes(items: Sequence[Any]) -> Sequence[int]:
    """`items`, checked to be sizes: by the writer against its bugs, by the reader against damage."""
    if not {int}.issuperset(map(type, items)) or (items and min(items) < 0):
        raise ValueError(f"holds {reprlib.repr(items)} where sizes belong")
    return items


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"holds a {_type_name(type(value))} where text belongs")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError(f"holds a {_type_name(type(value))} where bytes belong")
    return value


def _only(items: list[Any]) -> Any:
    (item,) = items
    return item


def _flat(value: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(value.items()))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


_FACTORIES: dict[str | None, Any] = {None: None} | {
    kind.__name__: kind for kind in (int, float, list, dict, set, str, bool, tuple)
}


def _factory_name(factory: Any) -> str | None:
    for name, known in _FACTORIES.items():
        if factory is known:
            return name
    raise _Refused(
        "is a defaultdict whose default_factory cannot be stored",
        "convert it to a dict, or use as default_factory one of " + ", ".join(map(str, _FACTORIES)),
    )


def _bounds(value: range | slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


# The codes are the format: never give one a second meaning.
_BY_TYPE: dict[type, _Form] = {
    int: _Form(1, lambda v: [_int_bytes(v)], lambda i: int.from_bytes(_bytes(_only(i)), "big", signed=True)),
    str: _Form(2, lambda v: [v.encode("utf-8", _AS_IS)], lambda i: _bytes(_only(i)).decode("utf-8", _AS_IS)),
    bytearray: _Form(3, lambda v: [bytes(v)], lambda i: bytearray(_bytes(_only(i)))),
    complex: _Form(4, lambda v: [v.real, v.imag], lambda i: complex(*i)),
    tuple: _Form(5, tuple, tuple),
    set: _Form(6, tuple, set),
    frozenset: _Form(7, tuple, frozenset),
    dict: _Form(8, _flat, _pairs),
    OrderedDict: _Form(9, _flat, lambda i: OrderedDict(_pairs(i))),
    Counter: _Form(10, _flat, lambda i: Counter(_pairs(i))),
    defaultdict: _Form(
        11,
        lambda v: (_factory_name(v.default_factory), *_flat(v)),
        lambda i: defaultdict(_FACTORIES[i[0]], _pairs(i[1:])),
    ),
    deque: _Form(12, lambda v: (v.maxlen, *v), lambda i: deque(i[1:], i[0])),
    range: _Form(13, _bounds, lambda i: range(*i)),
    slice: _Form(14, _bounds, lambda i: slice(*i)),
    TensorRef: _Form(32, lambda v: _sizes((v.index,)), lambda i: TensorRef(*_sizes(i))),
    InlineTensor: _Form(
        33,
        lambda v: [_text(v.dtype), _bytes(v.data), *_sizes(v.shape)],
        lambda i: InlineTensor(_text(i[0]), tuple(_sizes(i[2:])), _bytes(i[1])),
    ),
    TorchDtype: _Form(34, lambda v: [_text(v.name)], lambda i: TorchDtype(_text(_only(i)))),
    TorchDevice: _Form(35, lambda v: [_text(v.name)], lambda i: TorchDevice(_text(_only(i)))),
    TorchSize: _Form(36, lambda v: _sizes(v.dims), lambda i: TorchSize(tuple(_sizes(i)))),
}


def _numpy_form(value: Any) -> _Form:
    """The form of a numpy value; not in the table above, because that would import numpy. Other types are refused."""
    if "numpy" in sys.modules:
        import numpy as np

        if type(value) is np.ndarray and value.itemsize:
            return _NUMPY_ARRAY
        if issubclass(type(value), np.generic) and type(value) is value.dtype.type:
            return _NUMPY_SCALAR
    raise _Refused(f"is of type {_type_name(type(value))}, which cannot be stored exactly", _hint(value))


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """The name from which numpy makes `dtype` again. Objects, structs, heap strings and extensions have none."""
    # On Linux numpy calls both `long` and `long long` "<i8", yet keeps two types; "<q" is the second.
    for name in (dtype.str, dtype.str[0] + dtype.char):
        if _DTYPE.fullmatch(name) and not dtype.metadata:
            known = _dtype(name)
            if known == dtype and known.char == dtype.char and known.type is dtype.type:
                return name
    raise _Refused(
        f"is a numpy value of dtype {dtype}, which cannot be stored exactly",
        "store it as a list (`.tolist()`), as one array per field, or as a tensor",
    )


# Only numbers, dates and text of fixed size: from strings numpy would also make structs, objects and sub-arrays.
_DTYPE = re.compile(r"[<>|](?:[biufc][0-9]{1,2}|[SUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?|[qQ])")


def _dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    if not _DTYPE.fullmatch(name):
        raise ValueError(f"holds {reprlib.repr(name)} where a dtype belongs")
    return np.dtype(name)


def _scalar_parts(value: Any) -> list[Any]:
    # `tobytes()` of numpy text and bytes drops zeros at their end, or adds one when empty.
    if value.dtype.kind == "U":
        return [_dtype_name(value.dtype), str.encode(value, "utf-8", _AS_IS)]
    return [_dtype_name(value.dtype), bytes(value) if value.dtype.kind == "S" else value.tobytes()]


def _build_scalar(items: list[Any]) -> Any:
    import numpy as np

    name, data = _text(items[0]), _bytes(_only(items[1:]))
    dtype = _dtype(name)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-8", _AS_IS))
    if dtype.kind in "SV":
        return np.bytes_(data) if dtype.kind == "S" else np.void(data)
    return np.frombuffer(data, dtype).reshape(())[()]


def _build_array(items: list[Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    name, data, shape = _text(items[0]), _bytes(items[1]), _sizes(items[2:])
    dtype = _dtype(name)
    # Checked before numpy sees the shape, so that it allocates no more than what was received.
    if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no array of {name} with shape {reprlib.repr(shape)}")
    return np.ndarray(shape, dtype, buffer=data).copy()


_NUMPY_SCALAR = _Form(16, _scalar_parts, _build_scalar)
_NUMPY_ARRAY = _Form(17, lambda v: [_dtype_name(v.dtype), v.tobytes(), *v.shape], _build_array)
_BY_CODE: dict[int, _Form] = {form.code: form for form in (*_BY_TYPE.values(), _NUMPY_SCALAR, _NUMPY_ARRAY)}


def _explain(tree: Any, path: str) -> CaptureError:
    """Descend into the first child that fails on its own, until none does: that value is at fault."""
    value, parts, above = tree, [path] if path else [], set[int]()
    failure = _failure(tree)
    while id(value) not in above:
        above.add(id(value))
        for part, child in _children(value):
            if (failed := _failure(child)) is not None:
                value, failure = child, failed
                parts.append(part)
                break
        else:
            break
    else:
        failure = _Refused("contains itself", "break the cycle: store an index or a name in place of the reference")
    where = _shorten(".".join(parts)) or "the value"
    if failure is None:
        return CaptureError(
            f"{where} changed while it was captured", hint="capture where no other thread writes to the state"
        )
    hint = failure.hint if isinstance(failure, _Refused) else "store it as a tensor, or in smaller parts"
    return CaptureError(f"{where} {failure}", hint=hint)


def _failure(value: Any) -> Exception | None:
    try:
        _write(value)
    except _FAILURES as error:
        return error
    return None


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The children of a known container, each with its name in a path."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter, defaultdict):
        for key, item in value.items():
            name = _key_name(key)
            yield f"{name}(key)", key
            yield name, item
    elif kind in (list, tuple, set, frozenset, deque):
        for index, item in enumerate(value):
            yield str(index), item


def _key_name(key: Any) -> str:
    try:
        return key if type(key) is str else reprlib.repr(key)
    except ValueError:  # Python prints no int of more than 4300 digits
        return f"<{_type_name(type(key))}>"


def _hint(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return "store its `.value` or `.name`, and build the member again on restore"
    if issubclass(kind, os.PathLike):
        return "store `str(path)`"
    if issubclass(kind, datetime.date | datetime.time | datetime.timedelta):
        return "store a number of seconds, or `.isoformat()`"
    if callable(value):
        return "store the arguments it was made from; functions and classes come from the script, not from the state"
    for base in kind.__mro__:
        if base in _BY_TYPE or base in _QUICK:
            return f"store a plain {base.__name__}: `{base.__name__}(value)`"
    return "store its `state_dict()`, or plain numbers, text and containers; or remove it from the state"


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shorten(path: str) -> str:
    """The start and the end of a path: a value at fault can be a hundred levels deep."""
    return path if len(path) <= 200 else f"{path[:100]}...{path[-100:]}"
