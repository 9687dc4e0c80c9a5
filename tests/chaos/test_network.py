"""A link that is cut, a keeper that hangs, a link that is slow: training does not notice, and protection heals.

Three nodes in network namespaces; keepers have links of their own, so that what happens to them happens to nobody
else. Ranks keep time (paced.py): a step that takes longer is keepstep's doing, or that of other processes on these
cores. KEEPSTEP_TEST_FREEZE_S: how long a keeper hangs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.testing.cluster import LocalCluster
from keepstep.testing.network import KEEPERS, Namespaces
from keepstep.types import Status

SCRIPT = Path(__file__).with_name("paced.py")
FREEZE_S = float(os.environ.get("KEEPSTEP_TEST_FREEZE_S", "20"))
CUT_S = 8.0
HEAL_S = 90.0
SLOW = "80mbit"
MEGABYTES = 30
MEDIAN_MS, P99_MS = 10.0, 100.0
"""how much longer a step may take: three nodes share these cores, and an exchange with its bursts has them too"""

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="needs root, ip and tc"
    ),
]


@contextlib.contextmanager
def paced(network: Namespaces, *, losses: int = 1) -> Iterator[LocalCluster]:
    # Four slots: snapshots keep their pace whatever protection does, so that runs can be compared.
    environ = {"KEEPSTEP_PARITY_LOSSES": str(losses), "KEEPSTEP_ARENA_SLOTS": "4"}
    arguments = ["100000", "0.04", str(MEGABYTES)]
    with LocalCluster(nodes=3, script=SCRIPT, arguments=arguments, environ=environ, network=network) as cluster:
        cluster.train(until=20)
        yield cluster
        assert cluster.incarnation == 1, f"training was disturbed\n{cluster.tails()}"


def wait_until(condition: Callable[[], bool], cluster: LocalCluster, what: str, timeout_s: float = HEAL_S) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"waited for {what}\n{cluster.status(0)}\n{cluster.tails()}"
        time.sleep(0.1)
    return time.monotonic() - started


def exchanging(status: Status) -> bool:
    return status.target_step is not None and status.exchange_bytes_s > 0 and status.protected_step is not None


def step_ms(cluster: LocalCluster, since: float, until: float) -> list[float]:
    """Of all ranks, for the steps that were done in this time."""
    told = [fact for fact in cluster.facts if fact["event"] == "step" and since <= fact["at"] <= until]
    assert {fact["rank"] for fact in told} == {0, 1, 2}, "a rank stood still"
    return [fact["step_s"] * 1000 for fact in told]


def compare(name: str, calm: list[float], disturbed: list[float]) -> None:
    """The steps of two times: medians and 99th percentiles, in milliseconds."""
    (m0, p0), (m1, p1) = ((statistics.median(x), statistics.quantiles(x, n=100)[98]) for x in (calm, disturbed))
    print(
        f"{name}: median {m0:.1f} -> {m1:.1f} ms, p99 {p0:.1f} -> {p1:.1f} ms, longest {max(calm):.0f} -> "
        f"{max(disturbed):.0f} ms ({len(calm)} and {len(disturbed)} steps)"
    )
    assert m1 - m0 < MEDIAN_MS, name
    assert p1 - p0 < P99_MS, name


def outage(cluster: LocalCluster, name: str, victim: int, seconds: float, begin: Callable[[], None],
           end: Callable[[], None]) -> None:  # fmt: skip
    """Something is away for some seconds: shown, not felt, and made good."""
    witness = cluster.nodes[2]
    wait_until(lambda: exchanging(witness.status()), cluster, "an exchange")
    calm_from = time.time()
    time.sleep(seconds)
    before = witness.status()
    began = time.time()
    begin()
    try:
        time.sleep(seconds)
        during = witness.status()
        ended = time.time()
    finally:
        end()
    print(f"{name}: lag {before.lag_steps} -> {during.lag_steps} steps; {during.problems}")
    assert during.protected_step is not None
    assert before.protected_step is not None
    assert during.lag_steps is not None
    assert during.lag_steps > seconds / 0.2, "the lag is shown while it lasts"
    assert any(cluster.nodes[victim].node_id in text and "cannot be reached" in text for text in during.problems)
    progress = max(rank.progress or 0 for rank in during.ranks)
    healed = wait_until(
        lambda: (witness.status().protected_step or 0) > progress, cluster, "protection that goes on", HEAL_S
    )
    print(f"{name}: protected again {healed:.1f} s after its end")
    compare(name, step_ms(cluster, calm_from, began), step_ms(cluster, began, ended))


@pytest.mark.parametrize("victim", [1, 0], ids=["a peer", "the coordinator"])
def test_a_link_cut_in_mid_exchange_is_shown_not_felt_and_made_good(victim: int) -> None:
    network = Namespaces(apart=True)
    with paced(network) as cluster:
        node_id = cluster.nodes[victim].node_id
        network.limit(node_id, SLOW, KEEPERS)  # so that the cut falls into an exchange
        outage(
            cluster, f"cut of {node_id}", victim, CUT_S,
            lambda: network.cut(node_id, KEEPERS), lambda: network.mend(node_id, KEEPERS),
        )  # fmt: skip


@pytest.mark.parametrize("victim", [1, 0], ids=["a peer", "the coordinator"])
def test_a_keeper_that_hangs_is_shown_not_felt_and_made_good(victim: int) -> None:
    with paced(Namespaces(apart=True)) as cluster:
        pid = cluster.nodes[victim].keeper_pid()
        outage(
            cluster, f"freeze of {cluster.nodes[victim].node_id}", victim, FREEZE_S,
            lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT),
        )  # fmt: skip
        assert cluster.nodes[victim].keeper_pid() == pid


def test_a_slow_link_costs_protection_its_pace_and_training_nothing() -> None:
    """Paired with the same training without the exchange, twice each and in turn."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for losses in (0, 1, 0, 1):
        network = Namespaces(apart=True)
        with paced(network, losses=losses) as cluster:
            network.limit("node1", SLOW, KEEPERS)
            time.sleep(3)
            since = time.time()
            time.sleep(15)
            found[losses] += step_ms(cluster, since, time.time())
            if losses:
                slow = cluster.status(0)
                lag = slow.lag_steps or 0
                print(f"slow link: lag {lag} steps, {slow.exchange_bytes_s / 1e6:.1f} MB/s")
                assert slow.protected_step is not None
                assert lag > 20
                network.limit("node1", "", KEEPERS)
                wait_until(lambda lag=lag: (cluster.status(0).lag_steps or 0) < lag / 2, cluster, "less lag")
    compare("slow link", found[0], found[1])
