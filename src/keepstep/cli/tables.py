"""Tables, sizes and times as every command prints them."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.errors import printable

LOG_WIDTH = 120  # columns where the output is no terminal: a log is not cut at 80


class PrintableConsole(Console):
    """Removes what a terminal would obey from strings: names in memory may be anything."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def open_console() -> Console:
    """Standard output. Markup is off: names of runs and tensors may hold square brackets."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else LOG_WIDTH
    return PrintableConsole(markup=False, highlight=False, emoji=False, width=width)


def make_table(*columns: str, title: str | None = None) -> Table:
    """A plain table; a column written as `>name` is aligned to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def format_step(step: int | None) -> str:
    return "-" if step is None or step < 0 else str(step)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
