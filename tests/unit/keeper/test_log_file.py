"""The keeper's log stays small, whatever is logged how often."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.keeper import log_file
from keepstep.keeper.log_file import MAX_FIELD_CHARS, MAX_PER_WINDOW, WINDOW_S, JsonLines, LineLimit, log_to

log = logging.getLogger("keepstep.test_log_file")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    logger = logging.getLogger("keepstep")
    before = logger.level, logger.propagate, list(logger.handlers)
    log_to(tmp_path / "keeper.log")
    yield tmp_path / "keeper.log"
    for handler in logger.handlers[len(before[2]) :]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(before[0])
    logger.propagate = before[1]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_that_comes_too_often_is_not_written(path: Path) -> None:
    for number in range(10_000):
        log.warning("a message of %s cannot be decoded", number, extra={"peer": number})
    log.warning("another line")
    assert len(lines(path)) == MAX_PER_WINDOW + 1
    assert lines(path)[-1]["event"] == "another line"


def test_the_next_window_says_how_many_were_left_out() -> None:
    now = 0.0
    limit = LineLimit(clock=lambda: now)
    record = log.makeRecord("keepstep", logging.WARNING, __file__, 1, "again", (), None)
    assert sum(limit.filter(record) for _ in range(100)) == MAX_PER_WINDOW
    now += WINDOW_S
    assert limit.filter(record)
    assert json.loads(JsonLines().format(record))["left_out"] == 100 - MAX_PER_WINDOW


def test_the_file_is_replaced_before_it_is_large(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_PER_WINDOW", 10**6)
    (handler,) = (each for each in logging.getLogger("keepstep").handlers if hasattr(each, "maxBytes"))
    handler.maxBytes = 20_000  # type: ignore[attr-defined]
    for number in range(2_000):
        log.warning("line %d", number, extra={"text": "x" * 100})
    sizes = [each.stat().st_size for each in path.parent.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 20_000
    assert lines(path)[-1]["event"] == "line 1999"


def test_a_long_field_is_cut(path: Path) -> None:
    log.warning("peer", extra={"reason": "x" * 10**6})
    assert len(str(lines(path)[0]["reason"])) == MAX_FIELD_CHARS
