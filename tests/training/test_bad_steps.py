"""A step that is not finite names where that began: pass, module, micro-batch, rank and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.matrix import MODEL
from tests.support.runs import compose_tiny_run, read_learned_values, read_step_records, train_run
from tests.support.tiers import select_cases
from titan.metrics.reader import read_records
from titan.training.bad_steps import NonFiniteOpMode
from titan.training.trainer import Trainer

SETTINGS = (
    *MODEL,
    "optimizer=sgd",
    "checkpoint=off",
    "training.steps=4",
    "parallelism.microbatches=2",
    "evaluation.every=0",
)
STEP, PLACE = 2, 5
"""The step that fails, and the row in it, counted from its first."""


class Gradient(torch.autograd.Function):
    """Passes its argument on, and poisons rows of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return poisoned(grads[0], ctx.saved_tensors[0]), None


def poisoned(x: Tensor, rows: Tensor) -> Tensor:
    shape = (-1, *[1] * (x.dim() - 1))
    return x.masked_fill(rows.view(shape), float("nan"))


def plant(module: str, direction: str, rank: int) -> Callable[[Trainer], None]:
    """For `train_run`: let a linear layer fail on one rank, in the row `PLACE` of step `STEP`, also if repeated."""

    def before(trainer: Trainer) -> None:
        layer = dict(trainer.train_step.stages[-1].model.named_modules()).get(module)
        if layer is None:
            return
        fails = trainer.world.rank_info.rank == rank
        row: Tensor = fields_of(trainer)
        current: list[Tensor] = []

        def look(stage: Any, args: Any, kwargs: Any) -> None:
            targets = kwargs["targets"] if "targets" in kwargs else args[1]
            current[:] = [(targets == row[: targets.shape[1]]).all(1)]

        def product(x: Tensor, weight: Tensor) -> Tensor:  # on all ranks: it decides which collectives a region uses
            if not fails:
                return F.linear(x, weight)
            if direction == "backward":
                return F.linear(Gradient.apply(x, current[0]), weight)  # type: ignore[no-untyped-call]
            return poisoned(F.linear(x, weight), current[0])

        trainer.train_step.stages[-1].register_forward_pre_hook(look, with_kwargs=True)
        layer.product = product  # type: ignore[assignment]

    return before


def fields_of(trainer: Trainer) -> Tensor:
    """The targets of the row that fails."""
    training = trainer.run.training
    number = training.count_rows_before(STEP) + PLACE
    which, rows = trainer.mix.locate_rows(trainer.mix.compute_row_numbers(torch.tensor([number]).numpy()))
    start = int(rows[0]) * training.seq_len
    stored = trainer.mix.sources[int(which[0])].corpus.train.read(start, training.seq_len + 1)
    return torch.tensor(stored[1:].astype("int64"))


W1, W2, BLOCK = "layers.1.feed_forward.w1", "layers.1.feed_forward.w2", "layers.3.feed_forward.w1"
CASES = {
    "single-forward": ((), W1, "forward", 0, "micro-batch 1, rank 0, row 13"),
    "single-backward": ((), W1, "backward", 0, "micro-batch 1, rank 0, row 13"),
    "fsdp-backward": (("parallelism.shard=2",), W1, "backward", 1, "micro-batch 0, rank 1, row 13"),
    "fsdp-forward": (("parallelism.shard=2",), W1, "forward", 1, "micro-batch 0, rank 1, row 13"),
    "ddp-forward": (("parallelism.replicate=2",), W1, "forward", 1, "micro-batch 0, rank 1, row 13"),
    "tp-forward": (("parallelism.tensor=2",), W2, "forward", 1, "micro-batch 1, rank 1, row 13"),
    "tp-backward": (("parallelism.tensor=2",), W1, "backward", 1, "micro-batch 1, rank 1, row 13"),
    "pp-forward": (("parallelism.pipeline=2",), W1, "forward", 0, "micro-batch 1, rank 0, row 13"),
    "pp-backward": (("parallelism.pipeline=2",), BLOCK, "backward", 1, "micro-batch 1, rank 1, row 13"),
    "3d-backward": (("parallelism=3d",), BLOCK, "backward", 7, "micro-batch 0, rank 7, row 13"),
    "3d-forward": (("parallelism=3d",), BLOCK, "forward", 7, "micro-batch 0, rank 7, row 13"),
    "full-backward": (("parallelism.shard=2", "memory=full"), W1, "backward", 1, "micro-batch 0, rank 1, row 13"),
    "head-forward": ((), "head", "forward", 0, "micro-batch 1, rank 0, row 13"),
    "compiled-backward": (("compile=block", "compile.backend=aot_eager"), W1, "backward", 0,
                          "micro-batch 1, rank 0, row 13"),
}  # fmt: skip
QUICK = ("single-forward",)


@pytest.mark.parametrize(
    "settings, module, direction, rank, where",
    select_cases([pytest.param(*case, id=name) for name, case in CASES.items()], QUICK),
)
def test_the_origin_of_a_planted_value_is_named(
    tmp_path: Path, settings: tuple[str, ...], module: str, direction: str, rank: int, where: str
) -> None:
    run = compose_tiny_run(tmp_path, *SETTINGS, *settings)
    seen = train_run(run, plant(module, direction, rank))
    assert [one.code for one in seen] == [0] * run.layout.devices
    sentence = f"the first non-finite value is in the {direction} pass of {module}, operation masked_fill, {where}"
    found = [line.get("not_finite") for line in read_records(tmp_path / "metrics.jsonl") if "loss" in line]
    assert found == [None, sentence, None, None]
    assert f"{sentence}; the weights are unchanged" in (tmp_path / "log" / "rank-0.log").read_text()
    details = json.loads((tmp_path / "debug" / f"not-finite-step-{STEP}.json").read_text())
    assert details["sentence"] == sentence and len(details["ranks"]) == run.layout.devices


def test_steps_after_it_are_those_of_a_run_that_skips_it(tmp_path: Path) -> None:
    """The step that had started is repeated with the weights that it would have had."""
    kept, late = (
        compose_tiny_run(tmp_path / "kept", *SETTINGS),
        compose_tiny_run(tmp_path / "late", *SETTINGS, "evaluation.every=1"),
    )
    for run in (kept, late):  # the second one waits for each step before the next
        train_run(run, plant(W1, "forward", 0))
    assert read_learned_values(kept) == read_learned_values(late)
    assert [line["loss"] is None for line in read_step_records(kept)] == [False, True, False, False]


@pytest.mark.full
def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    def before(trainer: Trainer) -> None:
        weight = dict(trainer.train_step.named_parameters())["layers.2.attention.wk.weight"]
        with torch.no_grad():
            weight[3, 4] = float("inf")

    run = compose_tiny_run(tmp_path, *SETTINGS, "training.bad_steps=2")
    (seen,) = train_run(run, before)
    assert seen.failure is not None
    assert "in the forward pass of layers.2.attention.wk, micro-batch 0, rank 0" in seen.failure
    assert "not finite before the step: layers.2.attention.wk.weight (rank 0)" in seen.failure


X = torch.ones(2, 3)
OPERATIONS: dict[str, tuple[Callable[[], object], str | None]] = {
    "a logarithm of a negative number": (lambda: torch.log(X - 2) + 1, "log"),
    "in place": (lambda: (X * 1).div_(0), "div_"),
    "an overflow": (lambda: (X * 1e30) @ (X.T * 1e30), "mm"),
    "the first of two": (lambda: (torch.log(X - 2), X / 0), "log"),
    "later operations": (lambda: torch.log(X - 2).exp() @ X.T, "log"),
    "a mask": (lambda: (X.masked_fill(X > 0, -torch.inf) + X).exp(), None),
    "a value that came from elsewhere": (lambda: torch.full((2, 3), torch.nan).add_(X), None),
    "memory that is not written yet": (lambda: torch.empty_like(X).copy_(X), None),
}


@pytest.mark.parametrize("compute, operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_first_operation_with_a_value_that_is_not_finite(
    compute: Callable[[], object], operation: str | None
) -> None:
    operations = NonFiniteOpMode()
    with operations:
        compute()
    assert (operations.take_first(), operations.take_first()) == (operation, None)
