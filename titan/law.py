"""Fit a scaling law to runs or to a table: `python -m titan.law RUNS|FILE.csv [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.optional import advise_extra
from titan.config.output_files import check_output_files
from titan.config.settings import setting
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.scaling.findings import LawFindings

PAGE = "law.html"
FORMATS = (".html", ".csv", ".json")


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.law`."""

    sources: tuple[str, ...] = operand(
        "RUNS", "directories of runs or sweeps, or one CSV file with columns N, D and loss"
    )
    target: str | None = setting(
        None, "parameters and tokens to predict, as in 1.4B,28B; runs there are not fitted, and show the true loss"
    )
    holdout: str | None = setting(None, "runs with more parameters are predicted instead of fitted, as in 500M")
    baseline: str | None = setting(None, "variant that the others are compared with; null: the first")
    embeddings: bool = setting(False, "count embeddings and head as parameters, where both counts are known")
    extrapolate: bool = setting(False, "predict beyond 30 times the compute of the largest rung too, labelled as such")
    replicates: int = setting(1000, "fits to randomised losses, for intervals", at_least=100, cap=100_000)
    seed: int = setting(0, "of random numbers", at_least=0)
    to: str | tuple[str, ...] | None = setting(
        None, f"files to write: .html, .csv or .json; null: {PAGE} beside the runs or the file; []: none"
    )


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
    findings = study_sources(settings)

    from titan.report.render import law_report
    from titan.report.render.document import write_files
    from titan.scaling.fit import LEVEL
    from titan.sweep import predictions

    print(law_report.format_text(findings), end="")
    if (record := predictions.read_record(LEVEL)).scored:
        print(f"\n{record.describe()}")
    if files != ():
        source, words = Path(settings.sources[0]), ["titan.law", *command_line.words]
        page = (source if os.path.isdir(source) else source.parent) / PAGE
        write_files(files, page, partial(_format_file, findings), words, f", or {advise_extra('compare')}")
    return 0


def study_sources(settings: Settings) -> LawFindings:
    """Return what some runs show, for each corpus.

    Raises:
        ConfigError: where a source or a target is no such thing, and where the runs can't determine a law.
    """
    for name in settings.sources:
        if not os.path.exists(name):
            kind = "file" if name.endswith(".csv") else "directory"
            raise ConfigError(f"{name}: there is no such {kind}; correct the path.")
        if not os.path.isdir(name) and len(settings.sources) > 1:
            raise ConfigError(f"{name}: is a file; give one CSV file alone, or directories of runs.")

    from titan.report.law_runs import read_runs  # only now: --help need not wait for numpy
    from titan.scaling.study import Question, Target, study_table
    from titan.scaling.table import read_csv

    target = holdout = None
    if settings.target is not None:
        parts = settings.target.split(",")
        if len(parts) != 2:
            raise ConfigError(f"target={settings.target}: give parameters and tokens, as in target=1.4B,28B.")
        target = Target(*(_parse_count(f"target={settings.target}", part) for part in parts))
    if settings.holdout is not None:
        holdout = _parse_count(f"holdout={settings.holdout}", settings.holdout)
    is_folder = os.path.isdir(settings.sources[0])
    embeddings = settings.embeddings
    table = read_runs(settings.sources, embeddings) if is_folder else read_csv(settings.sources[0], embeddings)
    question = Question(target, holdout, settings.baseline, settings.extrapolate, settings.replicates, settings.seed)
    return study_table(table, question)


def _parse_count(typed: str, text: str) -> float:
    """Return a count, as 1.4B or 1.4e9; `typed` is the whole word, for messages."""
    from titan.scaling.table import LEAST_COUNT, parse_number

    value = parse_number(text.strip())
    if value is None or not value >= LEAST_COUNT:
        raise ConfigError(f"{typed}: is no number of parameters or tokens; write it as 1.4B or 1.4e9.")
    return value


def _format_file(findings: LawFindings, suffix: str, made: str) -> str:
    """Return what runs show in the format of a file's suffix."""
    from titan.report.render import law_report

    if suffix == ".html":
        return law_report.render_page(findings, made)
    return law_report.format_csv(findings) if suffix == ".csv" else law_report.format_json(findings)


main, cli = COMMAND.bind(_run_law)

if __name__ == "__main__":
    cli()
