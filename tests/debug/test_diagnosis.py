"""Which rank a hanging run waits for, from the states of its ranks."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from titan.debug import activity
from titan.debug.diagnosis import RunState, describe_layer, diagnose, diagnose_save, format_table
from titan.debug.rank_state import (
    Collectives,
    PendingCollective,
    RankGroup,
    RankState,
    describe_kind,
    dump_recorder,
    read_collectives,
)
from titan.debug.thread_state import record_nccl_timeouts

ALL = {"w": RankGroup("shard", range(4))}
UNITED = {"u": RankGroup("shard", range(2, 4)), "w": RankGroup("world", range(4))}
GRIDS = {"t": RankGroup("tensor", range(2)), "w": RankGroup("world", range(4))}


def rank(number: int, **more: Any) -> RankState:
    """A rank that computes step 118, in the module of layer 12."""
    common: dict[str, Any] = {"host": f"n{number // 2}", "pid": 100 + number, "step": 118, "groups": ALL}
    common |= {"phase": activity.COMPUTING, "layer": "model.layers.12.attention", "line": "a.py:1 in f"}
    return RankState(number, **(common | more))


def waits(number: int, at: int = 7, kind: str = "all-gather", group: str = "w", **more: Any) -> RankState:
    """A rank that waits in a collective."""
    op = PendingCollective(group, at, kind, familiar=more.pop("familiar", True), started=more.pop("started", True))
    return rank(number, **{"pending": (op,), "entered": {group: at}, **more})


def issued(number: int, at: int = 7, *, of: int | None = None, group: str = "w", **more: Any) -> RankState:
    """A rank whose device has not completed a collective `at`, while the host has issued others up to `of`."""
    ops = tuple(PendingCollective(group, n, "all-gather", started=None) for n in range(at, (of or at) + 1))
    common = {"pending": ops, "entered": {group: of or at}, "completed": {group: at - 1}}
    return rank(number, **(common | more))


def world(*states: RankState, silent: tuple[int, ...] = (), size: int = 4, **processes: str) -> RunState:
    by_rank = {int(name.removeprefix("of_")): state for name, state in processes.items()}
    return RunState(size, {state.rank: state for state in states}, frozenset(silent), by_rank)


IN = "in the all-gather of layer 12 (fsdp), step 118"
LATE: dict[str, Any] = {"entered": {"w": 6}}
THIRD: dict[str, tuple[RankState, str | None, str]] = {
    "stopped": (rank(2), "T", "stopped (SIGSTOP)"),
    "dead": (rank(2), "", "dead"),
    "data": (rank(2, phase=activity.DATA, reads="l.py:5 in read", **LATE), None,
             "waiting for data (l.py:5 in read), step 118"),
    "compiling": (rank(2, compiles=True, **LATE), None, "compiling (a.py:1 in f)"),
    "another-step": (rank(2, step=117, layer=None, phase=activity.UPDATING, **LATE), None,
                     "updating the weights (a.py:1 in f), step 117"),
    "another-kind": (waits(2, kind="barrier"), None, "in another collective, a barrier, step 118"),
    "gpu-not-there-yet": (waits(2, started=False), None, "its GPU is at work before the all-gather, step 118"),
}  # fmt: skip
"""What rank 2 does while the others wait in an all-gather, the state of its process where it is silent, the cause."""
BARRIER = PendingCollective("w", 2, "barrier", "", False, started=None)
SECOND: dict[str, tuple[list[RankState], str]] = {
    "crossed-groups": (
        [waits(1, at=3, kind="barrier", group="w", groups=GRIDS, familiar=False)],
        "in another collective, a barrier",
    ),
    "gpu-of-another-group-at-work": (
        [waits(1, group="t", groups=GRIDS, started=False), *(rank(n, groups=GRIDS) for n in (2, 3))],
        "its GPU is at work before the all-gather",
    ),
    "another-group-computes": (
        [rank(n, groups=GRIDS, entered={"t": 6 if n == 1 else 9}) for n in (1, 2, 3)],
        "computing gradients in layer 12 (a.py:1 in f)",
    ),
    "nccl-hosts-are-ahead": (
        [rank(1, groups=GRIDS, entered={"t": 6, "w": 1}), *(issued(n, 1, group="w", groups=GRIDS) for n in (2, 3))],
        "computing gradients in layer 12 (a.py:1 in f)",
    ),
    "nccl-another-collective": (
        [rank(1, groups=GRIDS, entered={"t": 6, "w": 2}, pending=(BARRIER,)),
         *(issued(n, group="u", groups=UNITED) for n in (2, 3))],
        "in another collective, a barrier",
    ),
}  # fmt: skip
"""What the ranks after 0 do while that waits for rank 1 in tensor parallelism, and the cause."""
CASES = {
    "host-unreachable": (
        world(waits(0), waits(1), rank(2), rank(3), silent=(2, 3)),
        f"waiting for ranks 2, 3 {IN}; ranks 2, 3: no answer from any rank on n1: it may be down or unreachable",
    ),
    "not-started": (world(waits(0), waits(1), waits(3)), f"waiting for rank 2 {IN}; rank 2: not started"),
    "new-kind-of-two": (
        world(waits(0), waits(1, kind="barrier", familiar=False), size=2),
        f"waiting for rank 1 {IN}; rank 1: in another collective, a barrier, step 118, process 101 on n0",
    ),
    "nccl-loader": (
        world(issued(0, of=9), issued(1, of=8), issued(3), THIRD["data"][0]),
        f"waiting for rank 2 {IN}; rank 2: waiting for data (l.py:5 in read), step 118, process 102 on n1",
    ),
    "nccl-one-gpu-has-not-completed-it": (
        world(issued(0, 8), issued(1, 8), issued(3, 8), issued(2, 7, of=8)),
        f"waiting for rank 2 {IN}; rank 2: its GPU has not completed the all-gather, step 118, process 102 on n1",
    ),
    "pipeline": (
        world(rank(0, transfers=True), rank(1, phase=activity.DATA), size=2),
        "waiting for rank 1 in a message between stages (pp), step 118; rank 1: waiting for data (a.py:1 in f), "
        "step 118, process 101 on n0",
    ),
    "start": (
        world(rank(0, joins=True, step=0), rank(1, step=0, phase=activity.STARTING, layer=None), size=2),
        "waiting for rank 1 while the ranks connect, before the first step; rank 1: starting (a.py:1 in f), "
        "before the first step, process 101 on n0",
    ),
}
for name, (state, process, cause) in THIRD.items():
    silent = {} if process is None else {"silent": (2,), "of_2": process}
    given = world(waits(0), waits(1), waits(3), state, **silent)  # type: ignore[arg-type]
    CASES[name] = given, f"waiting for rank 2 {IN}; rank 2: {cause}, process 102 on n1"
for name, (others, cause) in SECOND.items():
    first = (issued if name.startswith("nccl") else waits)(0, group="t", groups=GRIDS)
    words = f"waiting for rank 1 in the all-gather of layer 12 (tp), step 118; rank 1: {cause}, step 118"
    CASES[name] = world(first, *others, size=1 + len(others)), f"{words}, process 101 on n0"


@pytest.mark.parametrize("name", CASES)
def test_the_rank_and_the_cause_are_named(name: str) -> None:
    given, words = CASES[name]
    assert diagnose(given).sentence == words


@pytest.mark.parametrize(
    ("states", "words", "usual"),
    [
        pytest.param([rank(0, compiles=True), rank(1, compiles=True)], "all ranks are compiling", True, id="compile"),
        pytest.param(
            [rank(n, phase=activity.EVALUATING) for n in (0, 1)],
            "all ranks are evaluating (a.py:1 in f), step 118",
            True,
            id="evaluation",
        ),
        pytest.param([rank(0), rank(1)], "all ranks are computing gradients (a.py:1 in f), step 118", False, id="step"),
    ],
)
def test_ranks_that_are_slow_together_are_no_error(states: list[RankState], words: str, usual: bool) -> None:
    found = diagnose(world(*states, size=2))
    assert (found.ranks, found.sentence, found.is_expected) == ((), words, usual)


@pytest.mark.parametrize(("make", "timed"), [(issued, True), (waits, False)])
def test_a_collective_that_all_have_entered_names_no_rank(make: Any, timed: bool) -> None:
    found = diagnose(world(*(make(n) for n in range(4))))
    assert (found.ranks, found.all_entered) == ((), True)
    words = "ranks 0, 1, 2, 3 have entered the all-gather of layer 12 (fsdp), step 118, and none has completed it; "
    assert found.sentence.startswith(words) and ("TORCH_NCCL_ENABLE_TIMING" in found.sentence) == timed


def test_groups_of_other_ranks_under_the_same_name_are_not_compared() -> None:
    """Subgroups of one split may have one name."""
    left, right = ({"s": RankGroup("shard", members)} for members in (range(2), range(2, 4)))
    busy = rank(1, groups=left, entered={"s": 6})
    found = diagnose(
        world(waits(0, group="s", groups=left), busy, *(issued(n, 3, group="s", groups=right) for n in (2, 3)))
    )
    assert found.ranks == (1,)


def test_one_of_2048_ranks_is_found() -> None:
    groups = {"w": RankGroup("world", range(2048))}
    states = [issued(n, groups=groups, of=12) for n in range(2047)]
    found = diagnose(world(*states, rank(2047, groups=groups, **LATE), size=2048))
    assert found.ranks == (2047,)


def test_a_checkpoint_waits_for_the_rank_that_writes() -> None:
    waiting = [rank(n, saving=40, saving_waits=True) for n in (0, 1, 3)]
    writer = rank(2, saving=40, saving_line="w.py:3 in write", node="gpu7")
    found = diagnose_save(world(*waiting, writer))
    assert (found.ranks, found.node) == ((2,), "gpu7")
    assert found.sentence == (
        "the checkpoint of step 40 is waiting for rank 2; rank 2: writing it (w.py:3 in write), process 102 on n1"
    )
    assert diagnose_save(world(*(replace(s, saving_waits=False) for s in (*waiting, writer)))).is_expected


@pytest.mark.parametrize(
    ("module", "words"), [("layers.3", "layer 3"), ("model.tok_embeddings", "tok_embeddings"), (None, "")]
)
def test_layers_in_words(module: str | None, words: str) -> None:
    assert describe_layer(module) == words


def test_the_table_has_a_line_for_each_rank() -> None:
    lines = format_table(world(waits(0), rank(1), silent=(1,), size=3)).splitlines()
    assert [line[:7] for line in lines] == ["rank 0 ", "rank 1 ", "rank 2:"]
    assert "SILENT" in lines[1] and "all-gather of layer 12 (fsdp), number 7" in lines[0]


def entry(number: int, name: str = "gloo:all_reduce", *, ended: bool = True, state: str = "scheduled") -> Any:
    frames = [{"filename": "/x/torch/distributed/c10d.py", "line": 1, "name": "all_reduce"},
              {"filename": "/x/titan/train_step.py", "line": 9, "name": "norm"}]  # fmt: skip
    return {"process_group": ("0", "default"), "collective_seq_id": number, "profiling_name": name, "retired": ended,
            "input_sizes": [[4]], "is_p2p": False, "state": state, "frames": frames}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gloo:all_gather", "all-gather"),
        ("nccl:_all_gather_base", "all-gather"),
        ("nccl:_reduce_scatter_base", "reduce-scatter"),
        ("nccl:recv 1<-0", "receive"),
        ("gloo:barrier", "barrier"),
    ],
)
def test_collectives_in_words(name: str, words: str) -> None:
    assert describe_kind(name) == words


def test_what_has_not_ended_is_pending_and_known_from_before_or_not() -> None:
    entries = [entry(1), entry(2), entry(3, ended=False), entry(4, "gloo:barrier", ended=False)]
    found = read_collectives(pickle.dumps({"entries": entries}))
    assert (found.entered, found.completed) == ({"0": 4}, {"0": 2})
    line = "train_step.py:9 in norm"
    assert found.pending == (
        PendingCollective("0", 3, "all-reduce", "[[4]]", True, line=line),
        PendingCollective("0", 4, "barrier", "[[4]]", False, line=line),
    )


def nccl(*states: str, **more: Any) -> bytes:
    """A recorder of NCCL with one collective in each of these states, the last ones not retired."""
    entries = [entry(n + 1, "nccl:all_reduce", ended=s == "completed", state=s) for n, s in enumerate(states)]
    return pickle.dumps({"entries": [{**e, "pg_id": 3} for e in entries], **more})


def test_nccl_says_what_its_gpu_has_started_where_it_is_timed() -> None:
    found = read_collectives(nccl("completed", "started", "scheduled"))
    assert [op.started for op in found.pending] == [True, False]


def test_without_timing_it_is_not_known_what_its_gpu_has_started() -> None:
    found = read_collectives(nccl("completed", "completed", "scheduled", "scheduled"))
    assert [(op.number, op.started) for op in found.pending] == [(3, None), (4, None)]
    assert (found.entered, found.completed) == ({"0": 4}, {"0": 2})


def test_a_collective_of_nccl_that_has_timed_out_has_not_ended() -> None:
    content = pickle.loads(nccl("completed", "scheduled"))
    content["entries"][1]["retired"] = True
    assert [op.number for op in read_collectives(pickle.dumps(content)).pending] == [2]


def message(name: str, number: int, *, ended: bool = False) -> Any:
    state = "completed" if ended else "scheduled"
    sizes = [] if name == "nccl:coalesced" else [[4]]
    return {**entry(0, name, ended=ended, state=state), "is_p2p": True, "p2p_seq_id": number, "input_sizes": sizes}


@pytest.mark.parametrize("ended", [True, False])
def test_messages_that_nccl_launches_together_end_together(ended: bool) -> None:
    """Their own entries stay scheduled; see test_batched_send_recv in torch's test_c10d_nccl.py."""
    names = ("nccl:send 0->1", "nccl:recv 0<-1")
    entries = [message(name, number) for number in (1, 2) for name in names]
    entries.insert(2, message("nccl:coalesced", 1, ended=True))
    entries += [message("nccl:coalesced", 2, ended=ended), entry(1, "nccl:all_reduce", state="completed")]
    pending = read_collectives(pickle.dumps({"entries": entries})).pending
    assert [(op.kind, op.number, op.sizes) for op in pending] == ([] if ended else [("send", -1, "[[4]]")])


def test_a_message_that_is_not_launched_with_others_ends_alone() -> None:
    entries = [message("nccl:recv 0<-1", 1, ended=True), message("nccl:recv 0<-1", 2)]
    assert [op.kind for op in read_collectives(pickle.dumps({"entries": entries})).pending] == ["receive"]


def test_a_group_whose_collectives_left_the_ring_buffer_keeps_its_numbers() -> None:
    status = {"3": {"last_enqueued_collective": 90, "last_started_collective": -1, "last_completed_collective": 88}}
    found = read_collectives(nccl("scheduled", pg_status=status))
    assert (found.entered, found.completed) == ({"0": 90}, {"0": 88})


@pytest.mark.parametrize(("backend", "name"), [("nccl", b"nccl"), ("gloo", b"others")])
def test_the_recorder_is_that_of_the_backend(backend: str, name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with CUDA has both, and each knows its own collectives alone."""
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda: b"nccl", raising=False)
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace", lambda: b"others", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert dump_recorder() == name


def test_no_recorder_is_no_collective() -> None:
    assert read_collectives(b"") == Collectives({}, {}, ())


@pytest.mark.parametrize("given", [None, "/elsewhere/nccl_"])
def test_nccls_own_dumps_go_into_the_run_unless_the_user_says_where(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    monkeypatch.setattr(os, "environ", {names[1]: given} if given else {})
    record_nccl_timeouts(tmp_path)
    expected = f"{tmp_path}/debug/flight_recorder/nccl_rank_"
    assert os.environ == ({names[1]: given} if given else dict.fromkeys(names, expected))
    assert (tmp_path / "debug/flight_recorder").is_dir() == (given is None)
