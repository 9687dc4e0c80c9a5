"""`keepstep store`: serve the rendezvous store in the foreground, on a machine that does not fail with the job.

Every agent gets its address (`--rdzv-endpoint`). Without it one of the agents serves the store, and the job
cannot restart once that node is lost.
"""

from __future__ import annotations

import argparse
import threading

from keepstep.cli.signals import ended_in_order
from keepstep.errors import ConfigError

MAX_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bind", required=True, metavar="HOST:PORT",
        help="the address on which agents reach it, and a port (0: a free one). Clients are not authenticated: "
        "bind to the cluster's own network",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    host, port = parse_address(args.bind)
    from keepstep.launcher.store import serve

    with ended_in_order():
        store = serve(host, port)
        place = f"[{host}]:{store.port}" if ":" in host else f"{host}:{store.port}"
        try:  # a reader of these lines may end it at once
            print(f"the store is served at {place} until SIGTERM or Ctrl-C", flush=True)
            print(f"agents: --rdzv-backend=keepstep --rdzv-endpoint={place} --rdzv-conf=is_host=0", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            print("the store ends", flush=True)
    del store
    return 0


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address in square brackets."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        raise ConfigError(f"--bind {text} is not HOST:PORT", hint="keepstep store --bind 10.0.0.5:29400")
    return host, int(port)
