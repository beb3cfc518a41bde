"""The batch script of a job or a job array: submitit writes its head, this module what it runs.

The script runs on the job's first node, outside of any container. It starts the ranks under srun and waits. If they
are done or have failed, it exits likewise. If Slurm asked them to save and end (`titan.errors.EXIT_REQUEUE`), it
requeues the job, at most `cluster.requeues` times, or leaves the rest to the next job of the chain. After an error it
does the same, at most `cluster.restarts` times, and excludes the node that failed. Finally it writes
`JOB.ATTEMPT.end` beside itself.

`PROLOGUE` precedes the ranks. It makes a folder for the output of each node's ranks, since one for all would hold
thousands of files, and an empty file for rank 0's address: a client of a shared folder may cache that it is missing.
An element of an array is named JOB_INDEX, since its own number may be the whole array's. Existing files of
this attempt can only be those of another job that had the same number. The site's own lines may have set the shell to
exit at the first error. `$record` has one line per restart after an error: the step of the last checkpoint at that
time; these restarts do not count as requeues.

`EPILOGUE` follows the ranks: it decides what their exit means, and records that. `$chain` names the file that tells the
rest of a chain of jobs that there is nothing left to do; it is empty where jobs are requeued.

Ranks that ended because they were asked to write a file for that (`launchers.slurm.job`), and exit with 0: srun
would end those that have not come as far. Those that the signal before preemption or SIGTERM killed before they handled
it show 128 and its number (ASKED), or 143. srun has the highest exit code of all ranks: where one failed, the codes of
ranks that were ended for that do not count. A job that was cancelled is no longer running by Slurm's account; one that
is running, and was asked to stop by SIGTERM, is being preempted by a Slurm that is not set up to send the other signal.
Requeueing ends what runs in the job by SIGTERM, also the command that requests it, and what follows it has until
Slurm's KillWait.

After an error other than a ConfigError (exit code 2), a job is started again where `cluster.restarts` allows, but a
second time only when there is a newer checkpoint: else it would fail at the same step again. The node of the rank that
failed first (see `titan.sweep.job_exit.find_error`) is excluded, unless Slurm reports that the other nodes can't take
the job. Slurm lets a job's excluded nodes be changed only while it is pending, so after it was requeued; it then waits
long enough, since the credential of its last attempt has to expire first.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from titan.cluster.checks import parse_minutes
from titan.cluster.schema import Cluster
from titan.cluster.signals import PREEMPT, preempt_signal
from titan.console.numbers import format_plural
from titan.errors import EXIT_REQUEUE, ConfigError
from titan.run.run import Run
from titan.sweep.job_exit import DIED, TERMINATING


@dataclass(frozen=True)
class JobShape:
    """The resources of a job; trials of the same shape are submitted as one array."""

    nodes: int  # how many
    ranks: int  # on each of them
    gpus: int  # on each of them; 0 on CPUs
    cluster: Cluster  # what else is requested
    exclusive: bool = False  # whether the job has its nodes to itself

    @property
    def devices(self) -> int:
        """The number of ranks, which is the number of devices."""
        return self.nodes * self.ranks

    def compute_device_hours(self) -> float | None:
        """Return the device-hours that a trial's jobs may use, by their time limit; None where they have none."""
        limit = parse_minutes(self.cluster.time)
        return None if limit is None else max(1, self.cluster.chain) * self.devices * limit / 60

    def __str__(self) -> str:
        kind = "GPU" if self.gpus else "rank"
        return f"{format_plural(self.nodes, 'node')} x {format_plural(self.ranks, kind)}"


def derive_job_shape(run: Run) -> JobShape:
    """Return the resources of a run's layout: as few nodes as hold it, or `cluster.nodes` where it can be spread."""
    devices, cluster = run.layout.devices, run.cluster
    per_node = cluster.devices_per_node
    max_ranks = int(per_node) if per_node != "auto" else run.machine.count if run.machine.device == "cuda" else devices
    nodes = max(math.ceil(devices / max_ranks), min(cluster.nodes, devices))
    if devices % nodes:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: {devices} ranks ({run.layout}) don't spread evenly over {nodes} nodes; "
            "change a degree, cluster.nodes or cluster.devices_per_node."
        )
    gpus = devices // nodes if run.machine.device == "cuda" else 0
    full = devices // nodes == max_ranks and (gpus > 0 or per_node != "auto")
    exclusive = full if cluster.exclusive == "auto" else bool(cluster.exclusive)
    return JobShape(nodes, devices // nodes, gpus, cluster, exclusive)


@dataclass(frozen=True)
class Submission:
    """What a script runs."""

    folder: Path  # of scripts, exit records and lists: the sweep's `slurm/`
    # the file that names the trials, by their index in the array; one in .runs beside it names their runs' directories
    trial_list: Path
    name: str  # the job's, for people
    token: str  # by which its jobs are found when their numbers were not recorded
    code: Path  # the folder that titan is imported from
    count: int  # trials, each an element of the array; 1 makes no array
    at_once: int | None = None  # elements that may run at the same time; None: all
    dependency: str | None = None  # the jobs that have to end before, as sbatch's `afterany:` takes them; None: none
    bad_nodes: tuple[str, ...] = ()  # nodes that made earlier jobs fail, to exclude beside `cluster.exclude`


PROLOGUE = r"""
set +e +u +o pipefail
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
attempt=$folder/$job.${SLURM_RESTART_COUNT:-0}
record=${chain:-$folder/$job}.restarts
[ -z "$chain" ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && rm -f "$record"
restarted=$(cat "$record" 2>/dev/null | wc -l)
note='' asked='' without=''
end() {
  printf '{"code": %d, "again": %s, "state": "%s", "why": "%s", "note": "%s"}\n' \
    "$code" "$1" "$state" "$2" "$note" > "$attempt.end.tmp"
  mv "$attempt.end.tmp" "$attempt.end"
  rm -f "$attempt/meet"
  find "$attempt" "$attempt.out" -empty -delete 2>/dev/null
}
rm -rf "$attempt" "$attempt".*
[ -n "$chain" ] && [ -e "$chain" ] && exit 0
if [ "${SLURM_RESTART_COUNT:-0}" -gt $((requeues + restarted)) ]; then
  code=AGAIN; state=RUNNING
  end false "started again more often than cluster.requeues=$requeues allows"; exit $code
fi
mkdir -p "$attempt" && (cd "$attempt" && seq 0 $((${SLURM_JOB_NUM_NODES:-1} - 1)) | xargs mkdir -p && : > meet)
trap : TERM
"""
EPILOGUE = r"""
code=$?
state=$(squeue --noheader --array --jobs="$job" --format=%T 2>/dev/null)
case $code in ASKED) code=AGAIN ;; 143) code=130 ;; esac
if [ -e "$attempt/again" ]; then
  code=AGAIN
elif compgen -G "$attempt/*/*.error" >/dev/null || grep -qsE ": (DIED)" "$attempt.out"; then
  case $code in AGAIN | 130) code=1 ;; esac
elif [ -e "$attempt/stop" ]; then
  code=130
fi
saved() {
  run=$(sed -n "$((${SLURM_ARRAY_TASK_ID:-0} + 1))p" "$runs")
  (cd "$run/checkpoints" && ls -d step-*/manifest.json) 2>/dev/null | tr -dc '0-9\n' | sort -n | tail -n 1
}
killed() {
  sed -nE "$1 s/.*error: ([^ :]+): tasks? [^:]*: (DIED).*/\1/p; s/.* failed on node ([^ :]+):.*/\1/p" "$attempt.out"
}
raised() {
  cat "$attempt"/*/*.error | sort -k4,4r -k6,6n |
    sed -nE 's/^\{"lost": '"$1"', "killed": [a-z]+, "time": [0-9.]+, "node": "([^"]+)".*/\1/p'
}
failed_node() {
  { killed '/TERMINATING/q;'; raised false; killed; raised true; } 2>/dev/null | head -n 1
}
avoid() {
  [ -n "$1" ] || return
  others=$(scontrol show job --oneliner "$job" 2>/dev/null | sed -nE 's/.* ExcNodeList=([^( ]+).*/\1/p')
  excluded=${others:+$others,}$1
  case $(sbatch --test-only --exclude="$excluded" "$0" 2>&1) in *"configuration is not available"*) return ;; esac
  without=$1
}
again() {
  end true
  if [ -n "$chain" ]; then
    next=$(squeue --me --noheader --states=PENDING --name="$SLURM_JOB_NAME" --format=%i 2>/dev/null)
  elif (trap '' TERM && exec scontrol requeue "$job"); then
    next=$job
  else
    note=${note:+Slurm rejected requeueing the job}
    end false "${asked:+Slurm rejected requeueing the job}"
    return
  fi
  [ -n "$without" ] || return
  for one in $next; do
    (trap '' TERM
      for pause in 0.2 1 2 3 0; do scontrol update JobId="$one" ExcNodeList="$excluded" && break; sleep $pause; done)
  done
}
if { [ $code = AGAIN ] && [ "${state:-RUNNING}" = RUNNING ]; } || { [ $code = 130 ] && [ "$state" = RUNNING ]; }; then
  asked=yes
  if [ -z "$chain" ] && [ "${SLURM_RESTART_COUNT:-0}" -ge $((requeues + restarted)) ]; then
    end false "asked to save and end, and cluster.requeues=$requeues is used up"
  else
    again
  fi
  exit AGAIN
fi
case $code in 0 | 130 | AGAIN) may=0 ;; *) may=$restarts ;; esac
rejected='^\{"lost": [a-z]+, "killed": [a-z]+, "time": [0-9.]+, "node": "[^"]*", "code": 2,'
grep -qsE "$rejected" "$attempt"/*/*.error && may=0
if [ "$may" -gt 0 ] && [ "${state:-RUNNING}" = RUNNING ]; then
  step=$(saved)
  if [ "$restarted" -ge "$restarts" ]; then
    note="cluster.restarts=$restarts is used up"
  elif [ "$restarted" -gt 0 ] && [ "${step:-0}" -le "$(tail -n 1 "$record")" ]; then
    note="not restarted, since no checkpoint was saved after the last restart"
  else
    avoid "$(failed_node)"
    echo "${step:-0}" >> "$record"
    note="restart $((restarted + 1)) of $restarts${without:+ without $without}"
    again
    exit AGAIN
  fi
fi
[ -n "$chain" ] && : > "$chain"
end false
exit $code
"""


_UNSAFE_CHARACTERS = re.compile(r"[^\w.+-]+")


def build_parameters(shape: JobShape, submission: Submission) -> dict[str, Any]:
    """Return submitit's parameters: the options of sbatch."""
    cluster = shape.cluster
    options: dict[str, Any] = {
        "job_name": f"{_UNSAFE_CHARACTERS.sub('-', submission.name)}-{submission.token}",
        "comment": submission.token,  # replaced where the user sets a comment
        "nodes": shape.nodes,
        "ntasks_per_node": shape.ranks if cluster.tasks == "rank" else 1,
        "cpus_per_task": _count_cores(shape),
        "gpus_per_node": shape.gpus if shape.gpus and cluster.gres is None else None,
        "exclusive": True if shape.exclusive else None,
        "dependency": None if submission.dependency is None else f"afterany:{submission.dependency}",
        **{name: getattr(cluster, name) for name in ("partition", "account", "qos", "constraint", "gres")},
        "exclude": ",".join(filter(None, (cluster.exclude, *submission.bad_nodes))) or None,
    }
    return {
        **{name: value for name, value in options.items() if value is not None},
        "time": parse_minutes(cluster.time),  # None too: submitit would give five minutes, and a name for accounts
        "wckey": None,
        "signal_delay_s": cluster.signal_seconds,
        "stderr_to_stdout": True,
        "use_srun": False,
        "array_parallelism": submission.at_once or submission.count,
        "additional_parameters": _build_extra_options(shape, submission),
    }


def choose_signal(cluster: Cluster) -> Signals:
    """Return the signal by which Slurm asks a job's ranks to save and end."""
    return preempt_signal({**os.environ, **(cluster.environment or {})})


def _count_cores(shape: JobShape) -> int | None:
    """Return the cores of a task; a node's task needs at least one for each of its ranks."""
    cores_per_rank = shape.cluster.cpus_per_rank
    return cores_per_rank if shape.cluster.tasks == "rank" else (cores_per_rank or 1) * shape.ranks


def _build_extra_options(shape: JobShape, submission: Submission) -> dict[str, Any]:
    """Return the options of sbatch that submitit lacks; the user's own come last."""
    cluster = shape.cluster
    options: dict[str, Any] = {"output": f"{submission.folder}/{'%A_%a' if submission.count > 1 else '%j'}.out"}
    options |= {"signal": f"{choose_signal(cluster).name.removeprefix('SIG')}@{cluster.signal_seconds}"}
    options |= {"no-requeue" if cluster.chain else "requeue": True}
    options |= {"reservation": cluster.reservation} if cluster.reservation else {}
    memory_gib = cluster.node_memory_gib or (cluster.rank_memory_gib or 0) * shape.ranks
    if shape.exclusive and cluster.node_memory_gib is None:
        options["mem"] = "0"  # all of each node's
    elif memory_gib:
        options["mem"] = f"{round(memory_gib * 1024)}M"
    return options | dict(cluster.sbatch or {})


def build_script(shape: JobShape, submission: Submission) -> str:
    """Return the whole script."""
    from submitit.slurm.slurm import _make_sbatch_string

    count, command = submission.count if submission.count > 1 else None, build_command(shape, submission)
    parameters = build_parameters(shape, submission)
    return str(_make_sbatch_string(command=command, folder=submission.folder, map_count=count, **parameters))


def build_command(shape: JobShape, submission: Submission) -> str:
    """Return the lines of bash that the script runs."""
    cluster, asked = shape.cluster, str(128 + choose_signal(shape.cluster))
    prologue, epilogue = PROLOGUE.strip(), EPILOGUE.strip()
    values = {"AGAIN": str(EXIT_REQUEUE), "DIED": DIED, "TERMINATING": TERMINATING, "ASKED": asked}
    for name, value in values.items():
        prologue, epilogue = prologue.replace(name, value), epilogue.replace(name, value)
    site_lines = [f"module load {shlex.join(cluster.modules)} || exit 1"] if cluster.modules else []
    site_lines += cluster.setup
    site_lines += [f"export {name}={shlex.quote(value)}" for name, value in (cluster.environment or {}).items()]
    variables, srun = _build_variable_lines(shape, submission), _build_srun_line(shape, submission)
    return "\n".join([*site_lines, *variables, prologue, srun, epilogue])


def _build_variable_lines(shape: JobShape, submission: Submission) -> list[str]:
    chain = f"{submission.trial_list}.over" if shape.cluster.chain else ""
    return [
        f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(submission.code))}${{PYTHONPATH:+:$PYTHONPATH}}:$PWD",
        f"export {PREEMPT}={choose_signal(shape.cluster).name.removeprefix('SIG')}",
        f"folder={shlex.quote(str(submission.folder))}",
        f"runs={shlex.quote(str(submission.trial_list.with_suffix('.runs')))}",
        f"requeues={shape.cluster.requeues}",
        f"restarts={shape.cluster.restarts}",
        f"chain={shlex.quote(chain)}",
    ]


def _build_srun_line(shape: JobShape, submission: Submission) -> str:
    """Return the line that starts the ranks; srun's own messages go into a file of this attempt."""
    cluster, per_task = shape.cluster, _count_cores(shape)
    python = cluster.python or sys.executable
    words = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--unbuffered"]
    words += [f"--cpus-per-task={per_task}"] if per_task else []  # since Slurm 22.05 srun does not take it from sbatch
    inner = [python, "-u", "-m", "launchers.slurm.job", str(submission.trial_list)]
    if cluster.container == "pyxis":
        mounts = [f"--container-mounts={','.join(cluster.mounts)}"] if cluster.mounts else []
        words += [f"--container-image={cluster.image}", *mounts, f"--container-workdir={os.getcwd()}"]
    elif cluster.container == "apptainer":
        binds = [word for mount in cluster.mounts for word in ("--bind", mount)]
        gpus = ["--nv"] if shape.gpus else []
        inner = ["apptainer", "exec", *gpus, "--pwd", os.getcwd(), *binds, str(cluster.image), *inner]
    words += cluster.srun
    return f'{shlex.join(words)} --output="$attempt/%n/%t.out" {shlex.join(inner)} "$attempt" 2>>"$attempt.out"'
