"""The likely cause of a difference, in a sentence, and what to do about it (pure).

Names are stable: programs may compare them. docs/guides/check.md explains each one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from keepstep.check.command_run import FAILED, LOOPING, STALLED, RunOutcome
from keepstep.check.comparison import (
    AT_RESTORE,
    BESIDE,
    NOT_RESTORED,
    OF_STEPS,
    PRINTED,
    REFUSED,
    RNG,
    Difference,
)
from keepstep.check.evidence import ChangedValue, Evidence
from keepstep.check.trajectory import RankRun
from keepstep.control.check_events import BUFFER, GENERATOR, MODULE, OPTIMIZER, SCHEDULER, TENSOR, VARIABLE

MAX_NAMES = 3
_FLOATING = re.compile(r" (?:b?float|complex)\w+$")  # the end of a digest
REHEARSED_RANKS = 3  # from so many on, torch's DDP sums the first step of a process in another order
OWN_DATA = (
    "let keepstep ask for the batches: Snapshotter(state, loader=loader) and "
    "`for epoch, batch in snapshots.batches(...)`; or keep what is fetched ahead, and the place in the data, in the "
    "state"
)
# What lies outside the state, the most telling kind first.
_OUTSIDE = {
    BUFFER: "a buffer or an attribute of a module that state_dict() leaves out",
    MODULE: "a module that is not in the state",
    OPTIMIZER: "an optimizer that is not in the state",
    SCHEDULER: "a scheduler that is not in the state",
    GENERATOR: "a random generator that is not in the state",
    TENSOR: "a tensor that is not in the state",
    VARIABLE: "a variable that is not in the state",
}


@dataclass(frozen=True)
class Cause:
    """Why a run is not exact, or cannot be judged."""

    name: str
    text: str
    remedy: str


def cause_of(difference: Difference, num_ranks: int) -> Cause:
    """The cause of the first difference after a restore."""
    match difference.kind:
        case kind if kind == REFUSED:
            return Cause("refused", f"restore() refused: {difference.text}", "see the sentence")
        case kind if kind == NOT_RESTORED:
            return _not_restored(difference)
        case kind if kind == OF_STEPS:
            return _other_steps(difference)
        case kind if kind == AT_RESTORE:
            return Cause(
                "not written back",
                f"restore() has run, and {_names(difference.changed)} is not what was captured: the object's "
                "load_state_dict() leaves it out, or something has changed it since",
                "let load_state_dict() write all that state_dict() gives",
            )
        case kind if kind == BESIDE:
            return _outside(difference.changed)
        case kind if kind == PRINTED:
            return Cause(
                "printed",
                f"the state is equal, and the {difference.changed[0].path} that is printed is not: a mean or a history "
                "is kept in a variable",
                "put what it is computed from into a dict of the state",
            )
    if difference.evidence.no_step and difference.restored is not None and difference.is_first_step:
        return _taken_before(difference)
    return _cause_of_step(difference, num_ranks)


def undisturbed_cause(difference: Difference) -> Cause:
    """The cause of a difference between two undisturbed runs."""
    evidence = difference.evidence
    begun = _without_random(evidence.start)
    if difference.changed and all(_is_of_output(value) for value in difference.changed):
        return _output_directory(difference.changed)
    gone = [value.path for value in difference.changed if not value.found]
    new = [value.path for value in difference.changed if not value.expected]
    if gone and new and len(gone) + len(new) == len(difference.changed):
        return Cause(
            "keys", f"{gone[0]} has another name in each process: the keys of the state are id() or the like",
            "use names or indices as keys",
        )  # fmt: skip
    began_equal = difference.life == 0 and evidence.start_seen and not evidence.start and not evidence.inputs_differ
    if began_equal and not any(_FLOATING.search(value.expected + value.found) for value in difference.changed):
        return Cause(
            "not deterministic",
            f"two undisturbed runs differ at step {difference.step} in {_names(difference.changed)}, and in no tensor "
            "of floating point: kernels have no part in it",
            "leave out of the state what differs in each run by itself: a time, a name, an id",
        )  # fmt: skip
    if began_equal:
        return Cause(
            "kernels",
            f"two undisturbed runs differ at step {difference.step}, which began equal: kernels are not deterministic",
            "torch.use_deterministic_algorithms(True), and what it says; a fixed number of threads",
        )
    if begun:
        text = f"two undisturbed runs begin with other values of {_names(begun)}: nothing seeds them"
    elif evidence.start:
        text = "two undisturbed runs begin with other random states: nothing seeds them"
    else:
        text = "two undisturbed runs differ: the program is not deterministic by itself"
    return Cause(
        "not deterministic", text, "seed everything at the start: torch.manual_seed(), random, numpy, the data"
    )


def _output_directory(changed: Sequence[ChangedValue]) -> Cause:
    shown = next((value for value in changed if value.expected and value.found), changed[0])
    names = f"{shown.path} is {shown.found or 'missing'} instead of {shown.expected or 'missing'}"
    return Cause(
        "output directory",
        f"two undisturbed runs write into the same place, so each finds another name free: {names}",
        "a fixed directory that the script empties where keepstep.find() returns None, and files that are overwritten "
        "(ModelCheckpoint(directory, enable_version_counter=False)); or leave the paths out of the state",
    )


def _is_of_output(value: ChangedValue) -> bool:
    """Whether a path of a file differs, as a value or within a key."""
    texts = [text for text in (value.expected, value.found) if text]
    return (len(texts) < 2 and "/" in value.path) or all(text[0] in "'\"" and "/" in text for text in texts)


def failure_cause(calm: RunOutcome, reference: list[RankRun]) -> Cause | None:
    """Why an undisturbed run is nothing to compare with."""
    if calm.ending in (FAILED, LOOPING):
        return _failed(calm, "the command fails undisturbed")
    if calm.ending == STALLED:
        return Cause("stalled", "the command makes no step and prints nothing", "--timeout SECONDS")
    if not reference:
        return Cause("no snapshotter", "the command has ended without a keepstep.Snapshotter", "see the README")
    takes = [take for run in reference for take in run.takes]
    if not takes:
        return Cause("no take", "the command has ended without one take()", "call take(step) after optimizer.step()")
    if any(after.step <= before.step for run in reference for before, after in pairwise(run.takes)):
        return Cause(
            "steps", "take() was called with a step that is not larger than the one before",
            "count steps through all epochs: a step is never used again",
        )  # fmt: skip
    if not any(life.kept for run in reference for life in run.lives):
        reason = next(iter(reference[0].lives[0].skipped.values()), "")
        remedy = "repair what the reason names, or use the adapter of its framework in keepstep.frameworks"
        return Cause("no snapshot", f"no snapshot was complete: {reason}", remedy)
    return None


def crash_cause(struck: RunOutcome) -> Cause:
    """Why the run with kills came to no end that can be compared."""
    if struck.ending == STALLED:
        return Cause("stalled", "the command makes no step after a restore", "see the last lines")
    return _failed(struck, "the command fails after a restore", name="fails after restore")


def ended_early(steps: Sequence[int], last: int) -> Cause:
    """The run with kills has ended before the last step of the undisturbed one."""
    return Cause(
        "position", f"the run with kills ends at step {last}, the undisturbed one at {steps[-1]}: "
        "the place in the data or in the epoch is lost", OWN_DATA,
    )  # fmt: skip


def _failed(run: RunOutcome, text: str, name: str = "failed") -> Cause:
    if run.refusal:
        return Cause("refused", f"keepstep refuses: {run.refusal}", "see the sentence")
    return Cause(name, f"{text}, with exit code {run.exit_code}", "see its last lines")


def _not_restored(difference: Difference) -> Cause:
    if difference.text:
        return Cause(
            "restore not called", "the restarted command never calls restore()", "call it before the first step"
        )
    return Cause(
        "not restored", "restore() returned None although a snapshot was complete: the run has another name each time",
        "let the run id be the same at each start",
    )  # fmt: skip


def _other_steps(difference: Difference) -> Cause:
    if difference.expected_step < 0:
        text = f"step {difference.step} is made, which the undisturbed run does not make"
    else:
        text = f"step {difference.step} is made where the undisturbed run makes step {difference.expected_step}"
    return Cause(
        "position", f"{text}: the loop does not go on where restore() says, or an epoch is entered at another place",
        f"begin at restored.step + 1; with epochs, {OWN_DATA}",
    )  # fmt: skip


def _taken_before(difference: Difference) -> Cause:
    return Cause(
        "take before step", "take() stands before optimizer.step(): the snapshot of a step does not contain it",
        "call take(step) after the step is over",
    )  # fmt: skip


def _cause_of_step(difference: Difference, num_ranks: int) -> Cause:
    """Of a step whose state differs: by how it began, then by what surrounds it."""
    evidence = difference.evidence
    if evidence.no_step_before and difference.is_first_step:
        return Cause(
            "gradients", "a snapshot was taken between accumulation steps, and gradients are not captured",
            "take after optimizer.step(), or use keepstep.Config(grads=True)",
        )  # fmt: skip
    if evidence.inputs_differ and evidence.held:
        names = ", ".join(evidence.held[:MAX_NAMES])
        return Cause(
            "data fetched ahead", f"at take() the batch of the next step is held by {names}, which is not in the state",
            OWN_DATA,
        )  # fmt: skip
    if evidence.batch_of >= 0:
        return Cause(
            "position", f"the batch of step {evidence.batch_of} comes where that of step {difference.step} is due: the "
            "place in the data is lost", OWN_DATA,
        )  # fmt: skip
    generators = tuple(value for value in evidence.around_start if _kind(value) == GENERATOR)
    if generators:
        return _outside(generators)
    if moved := _without_random(evidence.moved):
        return _changed_after_take(moved, evidence)
    if changed := _without_random(evidence.start):
        return Cause(
            "changed after restore", f"{_names(changed)} is overwritten between restore() and the first step",
            "set it before restore(), and not again",
        )  # fmt: skip
    if evidence.start or (not evidence.start_seen and _has_random(difference.changed)):
        return _random(evidence)
    if evidence.inputs_differ:
        return _other_data(evidence)
    outside = [value for value in evidence.around_start if _kind(value) in _OUTSIDE and _kind(value) != VARIABLE]
    if outside:
        return _outside(tuple(outside))
    if num_ranks >= REHEARSED_RANKS and difference.is_first_step:
        return Cause(
            "rehearsal", "DDP with three or more ranks sums gradients in another order in the first step of a process",
            "restore(rehearsal=one_forward_and_backward)",
        )  # fmt: skip
    variables = tuple(value for value in evidence.around_start if _kind(value) == VARIABLE)
    if variables:
        return _outside(variables)
    if _has_random(difference.changed):
        return _random(evidence)
    late = tuple(value for value in evidence.around if _kind(value) in _OUTSIDE)
    if late:
        return _outside(late)
    path = difference.changed[0].path
    return Cause(
        "outside", f"something outside the state differs; {path} is the first to show it", "add it to the state"
    )


def _changed_after_take(changed: tuple[ChangedValue, ...], evidence: Evidence) -> Cause:
    names, in_batches = _names(changed), ""
    if evidence.in_batches:
        carried = f" (here {', '.join(evidence.carried[:MAX_NAMES])})" if evidence.carried else ""
        in_batches = (
            "do it in the body of the last batch of the epoch, not in that of the next one; and keep what the loop "
            f"carries{carried} in a dict of the state"
        )
    if any(re.search(r"\blr\b|_last_lr|last_epoch|_step_count|scheduler", value.path) for value in changed):
        return Cause(
            "scheduler after take", f"a scheduler steps after take(): {names}",
            in_batches or "call scheduler.step() before take()",
        )  # fmt: skip
    return Cause(
        "changed after take", f"{names} changes between take() and the next step, and the change is lost",
        in_batches or "change it before take()",
    )  # fmt: skip


def _random(evidence: Evidence) -> Cause:
    if evidence.evaluates and evidence.draws_first:
        where = "an evaluation between take() and the next step draws random numbers, and a restored process does not"
        return Cause("random", where, "evaluate before take(), or restore the random state after the evaluation")
    if evidence.draws_first:
        where = (
            "random numbers are drawn between take() and the next step (an iterator of a DataLoader, get_batch), and a "
            "restored process draws others"
        )
    elif evidence.drawn_before_take:
        where = "random numbers are drawn between optimizer.step() and take(): data is fetched ahead"
    else:
        where = "a restored process draws random numbers that the undisturbed run does not: it makes an iterator again"
    remedy = f"let nothing draw between restore() and the first step; {OWN_DATA}"
    return Cause("random", where, remedy)


def _other_data(evidence: Evidence) -> Cause:
    if evidence.workers:
        return Cause(
            "workers",
            "the step began equal, and its batch differs: loader workers draw by themselves, or the place in the data "
            "is lost", f"a keepstep.Loader restores what workers draw; {OWN_DATA}",
        )  # fmt: skip
    names = _names(evidence.around_start) if evidence.around_start else ""
    hint = f" ({names} differs)" if names else ""
    return Cause(
        "position", f"the step began equal, and its batch differs: the place in the data is not in the state{hint}",
        OWN_DATA,
    )  # fmt: skip


def _outside(changed: tuple[ChangedValue, ...]) -> Cause:
    kinds = [kind for kind in _OUTSIDE if any(_kind(value) == kind for value in changed)]
    kind = kinds[0]
    names = _names(tuple(value for value in changed if _kind(value) == kind))
    remedy = "register it as a persistent buffer, or keep it in a dict of the state"
    return Cause(
        f"{kind} outside", f"{_OUTSIDE[kind]} begins anew: {names}", remedy if kind == BUFFER else "add it to the state"
    )


def _kind(value: ChangedValue) -> str:
    return value.path.partition(" ")[0]


def _names(changed: tuple[ChangedValue, ...]) -> str:
    """The first paths, without their kinds."""
    paths = [value.path.partition(" ")[2] or value.path for value in changed]
    return ", ".join(paths[:MAX_NAMES]) + (f" and {len(paths) - MAX_NAMES} more" if len(paths) > MAX_NAMES else "")


def _without_random(changed: Sequence[ChangedValue]) -> tuple[ChangedValue, ...]:
    return tuple(value for value in changed if not value.path.startswith(RNG))


def _has_random(changed: Sequence[ChangedValue]) -> bool:
    return any(value.path.startswith(RNG) for value in changed)
