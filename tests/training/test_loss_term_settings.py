"""Settings of loss terms: their ids tell classes apart, and files name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loss_terms import Entropy
from tests.support.runs import tiny
from titan.config import settings
from titan.errors import ConfigError
from titan.run.identity import settings_of
from titan.training.loss_terms import LabelSmoothing, ZLoss
from titan.training.schema import Training

OWN = "+training.loss_terms.own={_target_: tests.support.loss_terms.Entropy, coefficient: -0.3}"


def test_ids_and_files_name_the_class_of_a_term(tmp_path: Path) -> None:
    run = tiny(tmp_path, "modules=[tests]", OWN)
    own = {"_target_": "tests.support.loss_terms.Entropy", "coefficient": -0.3}
    assert settings_of(run, science=True)["training.loss_terms"] == {"own": own}
    written = settings.plain(run.training)
    assert settings.build(Training, written, allowed=("tests",)) == run.training


def test_terms_have_the_names_that_metrics_show() -> None:
    training = Training(z_loss=1e-4, label_smoothing=0.1, loss_terms={"own": Entropy(coefficient=2.0)})
    assert training.terms == {
        "z_loss": ZLoss(coefficient=1e-4),
        "label_smoothing": LabelSmoothing(coefficient=0.1),
        "own": Entropy(coefficient=2.0),
    }
    assert Training().terms == {}


@pytest.mark.parametrize("name", ["z_loss", "label_smoothing"])
def test_an_own_term_has_another_name_than_a_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.loss_terms\.{name}: is the name of"):
        Training(loss_terms={name: Entropy()}).check()
