"""Which files of keepstep work on a snapshot and on a restore: recorded in every process of a real run. Not a test.

    python tests/integration/walked_files.py [cuda]     prints the files and functions of both ways

A window is open from `take()` until the snapshot is protected, and from the death of a node until `restore()` has
returned on all ranks of the next incarnation. `executed` is every file of which a function ran in the window, in any
process of the job (launchers, keepers, trainers) and on any thread; what imports run does not count. `walked` is the
main way: without the values, settings and errors that every module uses (BASE), without files whose objects were only
constructed, and without the files that ASIDE names, each with its reason.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path

TAKE, RESTORE = 1, 2
NAMES = {TAKE: "take() to protected", RESTORE: "restore() after a node loss"}
BASE = {"_version.py", "config.py", "errors.py", "faults.py", "identity.py", "layout.py", "types.py", "values.py"}
HEARTBEAT = "the launchers' heartbeats go on meanwhile"
ASIDE = {
    TAKE: {
        "launcher/agent.py": HEARTBEAT,
        "launcher/rendezvous.py": "torchrun asks meanwhile whether a node waits",
        "launcher/round_document.py": HEARTBEAT,
        "launcher/round_participant.py": HEARTBEAT,
        "launcher/rounds.py": HEARTBEAT,
        "control/signed_store.py": HEARTBEAT,
        "trainer/restore/restore.py": "the layout was proven before, and has not changed",
        "keeper/coordinator/restore.py": "asked with every report, and has nothing to do",
        "keeper/node/restore.py": "asked with every order, and has nothing to do",
        "keeper/node/trainers.py": "the keeper's timer looks for orphans",
        "trainer/data/fetch_watch.py": "looks at the first steps, and has nothing to do",
    },
    RESTORE: {
        "__init__.py": "the import of a name",
        "keeper/__main__.py": "log lines",
        "keeper/coordinator/grants.py": "the first grant follows the restore",
        "keeper/node/grants.py": "the first grant follows the restore",
        "keeper/transfer/protect.py": "parity of what was restored is built while the ranks still load",
        "launcher/crash_loops.py": "counts the failure, and has nothing to do",
        "trainer/data/batch_loop.py": "finds the loader among the objects",
        "trainer/connection/exit_watch.py": "waits for the end of the program",
        "trainer/check/surroundings.py": "an import",
        "trainer/data/fetch_watch.py": "begins to look at the first steps",
        "trainer/check/recorder.py": "asks the environment whether keepstep check runs",
    },
}
HERE = Path(__file__).parent
NUM_NODES = 3


class Windows:
    """The number of the window that is open, in one byte that all processes map."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / "window"
        if not path.exists():
            path.write_bytes(b"\0")
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    def open(self, number: int) -> None:
        self._byte[0] = number

    def close(self, number: int) -> None:
        if self._byte[0] == number:
            self._byte[0] = 0


def walk(directory: Path, *, cuda: bool = False) -> None:
    """Train on three nodes, walk one snapshot, lose a node, and walk the restore of the next incarnation."""
    from keepstep.testing.cluster import LocalCluster

    windows = Windows(directory)
    path = os.pathsep.join([str(HERE / "walk"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {"PYTHONPATH": path, "KEEPSTEP_TEST_WALK": str(directory)}
    script = HERE / "walk_trainer.py"
    arguments = ["cuda"] if cuda else []
    with LocalCluster(nodes=NUM_NODES, spares=1, script=script, arguments=arguments, environ=environ) as cluster:
        cluster.start()
        cluster.wait_step(0)
        members = cluster.restored.nodes
        lost = next(node for node in [*cluster.nodes, *cluster.spares] if node.node_id == members[-1])
        windows.open(RESTORE)
        lost.kill()
        assert cluster.restored.source == "parity"
        cluster.result()


def executed(directory: Path, number: int) -> dict[str, set[str]]:
    """The files that ran in a window, and their functions."""
    files: dict[str, set[str]] = {}
    for path in directory.glob("*.calls"):
        for line in path.read_text(encoding="utf-8").splitlines():
            window, file, function = line.split(" ", 2)
            if int(window) == number and not file.startswith("testing/"):
                files.setdefault(file, set()).add(function)
    return files


def walked(directory: Path, number: int) -> dict[str, set[str]]:
    """The files of the main way."""
    files = executed(directory, number)
    return {
        file: functions
        for file, functions in files.items()
        if file not in BASE and file not in ASIDE[number] and not all(map(_constructs, functions))
    }


def _constructs(function: str) -> bool:
    return "__init__" in function or "__post_init__" in function


def report(directory: Path) -> str:
    lines = []
    for number, name in NAMES.items():
        files, way = executed(directory, number), walked(directory, number)
        lines.append(f"{name}: {len(way)} files walked, {len(files)} executed")
        lines += [f"  {'+' if file in way else '-'} {file}: {', '.join(sorted(files[file]))}" for file in sorted(files)]
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        walk(Path(name), cuda="cuda" in sys.argv)
        print(report(Path(name)))
