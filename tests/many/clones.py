"""A protected job that is lost in many ways: made once, its memory copied for each way.

What a launcher holds of a node is all that is left of it when its keeper dies. Copies of those memfds,
given back to a fresh keeper, are that node again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodes import DEADLINE_S, Node, Run, wait_for

from keepstep.arena.memfd import NAME, SEALS
from keepstep.control.held_memory import HeldMemory
from keepstep.keeper.status_server import StatusRequest
from keepstep.types import Status, Version

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
        with still(run):
            memory = {n: memory_of(run.nodes[n]) for n in run.order}
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


@contextlib.contextmanager
def still(run: Run) -> Iterator[None]:
    """No keeper of the run decides anything while this lasts: copies that are made of the nodes one after the other go
    together. Of a run that goes on, one may hold parity of the version before and the next one of the version after."""
    go_on = threading.Event()
    stopped = {node_id: threading.Event() for node_id in run.order}

    class Stop(StatusRequest):
        """Asks a loop for its status, and holds it while it answers."""

        def __init__(self, node_id: str) -> None:
            super().__init__()
            self.node_id = node_id

        def answer(self, status: Status) -> None:
            stopped[self.node_id].set()
            go_on.wait()

    try:
        for node_id in run.order:
            run.nodes[node_id].keeper.put(Stop(node_id))
        for node_id, event in stopped.items():
            assert event.wait(DEADLINE_S), f"the keeper of {node_id} stands still"
        nodes = [run.nodes[node_id] for node_id in run.order]
        wait_for(lambda: all_held(nodes), "all memory is in the holders' hands")
        yield
    finally:
        go_on.set()


def memory_of(node: Node) -> Memory:
    with node.memory.duplicates() as fds:
        return {name: copy_of(fd) for name, fd in fds.items()}


def all_held(nodes: Iterable[Node]) -> bool:
    return all(set(node.memory.names()) == set(node.keeper.memory_fds()) for node in nodes)


def twin(run: Run, directory: Path) -> Run:
    """The same job, elsewhere on this machine."""
    made = Run(
        directory, losses=run.losses, group_size=run.group_size, size_bytes=run.size_bytes, slots=run.slots,
        local=run.local, growth=run.growth, deadlines=run.deadlines, peers=run.peers,
    )  # fmt: skip
    made.run_id, made.secret = run.run_id, run.secret
    return made


def protected_image(directory: Path, nodes: Sequence[str], **settings: object) -> Image:
    """A run that has protected two versions, or three, and rests; its keepers are gone."""
    run = Run(directory, **settings)  # type: ignore[arg-type]
    try:
        run.add(*nodes)
        run.start(list(nodes))
        run.protect()
        run.protect()
        version = rest(run)
        image = Image.of(run, version)
        assert rest(run) == version, "it went on while it was copied"
        return image
    finally:
        run.close()


def rest(run: Run) -> Version:
    """Until the newest complete version is the protected one, on all nodes, no newer one is on its way, and all memory
    is in the holders' hands."""

    def resting() -> bool:
        if run.awaits_a_version:  # asked first: the keeper of a rank that has heard of it keeps it by now
            return False
        kept = [node.keeper.core.orders.active for node in run.nodes.values()]
        same = {(k.complete, k.protected, k.target) for k in kept}
        settled = len(same) == 1 and kept[0].target is None and kept[0].complete == kept[0].protected
        return settled and all_held(run.nodes.values())

    wait_for(resting, "the newest version is protected")
    version = run.nodes[run.order[0]].keeper.core.orders.active.protected
    assert version is not None
    return version
