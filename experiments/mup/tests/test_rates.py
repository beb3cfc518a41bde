"""The best learning rate of each size is read from a grid's runs, and by how much it moves is shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.mup import rates
from experiments.mup.rates import BestRate, average_seeds, compute_shift, find_best
from tests.support.made_runs import Story, make_run

CONF = f"hydra.searchpath=[file://{Path(__file__).resolve().parents[1] / 'conf'}]"
MODEL = (CONF, "model=mup_llama", "model.layers=2", "model.vocab=512", "model.head_dim=16", "model.base_dim=32")


def make_grid(folder: Path, curves: dict[str, dict[float, Any]], seed: int = 0, *overrides: str) -> Path:
    """Make a run for each learning rate, with its level, of each set of overrides; without a level it diverges."""
    for number, (size, curve) in enumerate(curves.items()):
        for lr, level in curve.items():
            story = Story(seed=seed, bad=20) if level is None else Story(seed=seed, level=level, noise=0.0)
            make_run(folder / f"{number}_{lr}_{seed}", story, *MODEL, *size.split(), f"optimizer.lr={lr}", *overrides)
    return folder


BASE = "model.dim=32 model.heads=2 model.kv_heads=1"
WIDE = "model.dim=64 model.heads=4 model.kv_heads=2"


@pytest.mark.full
def test_a_grid_is_shown_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control = f"{WIDE} model.transfer=none"
    curves = {
        BASE: {0.001: 3.1, 0.002: 3.0, 0.004: 3.1},
        f"{BASE} model.transfer=none": {0.001: 3.1, 0.002: 3.0, 0.004: 3.1},
        WIDE: {0.001: 2.9, 0.002: 2.8, 0.004: None},
        control: {0.001: 2.9, 0.002: 3.2, 0.004: 3.3},
    }
    assert rates.main([str(make_grid(tmp_path / "grid", curves))]) == 0
    head, base, wide, none, *shifts = capsys.readouterr().out.splitlines()
    assert head.split() == ["transfer", "width", "blocks", "seeds", "0.001", "0.002", "0.004", "best"]
    assert base.split()[:4] == ["base", "32", "2", "1"] and base.split()[-1] == "0.002"
    assert wide.split()[:3] == ["both", "64", "2"] and wide.split()[-2:] == ["diverged", "0.002"]
    assert none.split()[0] == "none" and none.endswith("0.001 or less")
    assert [line.split(":")[0] for line in shifts] == ["model.transfer=both", "model.transfer=none"]
    assert "moves by 0.0 of a grid step, a factor of 2" in shifts[0] and "by at least 1.0 of" in shifts[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "overrides", "sentence"),
    [
        pytest.param(0, (), "there is another run of this size, learning rate and seed", id="twice"),
        pytest.param(1, ("optimizer.weight_decay=0.3",), "in optimizer.weight_decay; give one grid", id="different"),
    ],
)
def test_grids_that_do_not_join_are_rejected(
    seed: int, overrides: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_grid(tmp_path / "first", {BASE: {0.001: 3.0}})
    make_grid(tmp_path / "second", {BASE: {0.001: 3.0}}, seed, *overrides)
    assert rates.main([str(tmp_path / "first"), str(tmp_path / "second")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_model_without_transfer_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", Story())
    assert rates.main([str(tmp_path / "run")]) == 2
    assert "has no model.transfer; give a grid of model=mup_llama" in capsys.readouterr().err


@given(best=st.floats(0.0006, 0.007), curvature=st.floats(0.01, 10), level=st.floats(1, 10))
def test_the_best_rate_of_a_parabola_is_its_minimum(best: float, curvature: float, level: float) -> None:
    losses = {
        r: level + curvature * math.log(r / best) ** 2 for r in (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
    }
    assert find_best(losses) == BestRate(pytest.approx(best, rel=1e-3))


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        pytest.param({0.1: 1.0, 0.2: 2.0, 0.4: 3.0}, BestRate(0.1, "or less"), id="lowest-first"),
        pytest.param({0.1: 3.0, 0.2: 2.0, 0.4: 1.0}, BestRate(0.4, "or more"), id="lowest-last"),
        pytest.param({0.1: 3.0, 0.2: 2.0, 0.4: float("inf")}, BestRate(0.2), id="next-diverged"),
        pytest.param({0.1: 2.0, 0.2: 2.0, 0.4: 2.0}, BestRate(0.1, "or less"), id="all-equal"),
        pytest.param({0.1: 2.0}, BestRate(0.1, "or another"), id="one-rate"),
        pytest.param({0.1: float("inf"), 0.2: float("inf")}, None, id="all-diverged"),
    ],
)
def test_best_rates(losses: dict[float, float], best: BestRate | None) -> None:
    assert find_best(losses) == best


def test_rates_that_lack_a_seed_do_not_count() -> None:
    two, one = {0: 3.0, 1: 4.0}, {0: 1.0}
    assert average_seeds({0.1: two, 0.2: two, 0.4: two, 0.8: {1: 9.0}}) == ({0.1: 3.5, 0.2: 3.5, 0.4: 3.5}, 2)
    assert average_seeds({0.1: one, 0.2: two, 0.4: one}) == ({0.1: 1.0, 0.2: 3.0, 0.4: 1.0}, 1)


def test_a_shift_is_in_grid_steps() -> None:
    assert compute_shift([BestRate(0.1), BestRate(0.4), BestRate(0.2)], 2) == "2.0"
    assert compute_shift([BestRate(0.1, "or less"), BestRate(0.4)], 2) == "at least 2.0"
    assert compute_shift([BestRate(0.1, "or more"), BestRate(0.4)], 2) == "an unknown part"
