"""The hook's cosines are those of whole gradients, the same on every layout, and change nothing that is learned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.layer_norms.cosine import Measure
from tests.support.matrix import MODEL
from tests.support.runs import compose_tiny_run, read_learned_values, read_step_records, train_run
from titan.run.run import Run

CONF = f"hydra.searchpath=[file://{Path(__file__).resolve().parents[1] / 'conf'}]"
OWN = (CONF, *MODEL, "optimizer=sgd", "checkpoint=off")
HOOK = "hooks=[layer_norms]"
PREFIX = "hooks/layer_norms/cosine/"


def figures(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k.startswith(PREFIX)} for line in read_step_records(run)]


def call(measure: Measure, step: int, gradients: dict[str, Tensor]) -> dict[str, Any]:
    """Call a hook as the platform does; what it logs."""
    logged: dict[str, Any] = {}
    moment: Any = SimpleNamespace(step=step, named_gradients=lambda: gradients.items(), log=logged.__setitem__)
    moment.norms = lambda tensors: {name: tensor.double().norm() for name, tensor in tensors.items()}
    measure.before_optimizer(moment)
    return logged


def test_cosines_of_whole_layers() -> None:
    torch.manual_seed(0)
    names = ("layers.0.attention.wq.weight", "layers.0.norm.weight", "layers.10.attention.wq.weight", "head.weight")
    one, two = ({name: torch.randn(5, 3) for name in names} for _ in range(2))
    measure = Measure(1)
    assert call(measure, 1, one) == {}
    kept = {name: gradient.clone() for name, gradient in one.items()}
    one["head.weight"].zero_()  # as an optimizer may reuse the memory
    found = call(measure, 2, two)
    layers = {"layers.0": names[:2], "layers.10": names[2:3], "head": names[3:], "model": names}
    for layer, members in layers.items():
        a, b = (torch.cat([g[name].flatten() for name in members]) for g in (kept, two))
        assert float(found[f"cosine/{layer}"]) == pytest.approx(float(torch.cosine_similarity(a, b, 0)), abs=1e-6)
    assert len(found) == len(layers)


def test_steps_that_are_measured() -> None:
    measure, gradients = Measure(3), {"head.weight": torch.ones(2)}
    measured = [step for step in (2, 3, 4, 5, 6, 9, 11, 12) if call(measure, step, gradients)]  # resumed at 9, 11
    assert measured == [3, 6, 12] and not measure.kept


def test_a_repeated_step_has_no_figure() -> None:
    measure, gradients = Measure(1), {"head.weight": torch.ones(2)}
    assert [bool(call(measure, step, gradients)) for step in (1, 2, 3, 3, 4)] == [False, True, True, False, True]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("parallelism.pipeline=2", "parallelism.microbatches=4"), id="pp"),
        pytest.param(("parallelism=3d",), id="3d"),
        pytest.param(("parallelism=cp",), id="cp"),
        pytest.param(("parallelism=ddp", "compile=block", "compile.backend=aot_eager"), id="ddp-compiled"),
    ],
)  # fmt: skip
def test_layouts_give_the_same_figures_and_training_is_as_without(tmp_path: Path, layout: tuple[str, ...]) -> None:
    alone, plain = compose_tiny_run(tmp_path / "alone", *OWN, HOOK), compose_tiny_run(tmp_path / "plain", *OWN)
    split = compose_tiny_run(tmp_path / "split", *OWN, HOOK, *layout)
    for run in (alone, plain, split):
        train_run(run)
    (first, *there), (_, *here) = figures(alone), figures(split)
    assert first == {} and len(there) == 2 and len(there[0]) == 4 + 4
    for one, other in zip(there, here, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert read_learned_values(alone) == read_learned_values(plain)
