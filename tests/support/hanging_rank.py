"""A run of which a rank hangs as planned: `python -m tests.support.hanging_rank train SETTING ...`.

The environment variable HANG holds the plan as JSON: what happens, in which rank, at which step, and of which backend
the Flight Recorder seems to be.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from launchers import start, supervisor
from titan import train as command
from titan.cluster.rank_info import RankInfo
from titan.cluster.rank_process import run_from_file
from titan.training import rank

PLAN = "HANG"
LONG = 600.0  # seconds of a rank that sleeps: longer than any timeout here


def work(payload: Any, rank_info: RankInfo, report: Callable[[BaseException], int]) -> int:
    """Train, and hang as planned."""
    plan = json.loads(os.environ[PLAN])
    if plan["recorder"] == "nccl":
        _record_as_nccl()
    if plan["rank"] == rank_info.rank:
        PLANTS[plan["what"]](plan["step"])
    return rank.work(payload, rank_info, report)


def _record_as_nccl() -> None:
    """Let torch have two recorders, as with CUDA: NCCL's, without the times of starts, and an empty one of others."""
    from torch._C import _distributed_c10d as library

    from titan.debug import rank_state

    real: Callable[[], bytes] = library._dump_fr_trace

    def dump_trace() -> bytes:
        content = pickle.loads(real())
        for entry in content["entries"]:
            entry["profiling_name"] = "nccl:" + entry["profiling_name"].partition(":")[2]
            entry["state"] = "completed" if entry["retired"] else "scheduled"
            entry["time_discovered_started_ns"] = None
        if content["entries"]:
            content["entries"][:0] = _coalesce_messages(content["entries"][0])
        return pickle.dumps(content)

    empty_trace = pickle.dumps({**pickle.loads(real()), "entries": [], "pg_status": {}})
    library._dump_nccl_trace, library._dump_fr_trace = dump_trace, lambda: empty_trace  # type: ignore[attr-defined]
    rank_state._uses_nccl = lambda: True


def _coalesce_messages(like: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what NCCL's recorder holds of messages that were launched together and have ended."""
    message = {**like, "is_p2p": True, "p2p_seq_id": 1, "retired": False, "state": "scheduled"}
    ended = {**message, "profiling_name": "nccl:coalesced", "input_sizes": [], "retired": True, "state": "completed"}
    return [{**message, "profiling_name": name} for name in ("nccl:send 0->1", "nccl:recv 0<-1")] + [ended]


def _call_before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` with the arguments of a function before each call of it."""
    real = getattr(owner, name)

    def call_with_act(*args: Any, **named: Any) -> Any:
        act(*args)
        return real(*args, **named)

    setattr(owner, name, call_with_act)


def _plant_in_step(act: Callable[[], object]) -> Callable[[int], None]:
    """Return what plants `act` between the data of a step and its computation."""

    def plant(step: int) -> None:
        from titan.training.trainer import Trainer

        _call_before(Trainer, "to_device", lambda trainer, batch: act() if trainer.step == step else None)

    return plant


def _plant_in_save(act: Callable[[], object]) -> Callable[[int], None]:
    def plant(step: int) -> None:
        from titan.checkpoint.save import CheckpointSave

        _call_before(
            CheckpointSave, "_write_rank_files", lambda save, plan: act() if save.manifest.step >= step else None
        )

    return plant


def _hang_in_loader(step: int) -> None:
    from titan.dataset.loader import Loader

    _call_before(Loader, "_build_batch", lambda loader, number, *rest: _sleep() if number == step else None)


def _hang_in_compiler(step: int) -> None:
    from torch._dynamo.output_graph import OutputGraph

    _call_before(OutputGraph, "compile_and_call_fx_graph", lambda *args: _sleep())


def _sleep() -> None:
    time.sleep(LONG)


def _make_signal_sender(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _enter_other_collective() -> None:
    import torch.distributed as dist

    dist.barrier()


PLANTS: dict[str, Callable[[int], None]] = {
    "stop": _plant_in_step(_make_signal_sender(signal.SIGSTOP)),
    "kill": _plant_in_step(_make_signal_sender(signal.SIGKILL)),
    "stop in save": _plant_in_save(_make_signal_sender(signal.SIGSTOP)),
    "save": _plant_in_save(_sleep),
    "loader": _hang_in_loader,
    "compile": _hang_in_compiler,
    "collective": _plant_in_step(_enter_other_collective),
}


def train(arguments: list[str]) -> int:
    """Be `python -m titan.train`, with ranks that hang."""
    start.run_ranks = partial(supervisor.run_ranks, module="tests.support.hanging_rank")
    return command.main(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        sys.exit(train(sys.argv[2:]))
    run_from_file(work)
