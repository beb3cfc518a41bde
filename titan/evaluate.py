"""Figures of trained weights: `python -m titan.evaluate from=RUN [SETTING=VALUE ...] [OVERRIDE ...]`; see `--help`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan.cluster.environment import prepare_environment
from titan.config.arguments import describe_settings, parse_arguments, show_help
from titan.console import output
from titan.errors import ConfigError, RunError, exit_code
from titan.files.atomic import write_atomic
from titan.training.evaluation.job import EvaluationJob, read_result
from titan.training.evaluation.request import Settings, describe_job, plan_evaluation, split_words

HELP = f"""\
Figures of trained weights: python -m titan.evaluate from=RUN [SETTING=VALUE ...] [OVERRIDE ...]

  python -m titan.evaluate from=runs/first tasks=[hellaswag:hellaswag_val.jsonl]   its last checkpoint
  python -m titan.evaluate from=runs/first step=100 sets=[book.txt] to=book.json   an earlier one; text of a file
  python -m titan.evaluate from=runs/first average=4 parallelism=single            and the average of four checkpoints
  python -m titan.evaluate from=exported/ tasks=[arc:arc.jsonl,lambada:l.jsonl]    exported weights

{describe_settings(Settings)}

What is no setting is an override of the run's own command line. Nothing is written into the run's directory.

Exit codes: 0 done, 1 failed, 2 wrong settings (the message says how to correct them), 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    prepare_environment(os.environ)
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run_evaluation(words))


def _run_evaluation(words: list[str]) -> int:
    if show_help(words, HELP):
        return 0
    settings_words, overrides = split_words(words)
    settings = parse_arguments(Settings, settings_words)
    _check_paths(settings)
    from launchers.command import compose_single
    from launchers.scratch import make_scratch_folder
    from titan.weights.formats import open_weights  # only now: errors need not wait for torch

    with make_scratch_folder() as folder:
        job = plan_evaluation(settings, overrides, folder, compose_single, open_weights)
        code = _run_job(job)
        if code:
            return code
        figures = read_result(job)
    _print_table(figures)
    if settings.to:
        _write_results(settings, {"from": settings.from_, **describe_job(job), "results": figures})
    return 0


def _check_paths(settings: Settings) -> None:
    path = Path(settings.from_).expanduser()
    if not path.exists() and (path.parent.is_dir() or len(path.parts) != 2):
        raise ConfigError(f"from={settings.from_}: there is no such directory; correct the path.")
    target = Path(settings.to or "x").expanduser()
    if target.is_dir() or not target.parent.is_dir():
        problem = "is a directory" if target.is_dir() else f"there is no directory {target.parent}"
        raise ConfigError(f"to={settings.to}: {problem}; give another file.")


def _run_job(job: EvaluationJob) -> int:
    """Run the ranks, and return their exit code."""
    ranks = job.run.layout.devices
    source = "the weights" if job.attempt.checkpoint is None else f"the checkpoint of step {job.attempt.step}"
    print(f"titan: {source}, {job.run.layout}", file=sys.stderr)
    if ranks == 1:
        from titan.cluster.rank_info import RankInfo
        from titan.training.evaluation.worker import work

        return work(job, RankInfo())
    from launchers.supervisor import run_ranks

    return run_ranks(job, ranks, Path(job.run.directory), module="titan.training.evaluation.rank")


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


def _write_results(settings: Settings, content: Mapping[str, Any]) -> None:
    try:
        write_atomic(Path(str(settings.to)).expanduser(), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"to={settings.to}: can't be written ({error.strerror}).") from error


def cli() -> None:
    """The console script `titan-evaluate`."""
    output.run(main, keep_going=False)


if __name__ == "__main__":
    cli()
