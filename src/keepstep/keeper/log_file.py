"""The keeper's log: one JSON object per line, in a file that stays small whatever peers and local processes send.

It lies in the runtime directory, often a small tmpfs. At `MAX_BYTES` it is replaced, and the one before it is kept.
A line that comes too often is counted instead: its text without the values is the same each time.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

MAX_BYTES = 8 << 20
MAX_FIELD_CHARS = 1000
MAX_PER_WINDOW = 20  # lines of one kind
WINDOW_S = 60.0
_OWN_FIELDS = set(vars(logging.makeLogRecord({})))


class JsonLines(logging.Formatter):
    """One JSON object per line, with bounded fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {k: v for k, v in vars(record).items() if k not in _OWN_FIELDS}
        line = {"time": round(time.time(), 3), "level": record.levelname, "event": record.getMessage(), **fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: _short(value) for name, value in line.items()}, default=str)


def _short(value: Any) -> Any:
    if isinstance(value, (int, float, type(None))):
        return value
    text = str(value)
    return text if len(text) <= MAX_FIELD_CHARS else text[-MAX_FIELD_CHARS:]  # of an exception its end matters


class LineLimit(logging.Filter):
    """Passes so many lines of one kind in each window; the first of the next one has the number of those left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # when the window began, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)), self._clock()
        with self._lock:
            began, lines = self._kinds.get(kind, (now, 0))
            if now - began >= WINDOW_S:
                if lines > MAX_PER_WINDOW:
                    record.left_out = lines - MAX_PER_WINDOW
                began, lines = now, 0
            self._kinds[kind] = began, lines + 1
        return lines < MAX_PER_WINDOW


def log_to(path: Path | None) -> None:
    """Send all that this process logs to the file, or to standard error."""
    handler: logging.Handler = logging.StreamHandler()
    if path is not None:
        handler = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(JsonLines())
    handler.addFilter(LineLimit())
    logger = logging.getLogger("keepstep")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
