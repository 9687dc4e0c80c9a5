"""Bytes and small messages between keepers: one narrow interface, TCP behind it, and a twin in memory."""

from keepstep.transport.interface import (
    Body,
    Fetched,
    FetchError,
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
    "Fetched",
    "OnLink",
    "OnMessage",
    "Peer",
    "Refusal",
    "Serve",
    "TcpTransport",
    "Transport",
]
