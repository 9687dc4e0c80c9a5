"""A protected job that is lost in many ways: made once, its memory copied for each way.

What a launcher holds of a node is all that is left of it when its keeper dies. Copies of those memfds,
given back to a fresh keeper, are that node again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodes import DEADLINE_S, Node, Run, wait_for

from keepstep.arena.memfd import NAME, SEALS
from keepstep.control.held_memory import HeldMemory
from keepstep.types import Version

Memory = dict[str, bytes]
"""memfds by name"""


def copy_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def memfd_of(data: bytes) -> int:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(data))
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], done)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def held_copies(memory: Memory) -> HeldMemory:
    held = HeldMemory(request_timeout_s=DEADLINE_S)
    for name, data in memory.items():
        fd = memfd_of(data)
        held.hold(name, fd)
        os.close(fd)
    return held


@dataclass(frozen=True)
class Image:
    """What lies in the memory of every node of a run at one moment."""

    run: Run
    order: tuple[str, ...]
    version: Version
    memory: dict[str, Memory]

    @classmethod
    def of(cls, run: Run, version: Version) -> Image:
        memory = {}
        for node_id in run.order:
            with run.nodes[node_id].memory.duplicates() as fds:
                memory[node_id] = {name: copy_of(fd) for name, fd in fds.items()}
        return cls(run, tuple(run.order), version, memory)

    @contextlib.contextmanager
    def again(self, lost: Sequence[str] = (), *, memory: dict[str, Memory] | None = None) -> Iterator[Run]:
        """The run on fresh keepers that were given the memory back, empty nodes (`x'`) in place of the lost ones."""
        memory = memory or self.memory
        with tempfile.TemporaryDirectory(prefix="ks") as directory:
            run = twin(self.run, Path(directory))
            try:
                for node_id in self.order:
                    if node_id in lost:
                        run.add(node_id + "'")
                    else:
                        run.nodes[node_id] = Node(run, node_id, held_copies(memory[node_id]))
                        run.nodes[node_id].hello()
                yield run
            finally:
                run.close()

    def places(self, lost: Sequence[str]) -> list[str]:
        return [node_id + "'" if node_id in lost else node_id for node_id in self.order]


def twin(run: Run, directory: Path) -> Run:
    """The same job, elsewhere on this machine."""
    made = Run(
        directory, losses=run.losses, group_size=run.group_size, size_bytes=run.size_bytes, slots=run.slots,
        local=run.local, growth=run.growth, limits=run.limits, peers=run.peers,
    )  # fmt: skip
    made.run_id, made.secret = run.run_id, run.secret
    return made


def protected_image(directory: Path, nodes: Sequence[str], **settings: object) -> Image:
    """A run that has protected two versions and rests; its keepers are gone."""
    run = Run(directory, **settings)  # type: ignore[arg-type]
    try:
        run.add(*nodes)
        run.start(list(nodes))
        run.protect()
        run.protect()
        version = rest(run)
        return Image.of(run, version)
    finally:
        run.close()


def rest(run: Run) -> Version:
    """Until the newest complete version is the protected one, on all nodes, and all memory is in the holders' hands."""

    def resting() -> bool:
        kept = [node.keeper.core.kept for node in run.nodes.values()]
        same = {(k.complete, k.protected, k.target) for k in kept}
        settled = len(same) == 1 and kept[0].target is None and kept[0].complete == kept[0].protected
        held = all(set(node.memory.names()) == set(node.keeper.held_fds()) for node in run.nodes.values())
        return settled and held

    wait_for(resting, "the newest version is protected")
    version = run.nodes[run.order[0]].keeper.core.kept.protected
    assert version is not None
    return version
