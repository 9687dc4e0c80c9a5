"""Whether the struck run kept what keepstep promises: decided by a pure function that returns the reasons too."""

from __future__ import annotations

import msgspec

from keepstep.demo.run_record import FAULTS, RunRecord

VERDICT = "final state identical to the uninterrupted run"


class Judgement(msgspec.Struct, frozen=True):
    verdict: str
    differences: list[str]
    """every way in which the struck run is not the undisturbed one, as sentences"""
    leftovers: list[str]
    """processes of either run that were there after its end"""

    @property
    def exit_code(self) -> int:
        return 1 if self.differences or self.leftovers else 0


def judge(calm: RunRecord, struck: RunRecord) -> Judgement:
    differences = find_differences(calm, struck)
    leftovers = [*calm.leftovers, *struck.leftovers]
    verdict = VERDICT
    if differences:
        verdict = "something differs"
    elif leftovers:
        verdict = "something was left behind"
    return Judgement(verdict=verdict, differences=differences, leftovers=leftovers)


def find_differences(calm: RunRecord, struck: RunRecord) -> list[str]:
    return [*compare_losses(calm, struck), *compare_results(calm, struck), *check_outcomes(struck)]


def compare_losses(calm: RunRecord, struck: RunRecord) -> list[str]:
    expected = {step.step: step for step in calm.steps}
    wrong = [step for step in struck.steps if step.loss_hex != expected[step.step].loss_hex]
    missing = sorted(expected.keys() - {step.step for step in struck.steps})
    found = []
    if wrong:
        first, before = wrong[0], expected[wrong[0].step]
        values = f"{before.loss_hex} undisturbed, {first.loss_hex} struck"
        found.append(f"{len(wrong)} losses differ, first at step {first.step}: {values}")
    if missing:
        found.append(f"{len(missing)} steps were never done, first step {missing[0]}")
    return found


def compare_results(calm: RunRecord, struck: RunRecord) -> list[str]:
    found = []
    for rank, (before, after) in enumerate(zip(calm.results, struck.results, strict=True)):
        parts = sorted(name for name, digest in before.parts.items() if after.parts.get(name) != digest)
        if before != after:
            found.append(f"rank {rank} ends with another state: {', '.join(parts) or 'parts'}")
    return found


def check_outcomes(struck: RunRecord) -> list[str]:
    """The same end is worth nothing when the failures did not happen, or training began anew after them."""
    names = {fault.name for fault in FAULTS} - {outcome.fault.name for outcome in struck.outcomes}
    found = [f"{name} was never killed" for name in sorted(names)]
    if struck.unprovoked:
        found.append(f"training restarted {struck.unprovoked} times without the death of a trainer")
    for outcome in struck.outcomes:
        name = outcome.fault.name
        if outcome.resumed_at is None:
            found.append(f"no step followed the death of {name}")
        if outcome.expects_restart and outcome.restored is None:
            found.append(f"nothing was restored after the death of {name}")
        elif outcome.restored is not None and outcome.restored.source != outcome.expected_source:
            found.append(f"{outcome.expected_source} was to be the source after the death of {name}")
        if not outcome.expects_restart and outcome.restarts:
            found.append(f"training restarted after the death of {name}")
    return found
