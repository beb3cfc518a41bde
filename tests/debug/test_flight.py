"""What torch's Flight Recorder says of the collectives that a rank has entered."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from titan.debug.rank_state import Collectives, PendingCollective, describe_kind, dump_recorder, read_collectives
from titan.debug.thread_state import record_nccl_timeouts


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
