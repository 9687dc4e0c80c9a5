"""A keeper of another user that names a process of a third one as its trainer. Run as root.

python lying_keeper.py DIRECTORY PID STATUS.json
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from keepstep.control.framing import FrameReader, receive, send
from keepstep.control.messages import Hello, ProcessesAre, Refused, StatusIs, WantProcesses, WantStatus, Welcome
from keepstep.identity import Identity

LIAR = 61001
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"


def poisoned(value: Any) -> Any:
    if isinstance(value, str):
        return value + ESCAPES
    if isinstance(value, dict):
        return {name: poisoned(item) for name, item in value.items()}
    if isinstance(value, list):
        return [*map(poisoned, value)]
    return value


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def serve_control(listener: socket.socket, pid: int, status: bytes) -> None:
    while True:
        sock, _ = listener.accept()
        reader = FrameReader()
        while (got := receive(sock))[0]:
            for message, _ in reader.feed(*got):
                if isinstance(message, WantStatus):
                    answer = StatusIs(status, message.ticket)
                elif isinstance(message, WantProcesses):
                    answer = ProcessesAre([], [pid], message.ticket)
                elif isinstance(message, Hello):
                    answer = Welcome("liar", os.getpid(), 1, message.ticket)
                else:
                    answer = Refused("KeeperError", ESCAPES, ESCAPES, message.ticket)
                send(sock, answer)


def serve_http(listener: socket.socket, status: bytes) -> None:
    while True:
        sock, _ = listener.accept()
        sock.recv(65536)
        sock.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(status) + status)
        sock.close()


def main() -> None:
    directory, pid, told = Path(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    for rank in told["ranks"]:
        rank.update(pid=pid, alive=bool(pid))
    if not pid:
        ids = {name: told[name] for name in ("run_id", "node_id")}
        told = {**poisoned(told), **ids}
    status = json.dumps(told).encode()
    identity = Identity(told["run_id"], told["node_id"], directory, outlives_launch=True)
    for made in (directory, identity.directory):
        made.mkdir(mode=0o700)
        os.chown(made, LIAR, LIAR)
    os.setresgid(LIAR, LIAR, LIAR)
    os.setresuid(LIAR, LIAR, LIAR)
    control, http = listen(identity.control_socket), listen(identity.http_socket)
    card = {
        "run_id": told["run_id"],
        "node_id": told["node_id"],
        "pid": os.getpid(),
        "instance": "liar",
        "version": "0",
    }
    identity.card.write_text(json.dumps(card))
    threading.Thread(target=serve_http, args=(http, status), daemon=True).start()
    print("listening", flush=True)
    serve_control(control, pid, status)


if __name__ == "__main__":
    main()
