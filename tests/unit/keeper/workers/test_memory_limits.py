"""How much memory can be had, read from fake /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.errors import KeeperError
from keepstep.keeper.workers.memory_limits import (
    RESERVE_BYTES,
    ROOM_SLOTS,
    MemoryLimits,
    check,
    choose_slots,
    measure,
)
from keepstep.layout import gib

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


def machine(root: Path, *, available: int = 64 * GIB, cgroup: str | None = None) -> Path:
    """A /proc with this much memory and this /proc/self/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    meminfo = f"MemTotal:       131072000 kB\nMemFree:         1024 kB\nMemAvailable:   {available // 1024} kB\n"
    (root / "proc/meminfo").write_text(meminfo)
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    return root


def v2(root: Path, path: str, limit: int | str, used: int, *, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used}\nactive_file 5\ninactive_file {inactive_file}\n")


def v1(root: Path, path: str, limit: int, used: int, *, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_machine_without_cgroups_offers_what_is_available(tmp_path: Path) -> None:
    assert measure(machine(tmp_path)) == MemoryLimits(64 * GIB, None, 0)
    assert measure(tmp_path).free_bytes == 64 * GIB


def test_cgroup_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    v2(machine(tmp_path, cgroup="0::/user.slice\n"), "user.slice", "max", 5 * GIB)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, None, 0)


def test_limit_of_cgroup_v2_is_found(tmp_path: Path) -> None:
    v2(machine(tmp_path, cgroup="0::/pod/container\n"), "pod/container", 16 * GIB, 3 * GIB)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, 16 * GIB, 3 * GIB)
    assert measure(tmp_path).free_bytes == 13 * GIB


def test_limit_of_cgroup_v1_is_found_among_the_other_controllers(tmp_path: Path) -> None:
    lines = "12:cpu,cpuacct:/a\n7:hugetlb:/\n5:memory:/job/step\n1:name=systemd:/a:b\n0::/ignored\n"
    v1(machine(tmp_path, cgroup=lines), "job/step", 8 * GIB, 2 * GIB)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, 8 * GIB, 2 * GIB)


def test_cgroup_v1_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    v1(machine(tmp_path, cgroup="5:memory:/job\n"), "job", V1_UNLIMITED, GIB)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, None, 0)


@pytest.mark.parametrize(
    ("outer", "inner", "tightest"),
    [
        ((16 * GIB, 4 * GIB), (32 * GIB, 2 * GIB), (16 * GIB, 4 * GIB)),
        ((32 * GIB, 4 * GIB), (16 * GIB, 2 * GIB), (16 * GIB, 2 * GIB)),
        ((32 * GIB, 30 * GIB), (16 * GIB, 2 * GIB), (32 * GIB, 30 * GIB)),
    ],
    ids=["outer smaller", "inner smaller", "outer larger and nearly full"],
)
@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_nested_limits_count_by_what_each_leaves(
    tmp_path: Path, kind: str, outer: tuple[int, int], inner: tuple[int, int], tightest: tuple[int, int]
) -> None:
    write = v1 if kind == "v1" else v2
    machine(tmp_path, cgroup="3:memory:/outer/middle/inner\n" if kind == "v1" else "0::/outer/middle/inner\n")
    write(tmp_path, "outer/middle/inner", *inner)
    write(tmp_path, "outer", *outer)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, *tightest)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_limit_at_the_mount_itself_counts_where_the_path_is_the_hosts(tmp_path: Path, kind: str) -> None:
    """In a container without a cgroup namespace /proc names a path of the host that is not mounted here."""
    write = v1 if kind == "v1" else v2
    machine(tmp_path, cgroup="3:memory:/docker/0123abcd\n" if kind == "v1" else "0::/docker/0123abcd\n")
    write(tmp_path, "", 4 * GIB, GIB)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, 4 * GIB, GIB)


def test_path_above_the_namespace_is_survived(tmp_path: Path) -> None:
    v2(machine(tmp_path, cgroup="0::/../../elsewhere\n"), "", 4 * GIB, GIB)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, 4 * GIB, GIB)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_file_cache_that_the_kernel_would_drop_is_not_in_the_way(tmp_path: Path, kind: str) -> None:
    write = v1 if kind == "v1" else v2
    machine(tmp_path, cgroup="3:memory:/job\n" if kind == "v1" else "0::/job\n")
    write(tmp_path, "job", 16 * GIB, 15 * GIB, inactive_file=10 * GIB)
    assert measure(tmp_path) == MemoryLimits(64 * GIB, 16 * GIB, 5 * GIB)


def test_cgroup_without_statistics_is_taken_as_fully_used(tmp_path: Path) -> None:
    v2(machine(tmp_path, cgroup="0::/job\n"), "job", 16 * GIB, 15 * GIB, inactive_file=10 * GIB)
    (tmp_path / "sys/fs/cgroup/job/memory.stat").unlink()
    assert measure(tmp_path).free_bytes == GIB


def test_machine_can_have_less_than_the_cgroup_allows(tmp_path: Path) -> None:
    v2(machine(tmp_path, available=2 * GIB, cgroup="0::/job\n"), "job", 16 * GIB, GIB)
    assert measure(tmp_path).free_bytes == 2 * GIB


def test_machine_without_memavailable_says_something_sensible(tmp_path: Path) -> None:
    assert measure(tmp_path).free_bytes > 0


def test_real_machine_can_be_measured() -> None:
    room = measure()
    assert room.available_bytes > 0
    assert room.cgroup_limit_bytes is None or room.cgroup_limit_bytes > 0


def test_what_fits_is_not_refused() -> None:
    check(GIB, "the arena", room=MemoryLimits(GIB + RESERVE_BYTES, None, 0))
    check(GIB, "the arena", room=MemoryLimits(9 * GIB, 3 * GIB, GIB), memory_limit_bytes=GIB)


def test_the_one_error_names_need_cgroup_limit_and_available_memory() -> None:
    with pytest.raises(KeeperError) as caught:
        check(12 * GIB, "the arena of local rank 3", room=MemoryLimits(20 * GIB, 16 * GIB, 6 * GIB))
    assert caught.value.message == (
        "the arena of local rank 3 needs 12.00 GiB, and 9.94 GiB can be had "
        "(cgroup limit: 16.00 GiB with 6.00 GiB in use; MemAvailable: 20.00 GiB)"
    )
    assert "KEEPSTEP_ARENA_SLOTS=2" in caught.value.hint
    assert "keepstep release" in caught.value.hint


def test_error_without_a_cgroup_says_so() -> None:
    with pytest.raises(KeeperError, match=r"cgroup limit: none; MemAvailable: 1\.00 GiB"):
        check(GIB, "the arena", room=MemoryLimits(GIB, None, 0))


def test_error_names_the_users_own_limit() -> None:
    with pytest.raises(KeeperError, match=r"arena\.memory_limit_bytes 100\.0 MiB"):
        check(200 << 20, "the arena", room=MemoryLimits(GIB, None, 0), memory_limit_bytes=100 << 20)


def test_error_of_a_full_cgroup_offers_nothing_rather_than_less() -> None:
    with pytest.raises(KeeperError, match=r"and 0\.0 MiB can be had"):
        check(1, "the arena", room=MemoryLimits(GIB, GIB, 2 * GIB))


def test_sizes_are_written_in_the_unit_that_a_person_expects() -> None:
    assert (gib(5 * GIB // 2), gib(GIB - 1), gib(3 << 19)) == ("2.50 GiB", "1024.0 MiB", "1.5 MiB")


GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "slot", "ranks", "limit", "slots"),
    [
        (100, 20, 1, 0, 3),
        (60, 20, 1, 0, 2),
        (100, 20, 2, 0, 2),
        (1000, 20, 8, 0, 3),
        (1000, 20, 1, 59, 2),
        (1000, 20, 1, 60, 2),
        (1000, 20, 1, 61, 3),
        (10, 20, 1, 0, 2),
    ],
)
def test_auto_chooses_three_slots_where_four_would_fit(
    available: int, slot: int, ranks: int, limit: int, slots: int
) -> None:
    limits = MemoryLimits(available * GIB, None, 0)
    choice = choose_slots(slot * GIB, ranks, limits, limit * GIB)
    assert choice.slots == slots
    assert "GiB" in choice.reason


def test_the_last_rank_of_a_node_chooses_what_the_first_chose() -> None:
    """Each rank's memory is gone when the next one asks; the choice for all of them must stand."""
    slot, ranks = 10 * GIB, 8
    free = ROOM_SLOTS * slot * ranks + RESERVE_BYTES
    for created in range(ranks):
        limits = MemoryLimits(free - 3 * slot * created, None, 0)
        assert choose_slots(slot, ranks if created == 0 else 1, limits).slots == 3
