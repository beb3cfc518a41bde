"""The optimizer's groups get the learning rate and the weight decay of each step, also after a resume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch

from tests.checkpoint.test_manager import stop_at
from tests.support.runs import are_identical, compose_tiny_run, read_checkpoint, read_step_records, train_run
from titan.schedule.optimizer_schedule import OptimizerSchedule
from titan.schedule.schema import Constant, Linear, Schedule
from titan.training import reporter
from titan.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Rising(Constant):
    """A schedule of one's own."""

    def weight_decay_factor(self, step: int, steps: int) -> float:
        """Rise in proportion to the step."""
        return step / steps


OF_NORMS = "optimizer.groups={norms:{match:['*norm.weight'],weight_decay:0.4,lr:0.5}}"


def test_groups_keep_their_own_factors() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1)], "weight_decay": 0.1, "factor": 0.5}, {"params": [torch.zeros(1)]},
    ]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=1.0, weight_decay=0.4)
    rates = OptimizerSchedule(optimizer, 0.1, Linear(warmup=0, weight_decay_shape="linear").build(4))
    for step, factor in ((3, 0.5), (1, 1.0)):
        assert rates.set_rates(step) == pytest.approx(0.1 * factor)
        first, second = optimizer.param_groups
        assert (first["lr"], second["lr"]) == (pytest.approx(0.05 * factor), pytest.approx(0.1 * factor))
        assert (first["weight_decay"], second["weight_decay"]) == (0.1 * factor, 0.4 * factor)


@pytest.mark.parametrize(
    ("schedule", "weight_decay", "recorded"),
    [
        pytest.param(Constant(weight_decay_shape="linear"), 0.1, {"weight_decay": 0.08}, id="shape"),
        pytest.param(Rising(), 0.1, {"weight_decay": 0.04}, id="own"),
        pytest.param(Linear(), 0.1, {}, id="constant"),
        pytest.param(Rising(), 0.0, {}, id="none"),
    ],
)
def test_weight_decay_is_recorded_where_the_schedule_changes_it(
    schedule: Schedule, weight_decay: float, recorded: dict[str, float]
) -> None:
    run: Any = Namespace(schedule=schedule, optimizer=Namespace(weight_decay=weight_decay), training=Namespace(steps=5))
    assert reporter.build_weight_decay_record(run, schedule.build(5), 2) == pytest.approx(recorded)


def watch(trainer: Trainer) -> list[tuple[float, ...]]:
    """For `train_run`: give learning rate and weight decay of every group at each update."""
    optimizer, found = trainer.train_step.optimizer, list[tuple[float, ...]]()
    optimizer.register_step_pre_hook(
        lambda *_: found.append(tuple(g[k] for g in optimizer.param_groups for k in ("lr", "weight_decay")))
    )
    return found


def test_a_resumed_run_has_the_same_rates_and_weights(tmp_path: Path) -> None:
    how = ["schedule=cosine", "schedule.weight_decay_shape=linear", "schedule.warmup=1", "training.steps=5", OF_NORMS]
    whole, part = (compose_tiny_run(tmp_path / name, *how) for name in ("whole", "part"))
    (expected,) = (one.extra for one in train_run(whole, watch))
    train_run(part, stop_at(2))
    (found,) = (one.extra for one in train_run(part, watch))
    assert found == expected[-len(found) :] and 0 < len(found) < 5
    decays = [[round(row[i], 9) for row in expected] for i in (1, 3)]
    assert sorted(decays) == [[0.1, 0.08, 0.06, 0.04, 0.02], [0.4, 0.32, 0.24, 0.16, 0.08]]
    for key in ("lr", "weight_decay"):
        assert [line[key] for line in read_step_records(part)] == [line[key] for line in read_step_records(whole)]
    assert [line["weight_decay"] for line in read_step_records(part)] == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])
    assert are_identical(read_checkpoint(part, 5), read_checkpoint(whole, 5))
