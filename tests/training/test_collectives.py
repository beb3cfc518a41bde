"""How many collective operations a step takes beside those of the layout, and that all ranks clip by one factor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.runs import compose_tiny_run, train_run
from tests.support.tiers import full
from titan.parallelism import norms
from titan.training.trainer import Trainer

STEPS = 2


def counted(trainer: Trainer) -> dict[str, Any]:
    """Return what the rank counts from now on: its all-reduces by the size of their tensors, and its norms."""
    seen: dict[str, Any] = {"sizes": Counter(), "norms": []}
    all_reduce, clip = dist.all_reduce, norms.clip_gradients

    def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen["sizes"][tensor.dtype, tensor.numel()] += 1
        return all_reduce(tensor, *args, **options)

    def noting(gradients: Any, norm: torch.Tensor, largest: float) -> None:
        seen["norms"].append(norm.clone())
        clip(gradients, norm, largest)

    dist.all_reduce, norms.clip_gradients = counting, noting  # for good: this is a rank's process
    return seen


@pytest.mark.parametrize(
    ("layout", "settings", "flat"),  # replicas' gradients are summed too, by FSDP
    [
        pytest.param("fsdp2", (), 0, id="fsdp"),
        full("single", ("parallelism=tp", "cluster.devices=2", "model.kv_heads=2"), 1, id="tp"),
        full("single", ("parallelism=fsdp_tp", "cluster.devices=4", "model.kv_heads=2"), 1, id="fsdp-tp"),
        full("single", ("parallelism=pp", "cluster.devices=2"), 0, id="pp"),
        full("single", ("parallelism=hsdp", "cluster.devices=4"), None, id="hsdp"),
    ],
)
def test_a_step_sums_its_metrics_and_the_norm_at_once(
    layout: str, settings: tuple[str, ...], flat: int | None, tmp_path: Path
) -> None:
    how = (f"training.steps={STEPS}", "checkpoint=off", "compile=off", "metrics.sample_tokens=0", "evaluation.every=0")
    seen = [rank.extra for rank in train_run(compose_tiny_run(tmp_path, *how, *settings, layout=layout), counted)]
    for rank in seen:
        sums: dict[torch.dtype, int] = Counter()
        for (dtype, _), count in rank["sizes"].items():
            sums[dtype] += count
        assert sums[torch.float64] == STEPS, "of metrics and the norm"
        assert flat is None or sums[torch.float32] == STEPS * flat, "of weights that tensor ranks share"
        assert len(rank["norms"]) == STEPS
        assert all(torch.equal(norm, first) for norm, first in zip(rank["norms"], seen[0]["norms"], strict=True))
