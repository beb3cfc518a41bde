"""What torch's Flight Recorder says of the collectives that a rank has entered."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from titan.debug.flight import Operation, entered, kind


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
    assert kind(name) == words


def test_what_has_not_ended_is_pending_and_known_from_before_or_not() -> None:
    entries = [entry(1), entry(2), entry(3, ended=False), entry(4, "gloo:barrier", ended=False)]
    last, pending = entered(pickle.dumps({"entries": entries}))
    assert last == {"0": 4}
    line = "train_step.py:9 in norm"
    assert pending == [
        Operation("0", 3, "all-reduce", "[[4]]", True, line=line),
        Operation("0", 4, "barrier", "[[4]]", False, line=line),
    ]


def test_nccl_says_what_its_gpu_has_started() -> None:
    entries = [
        entry(n, "nccl:all_reduce", ended=False, state=s) for n, s in enumerate(("completed", "started", "scheduled"))
    ]
    assert [op.started for op in entered(pickle.dumps({"entries": entries}))[1]] == [True, False]


def test_no_recorder_is_no_collective() -> None:
    assert entered(b"") == ({}, [])
