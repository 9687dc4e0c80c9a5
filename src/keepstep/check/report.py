"""Output of a check: a progress bar for each run, the verdict as text, and a report as JSON and text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from keepstep.check.run_order import CheckResult, CheckSettings
from keepstep.control.check_events import AFTER, BEFORE, EVALUATION, WITHIN

MAX_PATHS = 8
_MOMENTS = {
    AFTER: "when the snapshot of step {} was complete",
    BEFORE: "at take({}), before anything of it was captured",
    WITHIN: "between take({}) and the next one",
    EVALUATION: "in the evaluation after step {}",
}


class CheckProgress:
    """A bar for each run, where standard error is a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
        console = Console(stderr=True)
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._bars: dict[str, TaskID] = {}

    def show(self, name: str, steps: int) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=self._steps)
        self._progress.update(self._bars[name], completed=steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def print_result(result: CheckResult) -> None:
    print(describe(result))


def describe(result: CheckResult) -> str:
    """The verdict as lines of text."""
    if result.exact:
        lines = [_exact(result)]
        lines += [f"  {text}" for text in _instants(result)]
        if result.lost_variables:
            lines.append(
                f"not compared: {_list(result.lost_variables)} changed during training and began anew after a kill. "
                "Where such a variable matters, put it into a dict of the state"
            )
        lines += _times(result)
        return "\n".join(lines)
    lines = ["not exact" if result.exact is False else "could not be checked"]
    difference = result.difference
    if difference is not None:
        lines[0] += f": step {difference.step} of rank {difference.rank} differs"
        if difference.restored is not None:
            lines.append(f"  after a kill, in a process that restored step {difference.restored}")
        lines += [
            f"  {value.path}: {value.found or 'missing'} instead of {value.expected or 'nothing'}"
            for value in difference.changed[:MAX_PATHS]
        ]
        if len(difference.changed) > MAX_PATHS:
            lines.append(f"  and {len(difference.changed) - MAX_PATHS} paths more")
    if result.cause is not None:
        lines += [f"cause: {result.cause.name}: {result.cause.text}", f"try: {result.cause.remedy}"]
    lines += _times(result)
    if result.last_lines:
        lines += ["the last lines of the command:", *(f"  {line}" for line in result.last_lines.splitlines())]
    return "\n".join(lines)


def _instants(result: CheckResult) -> list[str]:
    ranks = result.ranks > 1
    return [
        f"{_MOMENTS[order.moment].format(order.step)}{f', rank {order.rank}' if ranks else ''}"
        for order in result.kills
    ]


def _exact(result: CheckResult) -> str:
    equal = f"{len(result.steps)} steps are equal bit for bit, with {len(result.kills)} kills"
    if not result.lost_numbers:
        return f"exact: {equal}"
    first, *others = result.lost_numbers
    more = f" (and so were {_list([number.name for number in others])})" if others else ""
    return (
        f"exact so far: {equal}, but `{first.name}` was {first.found} instead of {first.expected} at step {first.step}"
        f"{more}; run it to its end with --steps"
    )


def _times(result: CheckResult) -> list[str]:
    return [f"not compared: times ({_list(result.times)})"] if result.times else []


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_PATHS} more" if len(names) > MAX_PATHS else ""
    return ", ".join(names[:MAX_PATHS]) + more


def write_report(result: CheckResult, settings: CheckSettings, path: Path) -> None:
    """PATH as JSON, and the text beside it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"schema": 1, "settings": settings, "result": result})))
    path.with_suffix(".txt").write_text(describe(result) + "\n", encoding="utf-8")
