"""The share of the baseline's compute in comparisons, margins as such shares, and seeds that a plan asks for."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.made_runs import Story, make_run
from titan.errors import ConfigError
from titan.report import effort
from titan.report.comparison import compare
from titan.report.findings import Comparison, Variant
from titan.report.render.sentences import describe_margin

S = Story(steps=200, noise=0.0, spread=0.003)
OTHER = "training.clip_norm=7"
SLOPE, EXPONENT = 0.2, 0.3
"""Nats by which the baseline's loss falls per factor e of tokens at its end, and the exponent of tokens."""


def compute_level(length: float) -> float:
    """Return the baseline's loss after a multiple of its tokens."""
    return 3 + SLOPE / EXPONENT * (length**-EXPONENT - 1)


def make_runs(folder: Path, lengths: tuple[int, ...], gap: float, seeds: int = 3) -> Comparison:
    """Compare a baseline, with shorter runs, and a variant whose loss differs by `gap`."""
    for seed in range(seeds):
        for steps in lengths:
            make_run(folder / f"a{steps}-{seed}", replace(S, seed=seed, steps=steps, level=compute_level(steps / 200)))
        make_run(folder / f"b{seed}", replace(S, seed=seed, level=3 + gap), OTHER)
    return compare([folder], baseline=str(folder / "a200-0"))


def find_variant(comparison: Comparison) -> Variant:
    (variant,) = (v for v in comparison.variants if "clip_norm=7.0" in v.label)
    return variant


@pytest.mark.full
@pytest.mark.parametrize("truth", [0.8, 1.1])
def test_a_variant_needs_a_share_of_the_baselines_tokens(truth: float, tmp_path: Path) -> None:
    variant = find_variant(make_runs(tmp_path, (200, 100), compute_level(1 / truth) - 3))
    effort = variant.effort
    assert effort is not None and effort.tokens is not None and effort.flops is not None
    assert effort.tokens.low is not None and effort.tokens.high is not None
    assert effort.tokens.low < truth < effort.tokens.high and effort.tokens.high - effort.tokens.low < 0.25
    assert effort.flops.estimate == pytest.approx(effort.tokens.estimate)
    assert effort.hours is not None and effort.hours.estimate == pytest.approx(effort.tokens.estimate, rel=0.1)
    assert "as compute: reaches the baseline's loss with" in effort.text


@pytest.mark.full
def test_one_pair_of_seeds_gives_no_interval(tmp_path: Path) -> None:
    effort = find_variant(make_runs(tmp_path, (200, 100), -0.05, seeds=1)).effort
    assert effort is not None and effort.tokens is not None and effort.tokens.low is None
    assert "one pair of seeds gives no interval" in effort.text


@pytest.mark.full
def test_the_run_that_would_determine_it_is_named(tmp_path: Path) -> None:
    comparison = make_runs(tmp_path, (200,), -0.05)
    effort = find_variant(comparison).effort
    assert effort is not None and effort.tokens is None
    assert "runs of the baseline with about" in effort.text and "decayed to their end" in effort.text
    assert comparison.variants[0].effort is None and comparison.margin_share is None


@pytest.mark.full
def test_a_shorter_run_that_is_no_worse_shows_no_slope(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / f"short{seed}", replace(S, seed=seed, steps=100, level=2.9))
    effort = find_variant(make_runs(tmp_path, (200,), -0.05)).effort
    assert effort is not None and effort.tokens is None and "are not worse than it" in effort.text


@pytest.mark.full
def test_hours_of_other_hardware_are_not_compared(tmp_path: Path) -> None:
    make_runs(tmp_path, (200, 100), -0.05)
    for seed in range(3):
        shutil.rmtree(tmp_path / f"b{seed}")
        make_run(tmp_path / f"b{seed}", replace(S, seed=seed, level=2.95, device={"device": "cpu", "name": "X"}), OTHER)
    effort = find_variant(compare([tmp_path], baseline=str(tmp_path / "a200-0"))).effort
    assert effort is not None and effort.tokens is not None and effort.hours is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("lengths", "note"), [pytest.param((200, 100), "", id="known"), pytest.param((200,), "not known in nats", id="not")]
)
def test_a_margin_may_be_a_share_of_compute(lengths: tuple[int, ...], note: str, tmp_path: Path) -> None:
    make_runs(tmp_path, lengths, -0.05)
    found = compare([tmp_path], baseline=str(tmp_path / "a200-0"), margin="10%")
    if note:
        assert found.margin == 0.02 and any(note in text for text in found.notes)
    else:
        assert found.margin == pytest.approx(SLOPE * math.log(1.1), rel=0.15)
        assert describe_margin(found).endswith("0.1 of the baseline's compute") and not found.notes[0].startswith(
            "the m"
        )


@pytest.mark.parametrize("margin", ["0%", "-1", "two", "nan", "2000%", "inf"])
def test_a_margin_that_is_none_is_rejected(margin: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", S)
    with pytest.raises(ConfigError, match=r"must be (a number of nats )?above 0"):
        compare([tmp_path], margin=margin)


@pytest.mark.full
def test_the_seeds_that_show_an_effect_follow_from_own_runs(tmp_path: Path) -> None:
    make_runs(tmp_path, (200, 100), -0.05)
    noise = effort.read_noise(tmp_path)
    assert noise.slope == pytest.approx(SLOPE, rel=0.15) and 0.001 < noise.spread < 0.01
    few, many = (effort.describe_power(effect, noise, 1e6, 2, 3, 1.0) for effect in (0.1, 0.001))
    assert "2 seeds per variant" in few[1] or "3 seeds per variant" in few[1]
    assert "4 device-hours" in few[1] or "6 device-hours" in few[1]
    assert int(many[1].split()[0].replace(",", "")) > 100
    assert "Besiroglu" in effort.describe_power(0.02, effort.PUBLISHED, 1e10, 2, 3, 1.0)[0]
