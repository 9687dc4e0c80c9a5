"""Everything that reads bytes from outside, against inputs that are nearly right.

One second per target here, minutes in `make fuzz` (FUZZ_S). A failure prints the seed and the input: put it
into the corpus, where every later run begins with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutation import mutate
from nodes import Run, running, wait_for
from targets import TARGETS
from test_strangers import stranger

from keepstep.control import messages as control
from keepstep.control.framing import pack
from keepstep.control.spawn import start_keeper
from keepstep.testing.run import LocalRun
from keepstep.transport.interface import FetchError, FetchRequest

SECONDS = float(os.environ.get("FUZZ_S", "1"))
SLOWEST_S = 20.0  # for one input, on a busy machine
MAX_GROWTH_BYTES = 512 << 20
CORPUS = Path(__file__).parent / "corpus"

pytestmark = pytest.mark.timeout(120 + 20 * SECONDS)


def corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def inputs(name: str, draw: random.Random) -> Iterator[bytes]:
    """The corpus as it is, then changes of it, until the time is over."""
    seeds = corpus(name)
    yield from seeds
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        yield mutate(draw.choice(seeds), seeds, draw)


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_a_refusal_comes_of_bad_bytes(name: str) -> None:
    seed, target = secrets.randbits(32), TARGETS[name]
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in inputs(name, random.Random(seed)):
        started = time.monotonic()
        try:
            target(data)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {name} raised for {data!r}") from error
        assert time.monotonic() - started < SLOWEST_S, f"seed {seed}: {name} took too long for {data!r}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    assert grown << 10 < MAX_GROWTH_BYTES, f"seed {seed}: {name} takes memory"


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_there(name: str) -> None:
    assert corpus(name)


def test_the_control_socket_outlives_bad_frames() -> None:
    """From a process of the same user, with and without a greeting before them."""
    draw = random.Random(seed := secrets.randbits(32))
    with LocalRun() as run:
        start_keeper(run.identity, run.config())
        hello = control.Hello(control.PROTOCOL, run.identity.run_id, run.identity.node_id, "trainer", 1)
        pid = run.keeper_pid()
        for data in inputs("control_frames", draw):
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock, contextlib.suppress(OSError):
                sock.settimeout(5)
                sock.connect(str(run.identity.control_socket))
                sock.sendall((pack(hello) if draw.random() < 0.8 else b"") + data)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 16)
        assert (seed, run.status().keeper.pid) == (seed, pid)


@contextlib.contextmanager
def two_nodes(place: Path) -> Iterator[Run]:
    with running(place, losses=1) as run:
        run.add("a", "b")
        run.start(["a", "b"])
        run.protect()
        yield run
        run.protect()


def test_the_peer_port_outlives_bad_bytes_before_a_handshake(place: Path) -> None:
    draw = random.Random(secrets.randbits(32))
    with two_nodes(place) as run:
        card = run.nodes["a"].card().card
        for data in inputs("peer_frames", draw):
            with contextlib.suppress(OSError), socket.create_connection((card.address, card.port), 5) as sock:
                sock.sendall(data)


def test_the_peer_port_outlives_bad_messages_and_requests_of_a_peer(place: Path) -> None:
    draw = random.Random(secrets.randbits(32))
    with two_nodes(place) as run, stranger(run, secret=run.secret) as peers:
        wait_for(lambda: peers.up("a"), "a guest is let in")
        requests = itertools.cycle(corpus("chunk_requests"))
        for data in inputs("peer_messages", draw):
            peers.send(draw.choice("ab"), data)
            request = mutate(next(requests), corpus("chunk_requests"), draw)[:4096]
            with contextlib.suppress(FetchError, ValueError):
                peers.fetch(FetchRequest("a", request, 1 << 16, 2.0)).result(10)
