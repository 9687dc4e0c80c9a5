"""Nothing is broken before somebody has said yes."""

from __future__ import annotations

import argparse
import sys

from keepstep.errors import KeeperError

NOT_CONFIRMED = 1


def confirmed(question: str, args: argparse.Namespace) -> bool:
    if args.yes:
        return True
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        raise KeeperError("nobody is there to confirm it", hint="--yes") from None
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was done", file=sys.stderr)
    return False
