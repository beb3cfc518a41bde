"""The acceptance suite: run its parts, keep what is done, and write a report that others can read. Free of torch.

A part whose result is there, of the same code and device, is not run again: the same command goes on after it was
interrupted, or after a fault was corrected in one part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan.bench.acceptance.lab import Findings, Lab
from titan.bench.acceptance.parts import PARTS, AcceptancePart
from titan.files.atomic import write_atomic

REPORT, FIGURES = "report.md", "report.json"


@dataclass(frozen=True)
class PartOutcome:
    """What became of a part.

    Attributes:
        name: the part's.
        findings: what it found.
        seconds: how long it took.
        key: of what it is: code and device.
    """

    name: str
    findings: Findings
    seconds: float
    key: str

    @property
    def word(self) -> str:
        """The outcome in a word."""
        findings = self.findings
        return "skipped" if findings.skipped else "fails" if findings.problems else "holds"


def run_parts(lab: Lab, parts: Sequence[AcceptancePart], provenance: Mapping[str, Any]) -> int:
    """Run parts, print a line for each, and write the report after each.

    Args:
        provenance: the machine and the versions; a part is run again when they change.

    Returns:
        0 where all parts hold, else 1.
    """
    lab.folder.mkdir(parents=True, exist_ok=True)
    provenance = {**provenance, "settings": list(lab.overrides)}
    key, outcomes = json.dumps(provenance, sort_keys=True, default=str), list[PartOutcome]()
    for part in parts:
        outcome = _load_outcome(lab.folder, part, key) or _run_part(lab, part, key)
        outcomes.append(outcome)
        print(f"{outcome.word:<8}{part.name:<16}{outcome.seconds:>6.0f} s  {part.question}", flush=True)
        for problem in outcome.findings.problems:
            print(f"        {problem}", flush=True)
        _write_report(lab.folder, provenance, outcomes)
    print(f"report: {lab.folder / REPORT}")
    return int(any(outcome.findings.problems for outcome in outcomes))


def _load_outcome(folder: Path, part: AcceptancePart, key: str) -> PartOutcome | None:
    """Return the outcome of a part that held before; None where it has to run."""
    try:
        content = json.loads((folder / "parts" / f"{part.name}.json").read_text())
        outcome = PartOutcome(**{**content, "findings": Findings(**content["findings"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return outcome if outcome.key == key and not outcome.findings.problems else None


def _run_part(lab: Lab, part: AcceptancePart, key: str) -> PartOutcome:
    """Run a part; an error in it is one of its problems."""
    start = time.monotonic()
    lab.remove_runs(part.name)
    try:
        findings = part.check(lab)
    except Exception as error:
        findings = Findings(problems=[f"{type(error).__name__}: {error}"])
    outcome = PartOutcome(part.name, findings, time.monotonic() - start, key)
    (lab.folder / "parts").mkdir(exist_ok=True)
    write_atomic(lab.folder / "parts" / f"{part.name}.json", json.dumps(asdict(outcome), indent=1))
    return outcome


def _write_report(folder: Path, provenance: Mapping[str, Any], outcomes: Sequence[PartOutcome]) -> None:
    content = {"about": provenance, "parts": {o.name: {"outcome": o.word, **asdict(o.findings)} for o in outcomes}}
    write_atomic(folder / FIGURES, json.dumps(content, indent=1, default=str))
    write_atomic(folder / REPORT, render_report(provenance, outcomes))


def render_report(provenance: Mapping[str, Any], outcomes: Sequence[PartOutcome]) -> str:
    """Return the report as Markdown."""
    questions = {part.name: part.question for part in PARTS}
    problems = [f"- {o.name}: {problem}" for o in outcomes for problem in o.findings.problems]
    lines = ["# Acceptance of a device", "", *(f"- {name}: {value}" for name, value in provenance.items()), ""]
    lines += ["All parts hold." if not problems else "Problems:", *problems, ""]
    lines += ["| part | question | outcome | seconds |", "| --- | --- | --- | --- |"]
    lines += [f"| {o.name} | {questions.get(o.name, '')} | {_format_outcome(o)} | {o.seconds:.0f} |" for o in outcomes]
    for outcome in (o for o in outcomes if o.findings.figures):
        lines += ["", f"## {outcome.name}", "", "| figure | value |", "| --- | --- |"]
        lines += [f"| {name} | {_format_value(value)} |" for name, value in outcome.findings.figures.items()]
    return "\n".join(lines) + "\n"


def _format_outcome(outcome: PartOutcome) -> str:
    return f"{outcome.word}: {outcome.findings.skipped}" if outcome.findings.skipped else outcome.word


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return str(value).replace("|", "\\|")
