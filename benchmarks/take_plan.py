"""What `bench_take.py` tells each of its children to measure. Light to import: the parent never loads torch."""

from __future__ import annotations

from dataclasses import dataclass

CONTENDERS: dict[str, str | None] = {
    "keepstep": "keepstep",
    "keepstep-loader": "keepstep",
    "keepstep-copy-alone": "keepstep",
    "dcp-thread": None,
    "dcp-process": None,
    "dcp-async-staging": None,
    "torch-save": None,
    "lm-resiliency": "lm_resiliency",
    "dlrover": "dlrover",
}
"""Every way of saving, and the package it needs besides torch."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    contender: str
    size_bytes: int
    num_tensors: int
    num_matmuls: int
    """matrix products between two updates"""
    num_snapshots: int
    """for the held time; 0 leaves it out"""
    steps_between: int
    """updates from one snapshot to the next"""
    num_pairs: int
    """blocks with and without a snapshot, for the slow-down"""
    block_steps: int
    """steps in such a block: long enough for the background work to end inside it"""
    wait_s: float
    """deadline for each wait on background work"""
    directory: str
    """where files go: on tmpfs, if there is room"""
