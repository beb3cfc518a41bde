"""What ranks know of each other, and what that costs a file system."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_ranks import SimulatedRun
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.debug import rank_state
from titan.debug import states as states_module
from titan.debug.activity import (
    DUMP_OPERATIONS,
    ENDED,
    EVALUATING,
    HOOK,
    OPERATIONS_OF_NODE,
    OPERATIONS_OF_READ,
    READS_PER_SECOND,
    SAVING,
    WRITES_PER_SECOND,
    Activity,
    Clock,
)
from titan.debug.rank_state import PendingCollective, RankGroup, RankState
from titan.debug.states import Folder, States
from titan.debug.verdict import Verdict
from titan.files import platform

MOST = 200  # operations a second on the file system that a job may take


def test_a_state_is_read_as_it_was_written() -> None:
    pending = (PendingCollective("w", 3, "barrier", started=None, peers=(1, 2)),)
    groups = {"w": RankGroup("world", range(0, 8, 2)), "t": RankGroup("tensor", (1, 2, 5))}
    state = RankState(3, "n1", attempt=2, beat=5, groups=groups, pending=pending, completed={"w": 2})
    assert rank_state.decode_state(rank_state.encode_state(state), 2) == state
    assert rank_state.decode_state(rank_state.encode_state(state), 1) is None
    assert [rank_state.decode_state(content, 2) for content in (None, b"", b"{", b'{"rank": 3}')] == [None] * 4


def test_a_file_that_becomes_shorter_keeps_nothing_of_before(tmp_path: Path) -> None:
    files = Folder(tmp_path / "some", file_bytes=64)
    for content in (b"a long content", b"short"):
        files.write("one", content)
        assert Folder(tmp_path / "some").read("one") == content
    assert files.read("two") is None and files.list_names() == ["one"]
    files.remove()
    assert not (tmp_path / "some").exists()


def test_memory_that_is_full_costs_no_descriptor_and_a_rank_counts_as_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_memory(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full_memory)
    before = os.listdir("/proc/self/fd")
    clock = Clock(Activity(get_time=lambda: 0.0), None, 2)
    states = States(tmp_path, RankInfo(1, 2, 1), 1, clock, lambda key: Folder(tmp_path / "memory", 64))
    for beat in range(5):
        states.write_rank(RankState(1, pid=os.getpid(), attempt=1, beat=beat))
    assert states.memory is None and states.is_writer()
    assert len(os.listdir("/proc/self/fd")) == len(before) and not os.listdir(tmp_path / "memory")


def test_memory_that_somebody_has_cleared_is_made_again(tmp_path: Path) -> None:
    files = Folder(tmp_path / "memory", file_bytes=64)
    files.write("one", b"before")
    shutil.rmtree(tmp_path / "memory")
    files.write("one", b"after")
    assert Folder(tmp_path / "memory").read("one") == b"after"


@pytest.mark.parametrize(("room", "waits"), [(0, True), (64, False)], ids=["shared", "memory"])
def test_other_nodes_see_at_once_what_is_written(room: int, waits: bool, tmp_path: Path) -> None:
    """A client of NFS writes later what is not written synchronously (nfs(5))."""
    files = Folder(tmp_path, room)
    files.write("one", b"content")
    flags = fcntl.fcntl(files._open_files["one"], fcntl.F_GETFL)
    assert (flags & os.O_DSYNC == os.O_DSYNC) == waits


def test_memory_of_ranks_that_were_killed_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "MEMORY", tmp_path)
    alive, killed = states_module.node_memory("alive"), states_module.node_memory("killed")
    for files, pid in ((alive, os.getpid()), (killed, 2**22 + 1)):  # above the largest number of a process
        files.write("rank-0.json", rank_state.encode_state(RankState(0, pid=pid)))
        os.utime(files.path, (0, 0))
    states_module.node_memory("new")
    assert alive.path.exists() and not killed.path.exists()


@pytest.fixture
def run(tmp_path: Path) -> SimulatedRun:
    return SimulatedRun(16, 4, tmp_path)


@pytest.mark.full
def test_the_lowest_rank_knows_what_all_do(run: SimulatedRun) -> None:
    run.enter_phase(EVALUATING)
    list(run.measure_rates(60))
    first = run.nodes[0].states
    assert [node.states.is_reporter() for node in run.nodes] == [True, False, False, False]
    world = first.build_run_state()
    assert sorted(world.states) == list(range(16)) and not world.silent_ranks and not first.is_undecided()
    assert sorted(file.name for file in first.shared.path.iterdir()) == [f"node-{n}.json" for n in (0, 12, 4, 8)]


@pytest.mark.full
def test_a_node_that_ends_is_silent_and_another_one_reports(run: SimulatedRun) -> None:
    run.enter_phase(EVALUATING)
    list(run.measure_rates(60))
    run.nodes[0].alive = False
    list(run.measure_rates(2 * run.nodes[1].clock.node_silence_timeout()))
    assert [node.states.is_reporter() for node in run.nodes[1:]] == [True, False, False]
    assert run.nodes[1].states.build_run_state().silent_ranks == set(range(4))


@pytest.mark.full
def test_a_rank_that_has_ended_is_not_silent_and_the_last_one_clears_the_memory(tmp_path: Path) -> None:
    now = [0.0]
    memory = tmp_path / "memory"

    def make_states(number: int) -> States:
        clock = Clock(Activity(get_time=lambda: now[0]), None, 2)
        return States(tmp_path, RankInfo(number, 2, number), 1, clock, lambda key: Folder(memory, 64))

    def write(states: States, beat: int, phase: str) -> None:
        states.write_rank(RankState(states.rank, pid=os.getpid(), attempt=1, beat=beat, phase=phase))

    first, second = make_states(0), make_states(1)
    write(first, 1, HOOK)
    write(second, 1, ENDED)
    second.publish_node()
    second.close()
    for beat in range(2, 100):
        now[0] = float(beat)
        write(first, beat, HOOK)
        first.read_nodes()
    state = first.build_run_state()
    assert (sorted(state.states), sorted(state.live), state.silent_ranks) == ([0, 1], [0], frozenset())
    assert first.is_reporter() and not first.is_undecided()
    write(first, 100, ENDED)
    first.close()
    assert not memory.exists()


@pytest.mark.full
def test_a_verdict_reaches_all_nodes(run: SimulatedRun) -> None:
    run.enter_phase(EVALUATING)
    list(run.measure_rates(60))
    found = Verdict(1, "rank 3 hangs", (3,), "", 1)
    run.nodes[0].states.publish_verdict(found)
    list(run.measure_rates(2 * run.nodes[0].clock.node_interval(is_late=True)))
    assert [node.states.verdict for node in run.nodes] == [found] * 4


def test_a_rank_that_was_stopped_learns_what_others_have_found(tmp_path: Path) -> None:
    """It is the lowest one, and would report."""
    clock = Clock(Activity(get_time=lambda: 7.0), None, 2)
    first, second = (
        States(tmp_path, RankInfo(n, 2, n), 1, clock, lambda key: Folder(tmp_path / "memory", 64)) for n in range(2)
    )
    found = Verdict(1, "rank 0 hangs", (0,), "", 1)
    second.publish_verdict(found)
    assert first.read_verdict() == found


def test_a_rank_that_does_not_beat_is_silent_and_the_next_one_writes(tmp_path: Path) -> None:
    run = SimulatedRun(4, 4, tmp_path)
    states, now = run.nodes[0].states, run.clock_time
    other = RankState(1, pid=os.getpid(), attempt=1)
    for beat in range(60):
        run.clock_time = now + beat
        states._record_beat(replace(other, beat=min(beat, 3)))
        states._record_beat(RankState(0, pid=os.getpid(), attempt=1, beat=beat))
    assert states.find_silent_ranks() == {1} and states.is_writer() and not states.is_undecided()
    states.rank = 1
    assert not states.is_writer()


@pytest.mark.full
def test_where_ranks_share_no_memory_one_of_them_reports(tmp_path: Path) -> None:
    """Each in a container, for example."""
    now = [0.0]

    def alone(number: int) -> States:
        clock = Clock(Activity(get_time=lambda: now[0]), None, 4)
        return States(tmp_path, RankInfo(number, 4, number), 1, clock, lambda key: Folder(tmp_path / str(number), 64))

    ranks = [alone(number) for number in range(4)]
    for beat in range(90):
        now[0] = float(beat)
        for number, states in enumerate(ranks):
            states.write_rank(RankState(number, pid=os.getpid(), attempt=1, beat=beat, late=1.0))
            states.read_verdict()
            if states.is_reporter():
                states.read_nodes()
    assert [states.is_reporter() for states in ranks] == [True, False, False, False]
    assert sorted(ranks[0].build_run_state().states) == [0, 1, 2, 3] and not ranks[0].build_run_state().silent_ranks


def test_a_node_writes_one_file(tmp_path: Path) -> None:
    """Real ranks of a node, with its memory."""
    now = [0.0]
    clocks = [Clock(Activity(get_time=lambda: now[0]), None, 3) for _ in range(3)]
    ranks = [
        States(tmp_path, RankInfo(n, 3, n), 1, clock, lambda key: Folder(tmp_path / "memory", 64))
        for n, clock in enumerate(clocks)
    ]
    for beat in range(30):
        now[0] = float(beat)
        for number, states in enumerate(ranks):
            states.write_rank(RankState(number, pid=os.getpid(), attempt=1, beat=beat))
    assert ranks[0].shared.list_names() == ["node-0.json"] and {clock.ranks_on_node for clock in clocks} == {3}
    ranks[2].read_node()
    assert sorted(ranks[2].latest) == [0, 1, 2]
    for states in ranks:
        states.close()
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("ranks", [pytest.param(16, id="16"), full(128, id="128"), full(2048, id="2,048")])
def test_the_file_system_is_asked_little_in_every_phase(ranks: int, tmp_path: Path) -> None:
    run = SimulatedRun(ranks, 8, tmp_path)
    assert max(run.measure_rates(25)) <= MOST
    run.enter_phase(SAVING)
    for operations in run.measure_rates(60):
        assert operations <= MOST and sum(node.states.is_reporter() for node in run.nodes) <= 1
    run.nodes[0].alive = run.nodes[1].alive = False
    assert max(run.measure_rates(60)) <= MOST


@given(nodes=st.integers(1, 4096), per_node=st.integers(1, 8), age=st.floats(0, 1800))
def test_intervals_grow_with_the_number_of_nodes(nodes: int, per_node: int, age: float) -> None:
    activity = Activity(get_time=lambda: age)
    activity.since = 0.0
    clock = Clock(activity, None, nodes * per_node)
    clock.ranks_on_node = per_node
    every = min(clock.node_interval(late) for late in (False, True))
    assert clock.nodes == nodes and (nodes == 1 or nodes * OPERATIONS_OF_NODE / every <= WRITES_PER_SECOND + 0.01)
    assert clock.count_reads(1.0) * OPERATIONS_OF_READ <= READS_PER_SECOND
    assert clock.count_reads(1.0) * clock.read_interval() >= nodes - 1 and clock.node_silence_timeout() > 2 * every


def test_stacks_of_2048_ranks_are_written_one_after_another() -> None:
    clock = Clock(Activity(), None, 2048)
    clock.ranks_on_node = 8
    delays = [clock.dump_delay(rank, 1000) for rank in range(2048)]
    assert delays[1000] == 0 and sum(d is not None for d in delays) >= 1024
    for second in range(90):
        assert DUMP_OPERATIONS * sum(d is not None and second <= d < second + 1 for d in delays) <= MOST
