"""What the operating system offers, and the other ways of a Mac."""

from __future__ import annotations

import fcntl
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from launchers.supervisor import Supervisor
from tests.support.processes import wait_until
from titan.cluster.compiler import find_missing_compiler
from titan.cluster.devices import detect_machine
from titan.cluster.gpus import Probe
from titan.cluster.heap import keep_freed_memory, read_resident_bytes, release_freed_memory
from titan.debug import states
from titan.files import leases, platform
from titan.files.environment import divide_cores, use_loopback

NOWHERE = Path("/nowhere")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A system without what a Mac has not."""
    monkeypatch.setattr(platform, "PROC", NOWHERE)
    monkeypatch.setattr(platform, "MEMORY", NOWHERE)
    monkeypatch.setattr(platform, "IS_MAC", True)
    monkeypatch.setattr(platform, "find_c_function", lambda name: None)
    for name in ("sched_getaffinity", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    return monkeypatch


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_constants_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(signal, "SIGRTMIN", raising=False)
    answers = SimpleNamespace(**runpy.run_path(str(platform.__file__)))
    assert (answers.IS_MAC, answers.LOOPBACK, answers.CXX, answers.START_METHOD) == (True, "lo0", "clang++", "spawn")
    assert signal.SIGURG == answers.STACKS_SIGNAL


@pytest.mark.parametrize("proc", [platform.PROC, NOWHERE], ids=["proc", "ps"])
def test_states_of_processes(proc: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "PROC", proc)
    read, pid = platform.read_process_state, child.pid
    wait_until(lambda: read(pid) == "S", "a process that sleeps")
    assert platform.is_alive(pid)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: read(pid) == "T", "a process that is stopped")
    assert platform.is_alive(pid)
    child.kill()
    wait_until(lambda: read(pid) == "Z", "a zombie")
    assert not platform.is_alive(pid)
    child.wait()
    assert read(pid) == ""
    assert not platform.is_alive(pid)
    assert not platform.is_alive(2**70)


@pytest.mark.parametrize(("is_mac", "size"), [(True, 1000), (False, 1024000)], ids=["bytes", "kib"])
def test_peak_memory_without_proc(is_mac: bool, size: int, mac: pytest.MonkeyPatch) -> None:
    mac.setattr(platform, "IS_MAC", is_mac)
    mac.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1000))
    assert platform.read_peak_resident_bytes() == size


def test_a_process_ends_with_its_parent_without_prctl(mac: pytest.MonkeyPatch) -> None:
    ended, parents, codes = Event(), iter([7, 7, 1]), list[int]()
    mac.setattr(platform, "WATCH_SECONDS", 0.0)
    mac.setattr(os, "getppid", lambda: next(parents))
    mac.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    platform.die_with_parent(7)
    assert ended.wait(60)
    assert codes == [1]


def test_nothing_needs_what_a_mac_has_not(mac: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mac.setattr(platform, "LOOPBACK", "lo0")
    mac.setattr(tempfile, "tempdir", str(tmp_path))
    leases.identify_machine.cache_clear()
    env: dict[str, str] = {}
    divide_cores(env, 2)
    use_loopback(env)
    assert env == {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)), "GLOO_SOCKET_IFNAME": "lo0"}
    keep_freed_memory()
    release_freed_memory()
    assert read_resident_bytes() == 0
    memory = states.node_memory("a run")
    memory.write("rank-0.json", b"{}")
    assert memory.path.parent == tmp_path
    assert memory.read("rank-0.json") == b"{}"
    memory.close()
    leases.identify_machine.cache_clear()


def test_a_mac_has_the_name_of_its_processor(mac: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = Probe(root=tmp_path, environ={}, run=lambda arguments: "Apple M2\n" if arguments[0] == "sysctl" else None)
    assert detect_machine("cpu", probe).name == "Apple M2"


def test_the_compiler_of_a_mac(mac: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = detect_machine("cpu", Probe(root=tmp_path, environ={}))
    mac.setattr("titan.cluster.compiler.CXX", "clang++")
    mac.delenv("CXX", raising=False)
    mac.setenv("PATH", str(tmp_path))
    assert find_missing_compiler(machine, "inductor") == "no C++ compiler (clang++) in PATH"
    (tmp_path / "clang++").touch(0o755)
    assert find_missing_compiler(machine, "inductor") is None


@pytest.mark.parametrize(("works", "flushes"), [(True, ["full"]), (False, ["full", "fsync"])], ids=["full", "not-here"])
def test_a_file_is_flushed_to_the_disk_of_a_mac(works: bool, flushes: list[str], mac: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def flush(descriptor: int, command: int) -> None:
        done.append("full")
        if not works:
            raise OSError(command)

    mac.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    mac.setattr(fcntl, "fcntl", flush)
    mac.setattr(os, "fsync", lambda descriptor: done.append("fsync"))
    platform.sync_file(1)
    assert done == flushes


@pytest.mark.parametrize("error", [PermissionError, ProcessLookupError])
def test_a_process_that_has_just_ended_gets_no_signal(error: type[OSError], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise error(*arguments)

    monkeypatch.setattr(os, "killpg", refuse)
    Supervisor([SimpleNamespace(poll=lambda: None, pid=1)]).send_signal(signal.SIGKILL)  # type: ignore[list-item]
