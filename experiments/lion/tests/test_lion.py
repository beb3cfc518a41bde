"""Lion's update is the published one, the same on every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.lion.update import SignedMomentum
from tests.support.runs import TINY, compose_tiny_run, read_step_records, train_run
from titan.run.compose import compose_run

CONF = Path(__file__).resolve().parents[1] / "conf"
LION = [f"hydra.searchpath=[file://{CONF}]", "optimizer=lion", "precision=fp32"]
SMALL = [o for o in TINY if not o.startswith("optimizer")]


def test_three_updates() -> None:
    generator = np.random.default_rng(0)
    weight, gradients = generator.normal(size=5), generator.normal(size=(3, 5))
    parameter = torch.nn.Parameter(torch.tensor(weight))
    optimizer = SignedMomentum([{"params": [parameter], "weight_decay": 0.3}], 0.1, (0.9, 0.99))
    momentum = np.zeros(5)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        update = np.sign(0.9 * momentum + 0.1 * gradient)
        weight = weight - 0.1 * (update + 0.3 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-12)


@pytest.mark.full
def test_its_settings_are_part_of_the_ids() -> None:
    run = compose_run([*SMALL, *LION, "name=x"])
    assert type(run.optimizer).__name__ == "Lion" and run.optimizer.lr == 3e-4
    assert run.optimizer.state_bytes(10, 5) == 60


@pytest.mark.full
def test_layouts_learn_the_same(tmp_path: Path) -> None:
    runs = [compose_tiny_run(tmp_path / name, *LION, "checkpoint=off", layout=name) for name in ("single", "fsdp2")]
    for run in runs:
        train_run(run)
    alone, split = ([line["loss"] for line in read_step_records(run)] for run in runs)
    assert split == pytest.approx(alone, rel=1e-5) and len(set(alone)) == len(alone)
