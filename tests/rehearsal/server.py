"""A process that has imported torch and titan, and forks others that carry out commands.

It is `python -m tests.rehearsal.server`. Importing takes longer than the small runs of a rehearsal. A forked command
goes through its own `__main__`, as `python -m MODULE ARGUMENT...` does, and starts its ranks through titan's
supervisor, which forks them as well. Requests and results are JSON objects, one per line, on standard input and output;
several commands may run at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from titan.files.platform import die_with_parent

MODULES = (
    "titan.train", "titan.generate", "titan.replay", "titan.api", "launchers.start", "launchers.rendezvous",
    "titan.training.worker", "titan.training.rank", "titan.training.replay.worker", "titan.generation.worker",
    "torch.testing._internal.distributed.fake_pg",
)  # fmt: skip
"""Imported before the first fork."""
POLL_SECONDS = 0.02


@dataclass
class Forked:
    """A forked process, as `subprocess.Popen` describes one.

    Attributes:
        pid: its number, and that of its session.
        returncode: its exit code, negative for a signal; None while it runs.
    """

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end, and return the exit code."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork_module(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int | None) -> Forked:
    """Fork a process in a new session that runs a module as `python -m` does.

    Args:
        module: the module's name.
        arguments: those of its command line.
        environment: all of its variables.
        log: the file descriptor for its output; None: this process's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        _run_module(module, arguments, environment, log)
    return Forked(pid)


def _run_module(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int | None) -> NoReturn:
    code: Any = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2) if log is not None else ():
            os.dup2(log or 0, number)
        os.environ.clear()
        os.environ.update(environment)
        import torch

        from tests.rehearsal import imports

        torch.set_num_threads(1)  # makes the pool of threads anew, which autograd's threads would do at the same time
        imports.start_process()
        sys.argv = [module, *arguments]
        sys.modules.pop(module, None)  # imported for the sake of what it imports
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _start_process(
    supervisor: Any, module: str, *arguments: str, env: Mapping[str, str] | None = None, log: IO[bytes] | None = None
) -> Forked:
    """Start a process in place of `launchers.supervisor.Supervisor.start`."""
    environment = dict(os.environ if env is None else env)
    process = fork_module(module, arguments, environment, log.fileno() if log else None)
    supervisor.processes.append(process)
    return process


@dataclass
class Server:
    """Forks commands, and reports their ends.

    Attributes:
        running: each command's process, its request's number, and when it is killed.
        unread: the beginning of a request.
    """

    running: list[tuple[Forked, int, float]] = field(default_factory=list)
    unread: bytes = b""

    def serve(self) -> None:
        """Carry out requests until standard input ends; then kill what still runs."""
        print(json.dumps({"ready": os.getpid()}), flush=True)
        try:
            while self._read_requests():
                self._report_ends()
        finally:
            for process, _, _ in self.running:
                self._kill_command(process)

    def _read_requests(self) -> bool:
        """Start what is asked for; return False at the end of input."""
        if not select.select([0], [], [], POLL_SECONDS)[0]:
            return True
        read = os.read(0, 2**16)
        *lines, self.unread = (self.unread + read).split(b"\n")
        for line in lines:
            self._start_request(json.loads(line))
        return bool(read)

    def _start_request(self, request: Mapping[str, Any]) -> None:
        with Path(request["log"]).open("ab") as log:
            environment = {**os.environ, **request["environment"]}
            process = fork_module(request["module"], request["arguments"], environment, log.fileno())
        self.running.append((process, request["number"], time.monotonic() + request["seconds"]))

    def _report_ends(self) -> None:
        for entry in list(self.running):
            process, number, limit = entry
            if time.monotonic() > limit and process.poll() is None:
                self._kill_command(process)
            if process.poll() is not None:
                self.running.remove(entry)
                print(json.dumps({"number": number, "code": process.returncode}), flush=True)

    @staticmethod
    def _kill_command(process: Forked) -> None:
        """Kill a command; its ranks end with it, as titan's do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """Import, and serve."""
    from tests.rehearsal import imports

    imports.install_finder()
    from titan.files.environment import prepare_environment, use_loopback

    die_with_parent(int(os.environ["REHEARSAL_PARENT"]))
    prepare_environment(os.environ)
    use_loopback(os.environ)
    import torch

    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    from launchers.supervisor import Supervisor

    replaced: Any = Supervisor
    replaced.start = _start_process
    gc.collect()
    gc.freeze()
    Server().serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
