"""Messages and bytes between keepers: the interface, and its implementation over TCP.

`keepstep.testing.memory_transport` is another implementation, for tests.
"""

from keepstep.transport.interface import (
    Body,
    Fetched,
    FetchError,
    FetchRequest,
    Peer,
    Refusal,
    Transport,
    TransportListener,
)
from keepstep.transport.tcp import TcpOptions, TcpTransport

__all__ = [
    "Body",
    "FetchError",
    "FetchRequest",
    "Fetched",
    "Peer",
    "Refusal",
    "TcpOptions",
    "TcpTransport",
    "Transport",
    "TransportListener",
]
