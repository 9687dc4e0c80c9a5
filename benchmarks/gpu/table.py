"""Figures become met or missed, and tables. Pure, but for the printing; plain text, since rich may not be there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from results import Results

CHUNK_BYTES = 4 << 20
SHARE_SLACK_BYTES = 4 * CHUNK_BYTES
"""a chunk per replica class and per turn, and the layout"""
NODES, LOSSES = 8, 1
RATE_SHARE = 0.97


@dataclass(frozen=True)
class Verdict:
    target: str
    limit: str
    measured: str
    outcome: str
    """met, missed, unclear or not measured"""


Found = dict[str, Any]


def judge(part: int, results: Results) -> list[Verdict]:
    judges: dict[int, Callable[[Found], list[Verdict]]] = {
        1: _judge_cost, 2: _judge_models, 3: _judge_kills, 4: _judge_shares,
    }  # fmt: skip
    return judges[part](results.measures)


# Part 1


def _judge_cost(found: Found) -> list[Verdict]:
    ours = found.get("keepstep", {})
    four = {**ours, "cadences": found.get("every-step", {}).get("cadences", {})}
    return [
        _judge_every_second(ours), _judge_every_step(ours, "three slots"), _judge_every_step(four, "four slots"),
        _judge_held(ours, "in the loop", _cadence(ours, 2)),
        _judge_held(ours, "launch queue empty", ours.get("quiet", {})),
        *_judge_first(ours), _judge_staging(ours), *_judge_rate(ours),
    ]  # fmt: skip


def _judge_every_second(ours: Found) -> Verdict:
    cadence = _cadence(ours, 2)
    return _with_count(_most("lost, every 2nd step", cadence.get("lost_s"), 0.003, _ms), cadence)


def _judge_every_step(ours: Found, slots: str) -> Verdict:
    cadence, limit = _cadence(ours, 1), ours.get("limit", {}).get("best_bytes_s")
    size = ours.get("workload", {}).get("state_bytes")
    above = None
    name = f"every step, {slots}, above max(step, bytes / link)"
    if limit and size and cadence.get("step_with_s"):
        least = max(cadence["step_alone_s"], size / limit)
        above = cadence["step_with_s"] - least
        name += f" of {_ms(least)}"
    return _with_count(_most(name, above, 0.003, _ms), cadence)


def _judge_held(ours: Found, where: str, found: Found) -> Verdict:
    return _most(f"take + hook, host, median, {where}", found.get("held", {}).get("median_s"), 0.001, _ms)


def _judge_first(ours: Found) -> list[Verdict]:
    first, usual = ours.get("first", {}), _cadence(ours, 2)
    skipped = f"the first take was skipped: {first['skipped']}" if first.get("skipped") else ""
    held = _ratio(first.get("held_s"), usual.get("held", {}).get("median_s"))
    step = _ratio(first.get("step_s"), usual.get("steps_with", {}).get("median_s"))
    names = ("first snapshot, held, of the median", "first snapshot, its whole step, of the median")
    if skipped:
        return [Verdict(name, "at most 1.20 x", skipped, "missed") for name in names]
    return [_most(name, value, 1.2, _times) for name, value in zip(names, (held, step), strict=True)]


def _judge_staging(ours: Found) -> Verdict:
    grown = ours.get("memory", {}).get("device_growth", {})
    return _most("staging on the device, growth of the peak", grown.get("peak_allocated_bytes"), 1.8e9, _gb)


def _judge_rate(ours: Found) -> list[Verdict]:
    limit = ours.get("limit", {}).get("best_bytes_s")
    rates = {
        "link while copying, by the capture's clock": _cadence(ours, 2).get("rate_bytes_s"),
        "link while copying, by the profiler": ours.get("profile", {}).get("rate_bytes_s"),
    }
    return [_least(f"{name}, of the limit", _ratio(rate, limit), RATE_SHARE, _percent) for name, rate in rates.items()]


# Part 2


def _judge_models(found: Found) -> list[Verdict]:
    large, small = found.get("large", {}), found.get("small", {})
    fifth, each = _cadence(large, 5), _cadence(small, 1)
    tensors = small.get("workload", {}).get("state_tensors")
    per_tensor = _ratio(each.get("take", {}).get("median_s"), tensors)
    quiet = _ratio(small.get("quiet", {}).get("take", {}).get("median_s"), tensors)
    asked = _ratio(small.get("state_dict_s"), tensors)
    asked_text = f" (state_dict() alone: {_us(asked)})" if asked is not None else ""
    return [
        _with_count(_most("large model, lost, every 5th step", fifth.get("lost_share"), 0.01, _percent), fifth),
        _with_count(_most("small tensors, take per tensor, in the loop", per_tensor, 0.5e-6, _us), each),
        _most(f"small tensors, take per tensor, queue empty{asked_text}", quiet, 0.5e-6, _us),
        _judge_per_byte(large, small),
    ]


def _judge_per_byte(large: Found, small: Found) -> Verdict:
    per_gb = [
        _ratio(_cadence(one, every).get("lost_s"), _ratio(one.get("workload", {}).get("state_bytes"), 1e9))
        for one, every in ((large, 5), (small, 1))
    ]
    name, limit = "small tensors, lost per GB, of the large model's", "at most 2.00 x"
    if per_gb[0] is None or per_gb[1] is None:
        return Verdict(name, limit, "-", "not measured")
    text = f"{_ms(per_gb[1])} against {_ms(per_gb[0])}"
    if per_gb[0] <= 0:  # nothing was lost that could be seen: a ratio to it says nothing
        return Verdict(name, limit, text, "met" if per_gb[1] <= 0 else "unclear")
    return Verdict(name, limit, text, "met" if per_gb[1] <= 2 * per_gb[0] else "missed")


# Part 3


def _judge_kills(found: Found) -> list[Verdict]:
    summary, lives = found.get("kills", {}).get("summary"), found.get("kills", {}).get("lives", [])
    verdicts = []
    if summary:
        text = f"{summary['exact']} of {summary['restored']}, {summary['in_mid_capture']} kills in mid-capture"
        good = summary["exact"] == summary["restored"] == summary["kills"] and not found["kills"].get("error")
        verdicts.append(
            Verdict("newest committed restored, bit for bit", "all", text, "met" if good and lives else "missed")
        )
    else:
        verdicts.append(Verdict("newest committed restored, bit for bit", "all", "-", "not measured"))
    restore = found.get("restore", {})
    name = f"restore() of {_gb(restore['state_bytes'])} to the device" if "state_bytes" in restore else "restore()"
    one = _most(f"{name} (copy alone: {restore.get('limit_s', 0):.2f} s)", restore.get("state_s"), 1.5, _s)
    if restore.get("problem"):
        one = Verdict(one.target, one.limit, f"{one.measured}, but {restore['problem']}", "missed")
    return [*verdicts, one]


# Part 4


def _judge_shares(found: Found) -> list[Verdict]:
    share = found.get("share", {})
    each, size = _cadence(share, 1), share.get("workload", {}).get("state_bytes")
    stored = share.get("memory", {}).get("slot_bytes")
    bytes_ = Verdict("share of 8 nodes, bytes per snapshot", "S/7", "-", "not measured")
    if size and stored:
        most = size / (NODES - LOSSES) + SHARE_SLACK_BYTES
        text = f"{_gb(stored)} of {_gb(size)}"
        bytes_ = Verdict(bytes_.target, f"S/7 = {_gb(most)}", text, "met" if stored <= most else "missed")
    lost = _with_count(_most("share of 8 nodes, lost, every step", each.get("lost_s"), 0.001, _ms), each)
    return [bytes_, lost, _judge_poison(found.get("poison", {})), _judge_parity(found.get("parity", {}))]


def _judge_poison(found: Found) -> Verdict:
    runs = [run for run in found.values() if isinstance(run, dict)]
    name, limit = "poisoned snapshots that mix steps", "none"
    errors = [run["error"] for run in runs if "error" in run]
    if not runs or errors:
        return Verdict(name, limit, errors[0] if errors else "-", "not measured")
    checked, mixed = sum(run["checked"] for run in runs), sum(run["num_mixed"] for run in runs)
    voids = sum(run["num_void"] for run in runs)
    text = f"{mixed} of {checked} read ({sum(run['complete'] for run in runs)} complete, {voids} void)"
    return Verdict(name, limit, text, "met" if checked and not mixed else "missed")


def _judge_parity(found: Found) -> Verdict:
    status = found.get("exit_status")
    outcome = "not measured" if status is None else "met" if status == 0 else "missed"
    return Verdict("parity on the device: its own targets", "all", str(found.get("missing", f"exit {status}")), outcome)


# The words of a verdict


def _cadence(found: Found, every: int) -> Found:
    cadence: Found = found.get("cadences", {}).get(str(every), {})
    return cadence


def _with_count(verdict: Verdict, cadence: Found) -> Verdict:
    """A cadence that was not kept is missed, whatever its snapshots cost."""
    if "requested" not in cadence or (verdict.outcome == "not measured" and cadence["complete"]):
        return verdict
    text = f"{verdict.measured}, {cadence['complete']} of {cadence['requested']} complete"
    kept = cadence["complete"] == cadence["requested"]
    return Verdict(verdict.target, verdict.limit, text, verdict.outcome if kept else "missed")


def _most(target: str, value: float | None, limit: float, form: Callable[[float], str]) -> Verdict:
    if value is None:
        return Verdict(target, f"at most {form(limit)}", "-", "not measured")
    return Verdict(target, f"at most {form(limit)}", form(value), "met" if value <= limit else "missed")


def _least(target: str, value: float | None, limit: float, form: Callable[[float], str]) -> Verdict:
    if value is None:
        return Verdict(target, f"at least {form(limit)}", "-", "not measured")
    return Verdict(target, f"at least {form(limit)}", form(value), "met" if value >= limit else "missed")


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.2f} us"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3f} GB"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x"


# Printing


def print_part(part: int, results: Results, verdicts: Sequence[Verdict]) -> bool:
    """Tables of what was measured, the targets last. Whether something of keepstep's own could not be measured."""
    found = results.measures
    for name in ("keepstep", "every-step", "large", "small", "share"):
        if name in found:
            _print_cadences(name, found[name])
    if "contenders" in found:
        _print_contenders(found)
    errors = {name: one["error"] for name, one in found.items() if isinstance(one, dict) and "error" in one}
    for name, error in errors.items():
        print(f"{name}: {error}")
    print_rows(f"Targets of part {part}", [[v.target, v.limit, v.measured, v.outcome] for v in verdicts])
    return bool(errors)


def _print_cadences(name: str, found: Found) -> None:
    rows = [["every", "complete", "lost", "step alone", "with", "p99 alone", "with", "take", "hook", "link GB/s"]]
    for every, one in found.get("cadences", {}).items():
        rate, lost = one["rate_bytes_s"], one["lost_s"]
        alone, with_ = one["steps_alone"], one["steps_with"]
        rows.append(
            [
                every, f"{one['complete']}/{one['requested']}", _ms(lost) if lost is not None else "-",
                _ms(alone["median_s"]), _ms(with_["median_s"]), _ms(alone["p99_s"]), _ms(with_["p99_s"]),
                _ms(one["take"].get("median_s", 0.0)), _ms(one["hook"].get("median_s", 0.0)),
                f"{rate / 1e9:.1f}" if rate else "-",
            ]
        )  # fmt: skip
        took_s = sorted(one.get("stages", {}).items(), key=lambda stage: -stage[1])
        if took_s:
            rows.append(["", "take: " + ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in took_s) + " ms"])
        stretches = {name: one["timeline"][name] for name in one.get("timeline", {}) if name.endswith("_s")}
        if stretches:
            told = [f"{name[:-2].replace('_', ' ')} {_ms(value['median'])}" for name, value in stretches.items()]
            rows.append(["", ", ".join(told)])
        for reason, count in one["not_complete"].items():
            rows.append(["", f"{count} x {reason}"[:100]])
    print_rows(f"{name}: {_facts(found)}", rows)


def _facts(found: Found) -> str:
    facts = []
    if "workload" in found:
        facts.append(f"{_gb(found['workload']['state_bytes'])} in {found['workload']['state_tensors']} tensors")
    if "limit" in found:
        facts.append(f"link limit {found['limit']['best_bytes_s'] / 1e9:.1f} GB/s")
    if "floor" in found:
        facts.append(f"floor {_ms(found['floor']['lost_s'])} per copy")
    if "first" in found:
        first = found["first"]
        held = "-" if first["held_s"] is None else _ms(first["held_s"])
        facts.append(f"first snapshot held {held}, its step grew by {_ms(first['growth_s'])}")
    if beside := found.get("unprotected_every_step"):
        facts.append(f"part 1 lost {_ms(beside['lost_s'])} at every step with full copies" if beside["lost_s"] else "")
    if "crowd" in found:
        crowd = found["crowd"]
        facts.append(f"{crowd['workers']} busy processes beside it lost {_percent(crowd['work_lost_share'])}")
    if "memory" in found:
        facts.append(f"{found['memory']['slots']} slots, {_gb(found['memory']['arena_bytes'])} of host memory")
    return ", ".join(filter(None, facts))


def _print_contenders(found: Found) -> None:
    rows = [["way", "lost, first", "lost, next", "call", "until done"]]
    for name, one in found["contenders"].items():
        shots = list(one.get("snapshots", {}).values())
        cells = [_s(shots[0]["lost_s"]) if shots else "-", _s(shots[1]["lost_s"]) if len(shots) > 1 else "-"]
        cells += [_s(shots[-1]["call_s"]), _s(shots[-1]["until_done_s"])] if shots else ["-", "-"]
        rows.append([name, *cells, one.get("error", "")[:60]])
    print_rows("Other ways", rows)


def print_rows(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they must be; the last of a row may be as long as it likes."""
    print(f"\n{title}")
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    for row in rows:
        print("  " + "  ".join(cell.ljust(widths.get(column, 0)) for column, cell in enumerate(row)).rstrip())
    print(flush=True)
