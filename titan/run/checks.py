"""Check combinations of settings across axes, in one place, before any work starts. Free of torch."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from titan.compile.compiler import find_missing_compiler, read_torch_version
from titan.config.kinds import get_kind
from titan.config.optional import advise_extra
from titan.config.settings import format_value, suggest_pattern
from titan.config.warning import warn_once
from titan.console.numbers import format_plural, format_rounded
from titan.dataset.schema import Synthetic
from titan.errors import ConfigError
from titan.estimate import accumulation, fit
from titan.estimate.regather import list_regather_obstacles
from titan.model.built_counts import is_titan_class
from titan.model.schema import Llama
from titan.parallelism import strategy
from titan.parallelism.pipeline.stage_plan import plan_stages
from titan.precision.schema import CAPABILITY, HARDWARE, QUANT_BLOCK
from titan.run.compile_scope import keeps_scales
from titan.run.model_limits import TECHNIQUES, check_limits
from titan.weights.hf_config import FAMILIES, OWN_MODELS

if TYPE_CHECKING:
    from titan.run.run import Run

SAVED_SHARE = 0.05
"""Share of a rank's memory that a recommended setting saves at least."""
EXCHANGE_TORCH = (2, 13)
"""The first release of torch whose FSDP has the settings of `_check_exchange`."""


def check(run: Run, started: bool = False, remote: bool = False) -> None:
    """Check a run across its axes.

    Args:
        started: its ranks are started by others, not on this machine by titan.
        remote: its machine is a node that a scheduler will provide, with other packages and programs.

    Raises:
        ConfigError: for a combination that can't work.
    """
    check_limits(run)
    _check_split(run)
    if not is_titan_class(type(run.model)):  # tests check titan's own, without torch here
        layout, gate = run.layout, run.memory.checkpointing == "gate"
        sequence = TECHNIQUES["sequence_parallel"].is_on(run)
        run.model.check_module(layout.tensor, layout.context, layout.expert, gate, sequence)
    _check_growth(run, remote)
    _check_precision(run, remote)
    _check_exchange(run, remote)
    _check_accumulation(run)
    _check_audit(run)
    for check_axis in (
        _check_tensor, _check_context, _check_attention, _check_sharding, _check_experts, _check_memory
    ):  # fmt: skip
        check_axis(run)
    if not started:
        _check_machine(run)
    if not run.is_layout_open:
        fit.check_memory(run, run.layout, run.machine, run.microbatches, remote)
    if run.compile.scope != "off" and run.debug.detect_anomaly:
        raise ConfigError("debug.detect_anomaly=true: compiled blocks hide the operation that fails; give compile=off.")
    if run.layout.tensor > 1 and run.debug.detect_anomaly:
        raise ConfigError(
            f"debug.detect_anomaly=true: torch can't trace what parallelism.tensor={run.layout.tensor} shards; "
            "give parallelism.tensor=1."
        )
    if run.microbatches > run.rank_rows:
        raise ConfigError(
            f"parallelism.microbatches={run.microbatches}: more than the rows of a rank per step, "
            f"training.global_batch / training.seq_len / ranks; give at most {run.rank_rows}."
        )
    if run.compile.scope != "off":
        _check_compiler(run, remote)
    if run.precision.eight_bit and not remote and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"precision.matmuls={run.precision.matmuls}: needs torchao; {advise_extra('float8')}.")
    _check_checkpoint(run)
    _check_evaluation(run)
    run.profile.check(run.layout.devices)


def _check_checkpoint(run: Run) -> None:
    """Reject settings about saved checkpoints where none are saved, and a format that lacks the model."""
    checkpoint = run.checkpoint
    if checkpoint.mode == "off" and run.cluster.restarts:
        raise ConfigError(f"cluster.restarts={run.cluster.restarts}: nothing to restart from; give checkpoint=sync.")
    for name, value in (("export", checkpoint.export), ("path", checkpoint.path)):
        if checkpoint.mode == "off" and value:
            raise ConfigError(f"checkpoint.{name}={value}: nothing is saved; give checkpoint=sync or checkpoint=async.")
    if checkpoint.export in ("hf", "meta") and run.model.logit_cap is not None:
        raise ConfigError(
            f"checkpoint.export={checkpoint.export}: models of this format do not cap logits, and model.logit_cap="
            f"{format_value(run.model.logit_cap)}; give checkpoint.export=null, or model.logit_cap=null."
        )
    if checkpoint.export == "meta" and type(run.model) is not Llama:
        alternative = "hf" if type(run.model) in FAMILIES.values() else "null"
        raise ConfigError(
            f"checkpoint.export=meta: this format exists for Llama only, and the model is a "
            f"{type(run.model).__name__}; give checkpoint.export={alternative}."
        )
    if checkpoint.export == "hf" and type(run.model) not in FAMILIES.values():
        raise ConfigError(
            f"checkpoint.export=hf: Hugging Face has no model {get_kind(type(run.model))}; give checkpoint.export=null "
            f"({OWN_MODELS})."
        )


def _check_evaluation(run: Run) -> None:
    """Reject texts to evaluate where the data have no tokenizer."""
    text_settings = [name for name in ("sets", "tasks") if getattr(run.evaluation, name)]
    if text_settings and isinstance(run.dataset, Synthetic):
        raise ConfigError(
            f"evaluation.{text_settings[0]}: dataset=synthetic has no tokenizer to read text with; choose a dataset "
            "of text, or leave it out."
        )


def _check_growth(run: Run, remote: bool) -> None:
    """Reject batches that a pipeline's schedule can't split into micro-batches of the same size."""
    for phase in run.training.phases[1:] if run.staging.count > 1 else ():
        rows = math.ceil(phase.rows / run.layout.data_ranks)
        count = math.ceil(rows / run.microbatch_rows)
        try:
            plan_stages(run.parallelism, run.layout, run.model, run.training.seq_len, count)
        except ConfigError as error:
            raise ConfigError(
                f"training.grow: {phase.rows * run.training.seq_len} tokens make {count} micro-batches of "
                f"{format_plural(run.microbatch_rows, 'row')}, and then {error}"
            ) from error
        larger = replace(run, training=replace(run.training, global_batch=phase.rows * run.training.seq_len, grow=()))
        fit.check_memory(larger, run.layout, run.machine, count, remote)


def _check_audit(run: Run) -> None:
    """Reject audits where no other rank computes the same part of the model with the same code."""
    layout, every = run.layout, run.debug.audit
    if not every or run.is_layout_open:
        return
    label = f"debug.audit={every}"
    if layout.pipeline > 1:
        raise ConfigError(
            f"{label}: the stages of a pipeline run forward only together with backward; give parallelism.pipeline=1, "
            "or debug.audit=0."
        )
    if run.compile.scope == "model":
        raise ConfigError(
            f"{label}: with compile=model nothing but the loss can be compared; give compile=block, or debug.audit=0."
        )
    places = layout.data_ranks // max(1, layout.expert // (layout.context * layout.tensor))
    if places < 2:
        shared = f" (parallelism.expert={layout.expert})" if layout.expert > 1 else ""
        raise ConfigError(
            f"{label}: no other rank computes the same part of the model{shared}; give parallelism.replicate=2 or "
            "parallelism.shard=2 times as many ranks, or debug.audit=0."
        )


def _check_precision(run: Run, remote: bool) -> None:
    """Reject types that can't be combined, and 8-bit matmuls where no kernel computes them."""
    precision = run.precision
    if precision.weights == "bf16" and precision.compute != "bf16":
        raise ConfigError(
            f"precision.weights=bf16: requires precision.compute=bf16, not {precision.compute}; give "
            "precision=bf16_pure."
        )
    if not precision.eight_bit:
        return
    if precision.compute != "bf16":
        raise ConfigError(
            f"precision.matmuls={precision.matmuls}: requires precision.compute=bf16, not {precision.compute}; give "
            "that type."
        )
    _check_formats(run, remote)
    _check_matmuls(run)


def _check_formats(run: Run, remote: bool) -> None:
    """Reject formats that the device does not support."""
    precision, machine = run.precision, run.machine
    min_capability = CAPABILITY[precision.matmuls]
    is_capability_unknown = machine.capability is None  # AMD's, or not known before the job has its node
    if precision.emulate or (
        machine.device == "cuda" and (is_capability_unknown or (machine.capability or 0) >= min_capability)
    ):
        return
    subject = "the cluster" if remote and machine.device == "cuda" else "this machine"
    raise ConfigError(
        f"precision.matmuls={precision.matmuls}: requires {HARDWARE[min_capability]}, and {subject} has "
        f"{machine.name}; give precision.emulate=true to emulate it slowly, or precision=bf16."
    )


def _check_matmuls(run: Run) -> None:
    """Reject sizes that no kernel supports."""
    precision, matmuls = run.precision, run.model.matmuls()
    for pattern in precision.skip:
        if not any(fnmatchcase(name, pattern) for name in matmuls):
            raise ConfigError(
                f"precision.skip={format_value(precision.skip)}: no matmul of the model is named {pattern}; names are "
                f"such as {next(iter(matmuls))} and head{suggest_pattern(pattern, matmuls)}"
            )
    choice, multiple = precision.select_layers(matmuls, run.layout.tensor), QUANT_BLOCK[precision.matmuls]
    if not choice.quantized:
        raise ConfigError(
            f"precision.matmuls={precision.matmuls}: applies to no matmul of the model: "
            f"{choice.describe_exclusions()}; change these, or give precision=bf16."
        )
    if "head" in choice.quantized and run.training.loss_chunk is not None:
        raise ConfigError(
            f"training.loss_chunk={run.training.loss_chunk}: computes the head in {precision.compute}, and "
            f"precision.matmuls={precision.matmuls} includes the head; give precision.skip=[head], or null."
        )
    tokens = run.microbatch_rows * run.training.seq_len // run.layout.context
    if tokens % multiple and precision.weight_grads_in_8_bits:
        raise ConfigError(
            f"precision.matmuls={precision.matmuls}: a micro-batch of a rank has {tokens} tokens, and weight gradients "
            f"need a multiple of {multiple}; give another training.seq_len or training.global_batch."
        )


def _check_split(run: Run) -> None:
    """Reject matmuls that can't be split into equal parts."""
    degree, model = run.layout.tensor, run.model
    for name in model.SPLIT:
        if getattr(model, name) % degree:
            largest = math.gcd(*(getattr(model, other) for other in model.SPLIT))
            divisor = next(d for d in range(degree - 1, 0, -1) if largest % d == 0)
            raise ConfigError(
                f"parallelism.tensor={degree}: does not divide model.{name}={getattr(model, name)}; "
                f"give a divisor of it, such as {divisor}."
            )


def _check_tensor(run: Run) -> None:
    """Reject the overlap that needs a GPU, and gathering again where it does not work."""
    degree, parallelism = run.layout.tensor, run.parallelism
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
            raise ConfigError(f"parallelism.async_tensor=true: needs {' and '.join(missing)}; give false.")
    if parallelism.regather is True and degree > 1 and (obstacles := list_regather_obstacles(run, run.layout)):
        raise ConfigError(f"parallelism.regather=true: does not work with {' and '.join(obstacles)}; give auto.")


def _check_context(run: Run) -> None:
    """Reject rows that can't be split into equal parts, and heads that Ulysses can't distribute."""
    layout, parallelism, length = run.layout, run.parallelism, run.training.seq_len
    multiple = parallelism.compute_row_multiple(layout)
    if length % multiple:
        halves = " (a head and a tail each)" if parallelism.balance else ""
        cuts = [f"context {layout.context}{halves}"] if layout.context > 1 else []
        cuts += [f"tensor {layout.tensor}"] if layout.tensor > 1 and parallelism.sequence_parallel else []
        raise ConfigError(
            f"training.seq_len={length}: must be a multiple of {multiple} to be split over {' and '.join(cuts)}; "
            f"the nearest is {max(1, round(length / multiple)) * multiple}."
        )
    heads = run.model.heads // layout.tensor
    if parallelism.context_method == "ulysses" and heads % layout.context:
        raise ConfigError(
            f"parallelism.context_method=ulysses: context {layout.context} does not divide a rank's {heads} heads; "
            "give allgather or ring, or another parallelism.context."
        )


def _check_attention(run: Run) -> None:
    """Reject kernels that a device lacks, and those that can't mask documents and chunks in a ring."""
    choice, parallelism = run.training.attention, run.parallelism
    if run.machine.device == "cpu" and choice == "flex":
        raise ConfigError("training.attention=flex: its backward pass needs a GPU; give auto.")
    if run.machine.device == "cpu" and choice in ("cudnn", "efficient"):
        raise ConfigError(f"training.attention={choice}: there is no such kernel for CPUs; give auto, flash or math.")
    ring = run.layout.context > 1 and parallelism.context_method == "ring"
    chunks = run.model.needs_mask(run.training.seq_len)
    if ring and (run.dataset.mask_documents or chunks) and choice not in ("auto", "flex", "math"):
        documents = "documents (dataset.mask_documents=true)"
        masked_units = (
            documents if run.dataset.mask_documents else "chunks (training.seq_len is above model.attention_chunk)"
        )
        alternatives = "auto or math" if run.machine.device == "cpu" else "auto, flex or math"
        raise ConfigError(
            f"training.attention={choice}: in a ring this kernel can't mask {masked_units}; give {alternatives}, or "
            "another parallelism.context_method."
        )


def _check_sharding(run: Run) -> None:
    """Reject FSDP settings that this layout does not support."""
    parallelism, layout = run.parallelism, run.layout
    for name in ("reshard", "accumulate", "prefetch"):
        if (value := getattr(parallelism, name)) not in ("auto", 0) and (layout.sharded == 1 or layout.only_replicated):
            raise ConfigError(
                f"parallelism.{name}={value}: no weights are sharded here; give parallelism=fsdp, or auto."
            )
    if parallelism.groups and (layout.sharded * layout.replicate == 1 or layout.only_replicated):
        raise ConfigError(
            f"parallelism.groups={','.join(parallelism.groups)}: no weights are sharded here; give parallelism=fsdp, "
            "or no group."
        )
    if parallelism.groups:
        strategy.check_groups(parallelism.groups, run.model.parameter_names(), layout, run.model.tied)
        _check_model_sharding(run)
    if isinstance(parallelism.reshard, int) and (
        layout.sharded % parallelism.reshard or layout.sharded == parallelism.reshard
    ):
        raise ConfigError(
            f"parallelism.reshard={parallelism.reshard}: weights are sharded over {layout.sharded} ranks; give a "
            "smaller divisor of that, always or never."
        )
    if parallelism.reshard not in ("auto", "never") and run.staging.splits_backward:
        raise ConfigError(
            f"parallelism.reshard={parallelism.reshard}: parallelism.schedule={run.staging.schedule} computes "
            "gradients of weights and of activations in two phases, which gives wrong results if weights are freed in "
            "between; give auto or never."
        )
    if parallelism.accumulate == "sharded" and run.staging.splits_backward:
        raise ConfigError(
            f"parallelism.accumulate=sharded: parallelism.schedule={run.staging.schedule} computes gradients of "
            "weights and of activations in two phases, which FSDP can't reduce together; give auto or whole."
        )
    if run.memory.offload and (layout.sharded == 1 or layout.only_replicated):
        raise ConfigError("memory.offload=true: only sharded weights can be in host memory; give parallelism=fsdp.")


def _check_model_sharding(run: Run) -> None:
    """Reject what only FSDP does where a strategy shards the whole model in another way."""
    parallelism, sharding = run.parallelism, run.parallelism.model_sharding
    if sharding is None:
        return
    rejected = {
        f"parallelism.reshard={parallelism.reshard}": isinstance(parallelism.reshard, int),
        f"parallelism.accumulate={parallelism.accumulate}": parallelism.accumulate == "whole",
        f"parallelism.prefetch={parallelism.prefetch}": parallelism.prefetch not in ("auto", 0),
        f"parallelism.reduce_buffers={parallelism.reduce_buffers}": parallelism.reduce_buffers > 1,
        "parallelism.separate_reduce=true": parallelism.separate_reduce,
        "parallelism.symmetric_memory=true": parallelism.symmetric_memory,
        f"parallelism.expert={parallelism.expert}": run.layout.expert > 1,
        "memory.offload=true": run.memory.offload,
    }
    if setting := next((name for name, is_set in rejected.items() if is_set), None):
        raise ConfigError(
            f"{setting}: only FSDP has it, and {sharding._target_} shards the model (parallelism.groups); leave one of "
            "them out."
        )


def _check_accumulation(run: Run) -> None:
    """Reject gradients accumulated in bf16 where none are accumulated in another type, or too many."""
    if run.precision.accumulate == "fp32":
        return
    for reason in accumulation.iterate_obstacles(run, run.layout, _count_most_microbatches(run)):
        raise ConfigError(f"precision.accumulate={run.precision.accumulate}: {reason}, or precision.accumulate=fp32.")


def _count_most_microbatches(run: Run) -> int:
    """Return the micro-batches of a rank in the step with the largest batch."""
    rows = max(math.ceil(phase.rows / run.layout.data_ranks) for phase in run.training.phases)
    return max(run.microbatches, math.ceil(rows / run.microbatch_rows))


def _check_experts(run: Run) -> None:
    """Reject expert parallelism that experts or ranks can't be divided for."""
    if run.parallelism.exchange.is_own and run.layout.expert == 1:
        warn_once("parallelism.exchange: has no effect, because no ranks share experts.")
    degree, layout, experts = run.layout.expert, run.layout, getattr(run.model, "experts", 0)
    expert_setting, ranks = f"parallelism.expert={run.parallelism.expert}", layout.sharded * layout.tensor
    if not experts and run.parallelism.expert == "auto":
        warn_once(
            "parallelism.expert=auto: has no effect, because the model has no experts; choose parallelism=fsdp, or a "
            "model with experts such as qwen3_moe_debug."
        )
    if degree == 1:
        return
    if not experts:
        raise ConfigError(
            f"{expert_setting}: the model has no experts; give 1, or a model with experts such as qwen3_moe_debug."
        )
    fitting = [d for d in range(1, experts + 1) if experts % d == 0 and ranks % d == 0]
    if degree not in fitting:
        divided = f"{experts} experts" if experts % degree else f"the {ranks} ranks of shard, context and tensor"
        raise ConfigError(f"{expert_setting}: can't divide {divided}; give one of {', '.join(map(str, fitting))}.")
    if layout.tensor > 1 and not run.parallelism.sequence_parallel:
        raise ConfigError(
            f"{expert_setting}: tensor ranks must have different tokens; give parallelism.sequence_parallel=true, or 1."
        )
    names = [f"layers.{i}.feed_forward.experts" for i in range(run.model.layers)]
    if matched_groups := strategy.assign_groups(names, run.parallelism.groups or {}):
        raise ConfigError(
            f"parallelism.groups.{next(iter(matched_groups.values()))}: matches experts, which {expert_setting} "
            "divides over ranks already; give 1, or match other modules."
        )


def recommend_shared_experts(run: Run) -> None:
    """Warn where each tensor rank has whole experts, and `expert=auto` needs less memory."""
    layout, device = run.layout, run.machine.device
    if layout.tensor == 1 or layout.expert > 1 or not run.parallelism.sequence_parallel:
        return
    node = fit.count_node_devices(run, run.machine)
    degree = math.gcd(layout.sharded * layout.tensor, fit.find_largest_degrees(run, node)["expert"])
    if degree == 1:
        return
    present, less = (
        fit.estimate_memory(run, candidate, run.microbatches, device).gib
        for candidate in (layout, replace(layout, expert=degree))
    )
    if less < present * (1 - SAVED_SHARE):
        warn_once(
            f"parallelism.expert=1: each of {layout.tensor} tensor ranks has whole experts; with "
            f"parallelism.expert=auto, which shares them among {degree} ranks, a rank needs {format_rounded(less)} "
            f"instead of {format_rounded(present)} GiB."
        )


def _check_exchange(run: Run, remote: bool) -> None:
    """Reject ways in which FSDP can't exchange weights and gradients here."""
    parallelism, layout = run.parallelism, run.layout
    changed = {
        "reduce_buffers": parallelism.reduce_buffers > 1,
        "separate_reduce": parallelism.separate_reduce,
        "symmetric_memory": parallelism.symmetric_memory,
    }
    for name in [name for name, is_changed in changed.items() if is_changed]:
        typed = f"parallelism.{name}={format_value(getattr(parallelism, name))}"
        if layout.only_replicated or layout.sharded * layout.replicate == 1:
            warn_once(f"{typed}: has no effect, because FSDP shards nothing; choose parallelism=fsdp.")
        elif not remote and () < read_torch_version() < EXCHANGE_TORCH:
            raise ConfigError(f"{typed}: needs torch 2.13; install it, or remove the setting.")
    if parallelism.symmetric_memory and run.machine.device != "cuda":
        raise ConfigError("parallelism.symmetric_memory=true: needs a CUDA device; give false.")
    if parallelism.symmetric_memory and parallelism.reduce_buffers > 1:
        raise ConfigError(
            f"parallelism.symmetric_memory=true: has one buffer, and parallelism.reduce_buffers="
            f"{parallelism.reduce_buffers}; give 1, or symmetric_memory=false."
        )


def _check_memory(run: Run) -> None:
    """Reject kinds of activation checkpointing that need other settings."""
    memory, schedule, alternative = run.memory, run.staging.schedule, _name_budget_alternative(run)
    if memory.checkpointing == "every_n" and memory.every > run.model.layers:
        raise ConfigError(
            f"memory.every={memory.every}: the model has {format_plural(run.model.layers, 'layer')}, so none would be "
            "recomputed; give fewer."
        )
    if memory.checkpointing == "budget" and run.debug.detect_anomaly:
        raise ConfigError(
            "memory=budget: needs the compiler, and compiled blocks hide the operation that anomalies "
            f"are traced to; give debug.detect_anomaly=false, or {alternative} with compile=off."
        )
    if memory.checkpointing == "budget" and run.compile.scope == "off":
        raise ConfigError(f"memory=budget: needs the compiler; give compile=block, or {alternative}.")
    if run.compile.scope != "off" and keeps_scales(run):
        raise ConfigError(
            "memory=selective: would save MXFP8's scales, for which Inductor has no CPU kernels; give compile=off, "
            "memory=full or compile.backend=aot_eager."
        )
    if memory.checkpointing == "budget" and run.compile.backend == "eager":
        raise ConfigError(
            "compile.backend=eager: saves all activations and ignores memory=budget; give inductor or aot_eager."
        )
    if memory.checkpointing == "selective" and run.staging.splits_backward:
        raise ConfigError(
            f"memory=selective: parallelism.schedule={schedule} runs the backward pass in two phases, which "
            "selective checkpointing does not support; give memory=full or none, or another schedule such as 1F1B."
        )


def _check_machine(run: Run) -> None:
    """Reject more ranks than this machine has devices."""
    if run.cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes={run.cluster.nodes}: titan starts ranks on one machine only; "
            "give hydra/launcher=slurm, start this command on each node with torchrun or srun, or give cluster.nodes=1."
        )
    if run.machine.device == "cuda" and run.layout.devices > run.machine.count:
        layout, available_devices = run.layout, f"{run.machine.count} x {run.machine.name}"
        fit.check_memory(run, layout, run.machine, run.microbatches)
        raise ConfigError(
            f"{run.describe()}: {layout} needs {layout.devices} ranks, and this machine has {available_devices}; give "
            f"smaller degrees, or cluster.device=cpu to try it with {layout.devices} CPU ranks."
        )


def _name_budget_alternative(run: Run) -> str:
    """Return activation checkpointing that needs no compiler and works with the schedule."""
    return "memory=full" if run.staging.splits_backward else "memory=selective"


def _check_compiler(run: Run, remote: bool) -> None:
    """Reject compiling where its requirements are missing, and name a way without a compiler."""
    lacking = find_missing_compiler(run.machine, run.compile.backend, remote)
    if lacking is None:
        return
    changes = [_name_budget_alternative(run)] if run.memory.checkpointing == "budget" else []
    changes += ["parallelism.async_tensor=false"] if run.parallelism.async_tensor else []
    raise ConfigError(
        f"compile={run.choices.get('compile', 'block')}: torch.compile can't work here: {lacking}; "
        f"fix this, or give {' '.join([*changes, 'compile=off'])}."
    )
