"""A port for a server that somebody else will start."""

from __future__ import annotations

import errno
import random
import socket

BELOW = range(20_000, 32_000)
"""below those that the kernel gives to outgoing connections: other tests make many of them meanwhile"""


def free_port() -> int:
    for port in random.Random().sample(BELOW, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    raise AssertionError("no port is free")
