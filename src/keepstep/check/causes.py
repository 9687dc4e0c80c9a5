"""The likely cause of a difference, in a sentence, and what to do about it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.check.command_run import FAILED, LOOPING, STALLED, RunOutcome
from keepstep.check.comparison import REFUSED, RNG, Difference
from keepstep.check.trajectory import RankRun


@dataclass(frozen=True)
class Cause:
    """Why a run is not exact."""

    name: str  # stable, for programs
    text: str
    remedy: str


def cause_of(difference: Difference) -> Cause:
    """The cause of the first difference after a restore."""
    if difference.kind == REFUSED:
        return Cause("refused", f"restore() refused: {difference.text}", "see the sentence")
    random_states = [value for value in difference.changed if value.path.startswith(RNG)]
    if random_states:
        return Cause(
            "random",
            "random numbers were drawn at other moments: data was fetched ahead of take(), a loader worker draws, or "
            "something draws between the start of the program and the first step after restore()",
            "use snapshots.batches(), or keep what is fetched ahead in the state",
        )
    return Cause(
        "outside", f"something outside the state differs; {difference.changed[0].path} is the first to show it",
        "give it to the Snapshotter",
    )  # fmt: skip


def undisturbed_cause(difference: Difference) -> Cause:
    """The cause of a difference that no kill is needed for."""
    return Cause("not deterministic", "two undisturbed runs differ: the program is not deterministic by itself", "seed")


def failure_cause(calm: RunOutcome, reference: list[RankRun]) -> Cause | None:
    """Why an undisturbed run is nothing to compare with."""
    if calm.ending in (FAILED, LOOPING):
        return Cause("failed", f"the command fails undisturbed, with exit code {calm.exit_code}", "repair it first")
    if calm.ending == STALLED:
        return Cause("stalled", "the command makes no step and prints nothing", "--timeout SECONDS")
    if not reference:
        return Cause("no snapshotter", "the command has ended without a keepstep.Snapshotter", "see the README")
    takes = [take for run in reference for take in run.takes]
    if not takes:
        return Cause("no take", "the command has ended without one take()", "call take(step) after optimizer.step()")
    if not any(life.kept for run in reference for life in run.lives):
        reason = next(iter(reference[0].lives[0].skipped.values()), "")
        return Cause("no snapshot", f"no snapshot was complete: {reason}", "see the reason")
    return None
