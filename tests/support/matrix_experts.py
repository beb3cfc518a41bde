"""The layouts on which models with experts are proven equal to one device: gradients of each expert and each router.

`python -m tests.support.matrix_experts` measures all of them and prints one line for each; docs/experts.md has the
worst of each group.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.matrix import COLUMNS, EXACT, Case, Outcome, outcome, worst
from tests.support.ranks import RankFailed
from tests.support.runs import Tensors

MODELS = {
    "qwen3_moe": (
        "training.global_batch=256", "model=qwen3_moe_debug", "model.experts=4", "model.chosen_experts=2",
        "model.expert_ffn=24", "model.head_dim=8", "model.aux_loss=0.5", "model.seq_aux_loss=0.5",
        "model.router_z_loss=0.1", "model.bias_rate=0.1",
    ),
}  # fmt: skip
"""The models, with all that balances experts, so large that their gradients count."""
LAYOUTS = {
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
MEMORY = ("none", "full", "selective")
STAGES = {"ep_pp", "ep_interleaved", "ep_zbv", "ep_4d"}
"""The layouts with a pipeline, which needs as many micro-batches as stages."""


def cases() -> Iterator[Case]:
    """Every model on every layout, with and without recomputation and accumulation."""
    for model, science in MODELS.items():
        for layout, settings in LAYOUTS.items():
            for memory, count in itertools.product(MEMORY, (2 if layout in STAGES else 1, 4)):
                if (layout, memory) != ("ep_zbv", "selective"):  # two backward passes
                    more = (f"memory={memory}", f"parallelism.microbatches={count}")
                    yield Case(f"{model}-{layout}-{memory}-{count}", (*settings, *more), model=science)


def each_expert(gradients: Tensors) -> Tensors:
    """Gradients with those of each expert by itself."""
    out: Tensors = {}
    for name, gradient in gradients.items():
        if gradient.dim() == 3:
            out |= {f"{name}.{expert}": part for expert, part in enumerate(gradient)}
        else:
            out[name] = gradient
    return out


def difference(a: Tensors, b: Tensors) -> tuple[float, str]:
    """The largest of max|a - b| / max|b| over gradients and experts, and of which; one that is zero must stay zero."""
    a, b = each_expert(a), each_expert(b)
    assert a.keys() == b.keys()
    tiny = torch.finfo(torch.float32).tiny
    return max((float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=tiny)), n) for n in a)


def main() -> int:
    """Measure the cases whose names contain the arguments, and print a table."""
    known: dict[tuple[str, ...], Outcome] = {}
    wanted = sys.argv[1:]
    names = ("experts", *COLUMNS, "terms")
    print(f"| {' | '.join(('layout', 'ranks', *names))} |\n|{' --- |' * (len(names) + 2)}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if not all(part in case.id for part in wanted):
                continue
            if case.model not in known:
                place = Path(folder) / str(len(known))
                place.mkdir()
                known[case.model] = outcome(place, None, case.model)
            one = known[case.model]
            try:
                with tempfile.TemporaryDirectory() as there:
                    got = outcome(Path(there), case, case.model)
                    found = worst(got, one)
            except RankFailed as failure:
                print(f"{case.id}: {failure}", file=sys.stderr)
                failed.append(case.id)
                continue
            found["experts"], where = difference(got.merged("gradients"), one.merged("gradients"))
            holds = bool(found["same start"] and found["same rows"]) and max(found[k] for k in names) <= EXACT
            figures = " | ".join(f"{found[k]:.0e}" for k in names)
            print(f"| {case.name} | {got.run.layout.devices} | {figures} |", flush=True)
            failed += [] if holds else [f"{case.id} ({where})"]
    print(f"{len(failed)} beyond the bound{': ' if failed else ''}{', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
