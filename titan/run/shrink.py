"""A run shrunk to the fewest ranks, blocks and tokens that still take the path of its layout. Free of torch.

Each degree above one becomes two or three: a rank then has a neighbour to exchange with, and which slice of a tensor,
which micro-batch and which token it has still depends on its coordinate in each dimension. docs/trust.md says which
faults this keeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.compile.schema import Compile
from titan.console.numbers import format_plural
from titan.dataset.schema import Synthetic
from titan.debug.schema import Debug
from titan.errors import ConfigError
from titan.evaluation.schema import Evaluation
from titan.memory.schema import Memory
from titan.metrics.schema import Metrics
from titan.model.schema import Llama
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.parallelism.schema import ExpertExchange, Layout, Parallelism
from titan.profile.schema import Profile
from titan.run.model_limits import require_tokens
from titan.run.resolve import resolve
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.training.schema import Training

SEQ_LEN = 64
"""Of a row; 96 with three context ranks, each of which has two chunks of it."""
STEPS = 3
SAVED_STEP = 2
MOST_RANKS = 64
LOSS_CHUNK = 24
KNOWN_MODELS = (Llama, Qwen3Moe, DeepseekV3, Llama4)
"""Models whose settings `shrink_model` knows."""
TIMEOUT = 120.0
"""Seconds that a shrunk run's collectives may take."""


@dataclass(frozen=True)
class Shrunk:
    """A run and its shrunk version."""

    target: Run  # the run
    run: Run  # the shrunk one, on CPU ranks
    changes: dict[str, tuple[Any, Any]]  # settings that differ, with the run's value and the shrunk one
    uncovered: tuple[str, ...]  # what the shrunk run can't show, in words


def shrink_run(target: Run, machine: Machine, directory: str) -> Shrunk:
    """Return a run shrunk to this machine's CPU.

    Raises:
        ConfigError: when the shrunk run can't be composed, or has too many ranks.
    """
    require_tokens(target.model, "titan.prove")
    layout = shrink_layout(target)
    if layout.devices > MOST_RANKS:
        raise ConfigError(
            f"parallelism: the shrunk layout, {layout}, has {format_plural(layout.devices, 'rank')}, more than "
            f"{MOST_RANKS}; prove a layout with fewer dimensions."
        )
    recipe = _shrink_recipe(target, layout)
    try:
        run = resolve(recipe, machine, directory, choices=target.choices, overrides=())
    except ConfigError as error:
        raise ConfigError(f"the shrunk run can't be composed: {error}") from None
    return Shrunk(target, run, _list_changes(target, run), tuple(list_uncovered(target)))


def reduce_to_one_device(run: Run, directory: str) -> Run:
    """Return a shrunk run on one device, without what only decides where and how it computes."""
    recipe = replace(
        _as_recipe(run),
        parallelism=Parallelism(microbatches=1),
        memory=Memory(),
        compile=Compile(scope="off"),
        precision=replace(run.precision, accumulate="fp32"),
        cluster=_build_cluster(1),
    )
    return resolve(recipe, run.machine, directory, choices=run.choices)


def widen_run(shrunk: Shrunk) -> Run:
    """Return the target with its widths and degrees, and the shrunk run's blocks, pipeline and micro-batches."""
    target, run = shrunk.target, shrunk.run
    layout = replace(target.layout, pipeline=run.layout.pipeline)
    model = _replace_known(target.model, layers=run.model.layers, first_dense=getattr(run.model, "first_dense", None))
    kept = ("microbatches", "stages", "split", "exchange", "symmetric_memory", "async_tensor")
    settings: dict[str, Any] = {name: getattr(run.parallelism, name) for name in kept}
    starts = tuple(first for first, _ in run.staging.layers[1:])  # the widths decide where stages of equal cost begin
    settings |= {**layout.degrees(), "expert": layout.expert, "starts": starts}
    parallelism = replace(target.parallelism, **settings)
    rows = layout.data_ranks * run.microbatches * run.microbatch_rows
    training = replace(run.training, seq_len=target.training.seq_len, global_batch=rows * target.training.seq_len)
    recipe = replace(
        _as_recipe(run), model=model, parallelism=parallelism, training=training, precision=target.precision,
        compile=Compile(scope="off"), cluster=replace(target.cluster, devices=layout.devices),
    )  # fmt: skip
    return resolve(recipe, target.machine, run.directory, remote=True, choices=target.choices)


def use_precision(run: Run, precision: Any) -> Run:
    """Return a shrunk run in another precision."""
    return resolve(replace(_as_recipe(run), precision=precision), run.machine, run.directory, choices=run.choices)


def shrink_layout(run: Run) -> Layout:
    """Return the layout with two ranks along each of its dimensions, or three where two would hide a fault.

    Of a ring of two ranks both neighbours are the same, and a pipeline of two stages has none in the middle. FSDP has
    three ranks where rows of a tensor don't divide by its ranks, and beside other dimensions, so that a division by
    another dimension's degree shows; it has four where it reshards over a part of them, or where ranks that share
    experts are only some of those that share weights.
    """
    old, settings = run.layout, run.parallelism
    degrees = {name: min(2, degree) for name, degree in old.degrees().items()}
    if run.staging.count == old.pipeline:
        degrees["pipeline"] = min(3, old.pipeline)
    if settings.context_method == "ring":
        degrees["context"] = min(3, old.context)
    spans = old.expert == old.sharded * old.tensor
    ranks = degrees["shard"] * degrees["context"] * degrees["tensor"]
    if isinstance(settings.reshard, int) or (old.expert > 1 and not spans and ranks == 2):
        widened = "shard" if old.shard > 1 else max(("context", "tensor"), key=lambda name: degrees[name])
        degrees[widened] = 2 * degrees[widened]
    elif old.shard > 2 and old.expert == 1:
        model = run.model
        widths = [model.ffn // old.tensor, model.heads * model.head_size // old.tensor, -(-model.vocab // old.tensor)]
        has_remainders = any(size % old.sharded for size in (model.dim, *widths))  # in numbers of rows of FSDP's ranks
        degrees["shard"] = 3 if has_remainders or old.shard < old.devices else degrees["shard"]
    ranks = degrees["shard"] * degrees["context"] * degrees["tensor"]
    return Layout(**degrees, expert=1 if old.expert == 1 else ranks if spans else 2)


def _as_recipe(run: Run) -> Recipe:
    return Recipe(**{field.name: getattr(run, field.name) for field in dataclasses.fields(Recipe)})


def _shrink_recipe(run: Run, layout: Layout) -> Recipe:
    model = shrink_model(run, layout)
    rows = Synthetic(tokens=65536, vocab=min(model.vocab, 128), mask_documents=run.dataset.mask_documents)
    microbatches = 2 * layout.pipeline if layout.pipeline > 1 else min(2, run.microbatches)  # several where it has some
    return replace(
        _as_recipe(run),
        model=model,
        dataset=replace(rows, longest=SEQ_LEN // 3) if rows.mask_documents else rows,
        schedule=_replace_known(run.schedule, warmup=1),
        training=_shrink_training(run, layout, microbatches),
        evaluation=Evaluation(every=0, tokens=0),
        precision=replace(run.precision, emulate=True) if run.precision.eight_bit else run.precision,
        parallelism=_shrink_parallelism(run, layout, microbatches),
        memory=run.memory,
        # the same graphs, and no kernels
        compile=run.compile if run.compile.scope == "off" else replace(run.compile, backend="aot_eager"),
        checkpoint=replace(
            run.checkpoint,
            mode="sync" if run.checkpoint.mode == "off" else run.checkpoint.mode,
            every=SAVED_STEP, minutes=0, keep=2, keep_tokens=0, at=(), fingerprints=False, path=None, resume=None,
            decay_steps=None, weights=None, export=None,
        ),
        metrics=Metrics(sample_tokens=0, plot=False, spike_window=0),
        debug=Debug(),
        profile=Profile(),
        cluster=_build_cluster(layout.devices),
        hooks={name: hook for name, hook in (run.hooks or {}).items() if hook.science} or None,
    )  # fmt: skip


def _build_cluster(ranks: int) -> Cluster:
    """Return the ranks on this machine, whose collectives end soon where one of them waits for ever."""
    return Cluster(device="cpu", devices=ranks, timeout=TIMEOUT, step_timeout=TIMEOUT)


def _shrink_training(run: Run, layout: Layout, microbatches: int) -> Training:
    """Return the training of three steps; a remainder of rows stays a remainder."""
    rows = layout.data_ranks * microbatches * min(2, run.microbatch_rows)
    rows -= 1 if has_uneven_rows(run) and rows > layout.data_ranks * microbatches else 0
    length = SEQ_LEN * 3 // 2 if layout.context == 3 else SEQ_LEN
    return replace(
        run.training,
        steps=STEPS, seq_len=length, global_batch=rows * length, grow=(), tokens=None, hours=None, step_seconds=None,
        measured=None, loss_chunk=None if run.training.loss_chunk is None else LOSS_CHUNK, attention="auto",
        bad_steps=0,
    )  # fmt: skip


def _shrink_parallelism(run: Run, layout: Layout, microbatches: int) -> Parallelism:
    old = run.parallelism
    stages = count_stages(run, layout) if layout.pipeline > 1 else old.stages
    degrees: dict[str, Any] = {**layout.degrees(), "expert": layout.expert}
    return replace(
        old,
        **degrees,
        microbatches=microbatches,
        stages=stages,
        starts=(),
        split="layers" if old.starts else old.split,
        reshard=2 if isinstance(old.reshard, int) else old.reshard,
        exchange=ExpertExchange(),
        symmetric_memory=False,
        async_tensor=False,
    )


def _replace_known(settings: Any, **values: Any) -> Any:
    names = {field.name for field in dataclasses.fields(settings)}
    return replace(settings, **{name: value for name, value in values.items() if name in names})


def _list_changes(target: Run, run: Run) -> dict[str, tuple[Any, Any]]:
    axes = [(axis, getattr(target, axis), getattr(run, axis)) for axis in ("model", "parallelism", "training")]
    values = {
        f"{axis}.{field.name}": (getattr(old, field.name, None), getattr(new, field.name))
        for axis, old, new in axes
        for field in dataclasses.fields(new)
    }
    return {name: (old, new) for name, (old, new) in values.items() if old != new}


UNCOVERED: tuple[tuple[str, Callable[[Run], bool]], ...] = (
    ("CUDA kernels and NCCL: ranks compute on CPUs and exchange by gloo", lambda run: run.machine.device == "cuda"),
    ("eight-bit hardware: matmuls in eight bits are emulated", lambda run: run.precision.eight_bit),
    (
        "kernels that the compiler makes: graphs run as they are (aot_eager)",
        lambda run: run.compile.scope != "off" and run.compile.backend == "inductor",
    ),
    ("parallelism.exchange: tokens travel by titan's all-to-all", lambda run: run.parallelism.exchange.is_own),
    (
        "training.attention: the CPU's kernel computes it, with the same masks",
        lambda run: run.training.attention not in ("auto", "math"),
    ),
    ("parallelism.symmetric_memory", lambda run: run.parallelism.symmetric_memory),
    ("parallelism.async_tensor", lambda run: run.parallelism.async_tensor),
    ("parallelism.starts: stages have equal numbers of layers", lambda run: bool(run.parallelism.starts)),
    ("training.grow: the batch does not grow", lambda run: bool(run.training.grow)),
    ("evaluations", lambda run: run.evaluation.tokens > 0 or bool(run.evaluation.tasks or run.evaluation.ema)),
    ("the weights or the run that it starts from", lambda run: bool(run.checkpoint.resume or run.checkpoint.weights)),
    ("copies and exports of checkpoints", lambda run: bool(run.checkpoint.path or run.checkpoint.export)),
    ("hooks that don't change what is learned", lambda run: any(not h.science for h in (run.hooks or {}).values())),
    ("text and tokenizer: rows are synthetic", lambda run: True),
    ("training beyond three steps, and the learning rate's schedule", lambda run: True),
)  # fmt: skip


def list_uncovered(run: Run) -> list[str]:
    """Return what the shrunk run of a run can't show."""
    listed = [text for text, applies in UNCOVERED if applies(run)]
    # whole numbers among the settings of a model of one's own may be lengths beyond a shrunk row
    inherited = {field.name for base in KNOWN_MODELS for field in dataclasses.fields(base)}
    values = {field.name: getattr(run.model, field.name) for field in dataclasses.fields(run.model)}
    return listed + [
        f"model.{name}={value}: it stays as it is, and rows have {SEQ_LEN} tokens"
        for name, value in values.items()
        if name not in inherited and isinstance(value, int) and value >= SEQ_LEN
    ]


def describe_changes(shrunk: Shrunk) -> str:
    """Return the shrunk sizes in one line."""
    model, run = shrunk.run.model, shrunk.run
    return (
        f"{model.layers} of {shrunk.target.model.layers} blocks, width {model.dim} of {shrunk.target.model.dim}, "
        f"{run.layout} of {shrunk.target.layout}, {format_plural(run.microbatches, 'micro-batch', 'micro-batches')}"
    )


HEAD_WIDTH = 16
"""Width of a head: the least that matmuls in eight bits, and rotary embeddings of a part of a head, divide."""
FFN_WIDTHS = (96, 80, 112, 160)
EXPERT_WIDTHS = (32, 48, 80)
VOCABULARIES = (192, 208, 250, 253)
CHUNK, FLOOR = 24, 16
"""Of a row of `SEQ_LEN` tokens: an attention chunk, and the position from which queries are scaled."""
FIXED = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "attention_chunk": CHUNK, "floor_scale": FLOOR,
}  # fmt: skip
"""Sizes that no degree divides, where the model has them and they are larger."""


def shrink_model(run: Run, layout: Layout) -> Any:
    """Return the model of a run, narrow and with few blocks.

    Kept are: whether heads share keys and values, whether heads make up the width, each kind of block, shared experts,
    groups of experts, and whether the sizes that ranks divide leave a remainder. A setting that is not known here keeps
    its value: sizes of one's own models too.
    """
    model = run.model
    sizes: dict[str, Any] = _shrink_widths(run, layout) | _shrink_experts(run, layout)
    sizes |= {name: min(size, value) for name, size in FIXED.items() if (value := getattr(model, name, None))}
    # the fewest blocks that have every kind of block, and as many on each stage or a remainder, as the run
    first_dense, stages = min(1, getattr(model, "first_dense", 0)), count_stages(run, layout)
    every = run.memory.every if run.memory.checkpointing == "every_n" else 1
    period = math.lcm(getattr(model, "moe_every", 1), getattr(model, "nope_every", 1), every)
    layers = stages * math.ceil(max(2, period + first_dense) / stages) + (1 if model.layers % run.staging.count else 0)
    return _replace_known(model, **sizes, layers=layers, first_dense=first_dense)


def has_uneven_rows(run: Run) -> bool:
    """Return whether a step's rows leave a remainder over ranks and micro-batches."""
    return run.training.global_batch // run.training.seq_len % (run.layout.data_ranks * run.microbatches) > 0


def count_stages(run: Run, layout: Layout) -> int:
    """Return the stages in all: of several on a pipeline rank two are kept."""
    return layout.pipeline * min(2, run.staging.count // run.layout.pipeline)


def choose_size(candidates: Iterable[int], divides: bool, *divisors: int) -> int:
    """Return the first size that the product of divisors divides, or that it does not.

    Args:
        candidates: the sizes, preferred ones first.
    """
    product, sizes = math.prod(divisors), list(candidates)
    return next((size for size in sizes if (size % product == 0) == divides), sizes[0])


def _shrink_widths(run: Run, layout: Layout) -> dict[str, int]:
    model, old, heads_split = run.model, run.layout, layout.tensor
    heads_split *= layout.context if run.parallelism.context_method == "ulysses" else 1
    kv_heads = heads_split * (2 if model.kv_heads > old.tensor else 1)
    heads = kv_heads * (2 if model.heads > model.kv_heads else 1)
    has_own_width = model.heads * model.head_size != model.dim
    ranks = old.tensor * old.sharded
    ffn = choose_size(FFN_WIDTHS, model.ffn % ranks == 0, layout.tensor, layout.sharded)
    divisors = (layout.tensor, layout.sharded) if model.vocab % old.tensor == 0 else (layout.tensor,)
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": (heads + (2 if has_own_width else 0)) * HEAD_WIDTH,
        "ffn": FFN_WIDTHS[0] if ffn % layout.tensor else ffn,
        "vocab": choose_size(VOCABULARIES, model.vocab % ranks == 0, *divisors),
    }
    return sizes | ({"head_dim": HEAD_WIDTH} if getattr(model, "head_dim", None) is not None else {})


def _shrink_experts(run: Run, layout: Layout) -> dict[str, int]:
    model: Any = run.model
    if not hasattr(model, "experts"):
        return {}
    groups = min(2, getattr(model, "groups", 1))
    kept_groups = 1 if groups == 2 and model.topk_groups < model.groups else groups
    experts = max(4, 2 * layout.expert) * groups
    width = choose_size(EXPERT_WIDTHS, model.expert_ffn % max(1, run.layout.expert_shards) == 0, layout.expert_shards)
    sizes = {"experts": experts, "top_k": min(2, model.top_k), "expert_ffn": width}
    return sizes | ({"groups": groups, "topk_groups": kept_groups} if hasattr(model, "groups") else {})
