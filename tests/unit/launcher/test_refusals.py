"""What `--rdzv-backend=keepstep` refuses before anything is started, and the store that is served alone."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from keepstep.errors import ConfigError
from keepstep.launcher.store import serve
from keepstep.launcher.torchrun import create


def parameters(min_nodes: int, max_nodes: int, **more: str) -> RendezvousParameters:
    return RendezvousParameters("keepstep", "localhost:1", "a-run", min_nodes, max_nodes, **more)


@pytest.fixture(autouse=True)
def nobody_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEPSTEP_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize(("sizes", "largest"), [((2, 2), 1), ((3, 8), 2), ((1, 8), 1)])
def test_losses_beyond_the_smallest_round_are_refused(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], largest: int
) -> None:
    monkeypatch.setenv("KEEPSTEP_PARITY_LOSSES", str(largest + 1))
    with pytest.raises(ConfigError, match=f"the largest possible value is {largest}"):
        create(parameters(*sizes))


def test_a_store_in_a_file() -> None:
    with pytest.raises(ConfigError, match="need a TCP store"):
        create(parameters(2, 2, store_type="file"))


def test_a_store_is_served_where_it_was_asked_for_and_nowhere_else() -> None:
    store = serve("127.0.0.5", 0)
    client = TCPStore("127.0.0.5", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    client.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=1)


def test_a_store_on_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="no store can be served"):
        serve("127.0.0.1", taken.getsockname()[1])
