"""Start processes on this machine, forward signals to them, wait, and end them: the ranks of a run among others.

The supervisor of ranks never imports torch. Each rank is `python -m titan.training.rank FILE` in its own session, so
that a terminal's Ctrl-C reaches only the supervisor: it asks the ranks to stop at the end of their step, and kills them
at the second Ctrl-C. A rank that loses its parent dies with it. Rank 0 writes to the terminal, the others to
`log/rank-N.log`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from titan.cluster import rank_error
from titan.cluster.rank_error import RankError
from titan.cluster.rank_info import RankInfo
from titan.cluster.signals import STOP_MESSAGE, handle_signals, is_repeat
from titan.console import output
from titan.console.text import sanitize_line, sanitize_lines
from titan.debug.verdict import Messages
from titan.errors import ConfigError, ReasonReceiver, ignore_reason
from titan.files.environment import divide_cores, prepare_environment, use_loopback
from titan.files.leases import identify_machine
from titan.files.platform import is_alive

GRACE_SECONDS = 10.0  # how long ranks may take to end after one of them failed
CONSEQUENCE_SECONDS = 0.5  # ranks that fail because another one did, fail about this much later
POLL_SECONDS = 0.02


@dataclass
class Supervisor:
    """Processes that this one starts, forwards signals to, waits for and ends."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)  # in the order in which they were started
    signals: int = 0  # how many requests to stop have come, see `forward_stop`

    def start(
        self, module: str, *arguments: str, env: Mapping[str, str] | None = None, log: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `python -m module arguments` in its own session; its output goes to `log`, or where this one's goes."""
        command = [sys.executable, "-u", "-m", module, *arguments]
        process = subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
        )
        self.processes.append(process)
        return process

    def find_failed(self) -> list[int]:
        """Return the indices of processes that have ended with another exit code than 0."""
        return [index for index, process in enumerate(self.processes) if process.poll() not in (None, 0)]

    def has_running(self) -> bool:
        """Return whether any process still runs."""
        return any(process.poll() is None for process in self.processes)

    def send_signal(self, number: int) -> None:
        """Send a signal to every process that still runs; SIGKILL also to what these have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended: macOS denies it then
                if process.poll() is None:
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until all processes have ended, one has failed, or a second request to stop has come.

        Args:
            meanwhile: called at every look at the processes.
        """
        while self.has_running() and not self.find_failed() and self.signals < 2:
            meanwhile()
            time.sleep(POLL_SECONDS)

    def end_processes(self, grace: float) -> None:
        """Let the processes end by themselves for `grace` seconds, then kill those that are left."""
        deadline = time.monotonic() + grace
        while self.has_running() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    @contextmanager
    def forward_stop(self, announces: Callable[[], bool]) -> Iterator[None]:
        """Forward each request to stop as SIGTERM while the block runs, and count them.

        Args:
            announces: whether to print at the first one that the processes stop; else they do so themselves.
        """

        def forward(number: int, frame: object) -> None:
            if is_repeat(number, self.signals):
                return
            self.signals += 1
            if self.signals == 1 and announces():
                output.write_stderr(STOP_MESSAGE)
            self.send_signal(signal.SIGTERM)

        with handle_signals(forward):
            yield


def run_ranks(
    payload: Any,
    size: int,
    directory: Path,
    module: str = "titan.training.rank",
    report: ReasonReceiver = ignore_reason,
) -> int:
    """Run `module` as ranks 0 to size - 1 of this machine and wait for them.

    Args:
        payload: what each rank is given; must be picklable.
        directory: the run's directory; the ranks' output goes to `log/` in it.
        module: its `__main__` is called with the file that holds payload and rank info.
        report: called with the error of the rank that failed first, in one line.

    Returns:
        0 when all ranks ended well, 2 after a ConfigError, 130 when a signal ended them, else 1; the error of the rank
        that failed first is printed once on stderr.
    """
    ranks = Supervisor()
    with make_scratch_folder() as folder, ranks.forward_stop(lambda: size > 1 or output.is_redirected()):
        messages = Messages(directory)
        try:
            _start_ranks(ranks, folder, payload, size, directory, module)
            return _wait_for_ranks(ranks, folder, directory, messages, report)
        finally:
            ranks.end_processes(0)


def run_job(
    job: Any, size: int, directory: Path, module: str = "titan.training.rank", report: ReasonReceiver = ignore_reason
) -> int:
    """Run a command's job on ranks as `run_ranks` does, a single one in this process; return the exit code.

    Args:
        job: names in `worker` the module whose `work` takes it and the rank's info.
    """
    if size == 1:
        return int(import_module(job.worker).work(job, RankInfo()))
    return run_ranks(job, size, directory, module, report)


def _start_ranks(ranks: Supervisor, folder: Path, payload: Any, size: int, directory: Path, module: str) -> None:
    (directory / "log").mkdir(parents=True, exist_ok=True)
    for rank in range(size):
        rank_info = RankInfo(rank, size, rank, f"file://{folder}/rendezvous" if size > 1 else "", supervised=True)
        file = folder / f"{rank}.pickle"
        file.write_bytes(pickle.dumps((payload, rank_info, os.getpid(), str(folder / f"{rank}.error"))))
        with (directory / "log" / f"rank-{rank}.log").open("ab") as log:
            ranks.start(module, str(file), env=_build_environment(size), log=None if rank == 0 else log)


def _build_environment(size: int) -> dict[str, str]:
    """Return the ranks' environment: with this process's own titan on the path, and the cores divided."""
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    prepare_environment(env)
    divide_cores(env, size)
    if size > 1:
        use_loopback(env)
    return env


def log_line(directory: Path, line: str) -> None:
    """Print a line on stderr, and append it with the time to the run's `log/launcher.log`."""
    line = sanitize_lines(line)
    print(f"titan: {line}", file=sys.stderr)
    with contextlib.suppress(OSError), (directory / "log" / "launcher.log").open("a") as log:
        log.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n")


def _wait_for_ranks(
    ranks: Supervisor, folder: Path, directory: Path, messages: Messages, report: ReasonReceiver
) -> int:
    """Wait for the ranks, show what they say about a hang, and report the error of one that failed; returns the exit
    code."""
    ranks.wait(lambda: _show_messages(directory, messages))
    if ranks.signals >= 2:
        ranks.send_signal(signal.SIGKILL)
        return 130
    if not ranks.find_failed():
        return 0
    first_failed = ranks.find_failed()[0]
    time.sleep(CONSEQUENCE_SECONDS)
    codes = [process.poll() for process in ranks.processes]
    if ranks.signals and -signal.SIGTERM in codes:  # ours, and it came before that rank could handle it
        return 130
    ranks.end_processes(GRACE_SECONDS if all(code in (None, 130) for code in codes) else 0)
    error = _find_error(folder, codes, first_failed)
    if error is None:  # it was stopped
        return codes[first_failed] or 1
    log_line(directory, error.format_report())
    report(error.summarize())
    return error.code


def _show_messages(directory: Path, messages: Messages) -> None:
    for line in messages.read_new():
        log_line(directory, line)


def _find_error(folder: Path, codes: list[int | None], first_failed: int) -> RankError | None:
    """Return the error that caused the others; None where a signal or a closed output stopped a rank."""
    if killed_ranks := [rank for rank, code in enumerate(codes) if code is not None and code < 0]:
        return rank_error.describe_kill(-(codes[killed_ranks[0]] or 0), killed_ranks[0])
    cause = rank_error.find_first_cause(map(rank_error.read, folder.glob("*.error")))
    code = codes[first_failed]
    if cause is not None or code in (130, output.SIGPIPE_CODE):
        return cause
    text = f"rank {first_failed} exited with code {code} without reporting an error"
    return RankError(rank=first_failed, text=text, plain=True)


SCRATCH_PREFIX = "titan-scratch-"


@contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """Make a folder, named after this machine and process, that is removed when the block ends."""
    remove_old_folders(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH_PREFIX}{identify_machine()}-{os.getpid()}-") as folder:
        yield Path(folder)


def remove_old_folders(parent: Path) -> None:
    """Remove this user's folders of processes that were on this machine and have ended."""
    for folder in parent.glob(f"{SCRATCH_PREFIX}{identify_machine()}-*-*"):
        pid = folder.name.removeprefix(f"{SCRATCH_PREFIX}{identify_machine()}-").partition("-")[0]
        with suppress(OSError):  # removed meanwhile
            status = folder.lstat()
            is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own_folder and pid.isdecimal() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


SHOWN_LINES = 5  # of what a failed command printed last
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would have the other interpreter import this environment's packages."""


def check_interpreter(python: str) -> str:
    """Return the path of an interpreter."""
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(f"python={python}: is no program here; give the interpreter of an environment with titan.")
    return found


def run_module(python: str, module: str, words: Sequence[str]) -> int:
    """Run a module, and return its exit code; after a failure the last lines that it printed are shown.

    The interpreter imports nothing of the working directory (`PYTHONSAFEPATH`), which may be a checkout of this titan.
    """
    env = {key: value for key, value in os.environ.items() if key not in OWN_VARIABLES} | {"PYTHONSAFEPATH": "1"}
    command = [check_interpreter(python), "-m", module, *words]
    result = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    for line in (result.stderr.splitlines() or ["(it printed nothing)"])[-SHOWN_LINES:] if result.returncode else ():
        print(f"titan: python={sanitize_line(python)}: {sanitize_line(line)}", file=sys.stderr)
    return result.returncode
