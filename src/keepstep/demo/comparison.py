"""Compare the struck run with the undisturbed one. Pure; returns the reasons with the verdict."""

from __future__ import annotations

import msgspec

from keepstep.demo.run_record import FAULTS, RunRecord

VERDICT = "final state identical to the uninterrupted run"


class Judgement(msgspec.Struct, frozen=True):
    """The verdict on the demo."""

    verdict: str
    differences: list[str]  # between the struck run and the undisturbed one, as sentences
    leftovers: list[str]  # processes of either run that were alive after its end

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
    differences = []
    if wrong:
        first, before = wrong[0], expected[wrong[0].step]
        values = f"{before.loss_hex} undisturbed, {first.loss_hex} struck"
        differences.append(f"{len(wrong)} losses differ, first at step {first.step}: {values}")
    if missing:
        differences.append(f"{len(missing)} steps were never done, first step {missing[0]}")
    return differences


def compare_results(calm: RunRecord, struck: RunRecord) -> list[str]:
    differences = []
    for rank, (before, after) in enumerate(zip(calm.results, struck.results, strict=True)):
        parts = sorted(name for name, digest in before.parts.items() if after.parts.get(name) != digest)
        if before != after:
            differences.append(f"rank {rank} ends with another state: {', '.join(parts) or 'parts'}")
    return differences


def check_outcomes(struck: RunRecord) -> list[str]:
    """Check that every failure happened, and that training restored its state instead of starting over."""
    names = {fault.name for fault in FAULTS} - {outcome.fault.name for outcome in struck.outcomes}
    differences = [f"{name} was never killed" for name in sorted(names)]
    if struck.unprovoked:
        differences.append(f"training restarted {struck.unprovoked} times without the death of a trainer")
    for outcome in struck.outcomes:
        name = outcome.fault.name
        if outcome.resumed_at is None:
            differences.append(f"no step followed the death of {name}")
        if outcome.expects_restart and outcome.restored is None:
            differences.append(f"nothing was restored after the death of {name}")
        elif outcome.restored is not None and outcome.restored.source != outcome.expected_source:
            differences.append(f"{outcome.expected_source} was to be the source after the death of {name}")
        if not outcome.expects_restart and outcome.restarts:
            differences.append(f"training restarted after the death of {name}")
    return differences
