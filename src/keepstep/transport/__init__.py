"""Bytes and small messages between keepers: one narrow interface, TCP behind it, and a twin in memory."""

from keepstep.transport.interface import (
    Body,
    Fetched,
    FetchError,
    FetchRequest,
    OnLink,
    OnMessage,
    Peer,
    Refusal,
    Serve,
    Transport,
)
from keepstep.transport.tcp import TcpTransport

__all__ = [
    "Body",
    "FetchError",
    "FetchRequest",
    "Fetched",
    "OnLink",
    "OnMessage",
    "Peer",
    "Refusal",
    "Serve",
    "TcpTransport",
    "Transport",
]
