"""Settings of loss terms: their ids tell classes apart, and files name them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.support.loss_terms import Entropy
from tests.support.runs import compose_tiny_run
from titan.config import settings
from titan.errors import ConfigError
from titan.model.schema import Llama
from titan.run.identity import select_settings
from titan.training.loss_terms import LabelSmoothing, ZLoss
from titan.training.schema import Training
from titan.weights.export import check_export

OWN = "+training.loss_terms.own={_target_: tests.support.loss_terms.Entropy, coefficient: -0.3}"


def test_ids_and_files_name_the_class_of_a_term(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "modules=[tests]", OWN)
    own = {"_target_": "tests.support.loss_terms.Entropy", "coefficient": -0.3}
    assert select_settings(run, science=True)["training.loss_terms"] == {"own": own}
    written = settings.to_plain(run.training)
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            ("checkpoint.export=hf", "model.logit_cap=30"), r"checkpoint\.export=hf.*model\.logit_cap=30", id="hf"
        ),
        pytest.param(("+training.loss_terms.a={coefficient: 1}",), r"training\.loss_terms\.a.*_target_", id="class"),
        *(
            pytest.param(
                ("modules=[tests]", "+training.loss_terms.own={_target_: tests.support.loss_terms.Rolled}", split),
                rf"{value}: splits rows, and training\.loss_terms\.own computes .* or give {way_out}\.",
                id=f"mixes-{split}",
            )
            for split, value, way_out in (
                ("parallelism=cp", r"parallelism\.context=2", r"parallelism\.context=1"),
                ("parallelism=tp", "sequence_parallel=true", r"parallelism\.sequence_parallel=false"),
                ("training.loss_chunk=32", r"training\.loss_chunk=32", r"training\.loss_chunk=null"),
            )
        ),
        pytest.param(("training.z_loss=-1",), r"training\.z_loss=-1.*at least 0", id="negative"),
    ],
)
def test_what_cannot_work_is_refused(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_tiny_run(tmp_path, *settings)


@pytest.mark.parametrize("form", ["hf", "meta"])
def test_formats_without_capped_logits_are_refused(form: Literal["hf", "meta"]) -> None:
    check_export(Llama(), form)
    with pytest.raises(ConfigError, match=rf"format={form}.*model\.logit_cap=30"):
        check_export(Llama(logit_cap=30.0), form)
