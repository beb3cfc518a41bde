from __future__ import annotations

import numpy as np
import pytest

from titan.errors import ConfigError
from titan.scaling.ladders import Ladder, compare_ladders

FLOOR, FACTOR, EXPONENT = 1.7, 3.0, 0.15
COMPUTE = np.geomspace(1e17, 1e20, 6)


def lose(compute: np.ndarray, factor: float = 1.0) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(FLOOR + 1.5 * (compute * factor / 1e18) ** -EXPONENT)


def make(noise: float = 0.0, seed: int = 0, compute: np.ndarray = COMPUTE) -> tuple[Ladder, Ladder]:  # type: ignore[type-arg]
    generator = np.random.default_rng(seed)
    first, second = (lose(compute, f) + noise * generator.normal(size=len(compute)) for f in (1.0, FACTOR))
    return Ladder(compute, first), Ladder(compute, second)


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


@pytest.mark.parametrize(
    ("compute", "losses", "loss", "words"),
    [
        pytest.param([1e18, 2e18], [3, 2], 2.5, "at least 3 of different compute", id="few"),
        pytest.param([1e18, 1e18, 2e18], [3, 3, 2], 2.5, "at least 3 of different compute", id="same"),
        pytest.param([1e18, 2e18, 3e18], [3, 2], 2.5, "each with a loss", id="lengths"),
        pytest.param([1e18, 2e18, 3e18], [3, 2, -1], 2.5, "above zero", id="negative"),
        pytest.param([1e18, 2e18, 3e18], [3, 2.5, 2.2], 0.0, "loss=0: nothing reaches it", id="target"),
    ],
)
def test_ladders_that_determine_nothing_are_rejected(
    compute: list[float], losses: list[float], loss: float, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        compare_ladders(Ladder(compute, losses), make()[1], loss)
