"""Why two replays differ: the order of the questions, and what each of them names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from titan.errors import RunError
from titan.numerics.differences import (
    GRADIENT,
    START,
    STATE,
    UPDATE,
    Operation,
    Replica,
    Samples,
    compare_fingerprints,
    compare_operations,
    measure_spread,
)
from titan.numerics.fingerprints import fingerprint_tensor
from titan.training.replay.observation import ReplayedStep
from titan.training.replay.questions import ReplayPair, ask_questions, find_consumer
from titan.training.replay.routing import _find_tokens

MODULES = ("tok_embeddings", "layers.0.attention_norm", "layers.0.attention", "layers.0", "norm")
PARAMETERS = (
    "tok_embeddings.weight",
    "layers.0.attention_norm.weight",
    "layers.0.attention.wq.weight",
    "norm.weight",
    "head.weight",
)
TOKENS = np.arange(8)


def make_step(changes: dict[tuple[str, str], float] | None = None, **record: Any) -> ReplayedStep:
    """A step whose activations and tensors are random; those in `changes` are that much larger."""
    changes, generator = changes or {}, np.random.default_rng(0)
    samples, tensors = {}, {}
    for direction, names in (("forward", MODULES), ("backward", MODULES[::-1])):
        for name in names:
            values = generator.normal(size=(8, 8)) * (1 + changes.get((direction, name), 0.0))
            samples[direction, name] = Samples(TOKENS, values.astype(np.float64), TOKENS // 4, TOKENS * 0)
    for kind in (START, STATE, GRADIENT, UPDATE):
        for name in PARAMETERS:
            values = generator.normal(size=(6, 4)) * (1 + changes.get((kind, name), 0.0))
            tensors[kind, name] = (Replica((0, 1), fingerprint_tensor(torch.from_numpy(values))),)
    known = {"step": 5, "loss": 4.0, "grad_norm": 1.0, "lr": 0.1, "rows": [0, 1], "batch_hash": "a"}
    return ReplayedStep(known | record, {}, samples, tensors=tensors, seq_len=4)


FAULTS: dict[str, tuple[dict[tuple[str, str], float], dict[str, Any], str, str]] = {
    "rows": ({}, {"batch_hash": "b"}, "rows", "rows"),
    "weights": ({(START, "norm.weight"): 1e-3, ("forward", "norm"): 1e-3}, {}, START, "norm.weight"),
    "state": ({(STATE, "norm.weight"): 1e-3, (UPDATE, "norm.weight"): 1e-3}, {}, STATE, "norm.weight"),
    "forward": (
        {("forward", "layers.0"): 1e-3, ("forward", "norm"): 1e-3, (GRADIENT, "head.weight"): 1e-3}, {"loss": 5.0},
        "forward", "layers.0",
    ),
    "loss": ({("backward", "norm"): 1e-3}, {"loss": 4.1}, "loss", "head"),
    "head": ({("backward", "norm"): 1e-3, ("backward", "layers.0"): 1e-3}, {}, "backward", "head"),
    "backward": (
        {("backward", "tok_embeddings"): 1e-3, (GRADIENT, "tok_embeddings.weight"): 1e-3}, {},
        "backward", "layers.0.attention_norm",
    ),
    "reduction": (
        {(GRADIENT, "layers.0.attention.wq.weight"): 1e-3, (GRADIENT, "tok_embeddings.weight"): 1e-3}, {},
        GRADIENT, "layers.0.attention.wq.weight",
    ),
    "norm": ({}, {"grad_norm": 1.1}, "grad_norm", "grad_norm"),
    "rate": ({}, {"lr": 0.2}, "rate", "lr"),
    "update": ({(UPDATE, "norm.weight"): 1e-3}, {}, UPDATE, "norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_that_differs_is_named(name: str) -> None:
    changes, record, kind, named = FAULTS[name]
    pair = ReplayPair(make_step(), make_step(changes, **record), "fp32")
    answers = ask_questions(pair, pair, same_code=False)
    assert (answers.findings[0].kind, answers.findings[0].name) == (kind, named)
    assert answers.comparable == (kind not in ("rows", START))


def test_what_is_equal_is_the_same_only_where_it_was_compared() -> None:
    pair = ReplayPair(make_step(), make_step(), "fp32")
    assert ask_questions(pair, pair, same_code=True).verdict.startswith(
        "both are the same, bitwise, in all activations"
    )
    hidden = replace(pair.b, unobserved={"layers.0.attention": "inside of compiled code"})
    observed = ReplayPair(pair.a, hidden, "fp32")
    missing = ask_questions(observed, observed, same_code=False)
    assert missing.verdict == "both are the same, bitwise, in all that was compared"
    assert missing.sentences[-1] == (
        "4. outputs that were not compared: layers.0.attention (inside of compiled code in B)"
    )
    other = ReplayPair(pair.a, make_step(grad_norm=1.0 + 1e-6), "fp32")
    assert "bitwise" not in ask_questions(other, other, same_code=False).verdict


def test_the_same_code_must_give_the_same_bits() -> None:
    pair = ReplayPair(make_step(), make_step({("forward", "layers.0"): 1e-7}), "fp32")
    assert ask_questions(pair, pair, same_code=True).findings[0].kind == "bitwise"
    assert ask_questions(pair, pair, same_code=False).findings == ()


def test_ranks_with_other_values_are_named() -> None:
    a, b = make_step(), make_step({(START, "norm.weight"): 1e-3})
    key = (START, "norm.weight")
    parts = (Replica((0,), a.tensors[key][0].fingerprint), Replica((1,), b.tensors[key][0].fingerprint))
    unequal = replace(a, tensors={**a.tensors, key: parts})
    pair = ReplayPair(a, unequal, "fp32")
    found = ask_questions(pair, pair, same_code=False).findings[0]
    assert (found.kind, found.name) == ("replicas", "norm.weight") and "rank 1 against rank 0" in found.where


def test_other_learning_rates_are_no_fault() -> None:
    other = make_step()
    pair = ReplayPair(make_step(), replace(other, record={**other.record, "lr": 0.5}), "fp32")
    answers = ask_questions(pair, pair, same_code=False)
    assert (
        answers.sentences[1]
        == "2. in fp32 both differ by more than 1e-05, but only in the update, whose settings differ"
    )
    assert answers.verdict.startswith("the learning rates of the step differ: ")


def test_precision_is_measured_by_random_rounding() -> None:
    exact = ReplayPair(make_step(), make_step(), "fp32")
    rounded = [make_step({("forward", "norm"): 1e-3 * sign}, loss=4.0 + 1e-3 * sign) for sign in (-2, -1, 1, 2)]
    spread = measure_spread([step.samples for step in rounded], [step.record for step in rounded])
    assert spread.figures["loss"] == (pytest.approx(4.0), pytest.approx(1e-3 * math.sqrt(10 / 3) / 2))
    assert spread.deviations["forward", "norm"] == pytest.approx(1e-3 * math.sqrt(10 / 3), rel=1e-3)
    for size, kinds in ((5e-3, []), (1e-2, ["rounding"])):
        native = ReplayPair(make_step(), make_step({("forward", "norm"): size}), "bf16")
        answers = ask_questions(native, exact, same_code=False, spread=spread)
        assert [finding.kind for finding in answers.findings] == kinds
        assert "mean of 4 randomly rounded repetitions ± its standard error: loss 4 ± 0.0009" in answers.sentences[2]


def test_the_consumer_of_an_output_computes_its_gradient() -> None:
    assert find_consumer("layers.0", MODULES) == "norm"
    assert find_consumer("norm", MODULES) == "head"
    assert find_consumer("layers.0.attention_norm", MODULES) == "layers.0.attention"


@pytest.mark.parametrize("change", ["swapped rows", "shifted", "scaled", "one element", "one bit"])
def test_fingerprints_of_unequal_tensors_differ(change: str) -> None:
    a = torch.randn(40, 24)
    b = a.clone()
    if change == "swapped rows":
        b[[3, 4]] = b[[4, 3]]
    elif change == "shifted":
        b = b.roll(1, 1)
    elif change == "scaled":
        b *= 1.5
    elif change == "one element":
        b[37, 5] += 1.0
    else:
        b[0, 0] = torch.nextafter(b[0, 0], torch.tensor(9.0))
    relative, where = compare_fingerprints(fingerprint_tensor(a), fingerprint_tensor(b))
    expected = {"swapped rows": (0.1, 3), "shifted": (0.5, 3), "scaled": (0.3, 0.4), "one element": (0.02, 1)}
    low, high = expected.get(change, (1e-12, 1e-6))
    assert low < relative < high
    if change == "one element":
        assert where == "rows 35 to 37 of 40"
    if change == "scaled":
        assert where == "all rows, B's times 0.6667"


def test_experts_are_projected_row_by_row() -> None:
    """Their weights have three dimensions: one vector for a whole expert would be as large as the expert."""
    a = torch.randn(4, 10, 6)
    b = a.clone()
    b[2, 5] += 1.0
    assert compare_fingerprints(fingerprint_tensor(a), fingerprint_tensor(b))[1] == "rows 25 to 27 of 40"
    assert np.array_equal(fingerprint_tensor(a).sketch, fingerprint_tensor(a.reshape(40, 6)).sketch)


@pytest.mark.parametrize(("one", "two"), [(1.0, math.nan), (1.0, math.inf), (math.inf, -math.inf), (math.nan, 1.0)])
def test_what_is_not_finite_on_one_side_differs(one: float, two: float) -> None:
    a, b = (Operation("layers.0", "mm", ((2, 2),), (x, abs(x))) for x in (one, two))
    assert "first operation whose result differs is mm" in compare_operations("layers.0", [a], [b], 1e-5)[-1]
    assert "agree" in compare_operations("layers.0", [b], [b], 1e-5)[-1]


def test_tokens_without_pinned_experts_are_no_others() -> None:
    pinned = np.array([0, 1, 4, 5])
    assert _find_tokens(pinned, np.array([4, 1])).tolist() == [2, 1]
    for missing in ([2], [9]):
        with pytest.raises(RunError, match="has no experts of some tokens"):
            _find_tokens(pinned, np.array(missing))


def test_a_fingerprint_does_not_depend_on_the_type_that_holds_the_values() -> None:
    x = torch.randn(7, 3).bfloat16()
    assert fingerprint_tensor(x).bits == fingerprint_tensor(x.double()).bits
    assert fingerprint_tensor(torch.tensor(3)).bits == fingerprint_tensor(torch.tensor(3.0)).bits
