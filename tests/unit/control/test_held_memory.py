"""Memory held for a keeper: every descriptor closed exactly once, duplicates valid for whoever reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from keepstep.control.held_memory import HeldMemory
from keepstep.control.messages import Hold


@pytest.fixture
def memory() -> Iterator[HeldMemory]:
    before = open_fds()
    memory = HeldMemory(request_timeout_s=1.0)
    yield memory
    memory.close()
    assert open_fds() == before


def memfd(data: bytes) -> int:
    fd = os.memfd_create("held")
    os.write(fd, data)
    return fd


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_own_memory_is_duplicated_and_the_caller_keeps_its_descriptor(memory: HeldMemory) -> None:
    fd = memfd(b"own")
    memory.hold("a", fd)
    memory.hold("a", fd)
    os.close(fd)
    assert memory.names() == ["a"]
    with memory.duplicates() as fds:
        assert os.pread(fds["a"], 3, 0) == b"own"


def test_descriptors_from_the_keeper_are_taken_over_and_second_copies_closed(memory: HeldMemory) -> None:
    memory.apply(Hold(["a", "b"], []), [memfd(b"a"), memfd(b"b")])
    before = open_fds()
    memory.apply(Hold(["b", "c"], ["a", "unknown"]), [memfd(b"b"), memfd(b"c")])
    assert sorted(memory.names()) == ["b", "c"]
    assert open_fds() == before


def test_duplicates_stay_readable_when_the_keeper_forgets_the_memory_meanwhile(memory: HeldMemory) -> None:
    memory.apply(Hold(["a"], []), [memfd(b"bytes")])
    with memory.duplicates() as fds:
        memory.apply(Hold([], ["a"]), [])
        assert memory.names() == []
        assert os.pread(fds["a"], 5, 0) == b"bytes"


def test_memory_that_arrives_after_the_end_is_closed_at_once(memory: HeldMemory) -> None:
    memory.apply(Hold(["a"], []), [memfd(b"a")])
    memory.close()
    memory.apply(Hold(["b"], []), [memfd(b"b")])
    assert memory.names() == []


def test_forked_child_keeps_neither_the_memory_nor_duplicates_of_it(memory: HeldMemory) -> None:
    memory.apply(Hold(["a"], []), [memfd(b"a")])
    with memory.duplicates() as fds:
        pid = os.fork()
        if pid == 0:
            memory.close_in_forked_child()
            os._exit(os.path.exists(f"/proc/self/fd/{fds['a']}") or bool(memory.names()))
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
