"""Protection and recovery across nodes, keepers only: seconds, rates and memory against the formula.

    python benchmarks/bench_nodes.py --out benchmarks/results/nodes-cpu.json [--quick] [--large]

All nodes are processes on this machine, so one node's rates are a share of two cores and of one loopback: what
counts are the ratios to a bare socket pair and to memcpy in the same run, and how time grows with the state.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from keepers import Run
from report import provenance, write_result

from keepstep.parity.cost_model import memory_bytes

MB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--large", action="store_true", help="8 GB in all too: needs 22 GB of memory")
    arguments = parser.parse_args()
    body: dict[str, Any] = {"benchmark": "nodes", **provenance(), "limits": limits()}
    body["memory"] = [memory(n, m, (8 if arguments.quick else 64) * MB) for n, m in ((4, 1), (8, 1), (8, 2))]
    sizes = [64 * MB] if arguments.quick else [256 * MB, 1024 * MB, 2048 * MB]
    if arguments.large:
        sizes.append(8192 * MB)
    body["recovery"] = [recovery(size, rounds=1 if arguments.quick or size > 4096 * MB else 3) for size in sizes]
    show(body)
    if arguments.out:
        write_result(arguments.out, body)


def limits() -> dict[str, float]:
    """What this machine gives a plain copy and a plain socket pair, one thread each way."""
    source, target = bytearray(64 * MB), bytearray(64 * MB)
    copies = []
    for _ in range(7):
        start = time.perf_counter()
        memoryview(target)[:] = source
        copies.append(len(source) / (time.perf_counter() - start))
    return {
        "memcpy_bytes_s": statistics.median(copies),
        "socket_bytes_s": statistics.median(_socket() for _ in range(5)),
    }


def _socket(size: int = 256 * MB) -> float:
    server = socket.create_server(("127.0.0.1", 0))
    left = socket.create_connection(server.getsockname())
    right, _ = server.accept()
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    os.posix_fallocate(fd, 0, size)

    def send() -> None:
        done = 0
        while done < size:
            done += os.sendfile(left.fileno(), fd, done, size - done)

    thread = threading.Thread(target=send)
    buffer = memoryview(bytearray(4 * MB))
    start = time.perf_counter()
    thread.start()
    got = 0
    while got < size:
        got += right.recv_into(buffer)
    took = time.perf_counter() - start
    thread.join()
    for sock in (left, right, server):
        sock.close()
    os.close(fd)
    return size / took


def memory(n: int, m: int, size_bytes: int) -> dict[str, Any]:
    """Bytes of memfds per node after three protected versions, against the formula and against full replicas."""
    with tempfile.TemporaryDirectory(prefix="ks") as directory:
        run = Run(Path(directory), losses=m, size_bytes=size_bytes)
        try:
            run.add(*(f"n{i}" for i in range(n)))
            run.start()
            for _ in range(3):
                run.protect()
            held = [node.status().memory_bytes for node in run.nodes.values()]
        finally:
            run.close()
    formula = memory_bytes(slots=2, unique_bytes=size_bytes, largest_unique_bytes=size_bytes, n=n, m=m, window_bytes=0)
    return {
        "n": n, "m": m, "unique_bytes": size_bytes, "held_bytes": max(held), "formula_bytes": formula,
        "ratio": max(held) / formula, "of_unique": max(held) / size_bytes,
        "full_replicas_of_unique": 2.0 + 2.0 * m,
    }  # fmt: skip


def recovery(total_bytes: int, *, rounds: int) -> dict[str, Any]:
    """Four nodes, m = 1: protect, lose a node, bring it back, protect again; medians over rounds."""
    with tempfile.TemporaryDirectory(prefix="ks") as directory:
        run = Run(Path(directory), losses=1, size_bytes=total_bytes // 4)
        protects, restores, heals = [], [], []
        try:
            run.add("n0", "n1", "n2", "n3")
            run.start()
            protects.append(run.protect())
            for number in range(rounds):
                victim = list(run.nodes)[2]
                old = run.nodes.pop(victim)
                names = list(run.nodes)
                old.kill()
                run.add(f"r{number}")
                # The newcomer takes the lost node's place.
                order = [*names[:2], f"r{number}", *names[2:]]
                run.nodes = {name: run.nodes[name] for name in order}
                restores.append(run.start())
                started = time.monotonic()
                for trainer in run.trainers:
                    trainer.wait(lambda t=trainer: t.protected is not None)  # type: ignore[misc]
                heals.append(time.monotonic() - started)
                if total_bytes <= 4096 * MB:
                    protects.append(run.protect())
        finally:
            run.close()

    def median(key: str, found: list[dict[str, float]]) -> float:
        return statistics.median(one[key] for one in found)

    return {
        "total_bytes": total_bytes, "nodes": 4, "losses": 1, "rounds": rounds,
        "seal_s": median("seal", protects), "protect_s": median("protect", protects),
        "restore_s": median("restore", restores), "heal_s": statistics.median(heals),
        "rebuilt_bytes": total_bytes // 4,
    }  # fmt: skip


def show(body: dict[str, Any]) -> None:
    limit = body["limits"]
    print(f"memcpy {limit['memcpy_bytes_s'] / 1e9:.1f} GB/s, socket {limit['socket_bytes_s'] / 1e9:.1f} GB/s")
    for row in body["memory"]:
        print(
            f"memory n={row['n']} m={row['m']}: {row['of_unique']:.2f} U per node, {row['ratio']:.3f} of the formula "
            f"(full replicas {row['full_replicas_of_unique']:.1f} U)"
        )
    for row in body["recovery"]:
        total, rebuilt = row["total_bytes"] / 1e9, row["rebuilt_bytes"] / 1e9
        print(
            f"{total:5.2f} GB: seal {row['seal_s']:.2f} s, protect {row['protect_s']:.2f} s "
            f"({total / row['protect_s']:.2f} GB/s of all), node lost: restore {row['restore_s']:.2f} s "
            f"({rebuilt / row['restore_s']:.2f} GB/s rebuilt), healed after {row['heal_s']:.2f} s"
        )


if __name__ == "__main__":
    main()
