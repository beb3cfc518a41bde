"""Builds the model, the optimizer and the train step from a run and its world: the one place where the axes meet.

The order in which techniques are applied is written here once, for any model's declaration: build on meta, split into
stages, precision, tensor, context, activation checkpointing, compile, FSDP, initial weights, DDP, optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from titan.compile.backend import GraphLabel, compile_stage
from titan.errors import ConfigError
from titan.estimate.regather import regathers_input
from titan.memory.checkpointing import checkpoint_blocks
from titan.model import attention, balance, init_weights, loss_terms
from titan.model.core import KeyValueCore, RecurrentCore, find_cores, iterate_cores
from titan.model.parts import list_parts
from titan.model.schema import Decoder
from titan.optimizer.update_factors import build_optimizer
from titan.parallelism import context, context_chunks, context_kernels, data, expert, tensor
from titan.parallelism.context_chunks import RowParts
from titan.parallelism.mesh import RunContext, World
from titan.parallelism.pipeline.runtime import Pipeline, PipelineShape, TiedWeights, create_p2p_groups
from titan.parallelism.schema import Sharding, Strategy
from titan.parallelism.strategy import is_in_group
from titan.parallelism.units import list_units, list_units_inside_blocks
from titan.precision import low_precision
from titan.precision.low_precision import set_compute_dtype
from titan.precision.schema import Precision
from titan.run.run import Run
from titan.training.expert_load import build_expert_load
from titan.training.train_step import GradAccumulation, MicrobatchRunner, ModelStage, StageWithLosses, TrainStep

Note = Callable[[str], None]


def build_train_step(
    run: Run, world: RunContext, log: Note = lambda line: None, memory: AbstractContextManager[Any] | None = None
) -> TrainStep:
    """Build the train step of `run` on this rank.

    Args:
        log: called with one line for each transformation.
        memory: the context in which weights get their memory: a simulation's fake tensors, for example.

    Raises:
        ConfigError: when the chosen attention kernel can't run.
    """
    notes: list[str] = []

    def add_note(line: str) -> None:
        notes.append(line)
        log(line)

    stages, choices = _build_stages(run, world, add_note), _Choices(run, world)
    model = next(iter(stages.values())).model  # what the blocks return is the same on all stages
    initializers = [stage.model.initial() for stage in stages.values()]
    groups = {name: strategy.build(world) for name, strategy in _collect_groups(run).items()}
    row_exchange = _build_row_exchange(model, run, world)
    labels = [
        label
        for stage in stages.values()
        for label in _transform_stage(stage, run, world, choices, groups, row_exchange)
    ]
    parallelism = run.parallelism
    data.configure_exchange(
        [*stages.values()], parallelism.reduce_buffers, parallelism.separate_reduce, parallelism.symmetric_memory
    )
    for line in _describe_layout(run, world, choices, groups, [b for s in stages.values() for b in s.model.blocks()]):
        add_note(line)
    device = torch.device("cpu") if run.memory.offload else world.device
    for stage, init in zip(stages.values(), initializers, strict=True):
        with memory or nullcontext():
            init_weights.materialise_model(stage.model, init, run.training.seed, device)
            stage.model.init_buffers(world.device)  # buffers are never offloaded
    if description := run.optimizer.describe():
        add_note(f"optimizer: {description}")
    add_note(f"initial weights from seed {run.training.seed} on {device}")
    runner = _build_runner(stages, run, world, choices)
    parameters = (named for stage in stages.values() for named in stage.iterate_global_parameters())
    return TrainStep(
        stages=tuple(stages.values()),
        runner=runner,
        optimizer=build_optimizer(run.optimizer, run.model, parameters),
        world=world,
        scales=_build_scales(stages, run, choices),
        token_positions=_build_token_positions(run, world),
        tied_weights=_build_tied_weights(stages, run, world),
        seq_len_multiple=choices.row_multiple,
        notes=tuple(notes),
        terms=(*run.training.terms, *model.losses),
        num_block_sums=StageWithLosses.count_block_sums(model) if _has_split_rows(run) else 0,
        expert_load=build_expert_load(tuple(stages.values()), run.model),
        graph_labels=tuple(labels),
    )


class _Choices:
    """What several techniques need to know of a run on this rank, decided once.

    Attributes:
        fsdp: the mesh that FSDP shards weights over; None where they are whole.
        reshard: see `Parallelism.resolve_reshard`.
        prefetch: see `Parallelism.resolve_prefetch`.
        accumulates_whole: see `Parallelism.accumulates_whole`.
        row_multiple: see `Parallelism.compute_row_multiple`.
        eight_bit: the matmuls that are computed in eight bits, and why others are not.
        gathered: the matmuls whose weights are gathered in float8: their scales are those of one mesh.
        regather: whether regions gather their input again in backward.
        kernel: the attention kernel that torch chooses, as in `training.attention`.
    """

    def __init__(self, run: Run, world: World) -> None:
        parallelism, precision, layout = run.parallelism, run.precision, run.layout
        gathered = precision.select_gathered(run.model.linear_layers(), run.weight_sharding)
        self.fsdp: Any = None if layout.only_replicated else world.get_mesh("replicate", "shard")
        self.reshard = parallelism.resolve_reshard(layout)
        self.prefetch = parallelism.resolve_prefetch(layout)
        self.accumulates_whole = parallelism.accumulates_whole(layout)
        self.row_multiple = parallelism.compute_row_multiple(layout)
        self.eight_bit = precision.select_layers(run.model.matmuls(), layout.tensor)
        self.gathered = tuple(name for name in gathered if not is_in_group(name, parallelism.groups or {}))
        self.regather = regathers_input(parallelism, run.memory, layout)
        self.kernel = _choose_attention_kernel(run, world)


def _collect_groups(run: Run) -> dict[str, Strategy]:
    """Return how modules are sharded that are not as all others: experts, and the user's groups, by name."""
    groups: dict[str, Strategy] = dict(run.parallelism.groups or {})
    if (ranks := run.layout.expert) > 1:
        model: Any = run.model
        sharding = expert.ExpertSharding(experts=model.experts, ranks=ranks, shard=run.layout.expert_shards)
        groups = {"experts": sharding, **groups}
    return groups


def _has_split_rows(run: Run) -> bool:
    """Return whether tensor ranks have parts of a row between matmuls."""
    return run.parallelism.sequence_parallel and run.layout.tensor > 1


def _build_stages(run: Run, world: World, note: Note) -> dict[int, ModelStage]:
    """Return this rank's stages by their number, on meta."""
    stage_plan, stages = run.staging, dict[int, ModelStage]()
    for number in stage_plan.list_stages(world.get_coordinate("pipeline")):
        with torch.device("meta"):
            model: Any = run.model.build()
        if stage_plan.count > 1:
            model.keep(range(*stage_plan.layers[number]), first=number == 0, last=number == stage_plan.count - 1)
        if StageWithLosses.count_block_sums(model):
            parts = run.layout.tensor if _has_split_rows(run) else 1
            stages[number] = StageWithLosses(model, world.get_coordinate("tensor"), parts)
        else:
            stages[number] = ModelStage(model)
    note(f"built on meta: {sum(p.numel() for s in stages.values() for p in s.parameters()):,} parameters")
    if stage_plan.count > 1:
        numbers = f"{'stages' if len(stages) > 1 else 'stage'} {', '.join(map(str, stages))} of {stage_plan.count}"
        note(f"pipeline: {numbers}, schedule {stage_plan.schedule}, idle {stage_plan.idle:.1%}")
    return stages


def _build_row_exchange(model: Any, run: Run, world: World) -> balance.RowExchange:
    """Return the exchange that lets routers see complete rows; a collective: all ranks call it."""
    names = ("context", "tensor") if _has_split_rows(run) else ("context",)
    needed = model.counted and balance.needs_whole_rows(run.model)
    if not needed or (group := world.get_group(*names)) is None:
        return balance.RowExchange()
    layout = run.layout
    return RowParts(group, layout.context, layout.tensor if "tensor" in names else 1, run.parallelism.balance)


def _transform_stage(
    stage: ModelStage,
    run: Run,
    world: World,
    choices: _Choices,
    groups: Mapping[str, Sharding],
    row_exchange: balance.RowExchange,
) -> list[GraphLabel]:
    """Apply the techniques to one stage, in the one order that works; return what is compiled."""
    model, parallelism, mesh, chunk = stage.model, run.parallelism, choices.fsdp, run.training.loss_chunk
    set_compute_dtype(model, run.precision, choices.eight_bit.quantized, mesh is not None)
    terms = tuple(loss_terms.Term(name, t.coefficient, t.build()) for name, t in run.training.terms.items())
    loss_terms.set_head_loss(model.head, terms, chunk, model.config.logit_cap)
    if (expert_mesh := world.get_mesh("expert", experts=True)) is not None:
        expert.shard_experts(model, expert_mesh, parallelism.exchange)
    if (tensor_mesh := world.get_mesh("tensor")) is not None:
        if parallelism.async_tensor:
            tensor.enable_async_tensor(tensor_mesh)
        sequence, loss_parallel = parallelism.sequence_parallel, parallelism.loss_parallel
        options = {"sequence_parallel": sequence, "loss_parallel": loss_parallel, "regather": choices.regather}
        tensor.apply_tensor_plan(model, tensor_mesh, chunk=chunk, **options)
    balance.set_row_exchange(model, row_exchange)
    attention.set_kernels(model, run.training.attention, world.device, use_flex=run.training.attention == "flex")
    if (context_group := world.get_group("context")) is not None:
        method, kernel = parallelism.context_method, choices.kernel
        context.replace_attention(model, method, context_group, parallelism.balance, kernel)
    hands_on = context_group is not None and any(isinstance(core, RecurrentCore) for core in iterate_cores(model))
    if run.layout.expert > 1:
        parallelism.exchange.change_model(model)
    # parts that one graph can hold: without exchanges of tokens and hooks of FSDP inside
    units = list_units_inside_blocks(list_units(model, mesh, groups, choices.reshard))
    hooked = {id(model.get_submodule(name)) for name in units}
    parts = [list_parts(block, expert.exchanges_tokens, lambda m: id(m) in hooked) for block in model.blocks()]
    own_sharding = parallelism.model_sharding
    checkpoint_blocks(model.blocks(), run.memory, int(next(iter(model.layers))), parts, run.compile.scope != "off")
    labels = compile_stage(
        stage,
        run.compile,
        fullgraph=(mesh is None or own_sharding is not None) and not hands_on,
        fullgraph_blocks=not hands_on,
        share=run.memory.share,
        keep_buffers=run.staging.splits_backward,
        parts=parts,
        inductor=own_sharding.compiler_settings() if own_sharding is not None else {},
    )
    if mesh is not None and choices.gathered:
        low_precision.use_float8_gather(model, choices.gathered)
    if mesh is not None or groups:
        data.shard_stage(
            stage,
            mesh,
            run.precision.dtype,
            reshard=choices.reshard,
            prefetch=choices.prefetch,
            offload=run.memory.offload,
            groups=groups,
            accumulate_dtype=run.precision.accumulate_dtype,
        )
    return labels


def _build_scales(stages: dict[int, ModelStage], run: Run, choices: _Choices) -> low_precision.Float8Scales | None:
    """Return what updates the scales of weights that are gathered in float8; offloaded weights are scaled at use."""
    mesh = choices.fsdp
    if mesh is None or run.memory.offload or not choices.gathered:
        return None
    return low_precision.Float8Scales((p for stage in stages.values() for p in stage.parameters()), mesh.get_group(-1))


def build_for_generation(schema: Decoder, precision: Precision, world: World) -> Any:
    """Return a whole model, or this tensor rank's part of it, that computes without gradients.

    Its parameters are in the compute type and have memory, but no values yet.

    Args:
        world: the ranks; tensor is the only dimension above one.
    """
    with torch.device("meta"):
        model = schema.build().to(precision.dtype)
    set_compute_dtype(model, precision)
    if (mesh := world.get_mesh("tensor")) is not None:
        tensor.apply_tensor_plan(model, mesh, sequence_parallel=False, loss_parallel=False)
    init_weights.allocate_model(model, world.device)
    return model.requires_grad_(False)


def _choose_attention_kernel(run: Run, world: World) -> str:
    """Return the name of the attention kernel that torch chooses, as in `training.attention`."""
    choice, documents, device = run.training.attention, run.dataset.mask_documents, world.device
    model, dtype, ranks, masked = run.model, run.precision.dtype, run.layout.tensor, _describe_masks(run)
    shape = (model.heads // ranks, model.kv_heads // ranks, model.head_size)
    masks_chunks = model.needs_mask(run.training.seq_len) and not _uses_ring_attention(run, world)
    is_merged = choice == "flex" or _merges_blocks(run, world)
    try:
        kernel = context_kernels.choose_kernel(choice, shape, dtype, device, documents) if is_merged else ""
        kernels = attention.choose_kernels(choice, device)
        if choice != "flex" and masks_chunks:  # torch's kernels for both masks
            attention.query_selected_kernel(shape, dtype, device, kernels, has_mask=True)
        return kernel or attention.query_selected_kernel(shape, dtype, device, kernels, documents)
    except attention.NoKernelError as error:
        with_mask = f", with a mask for {masked}" if masked else ""
        raise ConfigError(
            f"training.attention={choice}: torch has no such kernel for head size {model.head_size} in "
            f"{run.precision.compute} on this {device.type} device{with_mask}; give training.attention=auto."
        ) from error


def _merges_blocks(run: Run, world: World) -> bool:
    """Whether attention is merged from blocks of keys, for which a kernel has to return the logsumexp too."""
    gathers = world.layout.context > 1 and run.parallelism.context_method == "allgather"
    return _uses_ring_attention(run, world) or (gathers and not run.dataset.mask_documents)


def _uses_ring_attention(run: Run, world: World) -> bool:
    return world.layout.context > 1 and run.parallelism.context_method == "ring"


def _describe_masks(run: Run) -> str:
    """Return what is masked besides causality; empty if nothing is."""
    masked = {"documents": run.dataset.mask_documents, "chunks": run.model.needs_mask(run.training.seq_len)}
    return " and ".join(name for name, is_on in masked.items() if is_on)


def _describe_attention(run: Run, world: World, kernel: str) -> str:
    """Return the attention kernel with its device, and how documents and chunks are masked."""
    masked = _describe_masks(run)
    if kernel == "flex":
        return f"flex, blocks of {attention.BLOCK} tokens"
    mask_name = "document mask" if masked == "documents" else f"mask of {masked}"
    if kernel == "math" and _merges_blocks(run, world):
        return f"explicit formula, {mask_name}" if masked else "explicit formula"
    kernel_name = f"{kernel} ({world.device.type.upper()})"
    if masked and _uses_ring_attention(run, world):
        return f"{kernel_name}, explicit formula with a {mask_name}"
    return f"{kernel_name}, dense {mask_name}" if masked else kernel_name


def _describe_layout(
    run: Run, world: World, choices: _Choices, groups: Mapping[str, Sharding], blocks: Sequence[nn.Module]
) -> Iterator[str]:
    """Yield what was applied, in order."""
    parallelism, layout = run.parallelism, run.layout
    yield f"precision: {run.precision.describe()}"
    if run.precision.eight_bit:
        yield from _describe_low_precision(run, choices)
    if layout.tensor > 1:
        sequence = "with" if parallelism.sequence_parallel else "without"
        logits = "split" if parallelism.loss_parallel or run.training.loss_chunk else "whole"
        yield f"tensor parallel over {layout.tensor} ranks, {sequence} sequence parallel, loss from {logits} logits"
        if choices.regather:
            yield "inputs of split matmuls gathered again in backward"
    if layout.context > 1:
        cores = [core for block in blocks for core in iterate_cores(block)]
        methods: list[str] = [parallelism.context_method] if find_cores(blocks).has_titan else []
        methods += ["gathered keys and values"] if any(isinstance(core, KeyValueCore) for core in cores) else []
        methods += ["states that are handed on"] if any(isinstance(core, RecurrentCore) for core in cores) else []
        balanced = ", balanced" if parallelism.balance else ""
        yield f"context parallel over {layout.context} ranks by {' and '.join(methods)}{balanced}"
    if parallelism.exchange.is_own and layout.expert > 1:
        yield f"tokens exchanged by {parallelism.exchange._target_}"
    yield f"attention kernel: {_describe_attention(run, world, choices.kernel)}"
    if run.training.loss_chunk:
        yield f"logits and loss in chunks of {run.training.loss_chunk:,} tokens"
    yield f"activation checkpointing: {run.memory.checkpointing}"
    yield f"compile: {run.compile.scope}" + (f" (auto: {run.compile_why})" if run.compile_why else "")
    if choices.fsdp is not None:
        replicas = f", {layout.replicate} replicas" if layout.replicate > 1 else ""
        over = f"over {_format_ranks(choices.reshard)} " if not isinstance(choices.reshard, bool) else ""
        resharded = f"{'' if choices.reshard else 'not '}resharded {over}after forward"
        yield f"sharded over {_format_ranks(choices.fsdp.size(-1))}{replicas}, {resharded}"
    for name, (strategy, ranks) in groups.items():
        if ranks is not None:
            yield f"group {name} ({', '.join(strategy.match)}): {strategy.describe(ranks)}"
    if layout.only_replicated:
        yield f"replicated on {_format_ranks(layout.replicate)}"


def _format_ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _describe_low_precision(run: Run, choices: _Choices) -> Iterator[str]:
    """Yield which matmuls are computed in eight bits, and which weights are gathered in them."""
    precision, matmuls, gathered, choice = run.precision, run.model.matmuls(), choices.gathered, choices.eight_bit
    unquantized = f"; in {precision.compute}: {choice.describe_exclusions()}" if choice.exclusions else ""
    yield f"{len(choice.quantized)} of {len(matmuls)} matmuls in {precision.matmuls}{unquantized}"
    if choices.fsdp is not None:
        gathered_count = f" of {len(gathered)} matmuls" if gathered else ""
        yield f"weights{gathered_count} gathered in {'float8' if gathered else precision.compute}"


def _build_runner(stages: dict[int, ModelStage], run: Run, world: RunContext, choices: _Choices) -> MicrobatchRunner:
    """Return what runs micro-batches through the stages."""
    advance = world.activity.record_progress
    if (group := world.get_group("pipeline")) is not None:
        shape = PipelineShape(
            schedule=run.staging.schedule,
            owners=run.staging.owners,
            rows=run.microbatch_rows,
            length=run.training.seq_len // run.layout.context,
            width=run.model.dim,
            split=run.layout.tensor if run.parallelism.sequence_parallel else 1,
            dtype=run.precision.dtype,
            accumulates_whole=choices.accumulates_whole,
            reshards=choices.reshard is not False,
        )
        losses = len(run.training.terms), StageWithLosses.count_block_sums(next(iter(stages.values())).model)
        configure = partial(run.parallelism.exchange.configure_schedule, device=world.device)
        groups = create_p2p_groups(shape, group, world.timeout)
        return Pipeline(stages, shape, group, world.device, groups, losses, advance, configure)
    stage: nn.Module = stages[0]
    mesh = world.get_mesh("replicate")
    wrapped = data.replicate(stage, mesh) if world.layout.only_replicated and mesh is not None else stage
    return GradAccumulation(stage, wrapped, choices.accumulates_whole, advance)


def _build_token_positions(run: Run, world: World) -> Callable[[int], Tensor] | None:
    """Return what gives this rank's positions of a row of some length; None where ranks have whole rows."""
    if world.layout.context == 1:
        return None
    size, rank = run.layout.context, world.get_coordinate("context")

    @cache  # on the device already, so that no step waits for a copy
    def compute_token_positions(length: int) -> Tensor:
        return context_chunks.compute_positions(length, size, rank, run.parallelism.balance).to(world.device)

    return compute_token_positions


def _build_tied_weights(stages: dict[int, ModelStage], run: Run, world: World) -> TiedWeights | None:
    """Return the two replicas of a tied weight, on the ranks that have one of them."""
    stage_plan, group = run.staging, world.get_group("pipeline")
    if not run.model.tied or group is None:
        return None
    end_stages = stages.get(0), stages.get(stage_plan.count - 1)
    first = end_stages[0].model.tok_embeddings.weight if end_stages[0] else None
    last = end_stages[1].model.head.weight if end_stages[1] else None
    peer = stage_plan.owners[-1] if first is not None else stage_plan.owners[0]
    if first is None and last is None:
        return None
    tied_weights = TiedWeights(first, last, group, peer, world.device)
    tied_weights.connect()
    return tied_weights
