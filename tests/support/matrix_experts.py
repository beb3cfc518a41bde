"""The layouts on which models with experts are proven equal to one device: gradients of each expert and each router.

`python -m tests.measure.layout_table experts` measures all of them; docs/experts.md has the worst of each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.support.matrix import (
    DOCUMENTS,
    LLAMA4,
    LayoutCase,
    TrainedLayout,
    compare_layouts,
    train_case,
)
from tests.support.runs import Tensors, read_step_records
from titan.model import experts as model_experts
from titan.training.trainer import Trainer

MODELS = {
    "qwen3_moe": (
        "training.global_batch=256", "model=qwen3_moe_debug", "model.experts=4", "model.top_k=2",
        "model.expert_ffn=24", "model.head_dim=8", "model.aux_loss=0.5", "model.seq_aux_loss=0.5",
        "model.router_z_loss=0.1", "model.bias_rate=0.1", "training.seed=13",
    ),
    "llama4": (
        *LLAMA4, "model.seq_aux_loss=0.5", "model.router_z_loss=0.1", "model.bias_rate=0.1", "training.seed=13",
    ),
    "deepseek_v3": (
        "training.global_batch=256", "model=deepseek_v3_debug", "model.experts=8", "model.top_k=2",
        "model.expert_ffn=24", "model.kv_heads=4", "model.q_lora_rank=20", "model.kv_lora_rank=16",
        "model.qk_nope_head_dim=8", "model.qk_rope_head_dim=8", "model.v_head_dim=8", "model.aux_loss=0.5",
        "model.seq_aux_loss=0.5", "model.router_z_loss=0.1", "model.bias_rate=0.1", "model.rope_factor=4",
        "model.rope_original=8", "model.rope_mscale_all=0.7", "training.seed=16",
    ),
}  # fmt: skip
"""The models, with all that balances experts, so large that their gradients count."""
MARGIN = 2e-5
"""What the score of the last chosen expert, or group, is above the next by, as a fraction of it, with the seeds of
the cases: so that rounding changes no choice. A token that chooses another expert makes gradients differ by 15 %."""
LAYOUTS = {
    "ddp": ("parallelism=ddp",),
    "fsdp": ("parallelism=fsdp",),
    "tp": ("parallelism=tp",),
    "cp": ("parallelism=cp",),
    "ring": ("parallelism=cp", "parallelism.context_method=ring"),
    "pp": ("parallelism=pp",),
    "fsdp_tp": ("parallelism=fsdp_tp",),
    "3d": ("parallelism=3d",),
    "ep": ("parallelism=fsdp", "parallelism.expert=2"),
    "ep_fsdp": ("parallelism=fsdp", "cluster.devices=4", "parallelism.expert=2"),
    "ep_tp": ("parallelism=fsdp_tp", "parallelism.expert=2"),
    "ep_all": ("parallelism=fsdp_tp", "parallelism.expert=4"),
    "ep_cp": ("parallelism=cp", "parallelism.shard=2", "parallelism.expert=4"),
    "ep_pp": ("parallelism=pp", "parallelism.shard=2", "parallelism.expert=2", "parallelism.schedule=1F1B"),
    "ep_interleaved": (
        "parallelism=pp", "parallelism.shard=2", "parallelism.expert=2", "parallelism.schedule=Interleaved1F1B",
    ),
    "ep_zbv": ("parallelism=pp", "parallelism.shard=2", "parallelism.expert=2", "parallelism.schedule=ZBVZeroBubble"),
    "ep_hsdp": ("parallelism=hsdp", "parallelism.replicate=2", "parallelism.shard=2", "parallelism.expert=2"),
    "ep_4d": ("parallelism=3d", "parallelism.expert=4"),
    "ep_in_tp": ("parallelism=tp", "parallelism.expert=2"),
}  # fmt: skip
STAGES = {"pp", "3d", "ep_pp", "ep_interleaved", "ep_zbv", "ep_4d"}
"""The layouts with a pipeline, which needs as many micro-batches as stages."""


def list_memory_modes(layout: str, model: int) -> list[tuple[str, int]]:
    """How a layout keeps activations, each with few or many micro-batches: all of them for the first of the models."""
    fewest = 2 if layout in STAGES else 1
    ways = [("none", 4), ("full", fewest), ("selective", 4)]
    if layout == "ep_zbv":  # two backward passes, and so never selective
        ways = [("none", fewest), ("full", 4)]
    return ways if model == 0 else [ways[(list(LAYOUTS).index(layout) + model) % len(ways)]]


SCIENCE = {
    "documents": (*DOCUMENTS, "training.seed=22"),
    "growing": ("training.grow=[[256,384],[640,512]]", "training.steps=4", "training.seed=2"),
    "short": ("training.global_batch=80", "training.seed=1"),
    "capacity": ("model.capacity=0.6", "training.seed=13"),
    "of-one": ("model.norm_topk_prob=false", "model.top_k=1", "training.seed=22"),
    "muon": ("optimizer=muon", "training.seed=20"),
    "skewed": ("model.top_k=1", "model.bias_rate=0", "training.seed=0"),
}
"""What differs in the recipe: attention within documents; batches that grow; fewer rows than micro-batches of ranks, so
that some compute rows that count nothing; choices that are dropped; one expert that gets all tokens."""
HALVES, PAIRS = (
    f"+parallelism.exchange._target_=experiments.expert_exchange.{name}" for name in ("halves.Halves", "pairs.Pairs")
)
"""Computation beside the exchange of tokens."""
PLACES = ("ep", "ep_tp", "ep_cp", "ep_pp", "ep_hsdp", "ep_4d")


def list_special() -> Iterator[LayoutCase]:
    """What may go wrong at a particular recipe."""
    for name, science in SCIENCE.items():
        for layout in PLACES:
            yield LayoutCase(f"{name}-{layout}", LAYOUTS[layout], model=(*MODELS["qwen3_moe"], *science))
    yield from _list_halves()
    yield from _list_pairs()
    eight = ("parallelism=fsdp", "cluster.devices=8", "parallelism.expert=4")
    for name, settings, counts in (("ep", LAYOUTS["ep"], (1, 2, 4)), ("ep_eight", eight, (1, 2))):
        for count in counts:
            microbatches = f"parallelism.microbatches={count}"
            yield LayoutCase(
                f"loaded-{name}-{count}", (*settings, microbatches), model=(*MODELS["qwen3_moe"], "model.aux_loss=5")
            )


def _list_halves() -> Iterator[LayoutCase]:
    """Micro-batches in two halves: each model, layout and memory mode in some combination, and masked documents."""
    recipes = {**MODELS, "documents": (*MODELS["qwen3_moe"], *SCIENCE["documents"])}
    for number, (name, science) in enumerate(recipes.items()):
        for index, layout in enumerate((*PLACES, "ep_zbv")):
            mode = ("none", "full", "selective")[(number + index) % (2 if layout == "ep_zbv" else 3)]
            count = 2 if layout in STAGES else 1
            technique = (HALVES, f"memory={mode}", f"parallelism.microbatches={count}")
            yield LayoutCase(f"halves-{name}-{layout}-{mode}", (*LAYOUTS[layout], *technique), model=science)


def _list_pairs() -> Iterator[LayoutCase]:
    """Pairs of a schedule: each model, layout and memory mode in some combination, and masked documents."""
    recipes = {**MODELS, "documents": (*MODELS["qwen3_moe"], *SCIENCE["documents"])}
    for number, (name, science) in enumerate(recipes.items()):
        for index, layout in enumerate(("ep_pp", "ep_4d")):
            mode = ("none", "full")[(number + index) % 2]  # selective is rejected with DualPipeV
            technique = ("parallelism.schedule=DualPipeV", PAIRS, f"memory={mode}", "parallelism.microbatches=4")
            yield LayoutCase(f"pairs-{name}-{layout}-{mode}", (*LAYOUTS[layout], *technique), model=science)


def choose_preparation(case: LayoutCase) -> Callable[[Trainer], None] | None:
    """Return what is done to a trainer before it trains."""
    return {"skewed": skew_routers, "loaded": preload_routers}.get(case.name.partition("-")[0])


def preload_routers(trainer: Trainer) -> None:
    """Set an uneven load, so that the gradient of the first step has that of the load-balancing loss."""
    for stage in trainer.train_step.stages:
        for router in stage.model.routers().values():
            router.load.copy_(torch.arange(1.0, len(router.load) + 1) / sum(range(1, len(router.load) + 1)))


def skew_routers(trainer: Trainer) -> None:
    """Let all tokens choose the second expert of each layer, so that the others get none."""
    for stage in trainer.train_step.stages:
        for router in stage.model.routers().values():
            router.bias[1] = 100.0


def list_cases() -> Iterator[LayoutCase]:
    """Every model on every layout, with and without recomputation and accumulation, and special recipes."""
    for number, (model, science) in enumerate(MODELS.items()):
        for layout, settings in LAYOUTS.items():
            for mode, count in list_memory_modes(layout, number):
                technique = (f"memory={mode}", f"parallelism.microbatches={count}")
                yield LayoutCase(f"{model}-{layout}-{mode}-{count}", (*settings, *technique), model=science)
    yield from list_special()


class ChoiceMargin:
    """Observes what a rank chooses experts by, and keeps the smallest margin.

    Attributes:
        smallest: relative difference between the score of the last chosen one and the first that is not chosen.
    """

    def __init__(self) -> None:
        """Observe all choices of this process from now on."""
        self.smallest = math.inf
        choose = model_experts.select_top_k

        def observe(scores: Tensor, count: int) -> Tensor:
            self.smallest = min(self.smallest, measure_margin(scores, count))
            return choose(scores, count)

        model_experts.select_top_k = observe


def measure_margin(scores: Tensor, count: int) -> float:
    """Return the smallest margin of a choice among scores [..., E]; infinite where all are chosen."""
    if count == scores.shape[-1]:
        return math.inf
    ordered = scores.detach().sort(dim=-1, descending=True).values
    last, following = ordered[..., count - 1], ordered[..., count]
    return float(((last - following) / last.abs()).min())


class OneDevice(dict[tuple[tuple[str, ...], bool], TrainedLayout]):
    """Runs on one device by what they learn, each trained when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        """Take where runs have their directories."""
        self.folder = folder

    def find_outcome(self, case: LayoutCase) -> TrainedLayout:
        """The run of a case, whose choices no rounding changes; those of a prepared trainer follow from that.

        Raises:
            AssertionError: when its seed has a choice that rounding may change.
        """
        prepare = choose_preparation(case)
        key = case.model, prepare is not None
        if key not in self:
            folder = self.folder / str(len(self))
            folder.mkdir()
            self[key] = train_case(folder, None, case.model, prepare or (lambda _: ChoiceMargin()))
        if prepare is None:
            check_margin(self[key])
        return self[key]


def check_margin(trained: TrainedLayout) -> None:
    """Raise AssertionError when a run on one device has a choice that rounding may change."""
    (rank,) = trained.ranks
    assert rank.extra.smallest >= MARGIN, (
        f"training.seed={trained.run.training.seed}: the score of a chosen expert is above the next one's by only "
        f"{rank.extra.smallest:.1e} of it; choose a seed with at least {MARGIN:g}."
    )


def measure_case(case: LayoutCase, reference: TrainedLayout, folder: Path) -> dict[str, float]:
    """How far a case is from one device."""
    got = train_case(folder, case, case.model, choose_preparation(case))
    differences = compare_layouts(got, reference) | {"load": compare_loads(got, reference)}
    return differences | {
        "experts": compare_gradients(got.merge_tensors("gradients"), reference.merge_tensors("gradients"))
    }


def split_experts(gradients: Tensors) -> Tensors:
    """Gradients with those of each expert by itself."""
    out: Tensors = {}
    for name, gradient in gradients.items():
        if gradient.dim() == 3:
            out |= {f"{name}.{expert}": part for expert, part in enumerate(gradient)}
        else:
            out[name] = gradient
    return out


def compare_gradients(a: Tensors, b: Tensors) -> float:
    """The largest of max|a - b| / max|b| over gradients and experts; those of an expert without tokens stay zero."""
    a, b = split_experts(a), split_experts(b)
    assert a.keys() == b.keys()
    tiny = torch.finfo(torch.float32).tiny
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=tiny)) for n in a)


def compare_loads(got: TrainedLayout, reference: TrainedLayout) -> float:
    """The largest difference between metrics of the experts' load, which are shares of counts."""
    lines = zip(read_step_records(got.run), read_step_records(reference.run), strict=True)
    return max(
        abs(line[key] - expected[key]) for line, expected in lines for key in expected if key.startswith("expert_")
    )
