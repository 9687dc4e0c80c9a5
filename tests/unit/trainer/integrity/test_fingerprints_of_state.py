"""Fingerprints at the source, where they land, and after a restore; on the CPU, with the bits of a device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from keepstep.errors import IntegrityError
from keepstep.trainer.capture.small_tensors import make_batches
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.integrity.fingerprints import ROW, DeviceFingerprints, check_restored, frame, unframe
from keepstep.trainer.plan.copy_plan import CopyOp

SIZES = (9 << 20, 100, 5_000_001, 4 << 20)


def laid_out(sizes: tuple[int, ...] = SIZES) -> tuple[list[CopyOp], torch.Tensor]:
    """Units with random bytes, and a payload that they have landed in."""
    torch.manual_seed(1)
    units: list[CopyOp] = []
    offset = 0
    nobody: Any = None
    for number, size in enumerate(sizes):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        units.append(CopyOp(source, offset, size, f"tensor {number}", frozenset({number % 2}), nobody))
        offset += -(-size // 64) * 64
    payload = torch.zeros(offset, dtype=torch.uint8)
    for unit in units:
        payload[unit.offset : unit.offset + unit.size_bytes] = unit.source
    return units, payload


def taken(units: list[CopyOp], *, whole: bool = True, seed: int = 0) -> DeviceFingerprints:
    prints = DeviceFingerprints(units, random.Random(seed), whole=whole)
    prints.compute()
    prints.copy_to_host()
    return prints


def test_what_landed_and_stayed_is_not_accused() -> None:
    units, payload = laid_out()
    for whole in (True, False):
        prints = taken(units, whole=whole)
        assert prints.changed_in_transit(payload) is None
        assert prints.changed_at_source({0, 1}) is None


def test_one_bit_anywhere_on_the_way_is_found_and_named() -> None:
    units, payload = laid_out()
    prints = taken(units)
    for unit in units:
        for at in (0, unit.size_bytes // 2, unit.size_bytes - 1):
            payload[unit.offset + at] ^= 16
            assert prints.changed_in_transit(payload) is unit
            payload[unit.offset + at] ^= 16


def test_bytes_between_units_do_not_matter() -> None:
    units, payload = laid_out()
    payload[units[1].offset + units[1].size_bytes] ^= 1
    assert taken(units).changed_in_transit(payload) is None


def test_change_at_the_source_counts_against_the_optimizers_that_are_asked_for() -> None:
    units, _ = laid_out()
    prints = taken(units)
    units[2].source[4_999_999] ^= 1
    assert prints.changed_at_source({1}) is None
    prints = taken(units)
    units[2].source[4_999_999] ^= 1
    assert prints.changed_at_source({0}) is units[2]


def test_nobody_can_say_what_changed_before_the_prints_are_on_their_way() -> None:
    units, _ = laid_out()
    checks = SnapshotChecks(None, [DeviceFingerprints(units, random.Random(0), whole=True)])
    assert not checks.fingerprints_queued
    checks.compute_fingerprints(units[0].device)
    assert not checks.fingerprints_queued, "what stands in their place on the host is nothing yet"
    checks.copy_fingerprints(units[0].device)
    assert checks.fingerprints_queued
    assert checks.changed_at_source({0}) is None


def test_to_look_again_changes_nothing_of_what_was_seen() -> None:
    """One optimizer is suspected, another one has rightly written since: what it owns has left as it was."""
    units, payload = laid_out()
    prints = taken(units)
    kept = prints.encode()
    units[1].source[3] ^= 1
    assert prints.changed_at_source({0}) is None
    assert prints.changed_in_transit(payload) is None
    assert prints.encode() == kept
    again = taken(units)
    units[1].source[3] ^= 1
    assert again.changed_at_source({0}) is None
    assert again.encode() != kept, "also when nobody has asked before"


def test_chunks_are_drawn_anew_each_time_so_that_all_are_seen() -> None:
    units, payload = laid_out((64 * (4 << 20),))
    payload[5] ^= 1
    rng = random.Random(3)
    found = 0
    for _ in range(400):
        prints = DeviceFingerprints(units, rng, whole=False)
        prints.compute()
        prints.copy_to_host()
        found += prints.changed_in_transit(payload) is not None
    assert 1 <= found <= 30, "one chunk of sixty-four"


def test_kept_prints_find_a_wrong_bit_after_a_restore() -> None:
    units, _ = laid_out()
    kept = taken(units).encode()
    values, found = unframe(b"values" + frame(kept, 1 << 20))
    assert (values, found) == (b"values", kept)
    restored = [(unit.offset, unit.source.clone(), unit.path) for unit in units]
    assert check_restored(kept, restored) == sum(-(-size // (4 << 20)) for size in SIZES)
    assert check_restored(kept, restored[1:3]) == 3, "what is not on a device is not looked at"
    restored[2][1][17] ^= 1
    with pytest.raises(IntegrityError, match=r"tensor 2 .* is not what was captured"):
        check_restored(kept, restored)


def test_prints_that_do_not_fit_are_left_out_and_cut_ones_refused() -> None:
    units, _ = laid_out()
    kept = taken(units).encode()
    assert frame(kept, 7) == b""
    assert unframe(b"v" + frame(kept, 8 + 3 * ROW.itemsize + 1))[1] == kept[: 3 * ROW.itemsize]
    for broken in (b"", b"\xff" * 8, b"\x05" + bytes(7)):
        with pytest.raises(IntegrityError, match="cut off"):
            unframe(broken)


def test_small_tensors_are_gathered_as_they_lie_in_the_payload() -> None:
    units, payload = laid_out((64, 4, 100, 8, 1))
    apart = units[:3] + units[4:]
    landed = torch.zeros_like(payload)
    batches = make_batches(apart)
    assert [batch.offset for batch in batches] == [0, units[4].offset]
    for batch in batches:
        batch.collect()
        batch.copy_to_host(landed)
    for unit in apart:
        span = slice(unit.offset, unit.offset + unit.size_bytes)
        assert torch.equal(landed[span], payload[span])
    assert not landed[units[3].offset : units[3].offset + 8].any()
