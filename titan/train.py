"""Train a model: `python -m titan.train [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

from collections.abc import Sequence

from launchers.process import run_process, run_script
from launchers.session import TrialPlans
from launchers.trials import Trial
from titan.run.run import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line as command or as rank; return the exit code."""
    return run_process(argv, _launch_run, _describe_plan)


def _launch_run(run: Run) -> int:
    from titan import api  # only now: --help and rejected command lines need not wait for numpy

    return api.launch(run)


def _describe_plan(trials: Sequence[Trial]) -> TrialPlans:
    from titan import plan  # only now: it is needed by a dry run alone

    return plan.describe_trials(trials)


def cli() -> None:
    """The console script `titan-train`."""
    run_script(main)


if __name__ == "__main__":
    cli()
