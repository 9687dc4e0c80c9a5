"""Nobody looks at a terminal that says nothing while memory is prepared."""

from __future__ import annotations

import logging
import os
import pty
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keepstep.trainer.memory import progress
from keepstep.trainer.memory.progress import LARGE_BYTES, ProgressLine, waiting_for


@contextmanager
def a_terminal() -> Iterator[int]:
    """Its other end. Not a fixture: pytest puts its own `stderr` back before the test begins."""
    other, own = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(own, "w") as stderr:
        patch.setattr(sys, "stderr", stderr)
        patch.setenv("TERM", "xterm")
        yield other
    os.close(other)


def shown(terminal: int) -> str:
    sys.stderr.flush()
    os.set_blocking(terminal, False)
    found = b""
    try:
        while part := os.read(terminal, 65536):
            found += part
    except BlockingIOError:
        pass
    return found.decode(errors="replace")


def test_a_large_arena_that_the_keeper_makes_is_waited_for_visibly(caplog: pytest.LogCaptureFixture) -> None:
    with a_terminal() as terminal:
        with caplog.at_level(logging.INFO), waiting_for(3 * LARGE_BYTES, enabled=True):
            time.sleep(0.3)
        assert "waits for 12.0 GiB" in shown(terminal)
    assert "waits for 12.0 GiB" in caplog.text


@pytest.mark.parametrize(("size", "enabled"), [(LARGE_BYTES - 1, True), (9 * LARGE_BYTES, False)])
def test_of_what_is_soon_over_or_done_behind_training_nothing_is_said(size: int, enabled: bool) -> None:
    with a_terminal() as terminal:
        with waiting_for(size, enabled=enabled):
            time.sleep(0.2)
        assert shown(terminal) == ""


def test_what_goes_wrong_while_it_is_shown_comes_through_and_the_bar_ends() -> None:
    with a_terminal() as terminal:
        with pytest.raises(ValueError, match="no memory"), waiting_for(LARGE_BYTES, enabled=True):
            raise ValueError("no memory")
        assert "waits" in shown(terminal)
        time.sleep(0.3)
        assert shown(terminal) == ""


def test_pages_that_take_long_to_prepare_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SLOW_S", 0.0)
    with a_terminal() as terminal:
        with ProgressLine(1000, enabled=True) as show:
            show(500)
            time.sleep(0.3)
        assert "50%" in shown(terminal)


@contextmanager
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        monkeypatch.setattr(sys, "stderr", nowhere)
        yield


def test_without_a_terminal_it_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "SLOW_S", 0.0)
    with caplog.at_level(logging.INFO), no_terminal(monkeypatch):
        with waiting_for(LARGE_BYTES, enabled=True):
            pass
        with ProgressLine(5 << 30, enabled=True) as show:
            show(1)
    assert "waits for 4.0 GiB" in caplog.text
    assert "prepared 5.00 GiB" in caplog.text
