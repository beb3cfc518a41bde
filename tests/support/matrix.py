"""The layouts that are proven equal to one device: every mix of up to three dimensions, four at once, all schedules.

`python -m tests.measure.layout_table` measures all of them; docs/trust.md lists them, and has the worst.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.runs import (
    RankOutcome,
    Tensors,
    are_identical,
    compose_tiny_run,
    compute_difference,
    read_step_records,
    select_weights,
    train_run,
)
from titan.run.run import Run
from titan.training.trainer import Trainer

SHAPE = (
    "model.dim=32", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.head_dim=8", "model.ffn=48",
    "model.vocab=64",
)  # fmt: skip
MODEL = (
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "evaluation.tokens=64",
    "evaluation.every=2",
)
RECIPE = ("optimizer=sgd", "checkpoint=off", "training.clip_norm=0.5", *MODEL)
TIED = "model.tied=true"
DIMENSIONS = {"replicate": "ddp", "shard": "fsdp", "context": "cp", "tensor": "tp", "pipeline": "pp"}
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "ShallowInterleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip
METHODS = ("allgather", "ulysses", "ring")
EXACT = 1e-5
"""Law 3's bound in fp32."""


@dataclass(frozen=True)
class LayoutCase:
    """A layout and what is special about it.

    Attributes:
        name: for the table and for pytest.
        settings: what is overridden beside the recipe.
        tied: whether embedding and head share a weight.
        model: settings of the model, the same on one device.
    """

    name: str
    settings: tuple[str, ...]
    tied: bool = False
    model: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """A name without blanks."""
        return self.name.replace(" ", "-") + ("-tied" if self.tied else "")

    @property
    def science(self) -> tuple[str, ...]:
        """The settings that decide what is learned."""
        return (*self.model, *((TIED,) if self.tied else ()))


def list_layouts() -> Iterator[LayoutCase]:
    """Every dimension, every pair and triple, and four at once; untied and tied."""
    several = [mix for count in (1, 2, 3) for mix in itertools.combinations(DIMENSIONS, count)]
    for mix in [*several, ("shard", "context", "tensor", "pipeline")]:
        name = " ".join(DIMENSIONS[d] for d in mix)
        settings = tuple(f"parallelism.{d}={2 if d in mix else 1}" for d in DIMENSIONS)
        rows = 8 // (2 ** len({"replicate", "shard"} & set(mix)))  # a rank's, at most as many micro-batches
        microbatches = (f"parallelism.microbatches={min(4, rows)}",) if "pipeline" in mix else ()
        yield from _make_untied_and_tied(name, settings + microbatches)


def list_schedules() -> Iterator[LayoutCase]:
    """Every schedule alone, with shard, with tensor and with both; untied and tied."""
    for schedule in SCHEDULES:
        for mix in ((), ("shard",), ("tensor",), ("shard", "tensor")):
            name = " ".join([schedule, *(DIMENSIONS[d] for d in mix)])
            degrees = tuple(f"parallelism.{d}=2" for d in ("pipeline", *mix))
            yield from _make_untied_and_tied(
                name, (f"parallelism.schedule={schedule}", "parallelism.microbatches=4", *degrees)
            )


def list_variants() -> Iterator[LayoutCase]:
    """What the choices of a dimension change: sequence and loss parallel, ways to share a row, uneven sizes."""
    tensor = ("parallelism.tensor=2",)
    yield LayoutCase("tp whole sequence", ("parallelism.sequence_parallel=false", *tensor))
    yield LayoutCase("tp whole logits", ("parallelism.loss_parallel=false", *tensor))
    yield LayoutCase("tp inputs saved", ("parallelism.regather=false", *tensor))
    for mode in ("full", "selective"):
        again = ("parallelism.regather=true", f"memory={mode}")
        yield LayoutCase(f"{mode} fsdp tp regathered", (*again, "parallelism.shard=2", *tensor))
    pipeline = ("parallelism.pipeline=2", "parallelism.microbatches=4")
    yield LayoutCase("tp pp whole sequence", ("parallelism.sequence_parallel=false", *tensor, *pipeline))
    qwen = ("model=qwen3_debug", "model.tied=false", *SHAPE)
    yield LayoutCase("tp normed heads", tensor, model=qwen)
    yield LayoutCase("fsdp tp pp normed heads", ("parallelism.shard=2", *tensor, *pipeline), model=qwen)
    for method in METHODS:
        for balance in ("true", "false"):
            settings = (
                f"parallelism.context_method={method}",
                f"parallelism.balance={balance}",
                "parallelism.context=2",
            )
            name = f"cp {method} {'balanced' if balance == 'true' else 'in order'}"
            yield LayoutCase(name, settings)
            yield LayoutCase(f"{name} fsdp tp", (*settings, "parallelism.shard=2", *tensor))
    yield LayoutCase("cp of 4", ("parallelism.context=4", "parallelism.context_method=ring"))
    yield LayoutCase("tp of 4", ("parallelism.tensor=4",), model=("model.kv_heads=4",))
    yield LayoutCase("pp of 4", ("parallelism.pipeline=4", "parallelism.microbatches=8"), tied=True)
    yield LayoutCase("fsdp of 3 tp uneven", ("parallelism.shard=3", *tensor))
    sharded, of_two = "parallelism.accumulate=sharded", ("parallelism.replicate=2", "parallelism.shard=2")
    yield LayoutCase("ddp fsdp pp reduced", (sharded, *of_two, *pipeline[:1], "parallelism.microbatches=2"))
    interleaved = ("parallelism.schedule=Interleaved1F1B", sharded, "parallelism.shard=2", *pipeline)
    yield LayoutCase("Interleaved1F1B fsdp reduced", interleaved, tied=True)
    freeing = (interleaved[0], "parallelism.reshard=always", *interleaved[2:])
    yield LayoutCase("Interleaved1F1B fsdp resharded", freeing, tied=True)
    for settings in ("sharded", "whole"):
        several = ("parallelism.microbatches=2", f"parallelism.accumulate={settings}")
        yield LayoutCase(f"ddp fsdp {settings}", (*of_two, *several))
    yield LayoutCase(
        "fsdp of 3 pp uneven", ("parallelism.shard=3", "parallelism.pipeline=2", "parallelism.microbatches=2")
    )
    yield LayoutCase(
        "fsdp pp resharded", ("parallelism.shard=2", "parallelism.pipeline=2", "parallelism.reshard=always")
    )
    yield LayoutCase("fsdp resharded to 2 of 4", ("parallelism.shard=4", "parallelism.reshard=2"))
    yield LayoutCase("fsdp prefetching", ("parallelism.shard=2", "parallelism.prefetch=2"))
    yield LayoutCase("fsdp offloaded", ("parallelism.shard=2", "memory.offload=true"))
    yield LayoutCase(
        "fsdp tp pp offloaded", ("parallelism.shard=2", *tensor, "parallelism.pipeline=2", "memory.offload=true")
    )


OWN_STRATEGY = "tests.support.own_strategies"
GROUPS = (
    "+parallelism.groups={columns: {_target_: " + OWN_STRATEGY + ".Columns, match: ['*.w2', tok_embeddings]}, "
    "pairs: {_target_: " + OWN_STRATEGY + ".Pairs, match: ['layers.*.attention', layers.3]}, "
    "kept: {_target_: " + OWN_STRATEGY + ".Kept, match: ['layers.*.feed_forward']}, "
    "whole: {match: ['*norm', head], shard: 1}}"
)
GROUPED = {
    "fsdp": ("parallelism.shard=4",),
    "ddp fsdp": ("parallelism.replicate=2", "parallelism.shard=2", "parallelism.microbatches=2"),
    "fsdp cp": ("parallelism.shard=2", "parallelism.context=2"),
    "fsdp tp": ("parallelism.shard=2", "parallelism.tensor=2"),
    "ddp tp": ("parallelism.replicate=2", "parallelism.tensor=2"),
    "fsdp pp": ("parallelism.shard=2", "parallelism.pipeline=2"),
    "fsdp pp reduced": ("parallelism.shard=2", "parallelism.pipeline=2", "parallelism.accumulate=sharded"),
    "fsdp zbv": ("parallelism.shard=2", "parallelism.pipeline=2", "parallelism.schedule=ZBVZeroBubble"),
    "fsdp tp pp": ("parallelism=3d",),
    "fsdp whole": ("parallelism.shard=2", "parallelism.accumulate=whole", "parallelism.microbatches=2"),
    "fsdp offloaded": ("parallelism.shard=2", "memory.offload=true"),
    "fsdp compiled": ("parallelism.shard=2", "compile.scope=block", "compile.backend=aot_eager"),
    "fsdp selective": ("parallelism.shard=2", "memory=selective", "parallelism.prefetch=1"),
    "fsdp recomputing": ("parallelism.shard=2", "memory=full", "parallelism.prefetch=1"),
}


def list_grouped() -> Iterator[LayoutCase]:
    """Parameters that are sharded by four strategies."""
    for name, layout in GROUPED.items():
        yield LayoutCase(f"{name} in groups", ("modules=[tests]", GROUPS, *layout))
    tied = "+parallelism.groups={ends: {match: [head, tok_embeddings], shard: 1}}"
    yield LayoutCase("fsdp in groups", (tied, "parallelism.shard=2"), tied=True)


MODES = ("none", "full", "every_n", "selective", "budget", "gate")
COMPILED = {
    "fsdp": ("parallelism.shard=2",),
    "tp": ("parallelism.tensor=2",),
    "pp": ("parallelism.pipeline=2", "parallelism.microbatches=4"),
    "zbv": ("parallelism.pipeline=2", "parallelism.microbatches=4", "parallelism.schedule=ZBVZeroBubble"),
    "cp": ("parallelism.context=2",),
    "cp ring": ("parallelism.context=2", "parallelism.context_method=ring"),
    "3d": ("parallelism=3d", "parallelism.microbatches=4"),
}


def list_techniques() -> Iterator[LayoutCase]:
    """Every way to keep activations with every scope of compilation, and each of both in each kind of layout."""
    for (i, memory), (j, layout) in itertools.product(enumerate(MODES), enumerate(COMPILED)):
        if (memory, layout) == ("selective", "zbv"):
            continue
        scopes = ("block", "model") if memory in ("none", "budget") else ("block", "model", "off")
        scope = scopes[(i + j + 1) % len(scopes)]
        backend = ("compile.backend=aot_eager",) if scope != "off" else ()
        settings = (f"memory.checkpointing={memory}", f"compile.scope={scope}", *backend, *COMPILED[layout])
        yield LayoutCase(f"{memory} {scope} {layout}", settings)


CHUNKED = {
    "one device": (),
    "one device model": ("compile=model", "compile.backend=aot_eager"),
    "ddp": ("parallelism.replicate=2",),
    "fsdp of 3": ("parallelism.shard=3",),
    "tp whole sequence and logits": (
        "parallelism.tensor=2", "parallelism.sequence_parallel=false", "parallelism.loss_parallel=false"
    ),
    "fsdp cp tp pp": ("parallelism.shard=2", "parallelism.context=2", *COMPILED["pp"], "parallelism.tensor=2"),
    "zbv tp": (*COMPILED["zbv"], "parallelism.tensor=2"),
    "block zbv fsdp": ("compile=block", "compile.backend=aot_eager", *COMPILED["zbv"], "parallelism.shard=2"),
    "block tp": ("compile=block", "compile.backend=aot_eager", "parallelism.tensor=2"),
    "model fsdp": ("compile=model", "compile.backend=aot_eager", "parallelism.shard=2"),
    "model tp pp": ("compile=model", "compile.backend=aot_eager", "parallelism.tensor=2", *COMPILED["pp"]),
    "budget model": ("compile=model", "compile.backend=aot_eager", "memory=budget"),
}  # fmt: skip
CHUNKED_TIED = {"one device", "fsdp cp tp pp", "zbv tp", "block zbv fsdp", "model tp pp", "fsdp of 3"}
"""Where head and embedding are one weight too: on one device, in parts of different sizes, and on several stages."""


def list_chunked() -> Iterator[LayoutCase]:
    """Head and loss of some tokens at a time, in each kind of layout."""
    for name, settings in CHUNKED.items():
        untied, tied = _make_untied_and_tied(f"chunked {name}", ("training.loss_chunk=7", *settings))
        yield from (untied, tied) if name in CHUNKED_TIED else (untied,)


DOCUMENTS = ("dataset.mask_documents=true", "dataset.longest=12")
GROWING = ("training.grow=[[128,256],[384,384]]", "training.steps=4", "dataset.skip=[[20,29]]")
PIPELINED = ("parallelism.pipeline=2", "parallelism.microbatches=4")
READING = {
    "ddp": ("parallelism.replicate=2",),
    "fsdp of 3": ("parallelism.shard=3",),
    "tp": ("parallelism.tensor=2",),
    "pp": PIPELINED,
    "ZBVZeroBubble": ("parallelism.schedule=ZBVZeroBubble", *PIPELINED),
    "Interleaved1F1B tp": ("parallelism.schedule=Interleaved1F1B", "parallelism.tensor=2", *PIPELINED),
    "cp allgather": ("parallelism.context=2",),
    "cp allgather in order": ("parallelism.context=2", "parallelism.balance=false"),
    "cp ulysses": ("parallelism.context=2", "parallelism.context_method=ulysses"),
    "cp ring": ("parallelism.context=2", "parallelism.context_method=ring"),
    "cp ring of 4 in order": (
        "parallelism.context=4", "parallelism.context_method=ring", "parallelism.balance=false"
    ),
    "cp ring full pp": (
        "parallelism.context=2", "parallelism.context_method=ring", "memory=full", *PIPELINED
    ),
    "fsdp tp pp": ("parallelism.shard=2", "parallelism.tensor=2", *PIPELINED),
    "fsdp cp tp pp": ("parallelism.shard=2", "parallelism.context=2", "parallelism.tensor=2", *PIPELINED),
    "full fsdp": ("memory=full", "parallelism.shard=2"),
    "selective tp": ("memory=selective", "parallelism.tensor=2"),
    "block fsdp": ("compile=block", "compile.backend=aot_eager", "parallelism.shard=2"),
    "block cp ring": (
        "compile=block", "compile.backend=aot_eager", "parallelism.context=2", "parallelism.context_method=ring"
    ),
    "model tp": ("compile=model", "compile.backend=aot_eager", "parallelism.tensor=2"),
}  # fmt: skip
GROWN = {
    "ddp", "fsdp of 3", "tp", "pp", "ZBVZeroBubble", "Interleaved1F1B tp", "cp allgather", "fsdp tp pp",
    "fsdp cp tp pp", "block fsdp",
}  # fmt: skip
"""Where batches grow: ways to share a row and to keep activations know nothing of a batch's rows."""


def list_batch_kinds() -> Iterator[LayoutCase]:
    """Documents kept apart, and batches that grow while rows are skipped, in each kind of layout."""
    for kind, science in (("documents", DOCUMENTS), ("growing", GROWING)):
        for name, settings in READING.items():
            if kind == "documents" or name in GROWN:
                yield LayoutCase(f"{kind} {name}", settings, model=science)


LLAMA4 = (
    "model=llama4_debug", *SHAPE, "model.experts=4", "model.expert_ffn=24", "model.nope_every=2", "model.moe_every=2",
    "model.attention_chunk=5", "model.floor_scale=3", "model.aux_loss=0.5", "training.global_batch=256",
)  # fmt: skip
LLAMA4_LAYOUTS = {
    "tp whole sequence": ("parallelism.tensor=2", "parallelism.sequence_parallel=false"),
    "selective fsdp": ("memory=selective", "parallelism.shard=2"),
    "model": ("compile=model", "compile.backend=aot_eager"),
}
CUT = {
    "tp", "pp", "cp allgather", "cp allgather in order", "cp ulysses", "cp ring", "cp ring of 4 in order",
    "Interleaved1F1B tp", "fsdp cp tp pp", "block cp ring", "tp whole sequence", "model",
}  # fmt: skip
"""Where chunks are tested without documents too: where tokens, heads or blocks are on several ranks, and compiled."""


def list_llama4() -> Iterator[LayoutCase]:
    """Attention in chunks, without and with documents, and experts in every second block, in each kind of layout."""
    for kind, science in (("llama4", LLAMA4), ("llama4 documents", (*LLAMA4, *DOCUMENTS))):
        for name, settings in {**READING, **LLAMA4_LAYOUTS}.items():
            if kind == "llama4 documents" or name in CUT:
                yield LayoutCase(f"{kind} {name}", settings, model=science)


OWN_MODELS = ("window", "linear", "gated")


def list_own_models() -> Iterator[LayoutCase]:
    """Models of one's own, with documents, in each kind of layout."""
    selective = {"selective cp": ("memory=selective", "parallelism.context=2")}
    for kind in OWN_MODELS:
        own = ("modules=[tests]", "model._target_=tests.support.own_models.OwnLlama", f"+model.attention={kind}")
        for name, settings in {**READING, **selective}.items():
            # a core's own parameter can't be split over tensor ranks
            if kind != "linear" or "parallelism.tensor=2" not in settings:
                yield LayoutCase(f"{kind} {name}", settings, model=(*own, *DOCUMENTS))


OWN_TERM = "+training.loss_terms.own={_target_: tests.support.loss_terms.Entropy, coefficient: -0.3}"
OF_BLOCKS = ("modules=[tests]", "model._target_=tests.support.loss_terms.Small")
TERMS = {
    "z-loss": ("training.z_loss=0.01",),
    "smoothing": ("training.label_smoothing=0.1",),
    "capped": ("model.logit_cap=0.5",),
    "own": ("modules=[tests]", OWN_TERM),
    "blocks": OF_BLOCKS,
}
ALL_TERMS = tuple(dict.fromkeys(setting for science in TERMS.values() for setting in science))
SPLIT = {
    "ddp", "fsdp of 3", "tp", "pp", "ZBVZeroBubble", "cp allgather", "cp ring", "fsdp cp tp pp", "full fsdp",
    "block fsdp", "one device", "one device model", "tp whole sequence and logits", "zbv tp", "model tp pp",
    "budget model",
}  # fmt: skip
"""Where all terms are tested: one layout of each way to split logits, stages and tokens, and each compile scope."""


def list_loss_terms() -> Iterator[LayoutCase]:
    """Each loss term on split logits and stages, and all of them at once in each kind of layout."""
    of_two = ("parallelism.shard=2", "parallelism.tensor=2", *PIPELINED)
    for name, science in TERMS.items():
        yield LayoutCase(f"{name} fsdp tp pp", of_two, model=science)
    full = ("training.loss_chunk=7", "memory=full", "parallelism.tensor=2", *PIPELINED)
    yield LayoutCase("terms chunked full tp pp", full, model=ALL_TERMS)
    for name, settings in {**READING, **CHUNKED}.items():
        if name in SPLIT:
            yield LayoutCase(f"terms {name}", settings, model=ALL_TERMS)
    yield LayoutCase("terms documents fsdp of 3", ("parallelism.shard=3",), model=(*ALL_TERMS, *DOCUMENTS))
    yield LayoutCase("terms growing tp whole sequence", find_variant("tp whole sequence"), model=(*ALL_TERMS, *GROWING))


def find_variant(name: str) -> tuple[str, ...]:
    """The settings of a variant."""
    return next(case.settings for case in list_variants() if case.name == name)


def list_cases() -> list[LayoutCase]:
    """All of them."""
    return [
        *list_layouts(),
        *list_schedules(),
        *list_variants(),
        *list_techniques(),
        *list_chunked(),
        *list_batch_kinds(),
        *list_llama4(),
        *list_loss_terms(),
        *list_grouped(),
        *list_own_models(),
    ]


def _make_untied_and_tied(name: str, settings: tuple[str, ...]) -> Iterator[LayoutCase]:
    for tied in (False, True):
        yield LayoutCase(name, settings, tied)


@dataclass
class TrainedLayout:
    """What a layout gave."""

    run: Run
    ranks: list[RankOutcome]
    seconds: float

    def merge_tensors(self, field: str) -> Tensors:
        """Tensors by name of all ranks, each of which has some or all of them: the same ones."""
        out: Tensors = {}
        for rank in self.ranks:
            for name, tensor in getattr(rank, field).items():
                if not torch.equal(out.setdefault(name, tensor), tensor):
                    raise AssertionError(f"{name} differs between ranks")
        return out

    @property
    def validation(self) -> float:
        """The validation loss at the end."""
        result = json.loads((Path(self.run.directory) / "result.json").read_text())
        return float(result["validation_loss"])


def train_case(
    folder: Path,
    case: LayoutCase | None,
    science: tuple[str, ...] = (),
    prepare: Callable[[Trainer], Any] | None = None,
) -> TrainedLayout:
    """Train a case for three steps; None: one device. `prepare`: see `tests.support.runs.train_run`."""
    settings = (*science, *(case.settings if case else ()))
    run, start = compose_tiny_run(folder / "run", *RECIPE, *settings), time.monotonic()
    return TrainedLayout(run, train_run(run, prepare), time.monotonic() - start)


def compare_layouts(got: TrainedLayout, reference: TrainedLayout) -> dict[str, float]:
    """How far a layout is from one device, by law 3's measure; and whether laws 1 and 2 hold (0 or 1)."""
    lines, expected = read_step_records(got.run), read_step_records(reference.run)
    hashes = [line["batch_hash"] for line in lines] == [line["batch_hash"] for line in expected]

    def compute_relative(key: str) -> float:
        return max(abs(a[key] / b[key] - 1) for a, b in zip(lines, expected, strict=True))

    return {
        "same start": float(
            are_identical(select_weights(got.merge_tensors("first")), select_weights(reference.merge_tensors("first")))
        ),
        "same rows": float(hashes),
        "gradients": compute_difference(got.merge_tensors("gradients"), reference.merge_tensors("gradients")),
        "weights": compute_difference(
            select_weights(got.merge_tensors("last")), select_weights(reference.merge_tensors("last"))
        ),
        "loss": compute_relative("loss"),
        "norm": compute_relative("grad_norm"),
        "validation": abs(got.validation / reference.validation - 1),
        "terms": max((compute_relative(key) for key in expected[0] if key.startswith("loss/")), default=0.0),
    }
