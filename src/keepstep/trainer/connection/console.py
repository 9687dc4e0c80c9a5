"""Lines that people see although no logging is configured."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("keepstep")


def inform(text: str) -> None:
    """Log at INFO. Where nothing handles the logs of keepstep, Python would drop it: print it to standard error."""
    if log.hasHandlers():
        log.info(text)
    else:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)
