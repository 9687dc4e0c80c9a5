"""Bytes between nodes: protect a version, fetch or rebuild a snapshot."""
