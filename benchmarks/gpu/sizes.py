"""How large everything is: on an H200, and at toy size where the benchmark only shows that it runs. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class GptSize:
    width: int
    layers: int
    heads: int
    vocab: int
    context: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Blocks without snapshots (A) and with (B): A B A B ... A, so that drift cancels."""

    every: int
    """steps from one snapshot to the next"""
    steps: int
    """of a block with snapshots"""
    alone_steps: int
    pairs: int


@dataclass(frozen=True, kw_only=True)
class SmallSize:
    """A model of many small tensors: square parameters, their moments and step counts."""

    parameters: int
    side: int
    matmul_side: int
    num_matmuls: int
    """stand for forward and backward"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    gpt: GptSize
    """part 1 and the shares of part 4: 1.42 B parameters, 17.0 GB of fp32 state in 879 tensors and 293 counters"""
    large: GptSize
    """part 2: 3.0 B parameters in bf16 with fp32 master and moments, 42 GB, two slots of which fit 128 GiB"""
    large_step_s: float
    """the batch is raised until a step takes this long"""
    small: SmallSize
    cadences: tuple[Cadence, ...]
    large_cadences: tuple[Cadence, ...]
    small_cadences: tuple[Cadence, ...]
    share_cadences: tuple[Cadence, ...]
    warm_steps: int
    quiet_snapshots: int
    """for the host time of `take` and the hook with an empty launch queue"""
    limit_bytes: int
    """copied to find the limit of the link"""
    ring_bytes: int
    """registered memory that such a copy goes through, again and again"""
    kills: int
    killed_bytes: int
    """state of the trainers that are killed in mid-capture"""
    poison_bytes: int
    poison_snapshots: int
    poison_scales: tuple[float, ...] = (4.0, 0.25)
    """factors on the measured window: one that starts copies it cannot finish, one that stages what it need not"""


H200 = Sizes(
    gpt=GptSize(width=2048, layers=24, heads=16, vocab=50304, context=1024, batch=16),
    large=GptSize(width=2560, layers=35, heads=20, vocab=50304, context=1024, batch=20),
    large_step_s=0.8,
    small=SmallSize(parameters=10_000, side=64, matmul_side=8192, num_matmuls=60),
    cadences=(
        Cadence(every=2, steps=20, alone_steps=20, pairs=3),
        Cadence(every=1, steps=20, alone_steps=10, pairs=3),
        Cadence(every=10, steps=40, alone_steps=20, pairs=2),
    ),
    large_cadences=(Cadence(every=5, steps=15, alone_steps=10, pairs=3),),
    small_cadences=(Cadence(every=1, steps=20, alone_steps=20, pairs=3),),
    share_cadences=(Cadence(every=1, steps=20, alone_steps=20, pairs=4),),
    warm_steps=5,
    quiet_snapshots=10,
    limit_bytes=17 << 30,
    ring_bytes=4 << 30,
    kills=20,
    killed_bytes=2 << 30,
    poison_bytes=256 << 20,  # copied in the time of a step, and sealed often enough for 500
    poison_snapshots=500,
)

TOY = Sizes(
    gpt=GptSize(width=32, layers=2, heads=2, vocab=128, context=16, batch=2),
    large=GptSize(width=32, layers=2, heads=2, vocab=128, context=16, batch=2),
    large_step_s=0.0,
    small=SmallSize(parameters=50, side=8, matmul_side=64, num_matmuls=2),
    cadences=(
        Cadence(every=2, steps=6, alone_steps=4, pairs=1),
        Cadence(every=1, steps=4, alone_steps=4, pairs=1),
        Cadence(every=10, steps=10, alone_steps=4, pairs=1),
    ),
    large_cadences=(Cadence(every=5, steps=10, alone_steps=4, pairs=1),),
    small_cadences=(Cadence(every=1, steps=6, alone_steps=4, pairs=1),),
    share_cadences=(Cadence(every=1, steps=6, alone_steps=4, pairs=1),),
    warm_steps=2,
    quiet_snapshots=2,
    limit_bytes=4 << 20,
    ring_bytes=1 << 20,
    kills=1,
    killed_bytes=8 << 20,
    poison_bytes=4 << 20,
    poison_snapshots=6,
    poison_scales=(4.0,),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a child is told: one thing to measure, and where the results go."""

    name: str
    part: int
    device: str
    toy: bool
    out: str
    deadline: float
    """by time.monotonic(), which all processes of a machine share"""
    scratch: str = ""
    """a directory for files and for the words between parent and child"""
    option: str = ""
    """which contender, which way"""
    every: tuple[int, ...] = ()
    """only these cadences, and nothing beside them; empty: everything"""

    @property
    def sizes(self) -> Sizes:
        return TOY if self.toy else H200

    def cadences_of(self, all_of_them: tuple[Cadence, ...]) -> tuple[Cadence, ...]:
        return tuple(one for one in all_of_them if not self.every or one.every in self.every)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        return cls(**json.loads(text))
