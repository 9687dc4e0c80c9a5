"""A few nodes and a network with faults to order, over either transport, for the tests of `keepstep.transport`.

Over TCP every connection passes a small proxy that can stop forwarding without a word (cut, freeze), hold bytes back
and flip a bit. It knows who dials by the source address: node number i lives at 127.0.1.i.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from keepstep.config import PeersConfig
from keepstep.testing.memory_transport import MemoryHub, MemoryTransport
from keepstep.transport import Body, FetchRequest, Peer, Refusal, TcpOptions, TcpTransport

SECRET = b"a secret of this run"
RUN_ID = "run-1"
LIMIT_S = 20.0


def until(found: Callable[[], Any], what: str = "it", limit_s: float = LIMIT_S) -> Any:
    """Wait for something to be true, and return it."""
    end = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < end, f"waited {limit_s} s for {what}"
        time.sleep(0.002)
    return value


class Node:
    """A transport and what it has said. `things` is what it serves."""

    def __init__(self, node_id: str, instance: str) -> None:
        self.node_id, self.instance = node_id, instance
        self.peers: Any = None
        self.card = Peer(node_id, instance)
        self.messages: list[tuple[str, bytes]] = []
        self.links: list[tuple[str, bool, str]] = []
        self.things: dict[bytes, Body | Callable[[], Body]] = {}
        self.num_served = 0

    def on_message(self, node_id: str, message: bytes, instance: str) -> None:
        self.messages.append((node_id, message))

    def on_link(self, node_id: str, up: bool, reason: str) -> None:
        self.links.append((node_id, up, reason))

    def serve(self, node_id: str, request: bytes) -> Body:
        self.num_served += 1
        if request not in self.things:
            raise Refusal(f"no {request.decode()} here")
        thing = self.things[request]
        return thing() if callable(thing) else thing

    def keep(self, name: bytes, data: bytes) -> None:
        """Serve these bytes from a memfd, as a keeper does."""
        fd = os.memfd_create("thing")
        try:
            os.write(fd, b"#" * 100 + data)
            checksum, held = xxhash.xxh3_128_digest(data), os.dup(fd)
        finally:
            os.close(fd)
        self.fds = [*getattr(self, "fds", []), held]
        self.things[name] = lambda: Body.of_file(held, 100, len(data), checksum)

    def get(self, node: Node, name: bytes, size_bytes: int, **options: Any) -> Any:
        """Fetch into a buffer of our own: (future, buffer)."""
        buffer = bytearray(size_bytes)
        timeout_s = options.pop("timeout_s", 10.0)
        request = FetchRequest(node.node_id, name, size_bytes, timeout_s, memoryview(buffer), **options)
        return self.peers.fetch(request), buffer

    def downs(self, node: Node) -> list[str]:
        return [reason for node_id, up, reason in self.links if node_id == node.node_id and not up]


def transport_limits(config: dict[str, Any]) -> dict[str, Any]:
    """Of these options, the ones that a transport takes itself; they are removed."""
    limits = {"timeout_s": config.pop("timeout_s", 2.0)}
    if "num_streams" in config:
        limits["num_streams"] = config.pop("num_streams")
    return limits


class Net:
    """What both worlds offer. `make` starts a node, `acquaint` lets all that live meet."""

    name = ""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def make(self, node_id: str, instance: str = "1", **config: Any) -> Node:
        node = Node(node_id, instance)
        limits = transport_limits(config)
        self.nodes.append(node)
        self._start(node, PeersConfig(**({"dead_s": 0.6} | config)), limits)
        return node

    def pair(self, **config: Any) -> tuple[Node, Node]:
        one, other = self.make("a", **config), self.make("b", **config)
        self.acquaint(one, other)
        return one, other

    def acquaint(self, *nodes: Node) -> None:
        for node in nodes:
            node.peers.set_peers([other.card for other in nodes])
        for node in nodes:
            for other in nodes:
                if other is not node:
                    until(lambda n=node, o=other: n.peers.up(o.node_id), "a link")
                    until(lambda n=node, o=other: (o.node_id, True) in [x[:2] for x in n.links], "the word of it")

    def kill(self, node: Node) -> None:
        node.peers.close()

    def close(self) -> None:
        for node in self.nodes:
            node.peers.close()
            for fd in getattr(node, "fds", []):
                os.close(fd)

    def _start(self, node: Node, config: PeersConfig, limits: dict[str, Any]) -> None:
        raise NotImplementedError


class MemoryNet(Net):
    name = "memory"

    def __init__(self) -> None:
        super().__init__()
        self._hub = MemoryHub()
        self.cut, self.heal = self._by_name(self._hub.cut), self._by_name(self._hub.heal)
        self.freeze, self.thaw = self._by_name(self._hub.freeze), self._by_name(self._hub.thaw)
        self.corrupt = self._by_name(self._hub.corrupt)

    @staticmethod
    def _by_name(order: Callable[..., None]) -> Callable[..., None]:
        return lambda *nodes: order(*(node.node_id for node in nodes))

    def _start(self, node: Node, config: PeersConfig, limits: dict[str, Any]) -> None:
        node.peers = MemoryTransport(self._hub, node.card, config, node, **limits)
        node.card = node.peers.me


class TcpNet(Net):
    name = "tcp"

    def __init__(self, **tls: str) -> None:
        super().__init__()
        self._tls = tls
        self._addresses: dict[str, str] = {}
        self._proxies: list[Proxy] = []
        self.silent: set[frozenset[str]] = set()
        self.flip: set[tuple[str, str]] = set()

    def cut(self, one: Node, other: Node) -> None:
        self.silent.add(frozenset((one.node_id, other.node_id)))

    def heal(self, one: Node, other: Node) -> None:
        self.silent.discard(frozenset((one.node_id, other.node_id)))

    def freeze(self, node: Node) -> None:
        self.silent.add(frozenset((node.node_id,)))

    def thaw(self, node: Node) -> None:
        self.silent.discard(frozenset((node.node_id,)))

    def corrupt(self, source: Node, target: Node) -> None:
        self.flip.add((source.node_id, target.node_id))

    def quiet(self, one: str, other: str) -> bool:
        return bool(self.silent & {frozenset((one, other)), frozenset((one,)), frozenset((other,))})

    def _start(self, node: Node, config: PeersConfig, limits: dict[str, Any]) -> None:
        address = f"127.0.1.{len(self._addresses) + 1}"
        self._addresses[address] = node.node_id
        config = PeersConfig(
            **{name: getattr(config, name) for name in config.given} | {"address": address} | self._tls
        )
        node.peers = TcpTransport(node.card, RUN_ID, SECRET, config, node, options=TcpOptions(**limits))
        proxy = Proxy(self, node.node_id, node.peers.card_address())
        self._proxies.append(proxy)
        node.card = Peer(node.node_id, node.instance, *proxy.address)

    def who(self, address: str) -> str:
        return self._addresses.get(address, "stranger")

    def close(self) -> None:
        super().close()
        for proxy in self._proxies:
            proxy.close()


class Proxy:
    """Forwards connections to one node, as its net says."""

    def __init__(self, net: TcpNet, target: str, behind: tuple[str, int]) -> None:
        self._net, self._target, self._behind = net, target, behind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _spawn(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, name="test-proxy", daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            near, source = self._listener.accept()
            self._spawn(partial(self._forward, near, self._net.who(source[0])))

    def _forward(self, near: socket.socket, dialer: str) -> None:
        far = socket.socket()
        try:
            far.bind((near.getpeername()[0], 0))
            far.connect(self._behind)
            # Small buffers: a freeze is to be felt at once, not when a megabyte has drained.
            for sock in (near, far):
                sock.setblocking(False)
            self._pump(near, far, dialer)
        except OSError:
            pass
        finally:
            near.close()
            far.close()

    def _pump(self, near: socket.socket, far: socket.socket, dialer: str) -> None:
        pending = {near: b"", far: b""}  # what waits to be written to each
        ways = {near: (far, (dialer, self._target)), far: (near, (self._target, dialer))}
        while not self._closed:
            if self._net.quiet(dialer, self._target):
                time.sleep(0.002)
                continue
            readers = [sock for sock in ways if not pending[ways[sock][0]]]
            writers = [sock for sock in ways if pending[sock]]
            readable, writable, _ = select.select(readers, writers, [], 0.02)
            if self._net.quiet(dialer, self._target):
                continue
            for sock in readable:
                out, way = ways[sock]
                try:
                    data = sock.recv(65536)
                except BlockingIOError:
                    continue
                if not data:
                    return
                pending[out] = self._maybe_flip(data, way)
            for sock in writable:
                pending[sock] = pending[sock][sock.send(pending[sock]) :]

    def _maybe_flip(self, data: bytes, way: tuple[str, str]) -> bytes:
        if way in self._net.flip and len(data) > 4096:
            self._net.flip.discard(way)
            return data[:3000] + bytes([data[3000] ^ 4]) + data[3001:]
        return data


def num_sockets() -> int:
    return sum(1 for entry in Path("/proc/self/fd").iterdir() if _is_transport_fd(entry))


def _is_transport_fd(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith(("socket:", "anon_inode:", "/memfd:"))
    except OSError:
        return False


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("keepstep-peer")]


class Process:
    """A node in a process of its own (this file, run as a program), to be stopped and killed. Serves `thing`."""

    def __init__(self, node_id: str, address: str, **config: Any) -> None:
        said = json.dumps({"node_id": node_id, "config": {"address": address, **config}})
        self._process = subprocess.Popen(
            [sys.executable, __file__, said], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.card = Peer(**json.loads(self._process.stdout.readline()))

    def meet(self, *cards: Peer) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([vars(card) for card in cards]) + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.communicate(timeout=10)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()


class EchoNode(Node):
    """Sends every message back."""

    def on_message(self, node_id: str, message: bytes, instance: str) -> None:
        self.peers.send(node_id, b"echo " + message)


def main() -> None:
    said = json.loads(sys.argv[1])
    node = EchoNode(said["node_id"], "1")
    peers = node.peers = TcpTransport(node.card, RUN_ID, SECRET, PeersConfig(**said["config"]), node)
    node.keep(b"thing", bytes(range(256)) * 4096)
    address, port = peers.card_address()
    print(json.dumps({"node_id": node.node_id, "instance": "1", "address": address, "port": port}), flush=True)
    for line in sys.stdin:  # ends with the test
        peers.set_peers([Peer(**card) for card in json.loads(line)])
    peers.close()


if __name__ == "__main__":
    main()
