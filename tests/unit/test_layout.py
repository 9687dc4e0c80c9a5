"""Layouts: what is written is read back, and hostile bytes raise IntegrityError and nothing else."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep import layout as layouts
from keepstep.errors import IntegrityError
from keepstep.layout import ALIGN, Entry, Layout, TensorView, align, decode, describe, digest, format_bytes

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def piece(**changes: Any) -> TensorView:
    """A 2 x 3 float32 tensor, the second half of a 4 x 3 one."""
    return msgspec.structs.replace(
        TensorView("model.weight", "float32", (2, 3), (3, 1), 0, (4, 3), (2, 0), True), **changes
    )


def layout(**changes: Any) -> Layout:
    """Two entries: one with a tensor and a view of it, one with a scalar."""
    tied = piece(path="model.tied", shape=(3,), stride=(1,), start=12, global_shape=(3,), region=(0,), sharded=False)
    scalar = piece(path="step", dtype="int64", shape=(), stride=(), global_shape=(), region=(), sharded=False)
    whole = Layout((Entry(0, 24, (piece(), tied)), Entry(64, 8, (scalar,))), ((0, 0), (1, 0), (0, 1)))
    return msgspec.structs.replace(whole, **changes)


def refused(changed: Layout, payload_bytes: int = 128) -> str:
    with pytest.raises(IntegrityError, match="contradicts itself") as caught:
        decode(changed.encode(), payload_bytes=payload_bytes)
    return str(caught.value)


def with_piece(**changes: Any) -> Layout:
    return layout(entries=(Entry(0, 24, (piece(**changes),)),), refs=())


def test_layout_is_read_back_as_it_was_written() -> None:
    encoded = layout().encode()
    for form in (encoded, memoryview(encoded), bytearray(encoded)):
        assert decode(form, payload_bytes=128) == layout()
    assert layout().entries[0].path == "model.weight"


def test_empty_layout_is_a_layout() -> None:
    empty = Layout((), ())
    assert decode(empty.encode(), payload_bytes=0) == empty
    assert empty.payload_bytes == 0


def test_payload_ends_aligned_after_the_last_entry() -> None:
    assert layout().payload_bytes == 128
    assert layout(entries=(Entry(0, 64, (piece(),)),)).payload_bytes == 64


@pytest.mark.parametrize(("size", "aligned"), [(0, 0), (1, 64), (64, 64), (65, 128), (2**60 + 1, 2**60 + 64)])
def test_align_rounds_up(size: int, aligned: int) -> None:
    assert align(size) == aligned
    assert align(size, 1) == size


def test_digest_changes_with_every_field_of_the_layout() -> None:
    entries = layout().entries
    changed = [
        layout(refs=((1, 0),)),
        layout(entries=entries[:1], refs=()),
        *(layout(entries=(Entry(0, 24, (changed_piece,)), entries[1])) for changed_piece in _each_field_changed()),
        layout(entries=(entries[0], msgspec.structs.replace(entries[1], offset=128))),
        layout(entries=(entries[0], msgspec.structs.replace(entries[1], size_bytes=16))),
    ]
    digests = {digest(one.encode()) for one in [layout(), *changed]}
    assert len(digests) == len(changed) + 1
    assert all(len(one) == 16 for one in digests)


def _each_field_changed() -> list[TensorView]:
    other: dict[str, Any] = {
        "path": "model.bias", "dtype": "int32", "shape": (3, 2), "stride": (1, 2), "start": 4,
        "global_shape": (6, 3), "region": (0, 0), "sharded": False,
    }  # fmt: skip
    assert set(other) == set(TensorView.__struct_fields__)
    return [piece(**{name: value}) for name, value in other.items()]


def test_entry_beyond_the_payload_is_refused() -> None:
    assert decode(layout().encode(), payload_bytes=72)
    assert "beyond the payload of 71" in refused(layout(), payload_bytes=71)


@pytest.mark.parametrize("offset", [-64, 1, 63, 2**62 + 1])
def test_entry_at_a_wrong_offset_is_refused(offset: int) -> None:
    assert "unaligned" in refused(layout(entries=(Entry(offset, 24, (piece(),)),), refs=()))


@pytest.mark.parametrize("offset", [2**40, 2**63 - 64, 2**64 - 64])
def test_entry_at_an_absurd_offset_is_refused(offset: int) -> None:
    assert "beyond the payload" in refused(layout(entries=(Entry(offset, 24, (piece(),)),), refs=()))


def test_entries_that_overlap_or_go_backwards_are_refused() -> None:
    first, second = Entry(0, 65, (piece(),)), Entry(64, 24, (piece(),))
    assert "overlaps" in refused(layout(entries=(first, second), refs=()))
    assert "overlaps" in refused(layout(entries=(second, Entry(0, 24, (piece(),))), refs=()))


def test_entry_of_negative_size_or_without_tensors_is_refused() -> None:
    assert "overlaps" in refused(layout(entries=(Entry(0, -1, (piece(),)),), refs=()))
    assert "is empty" in refused(layout(entries=(Entry(0, 24, ()),), refs=()))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2, 22)},
        {"stride": (22, 1)},
        {"start": 19},
        {"start": 2**63},
        {"shape": (2**63, 2**63)},
        {"shape": (1, 25)},
    ],
    ids=str,
)
def test_tensor_that_reaches_beyond_its_entry_is_refused(changes: dict[str, Any]) -> None:
    assert "reaches beyond its entry" in refused(with_piece(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (-1, 3)}, {"stride": (3, -1)}, {"start": -1}, {"global_shape": (-4, 3)}, {"region": (-2, 0)},
        {"start": -4, "shape": (0, 3)},
    ],
    ids=str,
)  # fmt: skip
def test_tensor_with_a_negative_number_is_refused(changes: dict[str, Any]) -> None:
    assert "negative size" in refused(with_piece(**changes))


@pytest.mark.parametrize("field", ["shape", "stride", "global_shape", "region"])
@pytest.mark.parametrize("dims", [(), (1,), (1, 1, 1)], ids=len)
def test_tensor_whose_dimensions_disagree_is_refused(field: str, dims: tuple[int, ...]) -> None:
    assert "differ in length" in refused(with_piece(**{field: dims}))


def test_tensor_of_too_many_dimensions_is_refused() -> None:
    ones = (1,) * 65
    assert "differ in length" in refused(with_piece(shape=ones, stride=ones, global_shape=ones, region=(0,) * 65))


def test_tensor_without_elements_fits_everywhere() -> None:
    empty = with_piece(shape=(0, 3), stride=(3, 1))
    assert decode(empty.encode(), payload_bytes=24) == empty
    nothing = Layout((Entry(0, 0, (piece(shape=(0, 3)),)),), ((0, 0),))
    assert decode(nothing.encode(), payload_bytes=0) == nothing


@pytest.mark.parametrize("ref", [(2, 0), (-1, 0), (0, 2), (0, -1), (1, 1), (2**63, 0)])
def test_reference_to_what_does_not_exist_is_refused(ref: tuple[int, int]) -> None:
    assert "does not exist" in refused(layout(refs=((0, 0), ref)))


def test_more_entries_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MAX_ENTRIES", 2)
    assert "too many entries" in refused(layout())


@pytest.mark.parametrize(
    "encoded",
    [
        b"", b"\xc0", b"\x90", b"\x92\x90", b"\x92\x90\x90\x00", b"\x92\xdd\xff\xff\xff\xff",
        b"\x92\x90\xdf\xff\xff\xff\xff", b"\x91" * 10_000, b"\xff" * 64, b"\x92\x91\x93\x00\x18\x91\x98\xa2\xff\xff",
    ],
    ids=lambda data: f"{bytes(data[:6]).hex()} of {len(data)}",
)  # fmt: skip
def test_bytes_that_are_no_layout_are_refused(encoded: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        decode(encoded, payload_bytes=1 << 40)


def test_every_truncation_of_a_layout_is_refused() -> None:
    encoded = layout().encode()
    for length in range(len(encoded)):
        with pytest.raises(IntegrityError):
            decode(encoded[:length], payload_bytes=128)
    with pytest.raises(IntegrityError):
        decode(encoded + b"\0", payload_bytes=128)


def test_layout_that_announces_four_billion_entries_takes_no_memory() -> None:
    code = (
        "import resource, sys; from keepstep import layout, errors\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "for head in (b'\\x92\\xdd', b'\\x92\\x91\\x93\\x00\\x18\\xdd', b'\\x92\\x90\\xdd'):\n"
        "    try: layout.decode(head + b'\\xff\\xff\\xff\\xff' + bytes(1000), payload_bytes=9)\n"
        "    except errors.IntegrityError: pass\n"
        "    else: sys.exit('accepted')\n"
    )
    assert resource.getrlimit(resource.RLIMIT_AS)[1] in (resource.RLIM_INFINITY, 1 << 30)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


sizes = st.integers(0, 200) | st.integers(-2, 2**64 - 1)
names = st.text(max_size=5)


def piece_of(num_dims: int) -> st.SearchStrategy[TensorView]:
    dims = st.tuples(*[st.integers(-1, 9) | sizes] * num_dims)
    return st.builds(TensorView, names, names, dims, dims, sizes, dims, dims, st.booleans())


pieces = st.integers(0, 3).flatmap(piece_of)
offsets = st.integers(-1, 5).map(lambda n: n * ALIGN) | sizes
entries = st.builds(Entry, offsets, sizes, st.lists(pieces, max_size=3).map(tuple))
refs = st.tuples(st.integers(-1, 3) | sizes, st.integers(-1, 3) | sizes)
hostile = st.builds(Layout, st.lists(entries, max_size=4).map(tuple), st.lists(refs, max_size=4).map(tuple))


def assert_within_bounds(accepted: Layout, payload_bytes: int) -> None:
    """What the trainer relies on when it makes views of the payload."""
    end = 0
    for entry in accepted.entries:
        assert entry.offset % ALIGN == 0
        assert end <= entry.offset <= entry.offset + entry.size_bytes <= payload_bytes
        end = entry.offset + entry.size_bytes
        for one in entry.pieces:
            assert len(one.shape) == len(one.stride) == len(one.global_shape) == len(one.region)
            if 0 not in one.shape:
                last = one.start + sum((n - 1) * s for n, s in zip(one.shape, one.stride, strict=True))
                assert 0 <= one.start <= last < entry.size_bytes
    for entry_index, piece_index in accepted.refs:
        assert accepted.entries[entry_index].pieces[piece_index]
        assert min(entry_index, piece_index) >= 0


@fuzz
@given(hostile, sizes)
def test_hostile_layout_is_refused_or_lies_within_bounds(one: Layout, payload_bytes: int) -> None:
    try:
        accepted = decode(one.encode(), payload_bytes=payload_bytes)
    except IntegrityError:
        return
    assert_within_bounds(accepted, payload_bytes)


@fuzz
@given(st.data())
def test_damaged_layout_is_refused_or_lies_within_bounds(data: st.DataObject) -> None:
    encoded = bytearray(layout().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        accepted = decode(encoded, payload_bytes=128)
    except IntegrityError:
        return
    assert_within_bounds(accepted, 128)


@fuzz
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_integrity_errors(data: bytes) -> None:
    try:
        accepted = decode(data, payload_bytes=128)
    except IntegrityError:
        return
    assert_within_bounds(accepted, 128)


def test_describe_has_a_row_for_every_tensor() -> None:
    rows = describe(layout())
    assert [row["path"] for row in rows] == ["model.weight", "model.tied", "step"]
    assert rows[1] == {
        "path": "model.tied", "dtype": "float32", "shape": [3], "global_shape": [3], "region": [0], "offset": 12,
        "bytes": 24,
    }  # fmt: skip


def test_sizes_are_printed_in_the_largest_unit_below_them() -> None:
    sizes = (512, 38_200, 9 << 18, 3 << 30, 5 << 50)
    assert [format_bytes(size) for size in sizes] == ["512 B", "37.3 KiB", "2.2 MiB", "3.0 GiB", "5120.0 TiB"]
