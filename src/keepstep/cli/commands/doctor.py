"""`keepstep doctor`: check this machine before a run. Each line is ok, a warning or a problem, with what to do.

Exit code 0: no problem (warnings do not count); 3: a problem. The checks are in doctor_checks.py.
"""

from __future__ import annotations

import argparse

import msgspec
from rich.text import Text

from keepstep.cli.doctor_checks import OK, PROBLEM, WARNING, Finding, examine
from keepstep.cli.keepers import add_choice, settings
from keepstep.cli.tables import make_table, open_console
from keepstep.config import Config
from keepstep.errors import ConfigError

SICK = 3
STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


class DoctorReport(msgspec.Struct, frozen=True):
    """`keepstep doctor --json`."""

    ok: bool
    findings: list[Finding]
    schema: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--torch", action="store_true", help="import torch and test its devices too (takes seconds)")
    parser.add_argument("--json", action="store_true", help="the documented JSON")


def run(args: argparse.Namespace) -> int:
    report = _examine(args)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(report)
    return 0 if report.ok else SICK


def _examine(args: argparse.Namespace) -> DoctorReport:
    """All findings. Settings that cannot be read are a finding too; the other checks use the defaults then."""
    findings = []
    try:
        config = settings(args)
    except ConfigError as error:
        findings.append(Finding("settings", PROBLEM, error.message, error.hint))
        config = Config()
    findings += examine(config, torch=args.torch)
    return DoctorReport(ok=all(finding.level != PROBLEM for finding in findings), findings=findings)


def _print(report: DoctorReport) -> None:
    console = open_console()
    table = make_table("", "", "")
    for finding in report.findings:
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.name, _sentence(finding))
    table.show_header = False
    console.print(table)
    console.print("no problem was found" if report.ok else "fix the problems before a run")


def _sentence(finding: Finding) -> Text:
    text = Text(finding.text)
    if finding.todo:
        text.append(f" ({finding.todo})" if finding.level == OK else f"\ntry: {finding.todo}", style="dim")
    return text
