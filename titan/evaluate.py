"""Figures of trained weights: `python -m titan.evaluate MODEL [KEY=VALUE ...] [OVERRIDE ...]`; see `--help`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file, write_output_file
from titan.run import evaluated
from titan.training.evaluation.request import Settings, describe_job, plan_evaluation, read_result
from titan.weights.origin import check_source

COMMAND = Command(
    "titan.evaluate",
    "Measure trained weights: losses of validation sets, and tasks.",
    {
        "runs/first tasks=[hellaswag:hellaswag_val.jsonl]": "its last checkpoint",
        "runs/first step=100 sets=[book.txt] to=book.json": "an earlier one; text of a file",
        "runs/first average=4 parallelism=single": "and the average of four checkpoints",
        "exported/ tasks=[arc:arc.jsonl,lambada:l.jsonl]": "exported weights",
    },
    Settings,
    overrides="Other arguments are overrides of the run's own command line.",
    notes="Nothing is written into the run's directory.",
    uses_torch=True,
    keep_going=False,
)


def run_evaluation(command_line: CommandLine[Settings]) -> int:
    """Measure, print a table, and return the exit code."""
    settings = command_line.settings
    check_source(settings.source)
    file = None if settings.to is None else check_output_file(settings.to, (".json",))
    from launchers.command import compose_single
    from launchers.supervisor import make_scratch_folder, run_job
    from titan.weights.formats import find_damage, open_weights  # only now: errors need not wait for torch

    with make_scratch_folder() as folder:
        job = plan_evaluation(
            settings, command_line.overrides, folder, compose_single, partial(open_weights, verify=True), find_damage
        )
        source = "the weights" if job.attempt.checkpoint is None else f"the checkpoint of step {job.attempt.step}"
        print(f"titan: {source}, {job.run.layout}", file=sys.stderr)
        if code := run_job(job, job.run.layout.devices, Path(job.run.directory), report=command_line.report):
            return code
        figures = read_result(job)
    _print_table(figures)
    if file is not None:
        digests = evaluated.compute_digests(job.run.evaluation)
        write_output_file(
            file, {"from": settings.source, **describe_job(job), evaluated.KEY: digests, "results": figures}
        )
    return 0


def _print_table(figures: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table: a line for each figure, a column for the weights and for each average."""
    names = [key for key in figures["weights"] if not key.endswith(("_low", "_high"))]
    width = max(map(len, names))
    print(f"{'':<{width}}  " + "  ".join(f"{kind:>26}" for kind in figures))
    for name in names:
        cells = "  ".join(f"{_format_cell(column, name):>26}" for column in figures.values())
        print(f"{name.removeprefix('evaluation/'):<{width}}  {cells}")


def _format_cell(column: Mapping[str, float], name: str) -> str:
    """Return a figure with its interval."""
    value = f"{column[name]:.4g}"
    return f"{value} [{column[f'{name}_low']:.4g}, {column[f'{name}_high']:.4g}]" if f"{name}_low" in column else value


main, cli = COMMAND.bind(run_evaluation)

if __name__ == "__main__":
    cli()
