"""Seal and verify slots as the keeper does, without its checksum worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from keepstep.keeper.workers.checksum_client import ChecksumClient
from keepstep.keeper.workers.sealing import Sealer


def make_sealer() -> Sealer:
    return Sealer(ThreadPoolExecutor(1, thread_name_prefix="test-hash"), ChecksumClient(1), worker_min_bytes=1 << 62)


_sealer = make_sealer()
seal, verify = _sealer.seal, _sealer.verify
