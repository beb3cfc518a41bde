from __future__ import annotations

import numpy as np
import pytest

from titan.errors import ConfigError
from titan.scaling.ladders import ComputeLadder, are_ladders, compare_ladders, study_ladders
from titan.scaling.study import Question, Target, study_table
from titan.scaling.table import Table

FLOOR, FACTOR, EXPONENT = 1.7, 3.0, 0.15
COMPUTE = np.geomspace(1e17, 1e20, 6)


def lose(compute: np.ndarray, factor: float = 1.0) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(FLOOR + 1.5 * (compute * factor / 1e18) ** -EXPONENT)


def make(noise: float = 0.0, seed: int = 0, compute: np.ndarray = COMPUTE) -> tuple[ComputeLadder, ComputeLadder]:  # type: ignore[type-arg]
    generator = np.random.default_rng(seed)
    first, second = (lose(compute, f) + noise * generator.normal(size=len(compute)) for f in (1.0, FACTOR))
    return (compute, first), (compute, second)


def test_exact_ladders_determine_floor_and_factor() -> None:
    found = compare_ladders(*make(noise=1e-5), loss=2.8)
    assert found.factor == pytest.approx(FACTOR, rel=0.01) and found.floor == pytest.approx(FLOOR, abs=0.01)
    assert found.determined and found.describe().startswith("factor 3")


def test_a_narrow_noisy_ladder_gives_a_range() -> None:
    found = compare_ladders(*make(noise=0.01, compute=np.geomspace(1e17, 3e18, 4)), loss=2.1)
    assert not found.determined and "floor not determined" in found.describe()
    assert found.low < FACTOR < found.high and found.high > 1.5 * found.low


def test_the_factor_turns_with_the_ladders() -> None:
    first, second = make(noise=0.003)
    there, back = compare_ladders(first, second, 2.8), compare_ladders(second, first, 2.8)
    assert (back.factor, back.low, back.high) == pytest.approx((1 / there.factor, 1 / there.high, 1 / there.low))


@pytest.mark.full
@pytest.mark.parametrize("loss", [2.8, 2.4])
def test_intervals_hold_as_often_as_they_say(loss: float) -> None:
    found = [compare_ladders(*make(noise=0.005, seed=seed), loss) for seed in range(200)]
    held = sum(factor.low <= FACTOR <= factor.high for factor in found)
    assert 0.85 * 200 <= held < 0.97 * 200  # 90 %, and three standard errors


def make_lines(*proportions: float, rungs: int = 5) -> Table:
    """Variants a, b and so on with tokens in these proportions to parameters, each 2 times ahead of the one before."""
    sizes = np.geomspace(1e7, 3e8, rungs)
    names = tuple(chr(ord("a") + k) for k in range(len(proportions)) for _ in sizes)
    n, d = np.tile(sizes, len(proportions)), np.concatenate([ratio * sizes for ratio in proportions])
    ahead = np.repeat(2.0 ** np.arange(len(proportions)), rungs)
    texts = ("",) * len(n)
    return Table(n, d, lose(6 * n * d * ahead), texts, names, texts, texts, np.full(len(n), np.nan))


def test_variants_with_tokens_in_different_proportions_are_compared_by_compute() -> None:
    table = make_lines(20, 60, 100)
    (study,) = study_table(table, Question()).corpora
    assert study.laws == () and study.baseline == "a"
    both, lowest = study.factors["b"]
    ends = [float(table.loss[table.d / table.n == ratio].min()) for ratio in (table.d[0] / table.n[0], 60)]
    assert (both.loss, lowest.loss) == (max(ends), min(ends))
    assert both.factor == pytest.approx(2, rel=0.01) and lowest.factor == pytest.approx(2, rel=0.01)
    assert study.factors["c"][0].factor == pytest.approx(4, rel=0.01)
    (turned,) = study_table(table, Question(baseline="b")).corpora
    assert turned.factors["a"][0].factor == pytest.approx(0.5, rel=0.01)


def test_rungs_that_a_law_separates_are_no_ladders() -> None:
    """One variant, one proportion for all, or a variant with several lengths a size."""
    table = make_lines(20, 60)
    one, same = table.select(name == "a" for name in table.variant), make_lines(20, 20)
    joint = make_lines(20, 60, 60)
    joint = Table(joint.n, joint.d, joint.loss, joint.seed, tuple("aab"["abc".index(v)] for v in joint.variant),
                  joint.corpus, joint.name, joint.other_n)  # fmt: skip
    assert are_ladders(table) and not any(are_ladders(other) for other in (one, same, joint))


def test_a_short_ladder_is_left_out_or_rejected() -> None:
    table = make_lines(20, 60, 100)
    kept = [name != "c" or k % 5 < 2 for k, name in enumerate(table.variant)]
    study = study_ladders(table.select(kept), "")
    assert list(study.factors) == ["b"] and study.left_out == ("c: a ladder needs 3 rungs of different compute.",)
    with pytest.raises(ConfigError, match="variant a: its tokens are in one proportion"):
        study_ladders(make_lines(20, 60, rungs=2), "")


@pytest.mark.parametrize("question", [Question(Target(1e9, 2e10)), Question(holdout=1e8)], ids=["target", "holdout"])
def test_ladders_predict_no_loss(question: Question) -> None:
    with pytest.raises(ConfigError, match=r"(target=1B,20B|holdout=100M): each variant has tokens in another"):
        study_table(make_lines(20, 60), question)
