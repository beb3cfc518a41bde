"""Numbers in labels of trials, and what a sweeper of another package prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.session import RESULTS, describe_best
from titan.sweep.labels import clean_override, count_distinguishing_digits, format_label, format_numbers, is_same_value


@pytest.mark.parametrize(
    ("override", "cleaned", "label"),
    [
        pytest.param("optimizer.lr=0.00030000000000000003", "optimizer.lr=0.0003", "optimizer.lr=0.0003", id="error"),
        pytest.param("optimizer.lr=1e-05", "optimizer.lr=1e-5", "optimizer.lr=1e-5", id="exponent"),
        pytest.param("training.tokens=1000000000.0", "training.tokens=1e9", "training.tokens=1e9", id="large"),
        pytest.param("training.clip_norm=1.0", "training.clip_norm=1.0", "training.clip_norm=1.0", id="round"),
        pytest.param("x=[1e-05,0.30000000000000004]", "x=[1e-5,0.3]", "x=[1e-5,0.3]", id="list"),
        pytest.param("x=5.53501234e-05", "x=5.53501234e-05", "x=5.535e-5", id="sampled"),
        pytest.param("model.tied=False", "model.tied=false", "model.tied=False", id="switch"),
        pytest.param("x=[True,a]", "x=[true,a]", "x=[True,a]", id="switches"),
        pytest.param("dataset.path=True/a", "dataset.path=True/a", "dataset.path=True/a", id="no-switch"),
        pytest.param("dataset.path=a/1.00000", "dataset.path=a/1.00000", "dataset.path=a/1.00000", id="path"),
        pytest.param("name=v1.50", "name=v1.50", "name=v1.50", id="name"),
        pytest.param("training.seed=1", "training.seed=1", "training.seed=1", id="integer"),
    ],
)
def test_numbers_have_the_digits_that_a_user_types(override: str, cleaned: str, label: str) -> None:
    assert (clean_override(override), format_label([override])) == (cleaned, label)


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        pytest.param(["5.53501234e-05", "6.12345678e-04"], ["5.535e-5", "0.0006123"], id="usual"),
        pytest.param(["5.53501234e-05", "5.53511234e-05"], ["5.5350e-5", "5.5351e-5"], id="one-more"),
        pytest.param(["0.123456789012", "0.123456789013"], ["0.123456789012", "0.123456789013"], id="all"),
        pytest.param(["0.123456789012", "0.123456789012"], ["0.1235", "0.1235"], id="equal"),
        pytest.param(["0.1", "0.1000000001"], ["0.1", "0.1000000001"], id="short-beside-long"),
    ],
)
def test_labels_have_the_digits_that_distinguish_trials(rates: list[str], shown: list[str]) -> None:
    trials = [[f"optimizer.lr={rate}", "training.seed=1"] for rate in rates]
    digits = count_distinguishing_digits(trials)
    labels = [format_label(overrides, digits) for overrides in trials]
    assert labels == [f"optimizer.lr={rate} training.seed=1" for rate in shown]
    assert format_numbers(rates) == shown


def test_the_best_trial_of_another_sweeper_is_one_line(tmp_path: Path) -> None:
    assert describe_best(tmp_path, "validation_loss") == ""
    (tmp_path / RESULTS).write_text(
        "name: optuna\nbest_params: {optimizer.lr: 0.00031082345678}\nbest_value: 6.23129\n"
    )
    sentence = "best: optimizer.lr=0.0003108, validation_loss 6.2313; see "
    assert describe_best(tmp_path, "validation_loss") == f"{sentence}{tmp_path / RESULTS}\n"
    (tmp_path / RESULTS).write_text("name: optuna\nsolutions: []\n")
    assert describe_best(tmp_path, "validation_loss") == ""


@pytest.mark.parametrize(
    ("typed", "existing", "same"),
    [
        pytest.param("1e-3", "0.001", True, id="forms"),
        pytest.param("5.535e-5", "5.53501234e-05", True, id="label"),
        pytest.param("5.53501234e-05", "5.535e-5", False, id="label-as-value"),
        pytest.param("5.5350e-5", "5.53501234e-05", True, id="label-with-more-digits"),
        pytest.param("5.5350e-5", "5.53511234e-05", False, id="label-of-another-trial"),
        pytest.param("0.31623", "0.3162277", False, id="other-number"),
        pytest.param("' True'", "true", True, id="boolean"),
        pytest.param("[0.9, 0.95]", "[0.9,0.95]", True, id="list"),
        pytest.param("1024", "1Ki", True, id="unit"),
        pytest.param("5%", "0.05", True, id="share"),
        pytest.param("1k", "1024", False, id="other-unit"),
        pytest.param("fsdp", "FSDP", False, id="word"),
    ],
)
def test_values_are_compared_as_users_type_them(typed: str, existing: str, same: bool) -> None:
    assert is_same_value(typed, existing) == same
