"""Sampling: the candidates, their probabilities, and determinism."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from titan.model.sampling import draw_uniform, keep_nucleus
from titan.model.sampling import make_generator as source
from titan.model.sampling import sample_tokens as choose

LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30)
UNIFORM = st.floats(0, 1, exclude_max=True)
CHI_SQUARE_19 = 43.8
"""Exceeded by chance once in a thousand, with 19 degrees of freedom."""


def one(logits: list[float], uniform: float, **how: float) -> int:
    return int(choose(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), **how))  # type: ignore[arg-type]


def shares(logits: list[float], temperature: float = 1.0) -> Tensor:
    return (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1)


@given(LOGITS, UNIFORM, st.integers(1, 30))
def test_top_k_draws_from_the_largest(logits: list[float], uniform: float, top_k: int) -> None:
    sampled = one(logits, uniform, top_k=top_k)
    assert sum(value > logits[sampled] for value in logits) < top_k


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda x: sum(x) > 0.1), st.floats(0.01, 1))
def test_top_p_keeps_the_smallest_set_that_reaches_it(weights: list[float], top_p: float) -> None:
    whole = torch.tensor(sorted(weights, reverse=True), dtype=torch.float64)
    whole /= whole.sum()
    kept = int(keep_nucleus(whole[None], top_p)[0].count_nonzero())
    most = int(whole.count_nonzero())
    assert float(whole[:kept].sum()) >= top_p - 1e-9 or kept == most
    assert kept == 1 or float(whole[: kept - 1].sum()) < top_p + 1e-9


@given(LOGITS, UNIFORM, st.floats(0.01, 1))
def test_top_p_draws_from_that_set(logits: list[float], uniform: float, top_p: float) -> None:
    sampled = one(logits, uniform, top_p=top_p)
    likelier = [value for value in logits if value > logits[sampled]]
    before = float(torch.tensor(likelier, dtype=torch.float64).sub(max(logits)).exp().sum())
    whole = float(torch.tensor(logits, dtype=torch.float64).sub(max(logits)).exp().sum())
    assert before / whole < top_p + 1e-9


@given(LOGITS, UNIFORM)
def test_a_temperature_of_nought_and_near_it_takes_the_largest(logits: list[float], uniform: float) -> None:
    assert logits[one(logits, uniform, temperature=0)] == max(logits)
    assert logits[one(logits, uniform, temperature=1e-300)] == max(logits)
    assert logits[one(logits, uniform, top_k=1)] == max(logits)
    assert logits[one(logits, uniform, top_p=1e-12)] == max(logits)


@given(LOGITS, UNIFORM, st.integers(1, 30), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.5, 1.0]))
def test_ids_above_the_vocabulary_are_never_sampled(
    logits: list[float], uniform: float, vocab: int, temperature: float, top_p: float
) -> None:
    assert 0 <= one(logits, uniform, vocab=vocab, temperature=temperature, top_p=top_p) < vocab


@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"top_k": 3}], ids=["all", "top-p", "top-k"])
@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1, 0)], ids=["lowest", "highest"])
def test_the_ends_of_the_unit_interval(how: dict[str, float], uniform: float) -> None:
    logits = [0.1 * i for i in range(10)]
    sampled = one(logits, uniform, **how)
    likely = shares(logits)
    ordered = sorted(range(10), key=lambda i: -likely[i])
    kept = 9 if how.get("top_p") else 3
    expected = (0, 9) if not how else (ordered[0], ordered[kept - 1])
    assert sampled == expected[uniform > 0]


@pytest.mark.parametrize(
    ("how", "temperature", "takes_part"),
    [
        pytest.param({}, 1.0, 20, id="plain"),
        pytest.param({}, 0.5, 20, id="cold"),
        pytest.param({}, 2.0, 20, id="hot"),
        pytest.param({"top_k": 7}, 1.0, 7, id="top-k"),
        pytest.param({"top_p": 0.8}, 1.0, None, id="top-p"),
        pytest.param({"top_k": 12, "top_p": 0.9}, 1.5, None, id="both"),
    ],
)
def test_draws_follow_the_distribution(how: dict[str, float], temperature: float, takes_part: int | None) -> None:
    count, logits = 20_000, [math.sin(3.7 * i) * 1.5 for i in range(20)]
    expected = shares(logits, temperature)
    order = expected.argsort(descending=True).tolist()
    for i in order[int(how.get("top_k", 20)) :]:
        expected[i] = 0
    expected /= expected.sum()
    if "top_p" in how:
        reached = 0.0
        for i in order:
            expected[i], reached = (0.0 if reached >= how["top_p"] else expected[i]), reached + float(expected[i])
        expected /= expected.sum()
    generator = source(0, [1, 2, 3], 0)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    sampled = choose(torch.tensor([logits]).expand(count, -1), uniform, temperature=temperature, **how)  # type: ignore[arg-type]
    seen = torch.bincount(sampled, minlength=20).double()
    possible = expected > 0
    assert takes_part in (None, int(possible.sum())) and int(possible.sum()) > 1
    assert seen[~possible].sum() == 0
    surprise = ((seen - count * expected)[possible] ** 2 / (count * expected[possible])).sum()
    assert float(surprise) < CHI_SQUARE_19


def numbers(seed: int, prompt: list[int], sample: int) -> list[float]:
    generators = [source(seed, prompt, sample)]
    return [float(draw_uniform(generators)) for _ in range(3)]


def test_random_numbers_depend_on_seed_prompt_and_sample() -> None:
    same = numbers(0, [1, 23], 0)
    assert numbers(0, [1, 23], 0) == same
    others = [numbers(1, [1, 23], 0), numbers(0, [12, 3], 0), numbers(0, [1, 23], 1), numbers(0, [1, 2, 3], 0)]
    assert same not in others and len({tuple(other) for other in others}) == len(others)
