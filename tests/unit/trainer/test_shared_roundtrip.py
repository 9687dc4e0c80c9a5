"""take → seal → restore with streams, through a real keeper: a process that believes to be a rank of many nodes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import Config, IntegrityError, RecoveryError, Snapshotter, Survives
from keepstep import layout as layouts
from keepstep.arena.checksum import chunk_spans, read_table
from keepstep.arena.slots import DIGEST_BYTES, Arena
from keepstep.config import ArenaConfig, ParityConfig, TakeConfig
from keepstep.control.messages import ReplicaSetSource, RestoreFrom, WantRestore
from keepstep.keeper.workers.replica_digests import answer, set_digests
from keepstep.keeper.workers.sealed_snapshot import SealedSnapshot, open_sealed
from keepstep.layout import CHUNK_BYTES, Entry, Layout, TensorView
from keepstep.parity.divergence import Comparison, Divergence, ReplicaAudit, diverged_set
from keepstep.testing.run import LocalRun
from keepstep.trainer.connection.environment import RankPlace, World
from keepstep.trainer.connection.keeper_link import KeeperLink
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.plan import arena_size
from keepstep.trainer.plan.copy_plan import CopyPlan
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.restore.replica_chunks import ReplicaChunks

WIDE = 1024
"""a weight of WIDE x WIDE floats is one chunk"""
NAMED = "model,optimizer,extra"


def config(**parity: Any) -> Config:
    return Config(replicated=NAMED, parity=ParityConfig(**parity), take=TakeConfig(budget_ms=10_000))


def believe(monkeypatch: pytest.MonkeyPatch, rank: int, *nodes: int) -> None:
    """This process is `rank` of a job whose ranks run on these nodes."""

    def of(place: RankPlace, environ: Any = None) -> World:
        return World(rank, nodes)

    monkeypatch.setattr(World, "of", of)


OPEN: list[Snapshotter] = []


def begin(state: dict[str, Any], settings: Config) -> Snapshotter:
    OPEN.append(Snapshotter(state, settings))
    return OPEN[-1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRun]:
    torch.manual_seed(3)
    with LocalRun() as local:
        for name, value in local.environ.items():
            monkeypatch.setenv(name, value)
        yield local
        while OPEN:
            OPEN.pop().close(finished=False)


def make_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE + 3), nn.BatchNorm1d(WIDE + 3))
    extra = {"odd": torch.randn((1 << 19) + 1), "turned": torch.randn(WIDE, WIDE // 2).t(), "small": torch.randn(7)}
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "extra": extra}


def train(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(4, WIDE)).square().mean().backward()
    state["optimizer"].step()


def bits(state: dict[str, Any]) -> dict[str, bytes]:
    found = {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}
    for index, inner in state["optimizer"].state_dict()["state"].items():
        found.update({f"optimizer.{index}.{name}": tensor for name, tensor in inner.items()})
    found.update(state["extra"])
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def take(snapshots: Snapshotter, step: int) -> None:
    pending = snapshots.take(step)
    assert pending.wait(timeout_s=30) is Survives.PROCESS, pending


def save(
    state: dict[str, Any],
    settings: Config,
    steps: int = 1,
    spoil: Callable[[dict[str, Any]], None] = lambda state: None,
) -> dict[str, bytes]:
    """A life that trains, takes a snapshot at each step and dies. Returns what it had at the last one."""
    snapshots = begin(state, settings)
    restored = snapshots.restore()
    first = restored.step + 1 if restored else 0
    for step in range(first, first + steps):
        train(state)
        spoil(state)
        take(snapshots, step)
    snapshots.close(finished=False)
    return bits(state)


def newest(arena: Arena) -> tuple[int, Layout]:
    """The newest sealed slot and its layout."""
    sealed = [found for slot in range(arena.num_slots) if (found := arena.sealed(slot)) is not None]
    best = max(sealed, key=lambda found: found.version)
    span = arena.layout_span(best.slot)
    encoded = arena.segment.read(span.offset, best.trainer.layout_bytes)
    layout = layouts.decode(encoded, payload_bytes=best.trainer.payload_bytes)
    assert best.trainer.shared_offset == layout.shared_offset
    return best.slot, layout


# All of it on this rank


def test_state_in_a_stream_comes_back_bit_for_bit_in_the_same_objects(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch, 0, 0, 1)
    live = make_state()
    expected = save(live, config(), steps=5)
    with run.arenas() as (arena,):
        _, layout = newest(arena)
    (stream,) = layout.replica_sets
    assert (stream.mode, stream.ranks, stream.nodes, stream.chunks) == (
        "full", (0, 1), (0, 1), tuple(range(stream.num_chunks)),
    )  # fmt: skip
    shared = {entry.path for entry in stream.entries}
    assert {"model.0.weight", "model.2.weight", "optimizer.state.2.exp_avg", "extra.odd"} <= shared
    own = {entry.path for entry in layout.entries}
    assert {"model.3.running_mean", "model.0.bias", "extra.turned", "extra.small"} <= own

    objects = [live["model"][0].weight, live["extra"]["odd"]]
    for tensor in objects:
        tensor.detach().zero_()
    snapshots = begin(live, config())
    restored = snapshots.restore()
    assert restored is not None
    assert restored.step == 4
    snapshots.close(finished=False)
    assert bits(live) == expected
    assert live["model"][0].weight is objects[0]
    assert live["extra"]["odd"] is objects[1]

    fresh = make_state(seed=9)
    snapshots = begin(fresh, config())
    snapshots.restore()
    assert bits(fresh) == expected
    train(fresh)  # what is restored is no view of the arena: the next restore finds the same
    snapshots.close(finished=False)
    again = make_state(seed=10)
    snapshots = begin(again, config())
    snapshots.restore()
    snapshots.close(finished=False)
    assert bits(again) == expected


def test_memory_is_foreseen_so_that_the_first_snapshot_with_optimizer_state_fits(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, nodes in (("full", (0, 0, 1, 1)), ("share", (0, 1, 2))):
        believe(monkeypatch, 0, *nodes)
        settings = config(replicated=mode)
        state = make_state()
        snapshots = begin(state, settings)
        assert snapshots.restore() is None
        assert snapshots._memory.view is not None
        capacity = snapshots._memory.view.arena.header.payload_capacity
        for step in range(3):
            train(state)
            take(snapshots, step)
        with run.arenas() as arenas:
            assert len(arenas) == 1, "it did not grow"
            used = newest(arenas[0])[1].payload_bytes
        assert used <= capacity <= used + 2 * CHUNK_BYTES + (1 << 20)
        snapshots.close(finished=True)


def test_stream_copies_are_lazy_and_a_write_behind_the_fence_is_found(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, nodes in (("full", (0, 1)), ("share", (0, 1, 2))):
        believe(monkeypatch, 0, *nodes)
        state = make_state()
        settings = Config(
            replicated="model,optimizer",
            parity=ParityConfig(replicated=mode),
            take=TakeConfig(budget_ms=10_000, rate_bytes_s=40 << 20),
        )
        snapshots = begin(state, settings)
        snapshots.restore()
        train(state)
        pending = snapshots.take(0)
        assert not pending.done(), "the copies are behind take"
        for parameter in state["model"].parameters():
            parameter.data.mul_(1.5)  # no hook tells
        assert pending.wait(timeout_s=30) is Survives.NOTHING
        assert "changed" in pending.reason
        snapshots.close(finished=True)


def test_optimizer_waits_for_stream_copies_that_read_what_it_writes(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, nodes in (("full", (0, 1)), ("share", (0, 1, 2))):
        believe(monkeypatch, 0, *nodes)
        state = make_state()
        settings = Config(
            replicated="model,optimizer",
            parity=ParityConfig(replicated=mode),
            take=TakeConfig(budget_ms=10_000, rate_bytes_s=100 << 20),
        )
        snapshots = begin(state, settings)
        snapshots.restore()
        reached: list[Survives] = []
        deadline = time.monotonic() + 30
        for step in itertools.count():
            train(state)
            pending = snapshots.take(step)
            if not pending.skipped:
                train(state)  # beside the copies
                reached.append(pending.wait(timeout_s=30))
            if len(reached) == 4:
                break
            assert time.monotonic() < deadline, pending
        assert set(reached) == {Survives.PROCESS}
        assert not any(watched.untrusted_reason for watched in snapshots._fence.watched)
        snapshots.close(finished=True)


def test_no_snapshot_begins_while_the_one_before_still_reads_live_tensors(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    take_config = TakeConfig(budget_ms=10_000, rate_bytes_s=40 << 20)
    snapshots = begin(state, Config(arena=ArenaConfig(slots=3), take=take_config))
    snapshots.restore()
    train(state)
    first = snapshots.take(0)
    assert not first.done()
    # Without a step in between its fence is not trusted: copied at once, it would leave nobody to wait for the first.
    assert "still being copied" in snapshots.take(1).reason
    train(state)
    assert first.wait(timeout_s=30) is Survives.PROCESS
    snapshots.close(finished=True)


# Parts of it on other ranks


@contextlib.contextmanager
def given_sources(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch, change: Any = lambda source: source
) -> Iterator[list[int]]:
    """Restores get the chunks that these arenas, and the rank's own, hold; as a keeper of all of them would answer."""
    others: list[int] = []
    asked = KeeperLink.request

    def request(link: KeeperLink, message: Any, expect: Any, *, timeout_s: float) -> Any:
        if not isinstance(message, WantRestore):
            return asked(link, message, expect, timeout_s=timeout_s)
        with contextlib.suppress(RecoveryError):  # it has its own arena only, and has decided now
            _, fds = asked(link, message, expect, timeout_s=timeout_s)
            for fd in fds:
                os.close(fd)
        with run.arenas() as (arena,):
            slot, _ = newest(arena)
            found = arena.committed(slot)
            assert found is not None
            fds = [os.dup(fd) for fd in (arena.segment.fd, *others)]
            sources = [change(source) for source in find_sources(fds)]
            return RestoreFrom(found[1].version, arena.arena_id, slot, 0, [], streams=sources), fds

    with monkeypatch.context() as patched:
        patched.setattr(KeeperLink, "request", request)
        yield others
    for fd in others:
        os.close(fd)


def find_sources(fds: list[int]) -> list[ReplicaSetSource]:
    found: dict[str, tuple[dict[int, tuple[int, int]], int]] = {}
    for index, fd in enumerate(fds):
        arena = Arena.adopt(fd, run_id=os.environ["KEEPSTEP_RUN_ID"], node_id=os.environ["KEEPSTEP_NODE_ID"])
        slot, layout = newest(arena)
        for stream in layout.replica_sets:
            chunks = found.setdefault(stream.class_id, ({}, stream.num_chunks))[0]
            for stored in stream.stored():
                if stored.chunk >= 0:
                    chunks[stored.chunk] = (index, arena.payload_span(slot).offset + stored.offset)
    return [
        ReplicaSetSource(name, [chunks[q][0] for q in range(count)], [chunks[q][1] for q in range(count)])
        for name, (chunks, count) in found.items()
    ]


def capture_as(
    monkeypatch: pytest.MonkeyPatch, rank: int, nodes: tuple[int, ...], settings: Config, *, flip: bool = False
) -> tuple[int, dict[str, bytes]]:
    """One snapshot as that rank, with a keeper of its own. Returns its arena and what it had.

    `flip`: its replica has one wrong bit, in the first byte of model.2.weight.
    """
    with LocalRun() as other, monkeypatch.context() as there:
        for name, value in other.environ.items():
            there.setenv(name, value)
        believe(there, rank, *nodes)
        expected = save(make_state(), settings, spoil=_flip if flip else lambda state: None)
        with other.arenas() as (arena,):
            fd = os.dup(arena.segment.fd)
    return fd, expected


def _flip(state: dict[str, Any]) -> None:
    state["model"][2].weight.data.view(torch.uint8)[0, 0] ^= 1


@pytest.mark.parametrize(("mode", "nodes"), [("full", (0, 0, 1, 1)), ("share", (0, 1, 2))])
def test_rank_that_stores_a_part_restores_from_the_arenas_of_all(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch, mode: str, nodes: tuple[int, ...]
) -> None:
    settings = config(replicated=mode)
    beside = [1] if mode == "full" else [1, 2]  # in full mode those of the own node are enough
    others = [capture_as(monkeypatch, rank, nodes, settings) for rank in beside]
    believe(monkeypatch, 0, *nodes)
    expected = save(make_state(), settings)
    assert all(theirs == expected for _, theirs in others), "replicas"
    with run.arenas() as (arena,):
        slot, layout = newest(arena)
        (stream,) = layout.replica_sets
        assert 0 < len(stream.chunks) < stream.num_chunks
        assert bool(stream.parity) == (mode == "share")
        found = arena.trainer_header(slot)
        assert found is not None
        shared = [chunk for chunk in chunk_spans(arena, slot, found[1]) if chunk.region == "shared"]
        places = [(arena.payload_span(slot).offset + s.offset, s.size_bytes) for s in stream.stored()]
        assert [(chunk.span.offset, chunk.span.size_bytes) for chunk in shared] == places
        assert len(read_table(arena, slot)) % DIGEST_BYTES == 0

    fresh = make_state(seed=5)
    snapshots = begin(fresh, settings)
    with pytest.raises((IntegrityError, RecoveryError), match="replicated state"):
        snapshots.restore()
    snapshots.close(finished=False)
    with given_sources(run, monkeypatch) as fds:
        fds += [fd for fd, _ in others]
        snapshots = begin(fresh, settings)
        restored = snapshots.restore()
        assert restored is not None
        snapshots.close(finished=False)
    assert bits(fresh) == expected


def test_part_of_a_stream_without_the_rest_is_refused() -> None:
    piece = TensorView("x", "uint8", (2 * CHUNK_BYTES,), (1,), 0, (2 * CHUNK_BYTES,), (0,), False)
    stream = ReplicaShares(World(0, (0, 0, 1, 1))).replica_set(
        (0, 1, 2, 3), (Entry(0, 2 * CHUNK_BYTES, (piece,)),), offset=0
    )
    assert stream.chunks == (0,)
    payload = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    with ReplicaChunks([]) as sources:
        with pytest.raises(IntegrityError, match="named no source"):
            sources.chunks(Layout((), (), (stream,)), [], arena=payload, payload=payload)
        twice = [ReplicaSetSource(stream.class_id, [0, 0], [0, 0])] * 2
        with pytest.raises(IntegrityError, match="names a replica set twice"):
            sources.chunks(Layout((), (), (stream,)), twice, arena=payload, payload=payload)


def test_sources_that_lie_are_refused(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, 0, 0, 1)
    save(make_state(), config())

    def changed(**fields: Any) -> Any:
        return lambda source: ReplicaSetSource(
            source.class_id, fields.get("fd_index", source.fd_index), fields.get("offsets", source.offsets)
        )

    with run.arenas() as (arena,):
        count, size = newest(arena)[1].replica_sets[0].num_chunks, arena.segment.size_bytes
    lies = {
        "gave 1 of": changed(offsets=[0]),
        "points to descriptor 7": changed(fd_index=[7] * count),
        "points to descriptor -1": changed(fd_index=[-1] * count),
        "is outside": changed(offsets=[size] * count),
        "chunk 0 of .* is outside": changed(offsets=[-1] * count),
    }
    for text, lie in lies.items():
        with given_sources(run, monkeypatch, lie):
            snapshots = begin(make_state(seed=5), config())
            with pytest.raises(IntegrityError, match=text):
                snapshots.restore()
            snapshots.close(finished=False)


def test_state_whose_holders_are_others_now_is_refused_by_path(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, 0, 0, 1)
    save(make_state(), config())
    believe(monkeypatch, 0, 0, 1, 2)
    fresh = make_state(seed=5)
    before = bits(fresh)
    snapshots = begin(fresh, config())
    with pytest.raises(RecoveryError, match=r"model\.0\.weight is the same on ranks 0, 1, 2 now and was on ranks 0, 1"):
        snapshots.restore()
    snapshots.close(finished=False)
    assert bits(fresh) == before
    snapshots = begin(fresh, Config(take=TakeConfig(budget_ms=10_000)))  # nothing is said now: the bytes are the same
    assert snapshots.restore() is not None
    snapshots.close(finished=False)


def test_nothing_is_shared_on_a_single_node(run: LocalRun) -> None:
    save(make_state(), config())
    with run.arenas() as (arena,):
        assert newest(arena)[1].replica_sets == ()
        slot = newest(arena)[0]
        sealed = arena.sealed(slot)
        assert sealed is not None
        assert sealed.trainer.shared_offset == sealed.trainer.payload_bytes


def test_leftovers_of_an_earlier_layout_do_not_show_between_the_tensors_of_a_stream(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch, 0, 0, 1)
    tensors = {
        "a": torch.full((1 << 20,), 0xEE, dtype=torch.uint8),
        "b": torch.full((1 << 20,), 0xEE, dtype=torch.uint8),
    }
    snapshots = begin({"extra": tensors}, config())
    snapshots.restore()
    for step in range(4):  # fills every slot
        take(snapshots, step)
    tensors["a"] = torch.full(((1 << 20) + 5,), 0x11, dtype=torch.uint8)
    deadline = time.monotonic() + 20
    step = 4
    while snapshots.take(step).wait(timeout_s=30) is not Survives.PROCESS:
        assert time.monotonic() < deadline
        step += 1
        time.sleep(0.02)
    with run.arenas() as arenas:
        slot, layout = newest(arenas[-1])
        (stream,) = layout.replica_sets
        (first, second) = stream.entries
        at = arenas[-1].payload_span(slot).offset + stream.offset
        between = arenas[-1].segment.read(at + first.size_bytes, second.offset - first.size_bytes)
        assert between == bytes(len(between))
        assert len(between) == 59
    snapshots.close(finished=True)


def test_need_counts_what_is_still_to_come_by_who_will_hold_it() -> None:
    sharing = ReplicaShares(World(0, (0, 0, 1, 1)))
    plan = CopyPlan(Layout((), ()), b"", b"")
    everyone = (0, 1, 2, 3)
    alone = arena_size.need_of(plan, 0, [arena_size.MissingTensor(10 * CHUNK_BYTES)], sharing)
    shared = arena_size.need_of(plan, 0, [arena_size.MissingTensor(5 * CHUNK_BYTES, everyone)] * 2, sharing)
    assert alone.payload_bytes == 10 * CHUNK_BYTES
    assert shared.payload_bytes == 5 * CHUNK_BYTES
    assert arena_size.need_of(plan, 0, [], None).payload_bytes == 0


# The audit


@pytest.fixture
def fds() -> Iterator[list[int]]:
    opened: list[int] = []
    yield opened
    for fd in opened:
        os.close(fd)


def book_of(fd: int, rank: int) -> SealedSnapshot:
    """What that rank holds; to its keeper it was the only one."""
    arena = Arena.adopt(fd, run_id=os.environ["KEEPSTEP_RUN_ID"], node_id=os.environ["KEEPSTEP_NODE_ID"])
    book = open_sealed(arena, newest(arena)[0])
    book.sealed = replace(book.sealed, trainer=replace(book.sealed.trainer, rank=rank))
    return book


def compare(held: list[SealedSnapshot]) -> Divergence | None:
    """As the coordinator does, with what each book says by itself."""
    class_id = diverged_set(set_digests(book) for book in held)
    if class_id is None:
        return None
    comparison = Comparison(ReplicaAudit(held[0].sealed.version, class_id))
    for _ in range(2):
        said = [found for book in held if (found := answer(book, comparison.question)) is not None]
        verdict = comparison.receive(said)
        if verdict is not None:
            return verdict
    raise AssertionError("two questions are enough")


@pytest.mark.parametrize(("mode", "losses", "count"), [("full", 1, 3), ("share", 1, 3), ("share", 2, 4)])
def test_flipped_bit_in_a_replica_is_found_and_named(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch, fds: list[int], mode: str, losses: int, count: int
) -> None:
    settings, nodes = config(replicated=mode, losses=losses), tuple(range(count))
    for flip in (False, True):
        fds += [capture_as(monkeypatch, rank, nodes, settings, flip=flip)[0] for rank in nodes]
    alike = [book_of(fd, rank) for rank, fd in enumerate(fds[:count])]
    wrong = [book_of(fd, rank) for rank, fd in enumerate(fds[count:])]
    assert compare(alike) is None
    found = 0
    for flipped in range(count):
        verdict = compare([*alike[:flipped], wrong[flipped], *alike[flipped + 1 :]])
        if verdict is None:
            assert mode == "share", "it holds another part of the class"
            continue
        found += 1
        assert "model.2.weight" in verdict.paths
        named = [flipped] if mode == "full" or losses > 1 else list(nodes)
        assert f"{', '.join(map(str, named))} differ" in verdict.reason, verdict.reason
        assert verdict.rank == named[0]
    # In a stripe one rank holds the chunk itself and `losses` ranks hold parity of it.
    assert found == (count if mode == "full" else 1 + losses)


def test_device_without_memory_for_fingerprints_costs_no_snapshot(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> SnapshotChecks:
        raise torch.OutOfMemoryError("nothing left")

    monkeypatch.setattr(SnapshotChecks, "next", full)
    save(make_state(), Config(), steps=3)  # each of them is complete
