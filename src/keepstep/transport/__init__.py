"""Bytes and small messages between keepers: one narrow interface, TCP behind it, and a twin in memory."""

from keepstep.peers.base import (
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
from keepstep.peers.memory import Hub, MemoryPeers
from keepstep.peers.tcp import TcpPeers

__all__ = [
    "Body",
    "FetchError",
    "Fetched",
    "Hub",
    "MemoryPeers",
    "OnLink",
    "OnMessage",
    "Peer",
    "Peers",
    "Refusal",
    "Serve",
    "TcpPeers",
]
