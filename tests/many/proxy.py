"""A wire that is not to be trusted: passes bytes between two keepers, and flips bits in what it passes."""

from __future__ import annotations

import contextlib
import random
import socket
import threading


class BadWire:
    """Listens in place of a keeper. `flip_every`: one bit in about so many bytes, once `begin` was called."""

    def __init__(self, target: tuple[str, int], *, seed: int, flip_every: int) -> None:
        self._target, self._flip_every = target, flip_every
        self._draw = random.Random(seed)
        self._flipping = threading.Event()
        self.flipped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def begin(self) -> None:
        self._flipping.set()

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for sock in self._sockets:
            sock.close()

    def _run(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="bad-wire", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                far = socket.create_connection(self._target)
                self._sockets.append(far)
                self._run(self._pass, near, far)
                self._run(self._pass, far, near)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(self._damage(data) if self._flipping.is_set() else data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _damage(self, data: bytes) -> bytes:
        if self._draw.random() * self._flip_every > len(data):
            return data
        damaged = bytearray(data)
        damaged[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        self.flipped += 1
        return bytes(damaged)
