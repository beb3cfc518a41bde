"""The loop: steps that are not finite, the end of a run, and what training needs to be installed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor
from torch._inductor.exc import InductorError

from tests.checkpoint.test_manager import stop_at
from tests.support.runs import (
    TINY,
    Tensors,
    are_identical,
    compose_tiny_run,
    gather_tensors,
    read_checkpoint,
    read_step_records,
    train_run,
)
from tests.support.tiers import full
from titan.checkpoint.state import train_state_dict
from titan.metrics.reader import read_records
from titan.parallelism.microbatches import Microbatches
from titan.training.train_step import TrainStep
from titan.training.trainer import Trainer


@dataclass(frozen=True)
class Poisoned(TrainStep):
    """A train step whose steps in `bad` fail on one rank, and that keeps the state before each step's first try."""

    rank: int = 0
    bad: frozenset[int] = frozenset()
    loss_only: bool = False
    states: list[Tensors] = field(default_factory=list)
    steps: dict[bytes, int] = field(default_factory=dict)

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        step = self.steps.setdefault(rows.tokens.numpy().tobytes(), len(self.steps) + 1)
        if step > len(self.states):
            self.states.append(gather_tensors(train_state_dict(self)))
        if step not in self.bad:
            return super().backward(rows, scale)
        if self.loss_only:
            return super().backward(rows, scale) * math.nan
        return super().backward(rows, math.inf if step % 2 else math.nan)


def poison(bad: set[int], rank: int, loss_only: bool) -> Callable[[Trainer], list[Tensors]]:
    """For `train_run`: let these steps fail on that rank; gives the states before each step."""

    def before(trainer: Trainer) -> list[Tensors]:
        train_step = trainer.train_step
        mine = frozenset(bad if trainer.world.rank_info.rank == rank else ())
        parts = (train_step.stages, train_step.runner, train_step.optimizer, train_step.world)
        poisoned = Poisoned(*parts, rank=rank, bad=mine, loss_only=loss_only)
        trainer.train_step = trainer.bad_steps.train_step = poisoned
        return poisoned.states

    return before


POISON = [
    full("single", ["optimizer=adamw"], True, id="adamw-loss"),
    pytest.param("single", ["optimizer=adamw"], False, id="adamw-gradients"),
    full("single", ["optimizer=sgd"], True, id="sgd"),
    full("fsdp2", ["optimizer=adamw"], True, id="adamw-loss-fsdp2"),
    full("fsdp2", ["optimizer=adamw", "optimizer.implementation=for-loop"], False, id="adamw-loop-fsdp2"),
    full("fsdp2", ["optimizer=sgd", "optimizer.momentum=0.9"], True, id="sgd-momentum-fsdp2"),
    full("ddp2", ["optimizer=adamw"], True, id="adamw-loss-ddp2"),
]


@pytest.mark.parametrize(("layout", "settings", "loss_only"), POISON)
def test_a_step_that_is_not_finite_changes_nothing(
    layout: str, settings: list[str], loss_only: bool, tmp_path: Path
) -> None:
    run = compose_tiny_run(tmp_path, *settings, "training.steps=6", layout=layout)
    last = run.layout.devices - 1
    seen = train_run(run, poison({1, 4}, last, loss_only))
    for rank in seen:
        states = [*rank.extra, rank.last]  # number i: before step i + 1
        changed = [step for step in range(1, 7) if not are_identical(states[step - 1], states[step])]
        assert changed == [2, 3, 5, 6]
        assert all(bool(tensor.isfinite().all()) for tensor in rank.last.values())
    lines = read_step_records(run)
    assert [line["step"] for line in lines if line["loss"] is None or line["grad_norm"] is None] == [1, 4]
    assert [line["rows"][0] for line in lines] == [0, 8, 16, 24, 32, 40]
    for rank_number in range(len(seen)):
        log = (tmp_path / "log" / f"rank-{rank_number}.log").read_text()
        what = f"the loss of rank {last}" if loss_only else "the gradients (the loss is finite)"
        cause = (
            "the step was finite" if loss_only else "the first non-finite value is in the backward pass of the model"
        )
        assert f"step 4: not finite: {what}, rows 24 to 31: {cause}" in log and "; the weights are unchanged" in log
    assert are_identical(read_checkpoint(run, 6), seen[0].last)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", full("sgd")])
def test_a_bad_first_step_is_as_if_it_was_not(optimizer: str, tmp_path: Path) -> None:
    """Also of the optimizer's state: momentum that a skipped step made would be chance bytes."""
    momentum = ["optimizer.momentum=0.9", "optimizer.weight_decay=0.1"] if optimizer == "sgd" else []
    run = compose_tiny_run(tmp_path, f"optimizer={optimizer}", *momentum, "training.steps=2", "schedule=linear")
    first, second = train_run(run, poison({1}, 0, False))[0].extra
    assert are_identical(first, second)
    assert all(not bool(tensor.any()) for name, tensor in second.items() if name.startswith("optimizer."))


@pytest.mark.parametrize("layout", ["single", full("ddp2")])
def test_bad_steps_in_a_row_end_the_run(layout: str, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "training.steps=9", "training.bad_steps=3", "checkpoint.every=4", layout=layout)
    rank = run.layout.devices - 1
    seen = train_run(run, poison({2, 3, 5, 6, 7}, rank, True))
    for one in seen:
        assert one.failure is not None
        assert one.failure.startswith(
            f"3 steps in a row without finite values, the last one step 7: the loss of rank {rank}, "
        )
        for part in ("rows 48 to 55", "optimizer.lr=0.001", "training.bad_steps=3", "last checkpoint is from step 4."):
            assert part in one.failure


@pytest.mark.parametrize("stop", [2, full(5)], ids=["between", "in-the-last-step"])
def test_a_first_stop_ends_the_attempt_and_the_next_one_finishes(stop: int, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "training.steps=5", "evaluation.tokens=64")
    assert train_run(run, stop_at(stop))[0].code == 130
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["finished"], result["step"]) == (False, min(stop + 1, 5))
    assert "validation_loss" not in result
    assert train_run(run)[0].code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["finished"], result["step"], result["attempt"]) == (True, 5, 2)
    assert result["first_loss"] == read_step_records(run)[0]["loss"]
    assert result["last_loss"] == read_step_records(run)[-1]["loss"]
    assert result["validation_loss"] > 0


BLOCKED = ("tqdm", "wandb", "tensorboard", "tokenizers", "transformers", "datasets", "submitit")
WITHOUT = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        blocked = name.partition(".")[0] in {BLOCKED!r}
        return None if blocked else self.finder.find_spec(name, path, target)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
from titan.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_training_needs_torch_numpy_hydra_and_tiktoken_only(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    (tmp_path / "text" / "b.txt").write_text("eleven twelve thirteen fourteen fifteen\n" * 200)
    text = ["dataset=text", f"dataset.path={tmp_path}/text", "dataset.validation=0", "model.vocab=4096"]
    settings = [s for s in TINY if not s.startswith(("dataset", "model.vocab", "metrics.plot", "metrics.valid"))]
    command = [
        sys.executable,
        "-c",
        WITHOUT,
        *settings,
        *text,
        "metrics.sample_tokens=4",
        f"hydra.run.dir={tmp_path}/run",
    ]
    env = {**os.environ, "TITAN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["finished"]
    assert Path(result["plot"]).is_file()
    assert result["sample"]["text"]


@pytest.mark.full
@pytest.mark.parametrize("asked", [True, False], ids=["stopped", "by-itself"])
def test_a_signal_that_ends_the_compiler_ends_the_run(asked: bool, tmp_path: Path) -> None:
    def killed(trainer: Trainer) -> None:
        trainer.stop.requested = asked
        raise InductorError(RuntimeError("g++ died"), None)

    outcome = train_run(compose_tiny_run(tmp_path), killed)[0]
    assert outcome.code == 130 if asked else "g++ died; repair the compiler" in str(outcome.failure)


def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    def hear(trainer: Trainer) -> None:
        if trainer.world.rank_info.rank == 1:
            trainer.train_step.optimizer.register_step_pre_hook(lambda *_: setattr(trainer.stop, "requested", True))

    run = compose_tiny_run(tmp_path, "training.steps=50", "checkpoint=off", "cluster.timeout=60", layout="fsdp2")
    assert [rank.code for rank in train_run(run, hear)] == [130, 130]
    assert 1 <= len(read_step_records(run)) <= 3


@pytest.mark.full
def test_a_save_that_has_finished_is_recorded_before_the_step_in_flight(tmp_path: Path) -> None:
    def finish_save_late(trainer: Trainer) -> None:
        poll = trainer.saving.poll_finished
        late_save = {"checkpoint_step": 1, "checkpoint_stall_seconds": 0.0}
        trainer.saving.poll_finished = lambda: [late_save] if trainer.step == 4 else poll()  # type: ignore[method-assign]

    run = compose_tiny_run(tmp_path, "training.steps=5", "checkpoint.every=0")
    train_run(run, finish_save_late)
    records = read_records(tmp_path / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(steps)
    assert any("checkpoint_step" in record for record in records if record["step"] == 3)
