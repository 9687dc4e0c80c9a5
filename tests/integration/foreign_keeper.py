"""Root plays two users: one prepares what the other's keeper would use. Prints what happened as JSON.

    python foreign_keeper.py CASE CLIENT DIRECTORY

The victim is a fork, so that it needs no permission to read the installed packages.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path

import torch

import keepstep.trainer.snapshotter  # before the fork
from keepstep.cli.keepers import choose_run
from keepstep.config import Config, resolve
from keepstep.control.status import fetch_status
from keepstep.identity import Identity, identify
from keepstep.launcher.keeper_supervisor import KeeperSupervisor

ATTACKER, VICTIM = 61001, 61002
LISTEN_S = 60.0


def prepare(case: str, identity: Identity) -> None:
    """Make the directories of the case, as root."""
    owner = VICTIM if case in ("socket of another user", "link") else ATTACKER
    real = identity.runtime_dir
    if case == "link":
        real = identity.runtime_dir.with_name("elsewhere")
        identity.runtime_dir.symlink_to(real)
        os.lchown(identity.runtime_dir, ATTACKER, ATTACKER)
    mode = 0o700 if owner == VICTIM else 0o755
    for directory in (real, real / identity.key):
        directory.mkdir(mode=mode)
        directory.chmod(mode)
        os.chown(directory, owner, owner)


def serve(case: str, identity: Identity, ready: int) -> None:
    """The attacker's process: report connections and bytes received when it is ended."""
    if case == "no socket":
        os.setresuid(ATTACKER, ATTACKER, ATTACKER)
        os.write(ready, b"0 0\n")
        return
    listeners = []
    for path in (identity.control_socket, identity.http_socket):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)
        listeners.append(listener)
    os.setresuid(ATTACKER, ATTACKER, ATTACKER)
    for listener in listeners:
        listener.listen()  # the credentials that a client sees are those of this moment
    os.write(ready, b"listening\n")
    accepted, received, deadline = 0, 0, time.monotonic() + LISTEN_S
    clients: list[socket.socket] = []
    while time.monotonic() < deadline:
        readable, _, _ = select.select([*listeners, *clients, sys.stdin], [], [], 0.1)
        for sock in readable:
            if sock is sys.stdin:
                deadline = 0.0
            elif sock in listeners:
                clients.append(sock.accept()[0])
                accepted += 1
            elif data := sock.recv(65536):
                received += len(data)
            else:
                clients.remove(sock)
    os.write(ready, f"{accepted} {received}\n".encode())


def use(client: str, config: Config, identity: Identity) -> None:
    """What the victim does."""
    if client == "trainer":
        keepstep.Snapshotter({"weights": torch.zeros(1000)}, config).close()
    elif client == "launcher":
        supervisor = KeeperSupervisor(identity, config)
        try:
            supervisor.status(timeout_s=10.0, patient=True)
        finally:
            supervisor.close()
    elif client == "status":
        fetch_status(identity)
    else:
        choose_run(config)


def main() -> None:
    case, client, directory = sys.argv[1:]
    config = resolve(Config(run_id="run", node_id="node", runtime_dir=f"{directory}/r"))
    identity = identify(config)
    Path(directory).chmod(0o1777)
    prepare(case, identity)
    reading, writing = os.pipe()
    stop_reading, stop_writing = os.pipe()
    if (attacker := os.fork()) == 0:
        os.dup2(stop_reading, 0)
        os.close(stop_writing)
        serve(case, identity, writing)
        os._exit(0)
    os.close(stop_reading)
    report = os.fdopen(reading)
    first = report.readline()
    results, results_writing = os.pipe()
    if (victim := os.fork()) == 0:
        os.setresgid(VICTIM, VICTIM, VICTIM)
        os.setresuid(VICTIM, VICTIM, VICTIM)
        started, error = time.monotonic(), None
        try:
            use(client, config, identity)
        except BaseException as raised:
            error = raised
        outcome = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
        os.write(results_writing, json.dumps(outcome).encode())
        os._exit(0)
    os.waitpid(victim, 0)
    outcome = json.loads(os.read(results, 65536))
    if case != "no socket":
        os.write(stop_writing, b"x")
    os.waitpid(attacker, 0)
    counted = first if case == "no socket" else report.readline()
    accepted, received = map(int, counted.split())
    print(json.dumps({**outcome, "accepted": accepted, "received": received}))


if __name__ == "__main__":
    main()
