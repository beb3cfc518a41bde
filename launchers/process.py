"""The process of titan.train: the command, or a rank that torchrun or srun has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from launchers.command import run_command
from launchers.session import Describe
from titan.cluster import rank_info
from titan.cluster.rank_process import exit_now
from titan.config.modules import list_trusted_packages
from titan.console import output
from titan.errors import exit_code
from titan.files.environment import prepare_environment
from titan.run.run import Run


def run_process(argv: Sequence[str] | None, job: Callable[[Run], int], describe: Describe) -> int:
    """Carry out a command line as command or as rank; return the exit code; see `run_command`."""
    prepare_environment(os.environ)
    current_rank = rank_info.from_environment(os.environ)
    if current_rank is None:
        return run_command(argv, job, describe=describe)
    if current_rank.rank > 0:
        from launchers import start

        typed = [argument for argument in (sys.argv[1:] if argv is None else argv) if argument.startswith("modules=")]
        return exit_code(lambda: start.run_worker(current_rank, trusted=list_trusted_packages(typed)))
    return _run_leader(argv, current_rank)


def _run_leader(argv: Sequence[str] | None, current_rank: rank_info.RankInfo) -> int:
    """Compose and run as rank 0 of torchrun or srun; the other ranks wait for it, also when there is nothing to run."""
    from launchers import start

    led_runs: list[Run] = []

    def job(run: Run) -> int:
        led_runs.append(run)
        return start.run_rank0(run, current_rank)

    code = run_command(argv, job, ranks=current_rank.world_size)
    if not led_runs:
        start.dismiss_workers(current_rank, code)
    return code


def run_script(main: Callable[[], int]) -> None:
    """Be the console script; a rank leaves without tidying up."""
    if rank_info.from_environment(os.environ) is None:
        output.run(main)
    output.protect_streams()
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    exit_now(code)
