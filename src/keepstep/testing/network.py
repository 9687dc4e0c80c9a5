"""The network of a LocalCluster: the loopback, or links between network namespaces.

`Loopback` gives each node an address of its own and nothing else. `Namespaces` gives each node a network namespace with
one link to a bridge, which has a namespace of its own: links can be cut and slowed, and the bytes that a node sends are
counted. With `apart` keepers have a second link, which can be cut while trainers and agents go on. Needs root, `ip` and
`tc`; `close` removes everything.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from typing import Protocol

from keepstep.errors import ConfigError

COMMAND_S = 20.0
DEVICE, KEEPERS = "eth0", "eth1"  # Inside a node's namespace: of all processes, and the keepers' own.
SUBNET = "10.77.0"
SUBNETS = {DEVICE: SUBNET, KEEPERS: "10.78.0"}
BRIDGES = {DEVICE: "br0", KEEPERS: "br1"}
RATE = re.compile(r"[0-9]+(bit|kbit|mbit|gbit)")


class Network(Protocol):
    """The network as a cluster uses it."""

    store_address: str

    def open(self) -> None: ...
    def close(self) -> None: ...

    def add(self, node_id: str) -> str:
        """Add a node. Returns its address."""

    def inside(self, node_id: str, command: list[str]) -> list[str]:
        """The command that runs `command` on that node; "" is where the rendezvous store runs."""

    def environ(self, node_id: str) -> dict[str, str]: ...


class Loopback:
    """All nodes on the loopback: 127.0.0.10, 127.0.0.11, ..."""

    store_address = "127.0.0.1"

    def __init__(self) -> None:
        self._count = 0

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def add(self, node_id: str) -> str:
        self._count += 1
        return f"127.0.0.{9 + self._count}"

    def inside(self, node_id: str, command: list[str]) -> list[str]:
        return command

    def environ(self, node_id: str) -> dict[str, str]:
        return {}


class Namespaces:
    """A namespace per node, around a bridge. `rate`: of each link, both ways, as `tc` writes it: 200mbit.

    `apart`: keepers use a link of their own, KEEPERS.
    """

    store_address = f"{SUBNET}.1"

    def __init__(self, *, rate: str = "", apart: bool = False) -> None:
        self._rate, self._devices = _checked(rate), [DEVICE, KEEPERS] if apart else [DEVICE]
        self._name = f"ks{secrets.token_hex(2)}"
        self._nodes: dict[str, int] = {}
        self._opened: list[str] = []

    def open(self) -> None:
        missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
        if missing or os.geteuid() != 0:
            raise ConfigError(
                f"network namespaces need root and {' and '.join(missing or ['ip', 'tc'])}",
                hint="run as root with iproute2 installed, or LocalCluster without network=",
            )
        try:
            self._make(self._bridge)
            for device in self._devices:
                self._do(self._bridge, f"ip link add {BRIDGES[device]} type bridge")
                self._do(self._bridge, f"ip addr add {SUBNETS[device]}.1/16 dev {BRIDGES[device]}")
                self._do(self._bridge, f"ip link set {BRIDGES[device]} up")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the namespaces, and with them the links. One that a process still uses is removed at its end."""
        while self._opened:
            _run(["ip", "netns", "del", self._opened.pop()], check=False)

    def add(self, node_id: str) -> str:
        self._nodes[node_id] = len(self._nodes)
        namespace = self._namespace(node_id)
        self._make(namespace)
        for device in self._devices:
            port = self._port(node_id, device)
            _run(f"ip link add {port} netns {self._bridge} type veth peer name {device} netns {namespace}".split())
            self._do(namespace, f"ip addr add {self._address(node_id, device)}/16 dev {device}")
            self._do(namespace, f"ip link set {device} up")
            self._do(self._bridge, f"ip link set {port} master {BRIDGES[device]} up")
            if self._rate:
                self.limit(node_id, self._rate, device)
        return self._address(node_id, DEVICE)

    def inside(self, node_id: str, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(node_id) if node_id else self._bridge, *command]

    def environ(self, node_id: str) -> dict[str, str]:
        keepers = self._address(node_id, self._devices[-1])
        return {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE, "KEEPSTEP_PEERS_ADDRESS": keepers}

    # Faults

    def cut(self, node_id: str, device: str = DEVICE) -> None:
        """Set the node's link down: nothing passes, and no process is notified."""
        self._do(self._bridge, f"ip link set {self._port(node_id, device)} down")

    def mend(self, node_id: str, device: str = DEVICE) -> None:
        self._do(self._bridge, f"ip link set {self._port(node_id, device)} up")

    def limit(self, node_id: str, rate: str, device: str = DEVICE) -> None:
        """Limit both directions of the node's link; "" removes the limit."""
        shape = f"tbf rate {rate} burst 256kb limit 4mb" if _checked(rate) else ""
        for place, end in ((self._namespace(node_id), device), (self._bridge, self._port(node_id, device))):
            _run(["ip", "netns", "exec", place, "tc", "qdisc", "del", "dev", end, "root"], check=False)
            if shape:
                self._do(place, f"tc qdisc add dev {end} root {shape}")

    def sent_bytes(self, node_id: str, device: str = DEVICE) -> int:
        """Bytes that the node has sent on its link, headers included."""
        path = f"/sys/class/net/{device}/statistics/tx_bytes"
        return int(self._do(self._namespace(node_id), f"cat {path}"))

    # Names

    @property
    def _bridge(self) -> str:
        return f"{self._name}-bridge"

    def _namespace(self, node_id: str) -> str:
        return f"{self._name}-{self._nodes[node_id]}"

    def _port(self, node_id: str, device: str) -> str:
        return f"{self._name}{'k' if device == KEEPERS else 'p'}{self._nodes[node_id]}"  # at most 15 characters

    def _address(self, node_id: str, device: str) -> str:
        return f"{SUBNETS[device]}.{10 + self._nodes[node_id]}"

    def _make(self, name: str) -> None:
        _run(["ip", "netns", "add", name])
        self._opened.append(name)
        self._do(name, "ip link set lo up")

    def _do(self, name: str, command: str) -> str:
        return _run(["ip", "netns", "exec", name, *command.split()])


def _checked(rate: str) -> str:
    if rate and not RATE.fullmatch(rate):
        raise ConfigError(f"{rate!r} is not a rate", hint="for example 200mbit or 1gbit")
    return rate


def _run(command: list[str], *, check: bool = True) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if check and result.returncode:
        raise ConfigError(f"{' '.join(command)}: {result.stderr.strip() or result.returncode}")
    return result.stdout
