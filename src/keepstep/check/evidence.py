"""What is known of the step that differs: how it began in both runs (pure). `causes` judges by it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from keepstep.check.trajectory import TakeRecord
from keepstep.control.check_events import BUFFER, MODULE, OPTIMIZER, TENSOR, VARIABLE, WORKERS

# What a key is called that holds a time or a speed: eval_runtime, train_samples_per_second, epoch_time.
_TIME_KEY = re.compile(
    r"(?:^|[\W_])(?:runtime|walltime|time|seconds|elapsed|duration|timestamp|per_sec|per_second)"
    r"(?:_(?:s|ms|ns|sec))?(?:\.\d+)*$"
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class ChangedValue:
    """One path with its value in the undisturbed run and in the other; empty where it is missing."""

    path: str
    expected: str
    found: str


@dataclass(frozen=True)
class Evidence:
    """How the step began in the undisturbed run and in the other one."""

    start_seen: bool = False  # in both runs
    start: tuple[ChangedValue, ...] = ()  # the state at the first forward pass
    moved: tuple[ChangedValue, ...] = ()  # of these, what the undisturbed run changes between `take` and that moment
    inputs_differ: bool = False  # what the modules were called with
    batch_of: int = -1  # the step of the undisturbed run that has the inputs of the other run
    around_start: tuple[ChangedValue, ...] = ()  # what is not in the state, at that moment
    around: tuple[ChangedValue, ...] = ()  # and at `take`
    held: tuple[str, ...] = ()  # what held those inputs in the undisturbed run, at the `take` before
    draws_first: bool = False  # the undisturbed run draws random numbers before that forward pass
    drawn_before_take: bool = False  # and it drew some between optimizer.step() and the `take` before
    evaluates: bool = False  # and evaluates between that `take` and that forward pass
    no_step: bool = False  # an optimizer stepped before the `take` in the undisturbed run only
    no_step_before: bool = False  # none stepped before the `take` before, in the undisturbed run
    in_batches: bool = False  # the loop is one of `Snapshotter.batches`
    carried: tuple[str, ...] = ()  # numbers that the loop itself sets behind that `take`, besides the epoch
    workers: bool = False  # a DataLoader has workers


def gather_evidence(
    earlier: TakeRecord | None,
    expected: TakeRecord,
    found: TakeRecord,
    *,
    ignored: Collection[str] = (),
    constant: Collection[str] = (),
    batches: Mapping[tuple[str, ...], int] = {},
) -> Evidence:
    """`earlier`: the take before, in the undisturbed run. `ignored`: paths that differ by themselves. `constant`:
    surroundings that no step changes. `batches`: steps of the undisturbed run by their inputs."""
    start, other = expected.trace, found.trace
    differ = bool(start.inputs) and bool(other.inputs) and start.inputs != other.inputs
    changed = compare_values(start.state, other.state, ignored, only=start.state.keys() & other.state.keys())
    before = earlier.state if earlier is not None else start.state
    return Evidence(
        start_seen=bool(start.state) and bool(other.state),
        start=changed,
        moved=tuple(value for value in changed if before.get(value.path) != value.expected),
        inputs_differ=differ,
        batch_of=batches.get(other.inputs, -1) if differ else -1,
        around_start=_changed_around(start.around, other.around, {*ignored, *constant}),
        around=_changed_around(expected.around, found.around, {*ignored, *constant}),
        held=_holders(earlier, start.inputs),
        draws_first=earlier is not None and bool(compare_random(earlier.state, start.state)),
        drawn_before_take=earlier is not None and earlier.trace.drawn,
        evaluates=start.evaluated_first,
        no_step=start.stepped and not other.stepped,
        no_step_before=earlier is not None and not earlier.trace.stepped,
        in_batches=start.in_batches,
        carried=_carried(earlier, start.around),
        workers=any(path.startswith(f"{WORKERS} ") and text != "0" for path, text in expected.around.items()),
    )


def compare_values(
    expected: dict[str, str], found: dict[str, str], ignored: Collection[str], *, only: Collection[str] | None = None
) -> tuple[ChangedValue, ...]:
    """Every path whose value differs, in the order of the state. Times are not compared."""
    paths = [path for path in {**expected, **found} if path not in ignored and (only is None or path in only)]
    return tuple(
        ChangedValue(path, expected.get(path, ""), found.get(path, ""))
        for path in paths
        if expected.get(path) != found.get(path) and not is_time(path, expected.get(path, ""), found.get(path, ""))
    )


def is_time(path: str, *texts: str) -> bool:
    """Whether the key is named like a time or a speed, and every value is a Python float."""
    return _TIME_KEY.search(path) is not None and all(
        is_number(text) and not text.lstrip("-").isdigit() for text in texts
    )


def is_number(text: str) -> bool:
    """Whether the value is a number of Python's, or a tensor of one number that is not in the state."""
    return _NUMBER.fullmatch(text) is not None


def compare_random(before: dict[str, str], after: dict[str, str]) -> tuple[ChangedValue, ...]:
    """The random states that changed."""
    both = [path for path in after if path.startswith("rng.") and path in before]
    return compare_values(before, after, (), only=both)


def _changed_around(
    expected: dict[str, str], found: dict[str, str], ignored: Collection[str]
) -> tuple[ChangedValue, ...]:
    """Of variables what both have: one that a new process has not set yet explains nothing."""
    made_once = {path for path in expected if path.partition(" ")[0] in (BUFFER, MODULE, OPTIMIZER)}
    changed = compare_values(expected, found, ignored, only=(expected.keys() & found.keys()) | made_once)
    # What objects hold comes first: most variables of a function are set anew in each step.
    return tuple(sorted(changed, key=lambda value: value.path.startswith(f"{VARIABLE} ") and "." not in value.path))


def _carried(earlier: TakeRecord | None, around: dict[str, str]) -> tuple[str, ...]:
    before = earlier.around if earlier is not None else {}
    changed = compare_values(before, around, (), only=before.keys() & around.keys())
    counts = [value for value in changed if value.expected.isdigit() and value.found.isdigit()]
    names = [value.path.partition(" ")[2] for value in counts if value.path.startswith(f"{VARIABLE} ")]
    return tuple(name for name in names if name.rpartition(".")[2] != "epoch")


def _holders(earlier: TakeRecord | None, inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Tensors outside the state that were inputs of the next step already."""
    if earlier is None:
        return ()
    digests = {digest for digest in inputs if digest.startswith("#")}
    used = set(earlier.trace.inputs)  # data that every step is called with
    return tuple(
        path.partition(" ")[2]
        for path, digest in earlier.around.items()
        if path.startswith(f"{TENSOR} ") and digest in digests - used
    )
