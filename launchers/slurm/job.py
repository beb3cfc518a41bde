"""What a Slurm job runs: `python -m launchers.slurm.job LIST ATTEMPT`, as one task per rank, or one task per node.

The batch script (`launchers.slurm.script`) starts it under srun. LIST names the trials of a job array by the index of
their task; ATTEMPT is the folder in which this attempt of the job writes its records (`titan.sweep.job_exit`). A rank
finds its rank info in Slurm's environment, sends its output to its log in the run's directory, and joins the others
through the file ATTEMPT/meet. A node's task starts one rank for each of its devices and forwards Slurm's signals to
them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

from launchers import run_file
from launchers.supervisor import Supervisor, log_line
from titan.cluster import devices, rank_error
from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import exit_now, report_error, run_body
from titan.cluster.signals import handle_signals, preempt_signal, scheduler_signals
from titan.config import frozen_json
from titan.console import output
from titan.errors import EXIT_REQUEUE
from titan.files.environment import divide_cores, prepare_environment, use_loopback
from titan.run.resolve import adapt_to_machine
from titan.run.run import Run
from titan.sweep import job_exit
from titan.training.signals import choose_stop_exit_code

GRACE_SECONDS = 30.0  # how long the other ranks of a node may take to end after one of them has failed
LOCAL_RANK = "TITAN_LOCAL_RANK"  # the variable that a node's task sets for each rank that it starts


class StopBeforeStartError(KeyboardInterrupt):
    """A signal came before training had begun to handle it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.requeue = number == preempt_signal(os.environ)


def main(arguments: list[str]) -> int:
    """Be what Slurm's environment says: a rank, or the task of a node that starts its ranks; returns the exit code."""

    def stop_before_start(number: int, frame: object) -> None:
        raise StopBeforeStartError(number)  # until training handles signals, nothing is lost yet

    with handle_signals(stop_before_start, scheduler_signals(os.environ)):
        file, attempt = Path(arguments[0]), Path(arguments[1])
        trial_list = json.loads(file.read_text())
        trial = trial_list["points"][int(os.environ.get("SLURM_ARRAY_TASK_ID", 0))]
        ranks = int(trial_list["ranks_per_node"])
        if trial_list["tasks"] == "node" and LOCAL_RANK not in os.environ:
            return _run_node(arguments, ranks)
        rank_info = _build_rank_info(os.environ, ranks, attempt)
        cores = os.environ.get("SLURM_CPUS_PER_TASK")
        divide_cores(os.environ, ranks, None if cores is None else int(cores))  # of the node, where Slurm has not
        prepare_environment(os.environ)
        report = partial(report_error, _locate_error_file(attempt, rank_info.rank), rank_info.rank)
        return run_body(partial(_run_training, Path(trial), rank_info, attempt), report)


def _run_training(trial: Path, rank_info: RankInfo, attempt: Path) -> int:
    try:
        run = _load_run(trial, rank_info)
        end = job_exit.read_last_exit(attempt.parent, attempt.name.rpartition(".")[0])
        if rank_info.rank == 0 and end and end.requeue and not end.stopped:  # started again after an error
            log_line(Path(run.directory), end.reason)
        code = _train_rank(run, rank_info, attempt)
        if code not in (EXIT_REQUEUE, 130):
            return code
        # a signal ended this rank: with another code than 0 srun would end the ranks that have not come as far
        _touch_mark(attempt / ("again" if code == EXIT_REQUEUE else "stop"))
        return 0
    except StopBeforeStartError as stop:
        if stop.requeue:  # srun's own exit code may be that of a rank that it ended for this one's
            _touch_mark(attempt / "again")
        return choose_stop_exit_code(stop.requeue)


def _touch_mark(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _build_rank_info(env: Mapping[str, str], ranks: int, attempt: Path) -> RankInfo:
    """Return this rank's info: Slurm's own where a task is a rank, else that of its node and of the rank on it."""
    nodes = int(env.get("SLURM_STEP_NUM_NODES", 1))
    local_rank = int(env.get(LOCAL_RANK, env.get("SLURM_LOCALID", 0)))
    rank = int(env.get("SLURM_NODEID", 0)) * ranks + local_rank
    size = nodes * ranks
    return RankInfo(rank, size, local_rank, f"meet://{attempt}/meet" if size > 1 else "", scheduled=True)


def _load_run(trial: Path, rank_info: RankInfo) -> Run:
    """Return the frozen run, on the machine of this job; from here on this rank writes into its own log."""
    run = run_file.read(trial)
    log = Path(run.directory) / "log" / f"rank-{rank_info.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:  # also for what libraries write
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if rank_info.rank > 0:
        return run
    return adapt_to_machine(run, devices.detect_machine(run.cluster.device))


def _train_rank(run: Run, rank_info: RankInfo, attempt: Path) -> int:
    if int(os.environ.get("SLURM_STEP_NUM_NODES", 1)) == 1:
        use_loopback(os.environ)
    start = import_module("launchers.start")  # only now: numpy, too, reads how many cores it may use
    report = partial(report_error, _locate_error_file(attempt, rank_info.rank), rank_info.rank)
    if rank_info.rank == 0:
        return int(start.run_rank0(run, rank_info, report))
    return int(start.run_worker(rank_info, report, frozen_json.list_packages(run)))


def _locate_error_file(attempt: Path, rank: int) -> Path:
    """Return the file of a rank's error, where the batch script and `titan.sweep.job_exit` read it."""
    return attempt / os.environ.get("SLURM_NODEID", "0") / f"{rank}.error"


def _run_node(arguments: list[str], count: int) -> int:
    """Start the ranks of this node, forward signals to them, and exit with the highest of their exit codes."""
    ranks = Supervisor()
    with handle_signals(lambda number, frame: ranks.send_signal(number), scheduler_signals(os.environ)):
        shared = {name: value for name, value in os.environ.items() if name != "SLURM_CPUS_PER_TASK"}  # the node's
        for local_rank in range(count):
            ranks.start("launchers.slurm.job", *arguments, env={**shared, LOCAL_RANK: str(local_rank)})
        ranks.wait()
        first_rank = int(os.environ.get("SLURM_NODEID", 0)) * count
        for local_rank in ranks.find_failed():
            if (code := ranks.processes[local_rank].returncode) < 0:  # it could not write its error itself
                error = rank_error.describe_kill(-code, first_rank + local_rank)
                print(f"titan: {error.text}", file=sys.stderr)
                rank_error.write(_locate_error_file(Path(arguments[1]), first_rank + local_rank), error)
        ranks.end_processes(GRACE_SECONDS)
    return max(p.returncode if p.returncode >= 0 else 128 - p.returncode for p in ranks.processes)


if __name__ == "__main__":
    output.protect_streams()
    exit_now(main(sys.argv[1:]))
