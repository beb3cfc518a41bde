"""What a Slurm job runs: `python -m launchers.slurm.job LIST ATTEMPT`, as one task a rank, or one task a node.

The batch script (`launchers.slurm.script`) starts it under srun. LIST names the points that a job array has, by the
index of its task; ATTEMPT is where this attempt of the job leaves its words (`titan.sweep.job_exit`). A rank finds its
place in Slurm's environment, sends its output to its own log in the run's directory, and joins the others through the
file ATTEMPT/meet. A node's program starts a rank for each of its devices and hands Slurm's signals on to them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from launchers import frozen
from launchers.supervisor import Ranks, log_line
from titan.cluster import devices
from titan.cluster.environment import before_torch
from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import leave
from titan.cluster.signals import preempt_signal, stopping
from titan.console import output
from titan.console.text import safe_lines
from titan.errors import EXIT_REQUEUE, ConfigError, RunError, machine_error
from titan.run.resolve import moved
from titan.run.run import Run
from titan.sweep import job_exit
from titan.training.signals import exit_code_of_stop

GRACE_SECONDS = 30.0
"""How long the other ranks of a node may take to end after one of them has ended badly."""


class StopBeforeStart(KeyboardInterrupt):
    """A signal came before training had begun to listen for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.again = number == preempt_signal(os.environ)


def main(arguments: list[str]) -> int:
    """Be what Slurm's environment says: a rank, or the program of a node that starts its ranks; gives its exit code."""
    _listen()
    file, attempt = Path(arguments[0]), Path(arguments[1])
    listed = json.loads(file.read_text())
    point = listed["points"][int(os.environ.get("SLURM_ARRAY_TASK_ID", 0))]
    ranks = int(listed["ranks_per_node"])
    if listed["tasks"] == "node" and "TITAN_LOCAL_RANK" not in os.environ:
        return _node(arguments, ranks)
    rank_info = _place(os.environ, ranks, attempt)
    _share_cores(ranks)
    before_torch(os.environ)
    try:
        run = _run(Path(point), rank_info)
        _tell_of_restart(run, rank_info, attempt)
        return _said(attempt, _train(run, rank_info))
    except StopBeforeStart as told:
        if told.again:  # srun's own exit code may be that of a rank that it ended for this one's
            _mark(attempt / "again")
        return exit_code_of_stop(told.again)
    except ConfigError as refusal:
        return _write_error(attempt, rank_info.rank, str(refusal), 2)
    except RunError as failure:
        return _write_error(attempt, rank_info.rank, str(failure), 1)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _write_error(attempt, rank_info.rank, machine_error(error) or safe_lines(traceback.format_exc()), 1)


def _said(attempt: Path, exit_code: int) -> int:
    """Leave word that this rank was told to end, and end well: srun would end the ranks that are not as far."""
    if exit_code not in (EXIT_REQUEUE, 130):
        return exit_code
    _mark(attempt / ("again" if exit_code == EXIT_REQUEUE else "stop"))
    return 0


def _mark(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _listen() -> None:
    """Until training listens itself, a signal ends this process: nothing is lost yet."""

    def hear(number: int, frame: object) -> None:
        raise StopBeforeStart(number)

    for number in (preempt_signal(os.environ), *stopping()):
        signal.signal(number, hear)


def _share_cores(ranks: int) -> None:
    """Give each rank of a node its share of the cores, where Slurm has not; before torch is loaded."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK") or len(os.sched_getaffinity(0)) // ranks
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cores))))


def _place(env: Mapping[str, str], ranks: int, attempt: Path) -> RankInfo:
    """This rank's place: Slurm's own where a task is a rank, else that of its node and of the rank on it."""
    nodes = int(env.get("SLURM_STEP_NUM_NODES", 1))
    local = int(env.get("TITAN_LOCAL_RANK", env.get("SLURM_LOCALID", 0)))
    rank = int(env.get("SLURM_NODEID", 0)) * ranks + local
    size = nodes * ranks
    return RankInfo(rank, size, local, f"meet://{attempt}/meet" if size > 1 else "", scheduled=True)


def _run(point: Path, rank_info: RankInfo) -> Run:
    """The frozen run, on the machine that the job has got; from here on this rank writes into its own log."""
    run = frozen.read(point)
    log = Path(run.directory) / "log" / f"rank-{rank_info.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    _write_to(log)
    if rank_info.rank > 0:
        return run
    return moved(run, devices.detect(run.cluster.device))


def _tell_of_restart(run: Run, rank_info: RankInfo, attempt: Path) -> None:
    """Say in the run's `log/launcher.log` why this job was started again after a failure."""
    end = job_exit.last_exit(attempt.parent, attempt.name.rpartition(".")[0]) if rank_info.rank == 0 else None
    if end and end.again and not end.stopped:
        log_line(Path(run.directory), end.reason)


def _write_to(log: Path) -> None:
    """Send this process's output, also what libraries write, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _train(run: Run, rank_info: RankInfo) -> int:
    from launchers import start

    if int(os.environ.get("SLURM_STEP_NUM_NODES", 1)) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves to nothing would stop gloo
    return start.run_rank0(run, rank_info) if rank_info.rank == 0 else start.run_worker(rank_info)


def _write_error(attempt: Path, rank: int, text: str, exit_code: int, killed: bool = False) -> int:
    """Leave a rank's error where `titan.sweep.job_exit` looks for it, and in its log."""
    print(f"titan: {text}", file=sys.stderr)
    file = attempt / os.environ.get("SLURM_NODEID", "0") / f"{rank}.error"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{file}.tmp")
    # in the order in which the batch script reads them
    content: dict[str, Any] = {"lost": bool(job_exit.LOST.search(text)), "killed": killed, "time": time.time()}
    content |= {"node": os.environ.get("SLURMD_NODENAME", ""), "code": exit_code, "rank": rank, "text": text}
    temporary.write_text(json.dumps(content))
    temporary.rename(file)
    return exit_code


def _node(arguments: list[str], count: int) -> int:
    """Start the ranks of this node, hand signals on to them, and end with the highest of their exit codes."""
    ranks = Ranks(Path(arguments[1]).parent)

    def hand_on(number: int, frame: object) -> None:
        ranks.send(number)

    for number in (preempt_signal(os.environ), *stopping()):
        signal.signal(number, hand_on)
    shared = {name: value for name, value in os.environ.items() if name != "SLURM_CPUS_PER_TASK"}  # the node's
    for local in range(count):
        env = {**shared, "TITAN_LOCAL_RANK": str(local)}
        command = [sys.executable, "-u", "-m", "launchers.slurm.job", *arguments]
        ranks.processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
    while ranks.alive() and not ranks.failed():
        time.sleep(0.05)
    first = int(os.environ.get("SLURM_NODEID", 0)) * count
    for local in ranks.failed():
        _tell_of_signal(Path(arguments[1]), first + local, ranks.processes[local].returncode)
    ranks.end(GRACE_SECONDS)
    return max(p.returncode if p.returncode >= 0 else 128 - p.returncode for p in ranks.processes)


def _tell_of_signal(attempt: Path, rank: int, returned: int) -> None:
    """Leave word of a rank that a signal has killed, and that could not do so itself."""
    if returned < 0:
        name = signal.Signals(-returned).name
        _write_error(
            attempt, rank, f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}", 1, killed=True
        )


def run(arguments: list[str]) -> NoReturn:
    """Carry out `main` and end."""
    output.best_effort()
    leave(main(arguments))


if __name__ == "__main__":
    run(sys.argv[1:])
