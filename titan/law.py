"""Fit a scaling law to runs or to a table: `python -m titan.law RUNS|FILE.csv [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan.config.command import Command, CommandLine
from titan.config.optional import advise_extra
from titan.config.output_files import check_output_files
from titan.scaling.schema import PAGE, Settings

if TYPE_CHECKING:
    from titan.scaling.findings import LawFindings

FORMATS = (".html", ".csv", ".json")


COMMAND = Command(
    "titan.law",
    "Fit loss against parameters and tokens, and predict other sizes and lengths with intervals.",
    {
        "runs/ladder": "all finished runs of a sweep",
        "runs.csv target=1.4B,28B": "any table; predict a size and length",
        "runs.csv holdout=500M": "fit the runs up to a size, and score those above",
        "runs.csv to=[law.html,law.csv,law.json]": "write these files instead, also for other programs",
    },
    Settings,
    notes="Says what rungs do not determine, such as the floor. Writes the same with charts to an HTML page.",
)


def _run_law(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    files = None if settings.to is None else check_output_files(settings.to, FORMATS, settings.sources)
    from titan.report.law_runs import study_sources  # only now: --help and rejected words need not wait for numpy
    from titan.report.render import law_report
    from titan.report.render.document import write_files

    findings = study_sources(settings)
    print(law_report.format_text(findings), end="")
    print(law_report.format_record(), end="")
    if files != ():
        source, words = Path(settings.sources[0]), ["titan.law", *command_line.words]
        page = (source if os.path.isdir(source) else source.parent) / PAGE
        write_files(files, page, partial(_format_file, findings), words, f", or {advise_extra('compare')}")
    return 0


def _format_file(findings: LawFindings, suffix: str, made: str) -> str:
    """Return what runs show in the format of a file's suffix."""
    from titan.report.render import law_report

    if suffix == ".html":
        return law_report.render_page(findings, made)
    return law_report.format_csv(findings) if suffix == ".csv" else law_report.format_json(findings)


main, cli = COMMAND.bind(_run_law)

if __name__ == "__main__":
    cli()
