"""Namespaces: links that can be cut and slowed, and that leave nothing behind."""

from __future__ import annotations

import subprocess
import time

import pytest

from keepstep.errors import ConfigError
from keepstep.testing.network import Namespaces


def inside(network: Namespaces, node: str, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(network.inside(node, command.split()), capture_output=True, text=True, timeout=20)


def reaches(network: Namespaces, node: str, address: str) -> bool:
    """Whether a connection is refused, which takes a machine that answers."""
    script = f"""
import socket
try:
    socket.create_connection(("{address}", 9), timeout=1)
except ConnectionRefusedError:
    print("reached")
except OSError:
    pass
"""
    done = subprocess.run(network.inside(node, ["python3", "-c", script]), capture_output=True, text=True, timeout=20)
    return "reached" in done.stdout


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    return {line.split()[0] for line in listed.splitlines() if line}


@pytest.fixture
def network() -> Namespaces:
    before = namespaces()
    made = Namespaces(rate="100mbit")
    try:
        made.open()
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()
    assert namespaces() <= before


def test_nodes_reach_each_other_and_the_store_until_a_link_is_cut(network: Namespaces) -> None:
    a, b = network.add("a"), network.add("b")
    assert reaches(network, "a", b)
    assert reaches(network, "b", network.store_address)
    network.cut("b")
    assert not reaches(network, "a", b)
    assert reaches(network, "a", network.store_address)
    network.mend("b")
    deadline = time.monotonic() + 10
    while not reaches(network, "b", a):
        assert time.monotonic() < deadline


def test_a_limited_link_is_slow_and_what_it_carries_is_counted(network: Namespaces) -> None:
    a = network.add("a")
    network.add("b")
    receive = f"""
import socket
server = socket.create_server(("{a}", 7000))
print("open", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
"""
    send = f"""
import socket, time
started = time.monotonic()
with socket.create_connection(("{a}", 7000), timeout=20) as sock:
    sock.sendall(bytes(4 << 20))
    sock.shutdown(socket.SHUT_WR)
    sock.recv(1)
print(time.monotonic() - started)
"""
    before = network.sent_bytes("b")
    server = subprocess.Popen(network.inside("a", ["python3", "-c", receive]), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        done = subprocess.run(
            network.inside("b", ["python3", "-c", send]), capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        server.kill()
        server.communicate()
    assert 0.25 < float(done.stdout) < 10  # 32 Mbit at 100 Mbit/s
    assert network.sent_bytes("b") - before > 4 << 20


def test_a_rate_that_tc_would_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a rate"):
        Namespaces(rate="fast; rm -rf /")
