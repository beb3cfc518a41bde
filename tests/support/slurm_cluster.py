"""A real Slurm of several nodes on one machine, for tests.

One slurmctld, one munged and a slurmd for each node run as the calling user; everything that they write is in one
folder. Whatever runs in this Slurm has SLURM_CONF in its environment, or descends from something that has: that is how
all of it is found and killed, also when the process that started it was killed: a process that is started along with
the daemons waits for that. Made for Slurm 22.05 from Debian's packages; needs Linux.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.processes import ROOT, kill_process, list_descendants

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
"""Where daemons are looked for: a user's PATH often leaves the latter out."""
CPUS, GPUS, MEMORY_MB = 8, 8, 16000  # what each node says that it has
START_SECONDS = 120.0
LONGEST = 107 - len("/1/node4/node4_12345678.4294967291")
"""Characters in a folder's path: the socket of a step lies that deep in it."""
ATTEMPTS = 3  # starts before giving up: someone may take a port between our asking for it and the daemon's binding it

CONFIGURATION = """\
ClusterName=titan
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
# A munged of its own. A job that is requeued waits until its credential has expired: two minutes by default.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
# Nodes have what is written here, whatever the machine has; and no cgroups.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# No job id twice on a machine: what is left in a folder of an earlier cluster is never taken for this one's.
FirstJobId={first_job}
# Jobs start at once, and stay known after their end.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
MinJobAge=86400
# A job with --signal hears of its preemption, too, and may be started again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
# Jobs on a busy machine have the time to save, and nodes to answer; a node is taken back as soon as it is there again.
KillWait=60
SlurmdTimeout=300
ReturnToService=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets=1 CoresPerSocket={cpus} CPUs={cpus} "
    "ThreadsPerCore=1 RealMemory={memory} Gres=gpu:{gpus}\n"
)


class SlurmError(Exception):
    """Slurm did not start, or one of its commands failed; the message holds what it said."""


def list_missing() -> list[str]:
    """The programs that are needed and not installed."""
    return [name for name in (*DAEMONS, *CLIENTS) if shutil.which(name, path=SEARCH) is None]


class Slurm:
    """A running cluster; made by `start`.

    Attributes:
        folder: all that it writes.
        nodes: the nodes' names.
        env: what has to be in the environment of a client: SLURM_CONF and PATH.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.conf = folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf), "PATH": SEARCH}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def start(cls, folder: Path, nodes: int = 4) -> Slurm:
        """Start a cluster and wait until its nodes are idle, about two seconds.

        Args:
            folder: an existing folder for it alone; should this process be killed, it is taken away.
            nodes: how many nodes, node1 to nodeN.

        Raises:
            SlurmError: with the end of the daemons' logs.
            ValueError: for a folder whose path is too long for the sockets in it.
        """
        if len(str(folder)) > LONGEST:
            raise ValueError(f"{folder}: more than {LONGEST} characters; choose another folder")
        for attempt in range(1, ATTEMPTS):
            with contextlib.suppress(SlurmError):
                return cls(folder / str(attempt), nodes)._start_or_stop()
        return cls(folder / str(ATTEMPTS), nodes)._start_or_stop()

    def run(self, *argv: str, seconds: float = 300) -> str:
        """What a client command writes to stdout, such as `run("sbatch", "--wrap", "hostname")`.

        Raises:
            SlurmError: when it fails, with what it said.
            subprocess.TimeoutExpired: after `seconds`.
        """
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        result = subprocess.run(argv, env={**outer, **self.env}, capture_output=True, text=True, timeout=seconds)
        if result.returncode:
            raise SlurmError(f"{' '.join(argv)}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
        return result.stdout

    def read_jobs(self) -> dict[str, str]:
        """The state of every job that there was, such as PENDING, by its id; elements of arrays as `12_3`."""
        lines = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def read_states(self) -> dict[str, str]:
        """The state of every node, such as idle or down*, by its name."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd and all that runs on it by SIGKILL, as when its power fails; Slurm is notified."""
        _kill_all(lambda: find_processes(self.conf, f"SLURMD_NODENAME={name}"))
        self.daemons.pop(name).wait()
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=killed")

    def revive_node(self, name: str) -> None:
        """Start a killed node again and wait until jobs can run on it."""
        self._start_slurmd(name)
        self._wait_until(lambda: self.read_states()[name] in ("idle", "mix", "alloc"), f"{name} does not come back")

    def clear(self) -> None:
        """End all jobs and bring all nodes back, for the next test."""
        for name in set(self.nodes) - set(self.daemons):
            self._start_slurmd(name)
        self._wait_until(lambda: self._cancel_jobs() and self._is_idle(), "jobs or nodes are left over")

    def stop(self) -> None:
        """Kill the cluster and all that runs in it; what it wrote stays."""
        _kill_all(lambda: find_processes(self.conf))
        if "watch" in self.daemons:
            self.daemons["watch"].kill()
        for daemon in self.daemons.values():
            daemon.wait()
        self.daemons.clear()

    def _start_or_stop(self) -> Slurm:
        try:
            self._write_files()
            self._start_daemons()
        except BaseException:
            self.stop()
            raise
        return self

    def _start_daemons(self) -> None:
        munge = self.folder / "munge"
        self._start_daemon("watch", sys.executable, "-m", __spec__.name, str(os.getpid()), str(self.conf))
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._start_daemon("munged", "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        self._wait_until((munge / "socket").is_socket, "munged gives no socket")
        self._start_daemon("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.conf))
        for name in self.nodes:
            self._start_slurmd(name)
        self._wait_until(self._is_idle, "nodes are not idle")

    def _start_slurmd(self, name: str) -> None:
        self._start_daemon(name, "slurmd", "-D", "-N", name, "-f", str(self.conf), SLURMD_NODENAME=name)

    def _start_daemon(self, name: str, program: str, *argv: str, **env: str) -> None:
        """Start a program, which is found by its environment later; the one that watches must not be."""
        mark = {} if name == "watch" else self.env | env
        outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        path = shutil.which(program, path=SEARCH) or program
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                [path, *argv], env=outer | mark, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def _cancel_jobs(self) -> bool:
        """Whether no job is left; else those that are there are told to end at once."""
        jobs = set(self.run("squeue", "--noheader", "--format=%A").split())
        for options in (["--full", "--signal=KILL"], []) if jobs else ():
            with contextlib.suppress(SlurmError):  # one has ended meanwhile, or does not run yet
                self.run("scancel", *options, *jobs)
        return not jobs

    def _is_idle(self) -> bool:
        with contextlib.suppress(SlurmError):  # slurmctld does not answer yet
            return list(self.read_states().values()) == ["idle"] * len(self.nodes)
        return False

    def _wait_until(self, is_true: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_true():
            dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = [f"{file.name}: {file.read_text()[-1000:]}" for file in sorted(self.folder.glob("*.out"))]
                raise SlurmError("\n".join([f"{problem}; ended: {dead or 'none'}", *logs]))
            time.sleep(0.05)

    def _write_files(self) -> None:
        """Make all folders and files that the daemons need."""
        for name in ("state", "munge", *self.nodes):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge" / "key").write_bytes(os.urandom(128))
        (self.folder / "munge" / "key").chmod(0o600)
        (self.folder / "gres.conf").write_text(_make_gres(self.folder))
        _name_in_hosts(self.nodes)
        first, *ports = _find_free_ports(len(self.nodes) + 1)
        host = socket.gethostname().split(".")[0]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        job = random.SystemRandom().randrange(1000, 60_000_000)
        text = CONFIGURATION.format(host=host, port=first, user=user, folder=self.folder, first_job=job)
        for name, port in zip(self.nodes, ports, strict=True):
            text += NODE.format(name=name, host=host, port=port, cpus=CPUS, memory=MEMORY_MB, gpus=GPUS)
        self.conf.write_text(text)


def _make_gres(folder: Path) -> str:
    """Simulated GPUs: character devices, of which slurmd looks at no more than their kind.

    Who may not make such uses terminals; without those too, CUDA_VISIBLE_DEVICES is not set in jobs.
    """
    devices = [folder / f"gpu{number}" for number in range(GPUS)]
    with contextlib.suppress(OSError):
        for path in devices:
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
    for files, name in ((devices, folder / "gpu"), ([Path(f"/dev/tty{n}") for n in range(GPUS)], "/dev/tty")):
        if all(file.is_char_device() for file in files):
            return f"Name=gpu File={name}[0-{GPUS - 1}]\n"
    return f"Name=gpu Count={GPUS}\n"


def _name_in_hosts(nodes: Sequence[str]) -> None:
    """Let the nodes' names mean this machine, where that is ours to say: ranks look for the first of them."""
    hosts = Path("/etc/hosts")
    words = hosts.read_text().split() if hosts.exists() else []
    with contextlib.suppress(OSError), hosts.open("a") as file:
        file.write("".join(f"127.0.0.1 {name}\n" for name in nodes if name not in words))


def _find_free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def find_processes(conf: Path, *marks: str) -> list[int]:
    """Processes with SLURM_CONF=`conf` and all `marks` in their environment, and all that descend from them."""
    variables = {f"SLURM_CONF={conf}".encode(), *(mark.encode() for mark in marks)}
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variables <= set((entry / "environ").read_bytes().split(b"\0")):
                pids.append(int(entry.name))
    return sorted({*pids, *list_descendants(*pids)} - {os.getpid()})


def _kill_all(list_pids: Callable[[], list[int]]) -> None:
    """Kill until nothing is left, so also what is being started.

    All are stopped before the first dies: a parent that outlives its child by a moment reports its end to Slurm.
    """
    deadline = time.monotonic() + START_SECONDS
    while pids := list_pids():
        for sent in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                kill_process(pid, sent)
        if time.monotonic() > deadline:
            raise SlurmError(f"processes {pids} do not die")
        time.sleep(0.02)


def _watch_parent(parent: int, conf: Path) -> None:
    """Wait until the process that started this one has ended, then kill and remove what it left of the cluster."""
    while os.getppid() == parent:
        time.sleep(0.2)
    _kill_all(lambda: find_processes(conf))
    shutil.rmtree(conf.parent.parent)


if __name__ == "__main__":
    _watch_parent(int(sys.argv[1]), Path(sys.argv[2]))
