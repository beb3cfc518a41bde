"""Traces one step of one rank of a run, in this process.

A fake process group replaces the other ranks, and fake tensors have shapes only: the real build, forward, backward and
update run, so that jobs of hundreds of GPUs are traced on a laptop.

Not traced: what happens inside of kernels, and the compiler's fusion except that of the loss: operations are those of
the uncompiled model.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import traceback
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan.cluster.forked_tasks import ForkedTaskError, map_in_forks
from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError, RunError
from titan.estimate.operations import Speeds
from titan.estimate.regather import regathers_input
from titan.estimate.traced.compose import MICROBATCHES, UNITS, UNITS_AHEAD, compose_trace
from titan.estimate.traced.events import NONE, Region, StepTrace
from titan.estimate.traced.replay import RankResult, TracedStep, build_rank_result, build_traced_step
from titan.model.layers import Head, Product, cross_entropy
from titan.model.loss_terms import Objective, label_smoothing, z_loss
from titan.parallelism import data, mesh
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.strategy import blocks_are_alike
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.evaluation.averages import MovingAverage
from titan.training.trace.recorder import EventRecorder, hold_messages, record_streams
from titan.training.trace.regions import follow_regions
from titan.training.train_step import TrainStep

UPDATE = Region("U", 0, -1, NONE)
DEVICE = torch.device("cpu")
"""Where traced tensors would be; they have no memory."""
BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that DDP sums at once (torch's default)."""

TRACE_SECONDS = 7200.0
"""How long the traces of a run may take."""
FUSED_TERMS = (z_loss, label_smoothing)
"""Values of loss terms that need statistics of logits only."""


def trace_rank(run: Run, rank: int, device: str, fuses_loss: bool = False) -> StepTrace:
    """Trace the step of a rank after the first one, when the optimizer's state exists.

    Args:
        run: on any number of ranks; without compilation.
        device: "cuda" for norms as GPUs' kernel computes them, all else being as on a CPU.
        fuses_loss: whether head and loss are as in a compiled graph.

    Raises:
        ConfigError: when code of the step asks for the value of a tensor.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    world = _build_world(run, rank)
    groups = {name: world.get_group(name) for name in ("pipeline", "replicate", "shard", "tensor", "context")}
    streams = {str(dist.get_process_group_ranks(group)): name for name, group in groups.items() if group is not None}
    recorder = EventRecorder(streams, device)
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
            for stage in train_step.stages:
                for name, block in stage.model.layers.items():
                    block_of.update((id(module), int(name)) for module in block.modules())
            _record_step(run, train_step, recorder, fake)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frames = traceback.extract_tb(error.__traceback__)
        *_, frame = [each for each in frames if f"{os.sep}torch{os.sep}" not in each.filename] or frames
        raise ConfigError(
            f"plan.trace=true: {frame.filename}:{frame.lineno} needs the value of a tensor ({error.func}), and tensors "
            "of a trace have none; compute it on the device, or give plan.trace=false."
        ) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    numbers = run.staging.list_stages(world.get_coordinate("pipeline"))
    return StepTrace(rank, recorder.list_events(), {number: run.staging.layers[number] for number in numbers})


def _record_step(run: Run, train_step: TrainStep, recorder: EventRecorder, fake: FakeTensorMode) -> None:
    """Run the update once for the optimizer's state, then record a whole step."""
    numbers = run.staging.list_stages(train_step.world.get_coordinate("pipeline"))
    stages = dict(zip(numbers, train_step.stages, strict=True))
    with fake:
        for parameter in train_step.parameters():
            parameter.grad = torch.zeros_like(parameter)
        train_step.optimizer.step()
        train_step.optimizer.zero_grad(set_to_none=True)
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


def _record_initial_tensors(train_step: TrainStep, recorder: EventRecorder) -> None:
    """Record weights and optimizer state as what is in memory before the step."""
    named_parameters = list(train_step.named_parameters())
    blocks = {id(parameter): _find_block(name) for name, parameter in named_parameters}
    recorder.hold_tensors(((parameter, blocks[id(parameter)]) for _, parameter in named_parameters), "weights")
    for parameter, state in train_step.optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        recorder.hold_tensors(((value, blocks.get(id(parameter), NONE)) for value in tensors), "optimizer")


def _find_block(name: str) -> int:
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else NONE


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


class _LogitLoss(torch.autograd.Function):
    """The loss as a compiler's graph computes it: it reads logits once, and writes their gradient over them.

    Its operations on fake tensors have the same tensors and bytes (tests measure that); values do not matter.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax().float().expand(count).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return logits.mul_(grads[0][0].to(logits.dtype)), None


def fuse_losses(heads: Iterable[Head | None]) -> None:
    """Let heads compute their losses as in one graph; one of split, capped or chunked logits remains as it is."""
    for head in heads:
        if isinstance(head, Head) and (count := _count_figures(head)):
            head.fused = partial(_compute_loss, count=count)


def _count_figures(head: Head) -> int:
    """Return how many figures the loss has that a graph fuses; 0: none is."""
    objective = head.fused
    if objective is None:
        return 1 if head.loss is cross_entropy else 0
    if not isinstance(objective, Objective) or objective.cap or objective.chunk or objective.vocabulary.ranks > 1:
        return 0
    return 1 + len(objective.terms) if all(term.values in FUSED_TERMS for term in objective.terms) else 0


def _compute_loss(hidden: Tensor, weight: Tensor, targets: Tensor, product: Product, count: int) -> Tensor:
    figures: Tensor = _LogitLoss.apply(product(hidden, weight), count)  # type: ignore[no-untyped-call]
    return figures if count > 1 else figures[0].clone()  # FSDP warns of views


def trace_run(run: Run, speeds: Speeds, *, full: bool = False) -> TracedStep:
    """Trace a step of the first rank of each pipeline rank.

    Args:
        full: trace all blocks and micro-batches instead of composing them from a few.
    """
    start = time.perf_counter()
    ranks = [number * run.layout.devices // run.layout.pipeline for number in range(run.layout.pipeline)]
    # one task for each process: process groups of a second trace would have other names, which DTensor's caches lack
    tasks = [(run, speeds, rank, full) for rank in ranks]
    try:
        rank_results = map_in_forks(_build_rank_result, tasks, os.cpu_count() or 1, TRACE_SECONDS)
    except ForkedTaskError as error:
        raise RunError(f"the run could not be traced ({error}); give the machine more memory.") from None
    return build_traced_step(run, run.layout, run.microbatches, speeds, rank_results, time.perf_counter() - start)


def _build_rank_result(run: Run, speeds: Speeds, rank: int, full: bool) -> RankResult:
    return build_rank_result(run, run.layout, speeds, build_rank_trace(run, rank, full=full), run.machine.device)


def build_rank_trace(run: Run, rank: int, *, full: bool = False) -> StepTrace:
    """Return the trace of a rank, composed from a short one where its blocks allow it; see `trace_run`."""
    eager_run, device, fuses_loss = make_eager(run), run.machine.device, run.compile.fuses
    if full or not _blocks_repeat(run):
        return trace_rank(eager_run, rank, device, fuses_loss)
    short = trace_rank(shorten_run(eager_run), rank, device, fuses_loss)
    blocks = {stage: run.staging.layers[stage] for stage in short.blocks}
    return compose_trace(short, blocks, _find_period(run), run.microbatches, _count_units(run))


def _blocks_repeat(run: Run) -> bool:
    """Whether blocks do the same one after another.

    They do not where they are of several kinds, where weights are gathered further ahead than the next block's, where
    DDP sums buckets of several blocks' gradients, where a schedule separates backward for weights, which torch computes
    for one after another, and where some blocks are sharded in another way.
    """
    alike = len(run.model.kinds()) == 1 and blocks_are_alike(run.model.parameter_names(), run.parallelism.groups or {})
    prefetch = run.parallelism.resolve_prefetch(run.layout)
    differ = prefetch > 1 or run.layout.only_replicated or run.staging.splits_backward
    return alike and not differ


def make_eager(run: Run) -> Run:
    """Return the run without what a trace can't execute: compilation, matmuls in eight bits, FlexAttention.

    Its masks are dense instead.
    """
    regather = regathers_input(run.parallelism, run.memory, run.layout)  # which depends on what is replaced
    parallelism = dataclasses.replace(run.parallelism, async_tensor=False, regather=regather)
    precision = dataclasses.replace(run.precision, matmuls="compute").drop_unused_settings()
    compile_settings = dataclasses.replace(run.compile, scope="off")
    training = run.training
    if training.attention == "flex":
        training = dataclasses.replace(training, attention="auto")
    return dataclasses.replace(
        run, compile=compile_settings, parallelism=parallelism, precision=precision, training=training
    )


def shorten_run(run: Run) -> Run:
    """Return the run with as few blocks and micro-batches as their composition needs."""
    layers, start = [], 0
    for first, end in run.staging.layers:
        count = end - first
        if count // _find_period(run) > _count_units(run):
            count = _count_units(run) * _find_period(run) + count % _find_period(run)
        layers.append((start, start + count))
        start += count
    staging = dataclasses.replace(run.staging, layers=tuple(layers))
    short = dataclasses.replace(run, staging=staging, model=dataclasses.replace(run.model, layers=start))
    if run.layout.pipeline > 1 or run.microbatches <= MICROBATCHES:
        return short
    tokens = MICROBATCHES * run.microbatch_rows * run.layout.data_ranks * run.training.seq_len
    training = dataclasses.replace(run.training, global_batch=tokens)
    return dataclasses.replace(short, microbatches=MICROBATCHES, training=training)


def _count_units(run: Run) -> int:
    """Return the units of blocks of a short trace."""
    return UNITS_AHEAD if run.parallelism.resolve_prefetch(run.layout) else UNITS


def _find_period(run: Run) -> int:
    return run.memory.every if run.memory.checkpointing == "every_n" else 1
