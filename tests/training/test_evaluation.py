"""Evaluation while a run trains: sets of files, tasks and averaged weights, on several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_manager import in_two_attempts
from tests.support import prepared_folders, task_files
from tests.support.composing import compose_test_run
from tests.support.runs import (
    TINY,
    RankOutcome,
    Tensors,
    are_identical,
    compose_tiny_run,
    gather_tensors,
    select_weights,
    train_run,
)
from tests.support.tiers import select_cases
from titan.checkpoint.state import train_state_dict
from titan.cluster.rank_info import RankInfo
from titan.dataset.mixture import BLOCK, MixturePhase, RowMixture, TokenSequences
from titan.errors import ConfigError
from titan.metrics.reader import read_records
from titan.parallelism.mesh import RunContext
from titan.run.run import Run
from titan.training.evaluation.evaluator import build_eval_sets
from titan.training.trainer import Trainer

BASE = (
    *(setting for setting in TINY if not setting.startswith(("dataset", "evaluation"))),
    "model.vocab=4096", "model.kv_heads=2", "optimizer=sgd", "training.steps=2", "training.seq_len=64",
    "training.global_batch=256", "metrics.sample_tokens=0", "checkpoint=off", "evaluation.tokens=256",
)  # fmt: skip
LAYOUTS = ["fsdp", "tp", "pp", "cp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, tasks, and one device's run."""
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def given(folder: Path) -> list[str]:
    """The overrides of all runs here."""
    paths = task_files.write_tasks(folder)
    sets = f"+evaluation.sets.code={{path: {paths['lambada']}, tokens: 100}}"
    return [*BASE, *task_files.write_corpus(folder), *task_files.build_settings(paths), sets]


def trained(directory: Path, given: list[str], *more: str) -> Run:
    run = compose_test_run([*given, *more, f"hydra.run.dir={directory}"])
    assert [seen.code for seen in train_run(run)] == [0] * run.layout.devices
    return run


def measured(run: Run) -> dict[str, float]:
    """The figures of the last evaluation."""
    lines = [line for line in read_records(Path(run.directory) / "metrics.jsonl") if "validation_loss" in line]
    return {key: value for key, value in lines[-1].items() if key.startswith(("evaluation/", "validation", "ema/"))}


@pytest.fixture(scope="module")
def alone(folder: Path, given: list[str]) -> dict[str, float]:
    return measured(trained(folder / "single", given, "evaluation.ema=0.5"))


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[key] - other[key]) / max(abs(other[key]), 1e-9) for key in one)


@pytest.mark.parametrize("layout", select_cases(LAYOUTS, ("pp",)))
def test_all_layouts_measure_the_same(tmp_path: Path, given: list[str], alone: dict[str, float], layout: str) -> None:
    found = measured(trained(tmp_path / layout, given, f"parallelism={layout}", "evaluation.ema=0.5"))
    # the exponential of a sum over a word's tokens has the absolute error of that sum as its relative error
    assert difference(found, alone) < 2e-5


def test_synthetic_data_have_no_tokenizer_for_tasks(folder: Path) -> None:
    paths = task_files.build_settings(task_files.write_tasks(folder))
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: dataset=synthetic has no tokenizer"):
        compose_test_run([*TINY, *paths, "hydra.run.dir=/nowhere"])


def states_of(trainer: Trainer) -> list[Tensors]:
    """The weights at the start and, filled while it trains, after each step."""
    step = trainer.train_step
    found = [select_weights(gather_tensors(train_state_dict(step)))]
    step.optimizer.register_step_post_hook(
        lambda *_: found.append(select_weights(gather_tensors(train_state_dict(step))))
    )
    return found


def averages(seen: RankOutcome) -> Tensors:
    return {n.removesuffix(".ema"): t for n, t in seen.last.items() if n.endswith(".ema")}


@pytest.mark.full
def test_a_moving_average_is_that_of_all_steps(tmp_path: Path) -> None:
    """Over two attempts, of which the second begins at a checkpoint that has the average."""
    more = ["evaluation.ema=0.75", "evaluation.tokens=64", "optimizer=sgd", "schedule=linear"]
    (seen,) = train_run(compose_tiny_run(tmp_path / "one", *more, "training.steps=4"), states_of)
    first, *later = seen.extra
    for name, tensor in averages(seen).items():
        key = name.replace("optimizer.", "model.")
        expected = first[key]
        for state in later:
            expected = 0.75 * expected + 0.25 * state[key]
        assert torch.allclose(tensor, expected, rtol=1e-6, atol=1e-8)
    assert len(later) == 4 and len(averages(seen)) == len(first)
    run = compose_tiny_run(tmp_path / "two", *more, "training.steps=4")
    _, (halved,) = in_two_attempts(run, run)
    assert are_identical(averages(halved), averages(seen))
    lines = [line for line in read_records(tmp_path / "one" / "metrics.jsonl") if "validation_loss" in line]
    assert lines[-1]["ema/validation_loss"] != lines[-1]["validation_loss"]


@pytest.mark.full
def test_a_checkpoint_may_lack_the_average(tmp_path: Path) -> None:
    """Then it begins at the checkpoint's weights; a run without one ignores that of its checkpoint."""
    run = compose_tiny_run(tmp_path / "run", "training.steps=1", "schedule.warmup=0")
    train_run(run)
    with_it = compose_tiny_run(tmp_path / "run", "training.steps=2", "schedule.warmup=0", "evaluation.ema=0.5")
    (seen,) = train_run(with_it, states_of)
    before, after = seen.first, seen.extra[-1]
    for name, tensor in averages(seen).items():
        key = name.replace("optimizer.", "model.")
        assert torch.allclose(tensor, (before[key] + after[key]) / 2, rtol=1e-6, atol=1e-8)
    (without,) = train_run(compose_tiny_run(tmp_path / "run", "training.steps=3", "schedule.warmup=0"))
    assert without.code == 0 and not averages(without)


def test_a_step_that_was_not_finite_leaves_the_average_as_it_is(tmp_path: Path) -> None:
    def before(trainer: Trainer) -> Tensors:
        def averaged() -> Tensors:
            return gather_tensors({n: t for n, t in train_state_dict(trainer.train_step).items() if n.endswith(".ema")})

        assert trainer.average is not None
        trainer.average.copy_weights()
        at_first = averaged()
        for parameter in trainer.train_step.parameters():
            parameter.data.add_(1)
        trainer.average.update(torch.tensor(True))
        assert are_identical(averaged(), at_first)
        trainer.average.update(torch.tensor(False))
        return {name: tensor - at_first[name] for name, tensor in averaged().items()}

    (seen,) = train_run(compose_tiny_run(tmp_path, "evaluation.ema=0.75", "optimizer=sgd", "checkpoint=off"), before)
    assert all(torch.allclose(moved, torch.full_like(moved, 0.25), atol=1e-6) for moved in seen.extra.values())


@pytest.mark.parametrize(
    ("validation", "settings", "line"),
    [
        pytest.param([[1] * 40], ("evaluation.tokens=8",), "evaluation.tokens=8: no validation loss", id="tokens"),
        pytest.param([], ("evaluation.tokens=64",), "dataset.validation=0.01 of its documents are none", id="split"),
        pytest.param([[1] * 40], ("evaluation.tokens=64",), "", id="enough"),
        pytest.param([], ("evaluation.tokens=64", "dataset.validation=0"), "", id="no-split"),
    ],
)
def test_an_empty_set_is_reported(
    validation: list[list[int]], settings: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    run, shown = compose_tiny_run(tmp_path, *settings), list[str]()
    corpus = prepared_folders.write_corpus(tmp_path / "corpus", [[[1] * 40]], validation=validation)
    mix = RowMixture((TokenSequences("one", corpus, 16, 9),), (MixturePhase(0, (BLOCK,)),))
    world = RunContext(RankInfo(), run.layout, torch.device("cpu"))
    sets = build_eval_sets(run, world, mix, shown.append, lambda: False)
    assert bool(sets) == (bool(validation) and not line)
    assert line in "".join(shown) and len(shown) == bool(line)
