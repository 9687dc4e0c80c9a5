"""The bytes of streams at a restore: chunk by chunk, wherever on this node the keeper has them verified.

In `full` mode they lie in the arenas of the ranks of this node, in `share` mode in memory that the keeper
has filled for the restore. What the keeper says is checked before it is used: the class, the number of chunks,
and that each lies inside its memfd.
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

Chunks = list[torch.Tensor]
"""the bytes of every chunk of a stream, in order"""


class ReplicaChunks:
    """Owns the descriptors that came with a restore behind the first, the rank's own arena, and their maps."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        self._maps: dict[int, tuple[Mapping, torch.Tensor]] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)

    def chunks(
        self, layout: Layout, given: list[ReplicaSetSource], *, arena: torch.Tensor, payload: torch.Tensor
    ) -> dict[str, Chunks]:
        """The chunks of every stream of the layout. `arena`: the rank's own, `payload`: of its slot."""
        self._arena = arena
        named = {source.class_id: source for source in given}
        if len(named) != len(given):
            raise IntegrityError("the keeper names a class twice")
        return {
            stream.class_id: self._given(stream, named[stream.class_id])
            if stream.class_id in named
            else _own(stream, payload)
            for stream in layout.replica_sets
        }

    def _given(self, stream: ReplicaSet, source: ReplicaSetSource) -> Chunks:
        count = stream.num_chunks
        if (len(source.fd_index), len(source.offsets)) != (count, count):
            raise IntegrityError(f"the keeper gave {len(source.offsets)} of {count} chunks of {stream.class_id}")
        chunks = []
        for chunk, (index, offset) in enumerate(zip(source.fd_index, source.offsets, strict=True)):
            memory, size = self._memory(index), stream.chunk_bytes(chunk)
            if not 0 <= offset <= memory.numel() - size:
                raise IntegrityError(f"chunk {chunk} of {stream.class_id} lies beyond the memory it is said to lie in")
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


def _own(stream: ReplicaSet, payload: torch.Tensor) -> Chunks:
    """The only rank of its node that holds a class has all of it itself."""
    stored = {place.chunk: place.offset for place in stream.stored() if place.chunk >= 0}
    if len(stored) != stream.num_chunks:
        raise IntegrityError(f"the keeper did not say where the chunks of {stream.class_id} are")
    return [payload[stored[q] : stored[q] + stream.chunk_bytes(q)] for q in range(stream.num_chunks)]
