"""Whether the keeper of another node lives, asked from an agent that shares nothing with it but the network."""

from __future__ import annotations

import socket

from keepstep.control.messages import NodeCard

PROBE_S = 1.5
NONSENSE = bytes(64)


def answers(card: NodeCard) -> bool:
    """A keeper that gets nonsense hangs up at once, with TLS or without.

    A connection alone says nothing: the kernel accepts it for a process that is stopped.
    """
    try:
        with socket.create_connection((card.address, card.port), timeout=PROBE_S) as sock:
            sock.sendall(NONSENSE)
            sock.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True
