"""From a run and its world to what trains: the one place where the axes meet.

The order in which techniques are applied is written here once, for any model's declaration: build on meta, split into
stages, precision, tensor, context, activation checkpointing, compile, sharding, initial weights, copies, optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from titan.compile.backend import compile_stage
from titan.errors import ConfigError
from titan.memory.checkpointing import checkpoint_blocks
from titan.model import attention, init_weights, loss
from titan.model.schema import Decoder
from titan.parallelism import context, context_kernels, data, tensor
from titan.parallelism.mesh import World
from titan.parallelism.pipeline.runtime import Pipeline, Plan, TiedWeights, link
from titan.parallelism.schema import Parallelism
from titan.precision import low_precision
from titan.precision.cast import set_compute_dtype
from titan.precision.schema import Precision
from titan.run.run import Run
from titan.training.train_step import GradAccumulation, MicrobatchRunner, Stage, TrainStep

Note = Callable[[str], None]


def build(run: Run, world: World, log: Note = lambda line: None) -> TrainStep:
    """Build what trains `run` on this rank.

    Args:
        run: the choices and what follows from them.
        world: the ranks and their mesh.
        log: told each transformation as it is done.
    """
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        log(line)

    stages = _build_stages(run, world, note)
    initial = [stage.model.initial() for stage in stages.values()]
    for stage in stages.values():
        _transform(stage, run, world)
    _log_layout(run, world, note)
    device = torch.device("cpu") if run.memory.offload else world.device
    for stage, how in zip(stages.values(), initial, strict=True):
        with world.memory():
            init_weights.materialise(stage.model, how, run.training.seed, device)
            stage.model.init_buffers(world.device)  # which offloading does not concern
    if told := run.optimizer.describe():
        note(f"optimizer: {told}")
    note(f"initial weights from seed {run.training.seed} on {device}")
    return TrainStep(
        stages=tuple(stages.values()),
        runner=_runner(stages, run, world),
        optimizer=run.optimizer.build(named for stage in stages.values() for named in stage.named()),
        world=world,
        scales=_scales(stages, run, world),
        places=_token_positions(run, world),
        tied_weights=_tied_weights(stages, run, world),
        multiple=run.parallelism.multiple(run.layout),
        notes=tuple(notes),
    )


def _build_stages(run: Run, world: World, note: Note) -> dict[int, Stage]:
    """This rank's stages by their number, on meta."""
    staging, stages = run.staging, {}
    for number in staging.mine(world.coordinate("pipeline")):
        with torch.device("meta"):
            model: Any = run.model.build()
        if staging.count > 1:
            model.keep(range(*staging.layers[number]), first=number == 0, last=number == staging.count - 1)
        stages[number] = Stage(model)
    note(f"built on meta: {sum(p.numel() for s in stages.values() for p in s.parameters()):,} parameters")
    if staging.count > 1:
        note(f"stages {', '.join(map(str, stages))} of {staging.count}: {staging.schedule}, idle {staging.idle:.1%}")
    return stages


def _transform(stage: Stage, run: Run, world: World) -> None:
    """Apply to one stage what the axes ask for, in the one order that works."""
    model, how = stage.model, run.parallelism
    taken = run.precision.choose(run.model.products(), run.layout.tensor).taken
    sharding = _sharding(world)
    _apply_precision_and_tensor(
        model, run.precision, how, world, taken, run.training.loss_chunk, sharded=sharding is not None
    )
    attention.apply(model, run.training.attention, world.device, blocks=run.training.attention == "flex")
    if world.context is not None:
        context.apply(model, how.context_method, world.context, how.balance, _kernel(run, world))
    checkpoint_blocks(model.blocks(), run.memory, first=int(next(iter(model.layers))))
    compile_stage(
        stage,
        run.compile,
        whole=sharding is None,
        share=run.memory.share,
        keep_buffers=run.staging.splits_backward,
    )
    if sharding is not None:
        if small := run.precision.gathered(run.model.products(), run.cut):
            low_precision.gather_small(model, small)
        data.shard(
            stage,
            sharding,
            run.precision.dtype,
            reshard=how.reshards(run.layout),
            prefetch=how.prefetch,
            offload=run.memory.offload,
        )


def _scales(stages: dict[int, Stage], run: Run, world: World) -> low_precision.Scales | None:
    """What follows the scales of weights that are gathered in float8; offloaded ones are scaled where they are used."""
    mesh = _sharding(world)
    if mesh is None or run.memory.offload or not run.precision.gathered(run.model.products(), run.cut):
        return None
    return low_precision.Scales((p for stage in stages.values() for p in stage.parameters()), mesh.get_group(-1))


def _apply_precision_and_tensor(
    model: Any,
    how: Precision,
    parallelism: Parallelism,
    world: World,
    taken: tuple[str, ...] = (),
    chunk: int | None = None,
    sharded: bool = False,
) -> None:
    """Say how a model computes and what at a time, and cut its products: first in training and in generation.

    Args:
        model: on meta.
        how: the types.
        parallelism: how products are cut.
        world: the ranks.
        taken: modules whose products are computed in eight bits.
        chunk: tokens whose logits exist at a time; None: all.
        sharded: whether FSDP gathers weights.
    """
    set_compute_dtype(model, how, taken, sharded)
    if chunk is not None and model.head is not None:
        model.head.chunked = partial(loss.chunked, chunk=chunk)
    if (mesh := world.dimensions("tensor")) is not None:
        if parallelism.async_tensor:
            tensor.overlap(mesh)
        sequence, parts = parallelism.sequence_parallel, parallelism.loss_parallel
        tensor.apply(model, mesh, sequence=sequence, loss=parts, chunk=chunk)


def build_for_generation(schema: Decoder, how: Precision, world: World) -> Any:
    """A whole model, or this tensor rank's part of it, that computes without gradients.

    Its parameters are in the type to compute in; they have memory, and no values yet.

    Args:
        schema: the model's shape.
        how: the type.
        world: the ranks; no other dimension than tensor.
    """
    with torch.device("meta"):
        model = schema.build().to(how.dtype)
    _apply_precision_and_tensor(model, how, Parallelism(sequence_parallel=False, loss_parallel=False), world)
    with world.memory():
        init_weights.allocate(model, world.device)
    return model.requires_grad_(False)


def _kernel(run: Run, world: World) -> str:
    """The kernel that attends, as torch says, by the name that `training.attention` has for it.

    Raises:
        ConfigError: when the kernel that was chosen can't.
    """
    choice, documents, device = run.training.attention, run.dataset.mask_documents, world.device
    model, dtype, cut = run.model, run.precision.dtype, run.layout.tensor
    shape = (model.heads // cut, model.kv_heads // cut, model.head_size)
    try:
        if choice == "flex" or _attends_by_blocks(run, world):
            return context_kernels.choose(choice, shape, dtype, device, documents)
        return attention.chosen(shape, dtype, device, attention.kernels(choice, device), documents)
    except attention.NoKernel as error:
        masked = ", with a mask for documents" if documents else ""
        raise ConfigError(
            f"training.attention={choice}: torch has no such kernel for heads of {model.head_size} in "
            f"{run.precision.compute} on this {device.type} device{masked}; give auto."
        ) from error


def _attends_by_blocks(run: Run, world: World) -> bool:
    """Whether attention is put together from blocks of keys, for which a kernel has to give more than its output."""
    method = run.parallelism.context_method
    return world.context is not None and (
        method == "ring" or (method == "allgather" and not run.dataset.mask_documents)
    )


def _attention(run: Run, world: World) -> str:
    """What attends, and how documents are kept apart."""
    kernel = _kernel(run, world)
    if kernel == "flex":
        return f"flex, in blocks of {attention.BLOCK} tokens"
    if kernel == "math" and _attends_by_blocks(run, world):
        return "the formula" + (", which keeps documents apart" if run.dataset.mask_documents else "")
    named = f"torch's {kernel} kernel for {world.device.type.upper()}"
    return f"{named}, documents by a mask of tokens by tokens" if run.dataset.mask_documents else named


def _sharding(world: World) -> Any:
    """The mesh that FSDP cuts weights over; None where they are whole."""
    return None if world.layout.copies else world.dimensions("replicate", "shard")


def _log_layout(run: Run, world: World, note: Note) -> None:
    """Say what was applied, in its order."""
    how, layout = run.parallelism, run.layout
    note(f"precision {run.precision.describe()}")
    if run.precision.small:
        _log_low_precision(run, world, note)
    if layout.tensor > 1:
        sequence = "with" if how.sequence_parallel else "without"
        of = "parts" if how.loss_parallel or run.training.loss_chunk else "whole rows"
        note(f"tensor parallel over {layout.tensor} ranks, {sequence} sequence parallel, loss from {of} of the logits")
    if layout.context > 1:
        balance = ", head and tail balanced" if how.balance else ""
        note(f"context parallel over {layout.context} ranks by {how.context_method}{balance}")
    note(f"attention by {_attention(run, world)}")
    if run.training.loss_chunk:
        note(f"logits and loss of {run.training.loss_chunk:,} tokens at a time")
    note(f"activation checkpointing {run.memory.checkpointing}")
    note(f"compile {run.compile.scope}" + (f" (auto: {run.compile_why})" if run.compile_why else ""))
    if (mesh := _sharding(world)) is not None:
        copies = f", {layout.replicate} copies" if layout.replicate > 1 else ""
        note(f"sharded over {mesh.size(-1)} ranks{copies}, resharded after forward: {how.reshards(layout)}")
    elif layout.copies:
        note(f"copied on {layout.replicate} ranks")


def _log_low_precision(run: Run, world: World, note: Note) -> None:
    """Say which products are computed in eight bits, and which weights are gathered so."""
    how, products = run.precision, run.model.products()
    choice, gathered = how.choose(products, run.layout.tensor), how.gathered(products, run.cut)
    left = f"; in {how.compute}: {choice.left_alone()}" if choice.left else ""
    note(f"{len(choice.taken)} of {len(products)} products in {how.products}{left}")
    if _sharding(world) is not None:
        of = f" of {len(gathered)} products" if gathered else ""
        note(f"weights{of} gathered in {'float8' if gathered else how.compute}")


def _runner(stages: dict[int, Stage], run: Run, world: World) -> MicrobatchRunner:
    """What takes micro-batches through the stages."""
    if run.staging.count > 1:
        group = world.group("pipeline")
        if group is None:
            raise RuntimeError("stages without a pipeline")
        plan = _plan(run)
        return Pipeline(stages, plan, group, world.device, link(plan, group, world.timeout))
    stage: nn.Module = stages[0]
    copies = world.dimensions("replicate")
    wrapped = data.replicate(stage, copies) if world.layout.copies and copies is not None else stage
    return GradAccumulation(stage, wrapped, run.parallelism.accumulates_whole(run.layout))


def _plan(run: Run) -> Plan:
    return Plan(
        schedule=run.staging.schedule,
        owners=run.staging.owners,
        rows=run.microbatch_rows,
        length=run.training.seq_len // run.layout.context,
        width=run.model.dim,
        cut=run.layout.tensor if run.parallelism.sequence_parallel else 1,
        dtype=run.precision.dtype,
        whole=run.parallelism.accumulates_whole(run.layout),
    )


def _token_positions(run: Run, world: World) -> Any:
    if world.context is None:
        return None
    size, rank = run.layout.context, world.coordinate("context")

    @cache  # on the device already, so that no step waits for a copy
    def places(length: int) -> Tensor:
        return context.positions(length, size=size, rank=rank, balance=run.parallelism.balance).to(world.device)

    return places


def _tied_weights(stages: dict[int, Stage], run: Run, world: World) -> TiedWeights | None:
    """The two copies of a tied weight, for the ranks that have one of them."""
    staging, group = run.staging, world.group("pipeline")
    if not run.model.tied or group is None:
        return None
    ends = stages.get(0), stages.get(staging.count - 1)
    first = ends[0].model.tok_embeddings.weight if ends[0] else None
    last = ends[1].model.head.weight if ends[1] else None
    other = staging.owners[-1] if first is not None else staging.owners[0]
    if first is None and last is None:
        return None
    tied_weights = TiedWeights(first, last, group, other, world.device)
    tied_weights.greet()
    return tied_weights
