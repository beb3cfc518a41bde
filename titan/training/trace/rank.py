"""Traces one step of one rank of a run, in this process.

A fake process group replaces the other ranks, and fake tensors have shapes only: the real build, forward, backward and
update run, so that jobs of hundreds of GPUs are traced on a laptop.

Not traced: what happens inside of kernels, and the compiler's fusion except that of the loss: operations are those of
the uncompiled model.
"""

from __future__ import annotations

import gc
import os
import traceback
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError
from titan.estimate.traced.events import NONE, Region, StepTrace
from titan.parallelism import data, mesh
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.evaluation.averages import MovingAverage
from titan.training.trace.fused_loss import fuse_losses
from titan.training.trace.recorder import EventRecorder
from titan.training.trace.regions import follow_regions
from titan.training.trace.streams import hold_messages, record_streams
from titan.training.train_step import TrainStep

UPDATE = Region("U", 0, -1, NONE)
DEVICE = torch.device("cpu")
"""Where traced tensors would be; they have no memory."""
BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that DDP sums at once (torch's default)."""


def trace_rank(run: Run, rank: int, device: str, fuses_loss: bool = False) -> StepTrace:
    """Trace the step of a rank after the first one, when the optimizer's state exists.

    Args:
        run: on any number of ranks; without compilation.
        rank: among all.
        device: "cuda" for norms as GPUs' kernel computes them, all else being as on a CPU.
        fuses_loss: whether head and loss are as in a compiled graph.

    Raises:
        ConfigError: when code of the step asks for the value of a tensor.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    world = _build_world(run, rank)
    recorder = EventRecorder(_map_streams(world), device)
    try:
        with ExitStack() as stack:
            if device == "cuda":
                stack.enter_context(mock.patch.object(F, "rms_norm", _apply_fused_norm))
            else:
                stack.enter_context(mock.patch.object(torch_schedules, "_batch_p2p", hold_messages))
            stack.enter_context(mock.patch.object(data, "replicate", lambda stage, mesh: stage))
            block_of: dict[int, int] = {}
            stack.enter_context(record_streams(recorder, block_of))
            train_step = build_train_step(run, world, memory=fake)
            if fuses_loss:
                fuse_losses(stage.model.head for stage in train_step.stages)
            block_of.update(_map_blocks(train_step))
            _record_step(run, train_step, recorder, fake, rank)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"plan.trace=true: {_find_location(error)} needs the value of a tensor ({error.func}), and tensors of a "
            "trace have none; compute it on the device, or give plan.trace=false."
        ) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    numbers = run.staging.list_stages(world.get_coordinate("pipeline"))
    return StepTrace(rank, recorder.list_events(), {number: run.staging.layers[number] for number in numbers})


def _find_location(error: Exception) -> str:
    """Return the file and line where code outside of torch raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename] or frames
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}"


def _record_step(run: Run, train_step: TrainStep, recorder: EventRecorder, fake: FakeTensorMode, rank: int) -> None:
    """Run the update once for the optimizer's state, then record a whole step."""
    numbers = run.staging.list_stages(train_step.world.get_coordinate("pipeline"))
    stages = dict(zip(numbers, train_step.stages, strict=True))
    with fake:
        _create_states(train_step)
        average = None if run.evaluation.ema is None else MovingAverage(train_step, run.evaluation.ema)
    with ExitStack() as stack:
        gc.collect()
        gc.disable()  # it would free what is in reference cycles at any moment
        stack.callback(gc.enable)
        stack.enter_context(follow_regions(recorder, stages, run.staging.splits_backward))
        stack.enter_context(fake)
        stack.enter_context(recorder)
        recorder.active = True
        _record_initial_tensors(train_step, recorder)
        if train_step.world.layout.only_replicated and train_step.world.layout.devices > 1:
            _sum_replicas(train_step, recorder)
        shape = (run.microbatches, run.microbatch_rows, run.training.seq_len)
        device = train_step.world.device
        tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        documents = torch.zeros(shape, dtype=torch.int64, device=device) if run.dataset.mask_documents else None
        keys = torch.zeros(shape[:2], dtype=torch.int64, device=device) if run.model.uses_keys else None
        train_step.backward(Microbatches(tokens, targets, documents=documents, keys=keys), 1.0)
        for parameter in train_step.parameters():
            if parameter.grad is not None:
                recorder.label_tensor(parameter.grad, "gradients")
        recorder.region = UPDATE
        train_step.compute_norm()
        train_step.optimizer.step()
        if average is not None:
            average.update(torch.zeros((), dtype=torch.bool, device=device))
        train_step.optimizer.zero_grad(set_to_none=True)
        recorder.active = False


def _create_states(train_step: TrainStep) -> None:
    for parameter in train_step.parameters():
        parameter.grad = torch.zeros_like(parameter)
    train_step.optimizer.step()
    train_step.optimizer.zero_grad(set_to_none=True)


def _record_initial_tensors(train_step: TrainStep, recorder: EventRecorder) -> None:
    """Record weights and optimizer state as what is in memory before the step."""
    named_parameters = list(train_step.named_parameters())
    blocks = {id(parameter): _find_block(name) for name, parameter in named_parameters}
    recorder.hold_tensors(((parameter, blocks[id(parameter)]) for _, parameter in named_parameters), "weights")
    for parameter, state in train_step.optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        recorder.hold_tensors(((value, blocks.get(id(parameter), NONE)) for value in tensors), "optimizer")


def _find_block(name: str) -> int:
    """Return the block of a parameter by its name in the whole model."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else NONE


def _map_blocks(train_step: TrainStep) -> dict[int, int]:
    """Return the block of each module, by the module's id."""
    return {
        id(module): int(name)
        for stage in train_step.stages
        for name, block in stage.model.layers.items()
        for module in block.modules()
    }


def _sum_replicas(train_step: TrainStep, recorder: EventRecorder) -> None:
    """Do what DDP, which is not Python, does: keep gradients in buckets, and sum each while backward continues."""
    group = train_step.world.get_group("replicate")
    ranks = dist.get_process_group_ranks(group)
    bucket: list[float] = []

    def sum_bucket(parameter: Tensor) -> None:
        bucket.append(parameter.numel() * parameter.element_size())
        if sum(bucket) >= BUCKET_BYTES or parameter is last:
            start_key = recorder.next_key()
            recorder.add_event("record", key=start_key)
            recorder.add_event("wait", key=start_key, stream="reduce-scatter")
            shape = (len(ranks), ranks[1] - ranks[0])
            recorder.add_event("collective", name="all-reduce", size=sum(bucket), shape=shape, stream="reduce-scatter")
            bucket.clear()
        if parameter is last:
            end_key = recorder.next_key()
            recorder.add_event("record", key=end_key, stream="reduce-scatter")
            recorder.add_event("wait", key=end_key)

    parameters = [p for p in train_step.parameters() if p.requires_grad]
    last = parameters[0]  # the embedding, whose gradient is computed last
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        recorder.label_tensor(parameter.grad, "gradients")
        parameter.register_post_accumulate_grad_hook(sum_bucket)  # type: ignore[no-untyped-call]


def _map_streams(world: mesh.RunContext) -> dict[str, str]:
    """Return the stream of each dimension's group, by the list of its ranks as text."""
    groups = {name: world.get_group(name) for name in ("pipeline", "replicate", "shard", "tensor", "context")}
    return {str(dist.get_process_group_ranks(group)): name for name, group in groups.items() if group is not None}


def _build_world(run: Run, rank: int) -> mesh.RunContext:
    size = run.layout.devices
    rank_info = RankInfo(rank, size, rank % 8, "")
    if size == 1:
        return mesh.RunContext(rank_info, run.layout, DEVICE)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return mesh.build_world(rank_info, run.layout, DEVICE)


class _FusedNorm(torch.autograd.Function):
    """The tensors that the GPU kernel of RMSNorm saves and returns, without values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, weight, _ = ctx.saved_tensors
        return grads[0] * 1.0, weight * 1.0


def _apply_fused_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    out: Tensor = _FusedNorm.apply(x, x.new_ones(shape) if weight is None else weight)  # type: ignore[no-untyped-call]
    return out
