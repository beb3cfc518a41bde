"""The optimizer's groups get the learning rate and the weight decay of each step, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_manager import stop_at
from tests.support.runs import same, saved, steps, tiny, train
from titan.schedule.rates import Rates
from titan.schedule.schema import Linear
from titan.training.trainer import Trainer

OF_NORMS = "optimizer.groups={norms:{match:['*norm.weight'],weight_decay:0.4,lr:0.5}}"


def test_groups_keep_their_own_factors() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1)], "weight_decay": 0.1, "factor": 0.5}, {"params": [torch.zeros(1)]},
    ]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=1.0, weight_decay=0.4)
    rates = Rates(optimizer, 0.1, Linear(warmup=0, weight_decay_shape="linear").build(4))
    for step, factor in ((3, 0.5), (1, 1.0)):
        assert rates.set(step) == pytest.approx(0.1 * factor)
        first, second = optimizer.param_groups
        assert (first["lr"], second["lr"]) == (pytest.approx(0.05 * factor), pytest.approx(0.1 * factor))
        assert (first["weight_decay"], second["weight_decay"]) == (0.1 * factor, 0.4 * factor)


def watch(trainer: Trainer) -> list[tuple[float, ...]]:
    """For `train`: give learning rate and weight decay of every group at each update."""
    optimizer, found = trainer.train_step.optimizer, list[tuple[float, ...]]()
    optimizer.register_step_pre_hook(
        lambda *_: found.append(tuple(g[k] for g in optimizer.param_groups for k in ("lr", "weight_decay")))
    )
    return found


def test_a_resumed_run_has_the_same_rates_and_weights(tmp_path: Path) -> None:
    how = ["schedule=cosine", "schedule.weight_decay_shape=linear", "schedule.warmup=1", "training.steps=5", OF_NORMS]
    whole, part = (tiny(tmp_path / name, *how) for name in ("whole", "part"))
    (expected,) = (one.extra for one in train(whole, watch))
    train(part, stop_at(2))
    (found,) = (one.extra for one in train(part, watch))
    assert found == expected[-len(found) :] and 0 < len(found) < 5
    decays = [[round(row[i], 9) for row in expected] for i in (1, 3)]
    assert sorted(decays) == [[0.1, 0.08, 0.06, 0.04, 0.02], [0.4, 0.32, 0.24, 0.16, 0.08]]
    assert [line["lr"] for line in steps(part)] == [line["lr"] for line in steps(whole)]
    assert same(saved(part, 5), saved(whole, 5))
