"""The estimate of weight elements on a rank against those of a model that is built."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.tiers import select_cases
from titan.estimate.rank_sizes import RankSizes, StageBlocks
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.trace.rank import _build_world

LAYOUTS = {
    "tp": "parallelism=tp",
    "fsdp": "parallelism=fsdp",
    "fsdp-tp": "parallelism=fsdp_tp",
    "ep": "parallelism=fsdp parallelism.expert=2",
    "ep-fsdp": "parallelism=fsdp parallelism.expert=2 cluster.devices=4",
    "ep-tp": "parallelism=fsdp_tp parallelism.expert=4",
}
MODELS = ("qwen3_moe_debug", "deepseek_v3_debug", "llama4_debug")
CASES = [pytest.param(model, layout, id=f"{model}-{layout}") for model in MODELS for layout in LAYOUTS]


def elements(_: int, __: int, run: Run) -> int:
    """The elements of all weights on the first rank."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    step = build_train_step(run, _build_world(run, 0), memory=fake)
    weights = (p.to_local() if isinstance(p, DTensor) else p for p in step.parameters())
    found = sum(weight.numel() for weight in weights)
    dist.destroy_process_group()
    return found


@pytest.mark.full
@pytest.mark.parametrize(("model", "layout"), select_cases(CASES, ("deepseek_v3_debug-tp", "llama4_debug-ep-tp")))
def test_weights_that_tensor_ranks_split_are_divided(model: str, layout: str) -> None:
    common = (f"model={model}", "checkpoint=off", "dataset=synthetic", "compile=off", "cluster.memory_gib=1e6")
    run = compose_test_run([*common, *LAYOUTS[layout].split()])
    sizes = RankSizes(run, run.layout, 1, "cpu", {0: StageBlocks(range(run.model.layers), True, True)})
    found = run_ranks(elements, 1, run, joined=False, timeout=300)[0]
    assert sizes.elements / sizes.shards == pytest.approx(found, rel=1e-3 if sizes.shards > 1 else 1e-12)
