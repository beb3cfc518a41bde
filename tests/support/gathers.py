"""When FSDP gathers the experts of each block, and where the host waits, on one rank of a large job without devices."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.ranks import run_ranks
from titan.cluster.rank_info import RankInfo
from titan.parallelism import expert, mesh, units
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.build import build_train_step


class PassCounts(NamedTuple):
    """What happened in a forward or a backward pass.

    Attributes:
        layers: how many layers' experts were gathered.
        late: of them, those whose gather was issued after their own block had begun to wait for its other weights.
        host_waits: how often the host waited for the number of rows.
    """

    layers: int
    late: int
    host_waits: int


class _Recorder:
    """Records gathers and waits in order."""

    def __init__(self) -> None:
        self.phase, self.moment = "forward", 0
        self.gathered: dict[str, int] = {}
        self.began: dict[str, int] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    def note_gather(self, params: Any) -> None:
        self.moment += 1
        self.gathered[_name_part(params)] = self.moment

    def note_need(self, params: Any) -> None:
        self.moment += 1
        name = _name_part(params)
        if not name.endswith("experts"):
            self.began[name] = self.moment
            return
        self.counts[self.phase, "layers"] += 1
        self.counts[self.phase, "late"] += self.gathered[name] > self.began.get(name.removesuffix(" experts"), 0)

    def read(self, phase: str) -> PassCounts:
        return PassCounts(*(self.counts[phase, name] for name in PassCounts._fields))


def _name_part(params: Any) -> str:
    """Return the block of parameters that are gathered together, and whether they are experts."""
    name: str = params[0]._param_fqn
    return " ".join([".".join(name.split(".")[1:3]), *(["experts"] if ".experts." in name else [])])


def count_gathers(run: Run, has_mesh_per_parameter: bool = True) -> tuple[PassCounts, PassCounts]:
    """Return what a forward and a backward pass of the first rank do, in another process."""
    counts: tuple[PassCounts, PassCounts] = run_ranks(_count, 1, run, has_mesh_per_parameter, joined=False)[0]
    return counts


def _count(_: int, __: int, run: Run, has_mesh_per_parameter: bool) -> tuple[PassCounts, PassCounts]:
    dist.init_process_group("fake", rank=0, world_size=run.layout.devices, store=FakeStore())
    fake, recorder = FakeTensorMode(allow_non_fake_inputs=True), _Recorder()
    world = mesh.build_world(RankInfo(0, run.layout.devices, 0, ""), run.layout, torch.device("cpu"))
    with mock.patch.object(units, "HAS_MESH_PER_PARAMETER", has_mesh_per_parameter):
        train_step = build_train_step(run, world, memory=fake)
    shape = (1, run.microbatch_rows, run.training.seq_len)
    with fake:
        tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        train_step.backward(Microbatches(tokens, targets), 1.0)  # FSDP completes its set-up in the first pass
        train_step.optimizer.zero_grad(set_to_none=True)
        with _record(recorder):
            loss = train_step.stages[0](*Microbatches(tokens, targets).select_microbatch(0))
            recorder.phase = "backward"
            loss.sum().backward()
    return recorder.read("forward"), recorder.read("backward")


def _record(recorder: _Recorder) -> Any:
    fsdp: Any = _fsdp_param_group
    group = fsdp.FSDPParamGroup
    gather, wait, count = fsdp.foreach_all_gather, group.wait_for_unshard, expert._count_exchanged_rows

    def gather_noted(params: Any, *args: Any) -> Any:
        recorder.note_gather(params)
        return gather(params, *args)

    def wait_noted(self: Any) -> Any:
        if self._all_gather_result is not None:
            recorder.note_need(self.fsdp_params)
        return wait(self)

    def count_noted(*args: Any) -> Any:
        recorder.counts[recorder.phase, "host_waits"] += 1
        return count(*args)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(fsdp, "foreach_all_gather", gather_noted))
    stack.enter_context(mock.patch.object(group, "wait_for_unshard", wait_noted))
    stack.enter_context(mock.patch.object(expert, "_count_exchanged_rows", count_noted))
    return stack
