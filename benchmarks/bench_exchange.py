"""What it costs to fetch checked bytes from another keeper, against a bare socket that carries the same bytes.

    python benchmarks/bench_exchange.py --out benchmarks/results/exchange-cpu.json      about two minutes, idle machine
    python benchmarks/bench_exchange.py --quick                                         does it run at all?

Two processes each, memfd to memfd in chunks of 4 MiB, over loopback: `keepstep` asks chunk by chunk through
`TcpTransport.fetch` and checks xxh3_128; `bare` is os.sendfile into recv_into, no questions, no checks. Rounds
interleave; figures are medians. Then both again over a link shaped to 300 MB/s (network namespaces, veth, tbf; needs
root). Exit
status 1 when something could not be measured, whatever the figures say.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from report import provenance, write_result
from rich.console import Console

from keepstep.config import PeersConfig
from keepstep.transport import Body, Fetched, FetchRequest, Peer, TcpOptions, TcpTransport

CHUNK_BYTES = 4 << 20
SECRET = b"nothing of worth in here"
CPU_RATIO = 2.2
"""keepstep may cost so many times the CPU of the bare pair"""
LINK_SHARE = 0.95
SHAPED_BYTES_S = 300_000_000
MTU = 9000
WINDOW_CHUNKS = 8
"""fetches under way or waiting, as the exchange has"""
ANSWER_S = 120.0
WAYS = ("bare", "keepstep")


@dataclass(frozen=True)
class Verdict:
    target: str
    limit: str
    measured: str
    outcome: str
    """pass, miss or not measured"""


def main() -> int:
    options = parse_arguments()
    if options.role:
        child(options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(width=120 if not sys.stdout.isatty() else None, highlight=False)
    body: dict[str, Any] = {**provenance(), "options": vars(options)}
    loopback = measure("127.0.0.1", [], [], options, options.rounds, options.size_mb)
    shaped = measure_shaped(options, console)
    summary = {"loopback": summarize(loopback), "shaped": summarize(shaped) if isinstance(shaped, dict) else shaped}
    verdicts = judge(summary)
    if options.out:
        body.update(load_after=os.getloadavg(), verdicts=[asdict(verdict) for verdict in verdicts], summary=summary)
        write_result(Path(options.out), {**body, "runs": {"loopback": loopback, "shaped": shaped}})
        console.print(f"written to {options.out}", markup=False)
    console.print_json(json.dumps(summary))
    for verdict in verdicts:
        console.print(
            f"{verdict.outcome:>12}  {verdict.target}: {verdict.measured} (limit {verdict.limit})", markup=False
        )
    if options.quick:
        console.print("A toy size: this says that the benchmark runs, not what an exchange costs.")
    return 1 if any(verdict.outcome == "not measured" for verdict in verdicts) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=2000, help="bytes per round and way (10^6)")
    parser.add_argument("--memory-mb", type=int, default=256, help="memfd on each side; gone through again and again")
    parser.add_argument("--rounds", type=int, default=9, help="of both ways, each round in the other order")
    parser.add_argument("--streams", type=int, default=2, help="connections for bytes, both ways")
    parser.add_argument("--quick", action="store_true", help="200 MB, two rounds")
    parser.add_argument("--no-shaped", action="store_true", help="leave the shaped link out")
    parser.add_argument("--out", default="", help="result file, by custom in benchmarks/results/")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(size_mb=200, memory_mb=64, rounds=2)
    return options


# --- the parent -----------------------------------------------------------------------------------------------------


def measure(
    address: str, serve_in: list[str], fetch_in: list[str], options: argparse.Namespace, rounds: int, size_mb: int
) -> dict[str, list[dict[str, float]]]:
    """Samples of both ways, between two processes each that may live in other namespaces."""
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        pairs = {way: stack.enter_context(started(way, address, serve_in, fetch_in, options)) for way in WAYS}
        for way in WAYS:
            run_once(pairs[way], max(size_mb // 10, 50))  # pages, buffers and connections are there from here on
        for index in range(rounds):
            for way in WAYS if index % 2 else reversed(WAYS):
                samples[way].append(run_once(pairs[way], size_mb))
    return samples


@contextmanager
def started(
    way: str, address: str, serve_in: list[str], fetch_in: list[str], options: argparse.Namespace
) -> Iterator[tuple[Child, Child]]:
    common = ["--streams", str(options.streams), "--memory-mb", str(options.memory_mb)]
    with Child(
        [*serve_in, sys.executable, __file__, "--role", f"{way}-serve", "--address", address, *common]
    ) as server:
        where = server.hear()["address"]
        theirs = f"{where[0]}:{where[1]}"
        with Child(
            [*fetch_in, sys.executable, __file__, "--role", f"{way}-fetch", "--address", theirs, *common]
        ) as client:
            server.say(client.hear())
            yield server, client


def run_once(pair: tuple[Child, Child], size_mb: int) -> dict[str, float]:
    server, client = pair
    server.say({"begin": True})
    server.hear()
    client.say({"size_bytes": size_mb * 1_000_000 // CHUNK_BYTES * CHUNK_BYTES})
    done = client.hear()
    server.say({"end": True})
    return {**done, "server_cpu_s": server.hear()["cpu_s"]}


class Child:
    """One process of a pair; a line of JSON each way."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(ANSWER_S, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise SystemExit(f"a process of the benchmark ended, or said nothing for {ANSWER_S:.0f} s")
        heard: dict[str, Any] = json.loads(line)
        return heard


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("KEEPSTEP_")}


def measure_shaped(options: argparse.Namespace, console: Console) -> dict[str, list[dict[str, float]]] | str:
    """The same over a link of 300 MB/s, or the reason why not."""
    if options.no_shaped:
        return "left out (--no-shaped)"
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return "needs root, ip and tc"
    try:
        with shaped_link() as (server, client, address):
            size_mb, rounds = (300, 1) if options.quick else (1500, 3)
            return measure(
                address, ["ip", "netns", "exec", server], ["ip", "netns", "exec", client], options, rounds, size_mb
            )
    except subprocess.CalledProcessError as error:
        console.print(f"no shaped link: {error.stderr}", markup=False)
        return f"the link could not be made: {' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def shaped_link() -> Iterator[tuple[str, str, str]]:
    """Two namespaces and a veth between them; what leaves the server is shaped. Removed again, whatever happens."""
    server, client = f"ksb{os.getpid()}s", f"ksb{os.getpid()}c"
    try:
        for name in (server, client):
            ip("netns", "add", name)
        ip("link", "add", "veth0", "netns", server, "mtu", str(MTU), "type", "veth",
           "peer", "name", "veth0", "netns", client, "mtu", str(MTU))  # fmt: skip
        for name, address in ((server, "10.209.0.1/24"), (client, "10.209.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        shape = ["rate", f"{SHAPED_BYTES_S * 8}bit", "burst", "1500kb", "latency", "20ms"]
        command("tc", "-n", server, "qdisc", "add", "dev", "veth0", "root", "tbf", *shape)
        yield server, client, "10.209.0.1"
    finally:
        for name in (server, client):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=30)


def ip(*arguments: str) -> None:
    command("ip", *arguments)


def command(*arguments: str) -> None:
    subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=30)


def summarize(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, runs in samples.items():
        found[way] = {
            "bytes_s": statistics.median(run["size_bytes"] / run["seconds"] for run in runs),
            "cpu_s_per_gb": statistics.median(
                (run["cpu_s"] + run["server_cpu_s"]) / run["size_bytes"] * 1e9 for run in runs
            ),
            "client_cpu_s_per_gb": statistics.median(run["cpu_s"] / run["size_bytes"] * 1e9 for run in runs),
            "server_cpu_s_per_gb": statistics.median(run["server_cpu_s"] / run["size_bytes"] * 1e9 for run in runs),
        }
    found["throughput_ratio"] = found["keepstep"]["bytes_s"] / found["bare"]["bytes_s"]
    found["cpu_ratio"] = found["keepstep"]["cpu_s_per_gb"] / found["bare"]["cpu_s_per_gb"]
    return found


def judge(summary: dict[str, Any]) -> list[Verdict]:
    ratio = summary["loopback"]["cpu_ratio"]
    cpu = Verdict(
        "CPU seconds per GB, both sides, against the bare pair",
        f"{CPU_RATIO} x", f"{ratio:.2f} x", "pass" if ratio <= CPU_RATIO else "miss",
    )  # fmt: skip
    shaped, target = summary["shaped"], f"rate over a link of {SHAPED_BYTES_S / 1e6:.0f} MB/s"
    if isinstance(shaped, str):
        return [cpu, Verdict(target, f"{LINK_SHARE:.0%}", shaped, "not measured")]
    share = shaped["keepstep"]["bytes_s"] / SHAPED_BYTES_S
    bare = shaped["bare"]["bytes_s"] / SHAPED_BYTES_S
    outcome = "pass" if share >= LINK_SHARE else "miss"
    return [cpu, Verdict(target, f"{LINK_SHARE:.0%}", f"{share:.1%} (bare {bare:.1%}, MTU {MTU})", outcome)]


# --- the children ---------------------------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size = options.memory_mb * 1_000_000 // CHUNK_BYTES * CHUNK_BYTES
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    memory[:] = os.urandom(1 << 20) * (size >> 20)
    {
        "bare-serve": bare_serve,
        "bare-fetch": bare_fetch,
        "keepstep-serve": keepstep_serve,
        "keepstep-fetch": keepstep_fetch,
    }[options.role](fd, memory, options)


def tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def report_cpu() -> None:
    """Until the parent goes: the CPU this process used between `begin` and `end`."""
    before = 0.0
    for order in orders():
        if "begin" in order:
            before = time.process_time()
        tell({"cpu_s": time.process_time() - before})


def timed(run: Any) -> None:
    for order in orders():
        start, cpu = time.perf_counter(), time.process_time()
        run(order["size_bytes"])
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        tell({"size_bytes": order["size_bytes"], "seconds": seconds, "cpu_s": cpu_s})


def bare_serve(fd: int, memory: mmap.mmap, options: argparse.Namespace) -> None:
    """Every connection gets as many bytes as it asks for, eight bytes of it at a time."""
    listener = socket.create_server((options.address, 0))
    tell({"address": listener.getsockname()})

    def give(sock: socket.socket) -> None:
        while asked := sock.recv(8, socket.MSG_WAITALL):
            left, at = int.from_bytes(asked, "little"), 0
            while left:
                sent = os.sendfile(sock.fileno(), fd, at, min(CHUNK_BYTES, left, len(memory) - at))
                left, at = left - sent, (at + sent) % len(memory)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=give, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    next(orders())
    report_cpu()


def bare_fetch(fd: int, memory: mmap.mmap, options: argparse.Namespace) -> None:
    host, _, port = options.address.rpartition(":")
    socks = [socket.create_connection((host, int(port))) for _ in range(options.streams)]
    view = memoryview(memory)

    def take(sock: socket.socket, size_bytes: int) -> None:
        sock.sendall(size_bytes.to_bytes(8, "little"))
        left, at = size_bytes, 0
        while left:
            count = sock.recv_into(view[at : at + min(CHUNK_BYTES, left)])
            left, at = left - count, (at + count) % len(memory)

    def run(size_bytes: int) -> None:
        share = size_bytes // len(socks)
        threads = [threading.Thread(target=take, args=(sock, share)) for sock in socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    tell({})
    timed(run)


class ChunkListener:
    """Serves chunks of a file by their index."""

    def __init__(self, fd: int, table: list[bytes]) -> None:
        self._fd, self._table = fd, table
        self.linked = threading.Event()

    def on_message(self, node_id: str, message: bytes) -> None:
        pass

    def on_link(self, node_id: str, up: bool, reason: str) -> None:
        self.linked.set()

    def serve(self, node_id: str, query: bytes) -> Body:
        index = int.from_bytes(query, "little")
        return Body.of_file(self._fd, index * CHUNK_BYTES, CHUNK_BYTES, self._table[index])


def keepstep_serve(fd: int, memory: mmap.mmap, options: argparse.Namespace) -> None:
    table = [xxhash.xxh3_128_digest(memory[at : at + CHUNK_BYTES]) for at in range(0, len(memory), CHUNK_BYTES)]

    config = PeersConfig(address=options.address)
    peers = TcpTransport(
        Peer("server", "1"), "bench", SECRET, config, ChunkListener(fd, table),
        options=TcpOptions(num_streams=options.streams),
    )  # fmt: skip
    tell({"address": peers.card_address()})
    theirs = next(orders())["address"]
    peers.set_peers([Peer("client", "1", *theirs)])
    report_cpu()


def keepstep_fetch(fd: int, memory: mmap.mmap, options: argparse.Namespace) -> None:
    host, _, port = options.address.rpartition(":")
    config = PeersConfig(address="")
    listener = ChunkListener(fd, [])
    peers = TcpTransport(
        Peer("client", "1"), "bench", SECRET, config,
        listener,
        options=TcpOptions(towards=host, num_streams=options.streams),
    )  # fmt: skip
    peers.set_peers([Peer("server", "1", host, int(port))])
    tell({"address": peers.card_address()})
    if not listener.linked.wait(30):
        raise SystemExit("no link")
    num_chunks = len(memory) // CHUNK_BYTES
    view = memoryview(memory)

    def run(size_bytes: int) -> None:
        waiting: deque[Future[Fetched]] = deque()
        for number in range(size_bytes // CHUNK_BYTES):
            at = number % num_chunks
            waiting.append(
                peers.fetch(
                    FetchRequest(
                        "server", at.to_bytes(8, "little"), CHUNK_BYTES, 60.0,
                        view[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES],
                    )
                )
            )  # fmt: skip
            if len(waiting) == WINDOW_CHUNKS:
                waiting.popleft().result(60)
        while waiting:
            waiting.popleft().result(60)

    timed(run)


if __name__ == "__main__":
    sys.exit(main())
