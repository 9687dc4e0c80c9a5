"""Chunks of replica sets at a restore, wherever on this node the keeper verified them.

In `full` mode they are in the arenas of this node's ranks, in `share` mode in memory that the keeper filled for the
restore. The keeper's answer is validated before it is used: the replica set, the number of chunks, and that each of
them is inside its memfd.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

import numpy as np
import torch

from keepstep.arena.memfd import Mapping, Memfd
from keepstep.control.messages import ReplicaSetSource
from keepstep.errors import IntegrityError
from keepstep.layout import Layout, ReplicaSet

Chunks = list[torch.Tensor]  # the bytes of every chunk of a replica set, in order


class ReplicaChunks:
    """Owns the descriptors that the keeper sent with its answer, except the rank's own arena, and their mappings."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        self._maps: dict[int, tuple[Mapping, torch.Tensor]] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)

    def chunks(
        self, layout: Layout, given: list[ReplicaSetSource], *, arena: torch.Tensor, payload: torch.Tensor
    ) -> dict[str, Chunks]:
        """The chunks of every replica set of the layout. `arena`: the rank's own, `payload`: of its slot."""
        self._arena = arena
        by_class = {source.class_id: source for source in given}
        if len(by_class) != len(given):
            raise IntegrityError("the keeper names a replica set twice")
        return {
            replica_set.class_id: self._given(replica_set, by_class[replica_set.class_id])
            if replica_set.class_id in by_class
            else _own(replica_set, payload)
            for replica_set in layout.replica_sets
        }

    def _given(self, replica_set: ReplicaSet, source: ReplicaSetSource) -> Chunks:
        count = replica_set.num_chunks
        if (len(source.fd_index), len(source.offsets)) != (count, count):
            raise IntegrityError(f"the keeper gave {len(source.offsets)} of {count} chunks of {replica_set.class_id}")
        chunks = []
        for chunk, (index, offset) in enumerate(zip(source.fd_index, source.offsets, strict=True)):
            memory, size = self._memory(index), replica_set.chunk_bytes(chunk)
            if not 0 <= offset <= memory.numel() - size:
                raise IntegrityError(
                    f"chunk {chunk} of {replica_set.class_id} is outside the memory that the keeper named"
                )
            chunks.append(memory[offset : offset + size])
        return chunks

    def _memory(self, index: int) -> torch.Tensor:
        if index == 0:
            return self._arena
        if not 1 <= index <= len(self._fds):
            raise IntegrityError(f"the keeper points to descriptor {index} and gave {1 + len(self._fds)}")
        if index not in self._maps:
            mapping = Mapping(Memfd.adopt(self._fds[index - 1]))
            self._maps[index] = (mapping, torch.from_numpy(np.frombuffer(mapping.map, dtype=np.uint8)))
        return self._maps[index][1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        maps, self._maps = self._maps, {}
        for mapping, _ in maps.values():
            mapping.close()
        self._arena = torch.empty(0, dtype=torch.uint8)
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def _own(replica_set: ReplicaSet, payload: torch.Tensor) -> Chunks:
    """Chunks in the rank's own payload: it is the only rank of its node in this replica set, so it has all of them."""
    stored = {place.chunk: place.offset for place in replica_set.stored() if place.chunk >= 0}
    if len(stored) != replica_set.num_chunks:
        raise IntegrityError(f"the keeper named no source for the chunks of {replica_set.class_id}")
    return [payload[stored[q] : stored[q] + replica_set.chunk_bytes(q)] for q in range(replica_set.num_chunks)]
