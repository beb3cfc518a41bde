"""Schedule-Free AdamW is the published one; its average is what titan evaluates, exports and reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from experiments.schedule_free.update import Averaging
from tests.checkpoint.test_manager import in_two_attempts
from tests.support import task_files
from tests.support.runs import (
    TINY,
    Tensors,
    are_identical,
    compose_tiny_run,
    read_checkpoint,
    read_learned_values,
    train_run,
)
from tests.support.tiers import full
from titan.checkpoint import manifest
from titan.errors import ConfigError
from titan.metrics.reader import read_records
from titan.run.compose import compose_run
from titan.run.run import Run
from titan.training.evaluation.averages import average_weights
from titan.training.trainer import Trainer
from titan.weights.formats import open_weights

CONF = Path(__file__).resolve().parents[1] / "conf"
OWN = (f"hydra.searchpath=[file://{CONF}]", "recipe=schedule_free", "optimizer.lr=0.01", "schedule.warmup=2")
SMALL = [setting for setting in TINY if not setting.startswith("evaluation")]


def averages(state: Tensors) -> Tensors:
    """The averages of a state, by the parameters' names."""
    names = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    return {n: state[f"model.{n}"].sub(state[f"optimizer.{n}.base"], alpha=(1 - 0.9) / 0.9) for n in names}


def split(checkpoint: Tensors) -> tuple[Tensors, Tensors]:
    """What a resume needs of a checkpoint, and the weights to evaluate by the parameters' names."""
    other = {name.removeprefix("evaluation."): t for name, t in checkpoint.items() if name.startswith("evaluation.")}
    return {name: t for name, t in checkpoint.items() if not name.startswith("evaluation.")}, other


def test_updates_are_the_published_ones() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=5)
    z, second, squares = x, np.zeros(5), 0.0
    parameter = torch.nn.Parameter(torch.tensor(x))
    optimizer = Averaging([{"params": [parameter], "weight_decay": 0.3}], 0.1, (0.9, 0.95), 1e-8)
    for step, lr in enumerate((0.05, 0.1, 0.1, 0.02), 1):
        gradient, y = generator.normal(size=5), 0.1 * z + 0.9 * x
        optimizer.param_groups[0]["lr"], parameter.grad = lr, torch.tensor(gradient)
        optimizer.step()
        second, squares = 0.95 * second + 0.05 * gradient**2, squares + lr**2
        z = z - lr * (gradient / (np.sqrt(second / (1 - 0.95**step)) + 1e-8) + 0.3 * y)
        x = x + lr**2 / squares * (z - x)
        np.testing.assert_allclose(parameter.detach().numpy(), 0.1 * z + 0.9 * x, rtol=1e-12)
        np.testing.assert_allclose(optimizer.evaluation_weights(parameter).detach().numpy(), x, rtol=1e-12)


@pytest.mark.full
def test_its_settings() -> None:
    run = compose_run([*TINY, *OWN, "name=x"])
    assert type(run.optimizer).__name__ == "ScheduleFree" and type(run.schedule).__name__ == "Constant"
    assert run.optimizer.state_bytes(10, 5) == 120
    with pytest.raises(ConfigError, match=r"precision\.weights=bf16: .* give precision\.weights=fp32"):
        compose_run([*TINY, *OWN, "name=x", "precision=bf16_pure"])


def evaluated(trainer: Trainer) -> list[Tensor]:
    """The weight of the last norm in every forward pass without gradients, filled while it trains."""
    found: list[Tensor] = []
    stage = trainer.train_step.stages[0]

    def look(*_: object) -> None:
        if not torch.is_grad_enabled():
            found.append(stage.model.norm.weight.detach().clone())

    stage.register_forward_pre_hook(look)
    return found


def test_the_average_is_evaluated_sampled_exported_and_read(tmp_path: Path) -> None:
    data = task_files.write_corpus(tmp_path)
    sizes = ["model.vocab=4096", "evaluation.tokens=64", "evaluation.every=2", "metrics.sample_tokens=3"]
    export = ["checkpoint.export=hf", "checkpoint.export_dtype=fp32"]
    base = [setting for setting in SMALL if not setting.startswith(("dataset", "model.vocab"))]
    run = compose_run([*base, *data, *OWN, *sizes, *export, f"hydra.run.dir={tmp_path / 'run'}"])
    (seen,) = train_run(run, evaluated)
    state, kept = split(read_checkpoint(run, 3))
    expected = averages(state)
    assert are_identical(kept, expected)
    *_, sampled = seen.extra
    # validations after steps 2 and 3, then one forward pass for each of the three tokens
    assert all(torch.equal(weight, expected["norm.weight"]) for weight in seen.extra[-4:])
    assert not torch.equal(sampled, state["model.norm.weight"])
    assert torch.equal(seen.last["model.norm.weight"], state["model.norm.weight"])  # trained on from y
    exported = load_file(manifest.folder_of(Path(run.directory), 3) / "hf" / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], expected["norm.weight"])
    weights = open_weights(run.directory)
    assert are_identical({name: weights.read(name) for name in weights.shapes}, expected)


@pytest.mark.full
def test_averages_of_averages(tmp_path: Path) -> None:
    """A moving average, and the mean of checkpoints, are over x."""

    def before(trainer: Trainer) -> tuple[float, float]:
        optimizer, parameter = trainer.train_step.optimizer, next(trainer.train_step.parameters())

        def load(value: float) -> None:
            with torch.no_grad():
                parameter.fill_(value)
            optimizer.state[parameter]["base"].fill_(0.9 * value)  # so that x is 0.9 of it

        load(1.0)
        assert trainer.average is not None
        trainer.average.copy_weights()
        average = optimizer.state[parameter]["ema"].mean().item()
        average_weights(trainer.train_step, [lambda: load(1.0), lambda: load(3.0)])
        return average, parameter.mean().item()

    (seen,) = train_run(compose_tiny_run(tmp_path, *OWN, "evaluation.ema=0.5", "checkpoint=off"), before)
    assert seen.extra == pytest.approx((0.9, 1.8))


def validations(run: Run) -> list[float]:
    lines = read_records(Path(run.directory) / "metrics.jsonl")
    return [line["validation_loss"] for line in lines if "validation_loss" in line]


@pytest.mark.parametrize("layout", ["fsdp", full("3d")])
@pytest.mark.full
def test_layouts_evaluate_the_same_and_resume_each_other(tmp_path: Path, layout: str) -> None:
    evaluation = ["evaluation.tokens=64", "evaluation.every=1"]
    more = [*OWN, *evaluation, "training.steps=4", "model.kv_heads=2", "checkpoint.keep=9"]
    alone, parts, moved = (compose_tiny_run(tmp_path / name, *more) for name in ("alone", "parts", "moved"))
    (whole,) = train_run(alone)
    first, second = in_two_attempts(parts, parts)
    assert are_identical(second[0].first, first[0].last)
    assert are_identical(second[0].last, whole.last) and read_learned_values(parts) == read_learned_values(alone)
    _, second = in_two_attempts(compose_tiny_run(tmp_path / "moved", *more, f"parallelism={layout}"), moved)
    state, kept = split(read_checkpoint(moved, 2))
    assert are_identical(second[0].first, state) and are_identical(kept, averages(state))
    found, expected = validations(moved), validations(alone)
    assert found == pytest.approx(expected, rel=1e-5) and len(set(expected)) == 4
