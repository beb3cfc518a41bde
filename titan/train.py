"""Train a model: `python -m titan.train [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launchers.command import command
from launchers.trials import Trial
from titan.cluster import rank_info
from titan.cluster.environment import prepare_environment
from titan.cluster.rank_process import exit_now
from titan.console import output
from titan.errors import exit_code
from titan.run.run import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line as command or as rank; return the exit code."""
    prepare_environment(os.environ)
    mine = rank_info.from_environment(os.environ)
    if mine is None:
        return command(argv, _train, describe=_plan)
    if mine.rank > 0:
        from launchers import start

        return exit_code(lambda: start.run_worker(mine))
    return _lead(argv, mine)


def _train(run: Run) -> int:
    from titan import api  # only now: --help and rejected command lines need not wait for numpy

    return api.launch(run)


def _plan(trials: Sequence[Trial]) -> str:
    from titan import plan  # only now: it is needed by a dry run alone

    return plan.describe_trials(trials)


def _lead(argv: Sequence[str] | None, mine: rank_info.RankInfo) -> int:
    """Compose and run as rank 0 of torchrun or srun; the other ranks wait for it, also when there is nothing to run."""
    from launchers import start

    led: list[Run] = []

    def job(run: Run) -> int:
        led.append(run)
        return start.run_rank0(run, mine)

    code = command(argv, job, ranks=mine.world_size)
    if not led:
        start.dismiss(mine, code)
    return code


def cli() -> None:
    """The console script `titan-train`."""
    if rank_info.from_environment(os.environ) is None:
        output.run(main)
    output.best_effort()
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    exit_now(code)


if __name__ == "__main__":
    cli()
