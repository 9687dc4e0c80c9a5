"""Bytes and small messages between keepers: one narrow interface, TCP behind it, and a twin in memory."""

from keepstep.transport.interface import (
    Body,
    Fetched,
    FetchError,
    OnLink,
    OnMessage,
    Peer,
    Peers,
    Refusal,
    Serve,
)
from keepstep.transport.tcp import TcpPeers

__all__ = [
    "Body",
    "FetchError",
    "Fetched",
    "OnLink",
    "OnMessage",
    "Peer",
    "Peers",
    "Refusal",
    "Serve",
    "TcpPeers",
]
