"""The rule behind optimizer.lr=auto, and how a run's number follows from it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from titan.config import warning
from titan.errors import ConfigError
from titan.model.schema import Llama
from titan.optimizer import step_law
from titan.run import budget
from titan.run.compose import compose_run
from titan.run.identity import collect_science, compute_ids
from titan.run.run import Run, as_config

SIZE = ["model=qwen3_0.6b", "training.seq_len=2048", "training.tokens=20e9", "training.global_batch=524288"]


@pytest.fixture(scope="module")
def numbered() -> Run:
    """A run whose size and tokens the published runs have, with a number as its learning rate."""
    return compose_run([*SIZE, "optimizer.lr=0.001787"])


def set_values(run: Run, **values: object) -> Run:
    """Return a run with optimizer.lr=auto and other values of its training."""
    optimizer = dataclasses.replace(run.optimizer, lr="auto")
    return dataclasses.replace(run, optimizer=optimizer, training=dataclasses.replace(run.training, **values))  # type: ignore[arg-type]


def test_the_rule_is_the_published_one() -> None:
    # 1.79 N^-0.713 D^0.307 and 0.58 D^0.571
    assert step_law.compute_learning_rate(1e9, 1e11) == pytest.approx(1.6325e-3, rel=1e-4)
    assert step_law.compute_batch(1e11) == pytest.approx(1.10771e6, rel=1e-4)


def test_parameters_are_counted_as_published(numbered: Run) -> None:
    shapes = {(960, 9368, 15, 7): 214_663_680, (1280, 9472, 10, 10): 429_260_800, (2048, 8192, 16, 16): 1_073_741_824}
    for (dim, ffn, heads, layers), published in shapes.items():
        model = Llama(dim=dim, ffn=ffn, heads=heads, kv_heads=heads, layers=layers, vocab=65536)
        assert budget.count_parameters(dataclasses.replace(numbered, model=model)) == published


@pytest.mark.full
def test_auto_is_a_number_in_the_record_and_in_ids(numbered: Run) -> None:
    run = compose_run([*SIZE, "optimizer.lr=auto"])
    assert run.optimizer.lr == run.optimizer.peak_lr == 0.001787
    assert as_config(run)["optimizer"]["lr"] == 0.001787
    assert run.overrides == (*SIZE, "optimizer.lr=0.001787")  # so that resume=DIR has it, also with more steps
    ids, expected = (compute_ids(r, collect_science(r, "data", None)) for r in (run, numbered))
    assert ids.science == expected.science


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param({}, "", id="inside"),
        pytest.param({"steps": 300_000}, "runs with 2B to 100B tokens, and this one has 157B", id="tokens"),
        pytest.param({"global_batch": 2048 * 64, "steps": 160_000}, "a global batch of 454k tokens", id="batch"),
    ],
)
def test_outside_of_the_published_range_a_warning_says_so(
    numbered: Run, values: dict[str, int], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warning.warn_once.cache_clear()
    assert budget.apply_learning_rate(set_values(numbered, **values)).optimizer.peak_lr > 0
    printed = capsys.readouterr().err
    assert words in printed and bool(printed) == bool(words)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        pytest.param(["optimizer.lr=auto"], "runs with 215M to 2.16B parameters without embedding", id="small"),
        pytest.param([*SIZE, "training.tokens=2e12", "optimizer.lr=auto"], "2B to 100B tokens, and this", id="long"),
        pytest.param([*SIZE, "optimizer=muon", "optimizer.lr=auto"], "AdamW, and the optimizer is Muon", id="muon"),
        pytest.param(["optimizer=sgd", "optimizer.lr=auto"], "AdamW, and the optimizer is SGD", id="sgd"),
        pytest.param(["optimizer.lr=Auto"], "expected a number or auto", id="word"),
        pytest.param(["optimizer.lr=0"], "must be above 0", id="zero"),
    ],
)
def test_what_the_rule_does_not_know_is_rejected(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose_run(overrides)


def test_a_branch_has_the_rate_of_its_trunk(numbered: Run) -> None:
    run = set_values(numbered)
    branch = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, decay_steps=10))
    with pytest.raises(ConfigError, match=r"decay_steps=10 decays another run's"):
        budget.apply_learning_rate(branch)
