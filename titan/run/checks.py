"""Check combinations of settings across axes, in one place, before any work starts. Free of torch.

Each function of `CHECKS` yields the sentences of what it rejects, of which the first ends the command.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from titan.cluster.compiler import find_missing_compiler, read_torch_version
from titan.config.kinds import get_kind
from titan.config.optional import advise_extra
from titan.config.settings import format_value, suggest_pattern
from titan.config.warning import warn_once
from titan.console.numbers import format_plural
from titan.dataset.schema import Synthetic
from titan.errors import ConfigError
from titan.estimate import fit
from titan.estimate.regather import list_regather_obstacles
from titan.hooks.schema import check_hooks
from titan.model.built_counts import is_titan_class
from titan.model.schema import Llama
from titan.parallelism import strategy
from titan.parallelism.pipeline.stage_plan import plan_stages
from titan.precision.schema import CAPABILITY, HARDWARE, QUANT_BLOCK
from titan.run.compile_scope import keeps_scales
from titan.run.model_limits import list_limit_faults
from titan.weights.hf_config import FAMILIES, OWN_MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from titan.run.run import Run

    Faults = Iterator[str]

EXCHANGE_TORCH = (2, 13)
"""The first release of torch whose FSDP has the settings of `_list_exchange_faults`."""


def check_run(run: Run, started: bool = False, remote: bool = False) -> None:
    """Raise ConfigError for a combination that can't work.

    Args:
        started: its ranks are started by others, not on this machine by titan.
        remote: its machine is a node that a scheduler will provide, with other packages and programs.
    """
    check_hooks(run.hooks)
    skipped = [_list_machine_faults] if started else []
    for list_faults in CHECKS:
        for sentence in list_faults(run, remote) if list_faults not in skipped else ():
            raise ConfigError(sentence)
    run.profile.check(run.layout.devices)


def _list_split_faults(run: Run, remote: bool) -> Faults:
    """Matmuls, and batches of a pipeline's schedule, that can't be split into equal parts."""
    degree, model, layout = run.layout.tensor, run.model, run.layout
    for name in model.SPLIT:
        if getattr(model, name) % degree:
            largest = math.gcd(*(getattr(model, other) for other in model.SPLIT))
            divisor = next(d for d in range(degree - 1, 0, -1) if largest % d == 0)
            yield (
                f"parallelism.tensor={degree}: does not divide model.{name}={getattr(model, name)}; "
                f"give a divisor of it, such as {divisor}."
            )
    if not is_titan_class(type(model)):  # a user's own is built, titan's are checked by tests
        from titan.model.module_checks import check_module

        sequence = run.parallelism.sequence_parallel and degree > 1
        check_module(model, degree, layout.context, layout.expert, run.memory.checkpointing == "gate", sequence)
    for phase in run.training.phases[1:] if run.staging.count > 1 else ():
        tokens = phase.rows * run.training.seq_len
        count = math.ceil(math.ceil(phase.rows / layout.data_ranks) / run.microbatch_rows)
        try:
            plan_stages(run.parallelism, layout, model, run.training.seq_len, count)
        except ConfigError as error:
            yield (
                f"training.grow: {tokens} tokens make {count} micro-batches of "
                f"{format_plural(run.microbatch_rows, 'row')}, and then {error}"
            )
        larger = replace(run, training=replace(run.training, global_batch=tokens, grow=()))
        fit.check_memory(larger, layout, run.machine, count, remote)


def _list_precision_faults(run: Run, remote: bool) -> Faults:
    """Types that can't be combined, and 8-bit matmuls where no kernel computes them."""
    precision, machine = run.precision, run.machine
    if precision.weights == "bf16" and precision.compute != "bf16":
        yield (
            f"precision.weights=bf16: requires precision.compute=bf16, not {precision.compute}; give "
            "precision=bf16_pure."
        )
    if not precision.eight_bit:
        return
    label = f"precision.matmuls={precision.matmuls}"
    if precision.compute != "bf16":
        yield f"{label}: requires precision.compute=bf16, not {precision.compute}; give that type."
    least = CAPABILITY[precision.matmuls]
    has_format = machine.device == "cuda" and (machine.capability is None or machine.capability >= least)
    subject = "the cluster" if remote and machine.device == "cuda" else "this machine"
    if not (precision.emulate or has_format):  # unknown of AMD's GPUs, and before the job has its node
        yield (
            f"{label}: requires {HARDWARE[least]}, and {subject} has {machine.name}; give precision.emulate=true to "
            "emulate it slowly, or precision=bf16."
        )
    matmuls = run.model.matmuls()
    for pattern in precision.skip:
        if not any(fnmatchcase(name, pattern) for name in matmuls):
            yield (
                f"precision.skip={format_value(precision.skip)}: no matmul of the model is named {pattern}; names are "
                f"such as {next(iter(matmuls))} and head{suggest_pattern(pattern, matmuls)}"
            )
    choice, multiple = precision.select_layers(matmuls, run.layout.tensor), QUANT_BLOCK[precision.matmuls]
    if not choice.quantized:
        yield (
            f"{label}: applies to no matmul of the model: {choice.describe_exclusions()}; change these, or give "
            "precision=bf16."
        )
    if "head" in choice.quantized and run.training.loss_chunk is not None:
        yield (
            f"training.loss_chunk={run.training.loss_chunk}: computes the head in {precision.compute}, and {label} "
            "includes the head; give precision.skip=[head], or null."
        )
    tokens = run.microbatch_rows * run.training.seq_len // run.layout.context
    if tokens % multiple and precision.weight_grads_in_8_bits:
        yield (
            f"{label}: a micro-batch of a rank has {tokens} tokens, and weight gradients need a multiple of "
            f"{multiple}; give another training.seq_len or training.global_batch."
        )


def _list_exchange_faults(run: Run, remote: bool) -> Faults:
    """Ways in which FSDP can't exchange weights and gradients, or accumulate gradients in bf16, here."""
    parallelism, layout = run.parallelism, run.layout
    for name, default in (("reduce_buffers", 1), ("separate_reduce", False), ("symmetric_memory", False)):
        if (value := getattr(parallelism, name)) == default:
            continue
        typed = f"parallelism.{name}={format_value(value)}"
        if layout.only_replicated or layout.sharded * layout.replicate == 1:
            warn_once(f"{typed}: has no effect, because FSDP shards nothing; choose parallelism=fsdp.")
        elif not remote and () < read_torch_version() < EXCHANGE_TORCH:
            yield f"{typed}: needs torch 2.13; install it, or remove the setting."
    if parallelism.symmetric_memory and run.machine.device != "cuda":
        yield "parallelism.symmetric_memory=true: needs a CUDA device; give false."
    if parallelism.symmetric_memory and parallelism.reduce_buffers > 1:
        yield (
            f"parallelism.symmetric_memory=true: has one buffer, and parallelism.reduce_buffers="
            f"{parallelism.reduce_buffers}; give 1, or symmetric_memory=false."
        )
    accumulate = run.precision.accumulate
    rows = max(math.ceil(phase.rows / layout.data_ranks) for phase in run.training.phases)
    most = max(run.microbatches, math.ceil(rows / run.microbatch_rows))  # in the step with the largest batch
    for reason in fit.iterate_obstacles(run, layout, most) if accumulate != "fp32" else ():
        yield f"precision.accumulate={accumulate}: {reason}, or precision.accumulate=fp32."


def _list_audit_faults(run: Run, remote: bool) -> Faults:
    """Audits where no other rank computes the same part of the model with the same code."""
    layout, label = run.layout, f"debug.audit={run.debug.audit}"
    if not run.debug.audit or run.is_layout_open:
        return
    if layout.pipeline > 1:
        yield (
            f"{label}: the stages of a pipeline run forward only together with backward; give parallelism.pipeline=1, "
            "or debug.audit=0."
        )
    if run.compile.scope == "model":
        yield (
            f"{label}: with compile=model nothing but the loss can be compared; give compile=block, or debug.audit=0."
        )
    shared = f" (parallelism.expert={layout.expert})" if layout.expert > 1 else ""
    if layout.data_ranks // max(1, layout.expert // (layout.context * layout.tensor)) < 2:
        yield (
            f"{label}: no other rank computes the same part of the model{shared}; give parallelism.replicate=2 or "
            "parallelism.shard=2 times as many ranks, or debug.audit=0."
        )


def _list_tensor_faults(run: Run, remote: bool) -> Faults:
    """What tensor and context parallelism need: a GPU, recognised modules, rows and heads in equal parts."""
    layout, parallelism, length = run.layout, run.parallelism, run.training.seq_len
    degree = layout.tensor
    if parallelism.async_tensor:
        needed = {
            "parallelism.tensor above 1": degree > 1,
            "parallelism.sequence_parallel=true": parallelism.sequence_parallel,
            "compile=block": run.compile.scope != "off",
            "compile.backend=inductor": run.compile.backend == "inductor",
            "a CUDA device": run.machine.device == "cuda",
        }
        missing = [name for name, is_met in needed.items() if not is_met]
        if missing:
            yield f"parallelism.async_tensor=true: needs {' and '.join(missing)}; give false."
    if parallelism.regather is True and degree > 1 and (obstacles := list_regather_obstacles(parallelism, layout)):
        yield f"parallelism.regather=true: does not work with {' and '.join(obstacles)}; give auto."
    multiple = parallelism.compute_row_multiple(layout)
    halves = " (a head and a tail each)" if parallelism.balance else ""
    cuts = [f"context {layout.context}{halves}"] if layout.context > 1 else []
    cuts += [f"tensor {layout.tensor}"] if layout.tensor > 1 and parallelism.sequence_parallel else []
    if length % multiple:
        yield (
            f"training.seq_len={length}: must be a multiple of {multiple} to be split over {' and '.join(cuts)}; "
            f"the nearest is {max(1, round(length / multiple)) * multiple}."
        )
    heads = run.model.heads // layout.tensor
    if parallelism.context_method == "ulysses" and heads % layout.context:
        yield (
            f"parallelism.context_method=ulysses: context {layout.context} does not divide a rank's {heads} heads; "
            "give allgather or ring, or another parallelism.context."
        )


def _list_attention_faults(run: Run, remote: bool) -> Faults:
    """Kernels that a device lacks, and those that can't mask documents and chunks in a ring."""
    choice, is_cpu = run.training.attention, run.machine.device == "cpu"
    if is_cpu and choice == "flex":
        yield "training.attention=flex: its backward pass needs a GPU; give auto."
    if is_cpu and choice in ("cudnn", "efficient"):
        yield f"training.attention={choice}: there is no such kernel for CPUs; give auto, flash or math."
    ring = run.layout.context > 1 and run.parallelism.context_method == "ring"
    masks = run.dataset.mask_documents or run.model.needs_mask(run.training.seq_len)
    chunks = "chunks (training.seq_len is above model.attention_chunk)"
    masked = "documents (dataset.mask_documents=true)" if run.dataset.mask_documents else chunks
    alternatives = "auto or math" if is_cpu else "auto, flex or math"
    if ring and masks and choice not in ("auto", "flex", "math"):
        yield (
            f"training.attention={choice}: in a ring this kernel can't mask {masked}; give {alternatives}, or another "
            "parallelism.context_method."
        )


def _list_sharding_faults(run: Run, remote: bool) -> Faults:
    """FSDP settings that this layout does not support."""
    parallelism, layout, schedule = run.parallelism, run.layout, run.staging.schedule
    shards_nothing = layout.sharded == 1 or layout.only_replicated
    for name in ("reshard", "accumulate", "prefetch"):
        value = getattr(parallelism, name)
        if value not in ("auto", 0) and shards_nothing:
            yield f"parallelism.{name}={value}: no weights are sharded here; give parallelism=fsdp, or auto."
    if parallelism.groups:
        if layout.sharded * layout.replicate == 1 or layout.only_replicated:
            yield (
                f"parallelism.groups={','.join(parallelism.groups)}: no weights are sharded here; give "
                "parallelism=fsdp, or no group."
            )
        strategy.check_groups(parallelism.groups, run.model.parameter_names(), layout, run.model.tied)
    if (sharding := parallelism.model_sharding) is not None:
        only_fsdp = {
            f"parallelism.reshard={parallelism.reshard}": isinstance(parallelism.reshard, int),
            f"parallelism.accumulate={parallelism.accumulate}": parallelism.accumulate == "whole",
            f"parallelism.prefetch={parallelism.prefetch}": parallelism.prefetch not in ("auto", 0),
            f"parallelism.reduce_buffers={parallelism.reduce_buffers}": parallelism.reduce_buffers > 1,
            "parallelism.separate_reduce=true": parallelism.separate_reduce,
            "parallelism.symmetric_memory=true": parallelism.symmetric_memory,
            f"parallelism.expert={parallelism.expert}": layout.expert > 1,
            "memory.offload=true": run.memory.offload,
        }
        for setting in (setting for setting, is_set in only_fsdp.items() if is_set):
            yield (
                f"{setting}: only FSDP has it, and {sharding._target_} shards the model (parallelism.groups); leave "
                "one of them out."
            )
    if isinstance(parallelism.reshard, int) and (
        layout.sharded % parallelism.reshard or layout.sharded == parallelism.reshard
    ):
        yield (
            f"parallelism.reshard={parallelism.reshard}: weights are sharded over {layout.sharded} ranks; give a "
            "smaller divisor of that, always or never."
        )
    phases = f"parallelism.schedule={schedule} computes gradients of weights and of activations in two phases, which"
    if parallelism.reshard not in ("auto", "never") and run.staging.splits_backward:
        yield (
            f"parallelism.reshard={parallelism.reshard}: {phases} gives wrong results if weights are freed in between; "
            "give auto or never."
        )
    if parallelism.accumulate == "sharded" and run.staging.splits_backward:
        yield f"parallelism.accumulate=sharded: {phases} FSDP can't reduce together; give auto or whole."
    if run.memory.offload and shards_nothing:
        yield "memory.offload=true: only sharded weights can be in host memory; give parallelism=fsdp."


def _list_expert_faults(run: Run, remote: bool) -> Faults:
    """Expert parallelism that experts or ranks can't be divided for."""
    degree, layout, experts = run.layout.expert, run.layout, getattr(run.model, "experts", 0)
    label, ranks = f"parallelism.expert={run.parallelism.expert}", layout.sharded * layout.tensor
    if run.parallelism.exchange.is_own and degree == 1:
        warn_once("parallelism.exchange: has no effect, because no ranks share experts.")
    if not experts and run.parallelism.expert == "auto":
        warn_once(
            "parallelism.expert=auto: has no effect, because the model has no experts; choose parallelism=fsdp, or a "
            "model with experts such as qwen3_moe_debug."
        )
    if degree == 1:
        return
    if not experts:
        yield f"{label}: the model has no experts; give 1, or a model with experts such as qwen3_moe_debug."
    fitting = [d for d in range(1, experts + 1) if experts % d == 0 and ranks % d == 0]
    divided = f"{experts} experts" if experts % degree else f"the {ranks} ranks of shard, context and tensor"
    if degree not in fitting:
        yield f"{label}: can't divide {divided}; give one of {', '.join(map(str, fitting))}."
    if layout.tensor > 1 and not run.parallelism.sequence_parallel:
        yield f"{label}: tensor ranks must have different tokens; give parallelism.sequence_parallel=true, or 1."
    names = [f"layers.{i}.feed_forward.experts" for i in range(run.model.layers)]
    for group in strategy.assign_groups(names, run.parallelism.groups or {}).values():
        yield (
            f"parallelism.groups.{group}: matches experts, which {label} divides over ranks already; give 1, or match "
            "other modules."
        )


def _list_memory_faults(run: Run, remote: bool) -> Faults:
    """Kinds of activation checkpointing that need other settings."""
    memory, scope, kind = run.memory, run.compile.scope, run.memory.checkpointing
    alternative = "memory=full" if run.staging.splits_backward else "memory=selective"  # which needs no compiler
    if kind == "every_n" and memory.every > run.model.layers:
        yield (
            f"memory.every={memory.every}: the model has {format_plural(run.model.layers, 'layer')}, so none would be "
            "recomputed; give fewer."
        )
    if kind == "budget" and run.debug.detect_anomaly:
        yield (
            "memory=budget: needs the compiler, and compiled blocks hide the operation that anomalies are traced to; "
            f"give debug.detect_anomaly=false, or {alternative} with compile=off."
        )
    if kind == "budget" and scope == "off":
        yield f"memory=budget: needs the compiler; give compile=block, or {alternative}."
    if scope != "off" and keeps_scales(run):
        yield (
            "memory=selective: would save MXFP8's scales, for which Inductor has no CPU kernels; give compile=off, "
            "memory=full or compile.backend=aot_eager."
        )
    if kind == "budget" and run.compile.backend == "eager":
        yield "compile.backend=eager: saves all activations and ignores memory=budget; give inductor or aot_eager."
    if kind == "selective" and run.staging.splits_backward:
        yield (
            f"memory=selective: parallelism.schedule={run.staging.schedule} runs the backward pass in two phases, "
            "which selective checkpointing does not support; give memory=full or none, or another schedule such as "
            "1F1B."
        )


def _list_machine_faults(run: Run, remote: bool) -> Faults:
    """More ranks than this machine has devices."""
    if run.cluster.nodes > 1:
        yield (
            f"cluster.nodes={run.cluster.nodes}: titan starts ranks on one machine only; "
            "give hydra/launcher=slurm, start this command on each node with torchrun or srun, or give cluster.nodes=1."
        )
    if run.machine.device == "cuda" and run.layout.devices > run.machine.count:
        layout, available_devices = run.layout, f"{run.machine.count} x {run.machine.name}"
        fit.check_memory(run, layout, run.machine, run.microbatches)
        yield (
            f"{run.describe()}: {layout} needs {layout.devices} ranks, and this machine has {available_devices}; give "
            f"smaller degrees, or cluster.device=cpu to try it with {layout.devices} CPU ranks."
        )


def _list_missing_faults(run: Run, remote: bool) -> Faults:
    """Memory, packages and programs that are missing, anomalies that can't be traced, micro-batches without rows."""
    if not run.is_layout_open:
        fit.check_memory(run, run.layout, run.machine, run.microbatches, remote)
    if run.compile.scope != "off" and run.debug.detect_anomaly:
        yield "debug.detect_anomaly=true: compiled blocks hide the operation that fails; give compile=off."
    if run.layout.tensor > 1 and run.debug.detect_anomaly:
        yield (
            f"debug.detect_anomaly=true: torch can't trace what parallelism.tensor={run.layout.tensor} shards; give "
            "parallelism.tensor=1."
        )
    if run.microbatches > run.rank_rows:
        yield (
            f"parallelism.microbatches={run.microbatches}: more than the rows of a rank per step, "
            f"training.global_batch / training.seq_len / ranks; give at most {run.rank_rows}."
        )
    if run.compile.scope != "off" and (lacking := find_missing_compiler(run.machine, run.compile.backend, remote)):
        changes = ["memory=full" if run.staging.splits_backward else "memory=selective"]
        changes = changes if run.memory.checkpointing == "budget" else []
        changes += ["parallelism.async_tensor=false"] if run.parallelism.async_tensor else []
        yield (
            f"compile={run.choices.get('compile', 'block')}: torch.compile can't work here: {lacking}; "
            f"fix this, or give {' '.join([*changes, 'compile=off'])}."
        )
    if run.precision.eight_bit and not remote and importlib.util.find_spec("torchao") is None:
        yield f"precision.matmuls={run.precision.matmuls}: needs torchao; {advise_extra('float8')}."


def _list_checkpoint_faults(run: Run, remote: bool) -> Faults:
    """Settings about checkpoints where none are saved, a format that lacks the model, texts without a tokenizer."""
    checkpoint, cls = run.checkpoint, type(run.model)
    if checkpoint.mode == "off":
        if run.cluster.restarts:
            yield f"cluster.restarts={run.cluster.restarts}: nothing to restart from; give checkpoint=sync."
        for name in ("export", "path"):
            if value := getattr(checkpoint, name):
                yield f"checkpoint.{name}={value}: nothing is saved; give checkpoint=sync or checkpoint=async."
    if checkpoint.export in ("hf", "meta") and run.model.logit_cap is not None:
        yield (
            f"checkpoint.export={checkpoint.export}: models of this format do not cap logits, and model.logit_cap="
            f"{format_value(run.model.logit_cap)}; give checkpoint.export=null, or model.logit_cap=null."
        )
    if checkpoint.export == "meta" and cls is not Llama:
        yield (
            f"checkpoint.export=meta: this format exists for Llama only, and the model is a {cls.__name__}; give "
            f"checkpoint.export={'hf' if cls in FAMILIES.values() else 'null'}."
        )
    if checkpoint.export == "hf" and cls not in FAMILIES.values():
        yield (
            f"checkpoint.export=hf: Hugging Face has no model {get_kind(cls)}; give checkpoint.export=null "
            f"({OWN_MODELS})."
        )
    for name in ("sets", "tasks"):
        if getattr(run.evaluation, name) and isinstance(run.dataset, Synthetic):
            yield (
                f"evaluation.{name}: dataset=synthetic has no tokenizer to read text with; choose a dataset of text, "
                "or leave it out."
            )


CHECKS = (
    list_limit_faults, _list_split_faults, _list_precision_faults, _list_exchange_faults,
    _list_audit_faults, _list_tensor_faults, _list_attention_faults,
    _list_sharding_faults, _list_expert_faults, _list_memory_faults, _list_machine_faults,
    _list_missing_faults, _list_checkpoint_faults,
)  # fmt: skip
"""In the order in which they are asked."""
