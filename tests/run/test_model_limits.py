"""What a model's family does not support is rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.runs import compose_tiny_run
from titan.errors import ConfigError
from titan.model.schema import Llama
from titan.run.model_limits import list_limit_faults, require_tokens
from titan.training.schema import ZLoss


class Limited(Llama):
    """Lacks all techniques, predicts no tokens, and reads rows of 16 ids only."""

    UNUSED: ClassVar[tuple[str, ...]] = ("rope_factor",)
    LACKS: ClassVar[tuple[str, ...]] = ("pipeline", "context", "sequence_parallel", "eight_bit")
    predicts_tokens: ClassVar[bool] = False

    def check_rows(self, seq_len: int) -> None:
        if seq_len != 16:
            raise ConfigError(f"training.seq_len={seq_len}: give 16.")


class Format(Limited):
    row_format = "pictures"


def limited(directory: Path, kind: type[Llama] = Limited, **changes: Any) -> Any:
    run = compose_tiny_run(directory)
    model = kind(**{name: getattr(run.model, name) for name in ("dim", "layers", "heads", "kv_heads", "ffn", "vocab")})
    axes = {axis: replace(getattr(run, axis), **values) for axis, values in changes.items()}
    return replace(run, model=model, **axes)


def reject(run: Any) -> None:
    raise ConfigError(next(list_limit_faults(run)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"layout": {"pipeline": 2}}, "parallelism.pipeline=2: the model .* into stages", id="pipeline"),
        pytest.param({"layout": {"context": 2}}, "parallelism.context=2: the model .* parts of a row", id="context"),
        pytest.param({"layout": {"tensor": 2}}, "parallelism.sequence_parallel=true: .* give .*=false", id="sequence"),
        pytest.param({"precision": {"matmuls": "float8"}}, "precision.matmuls=float8: the model", id="eight-bit"),
        pytest.param({"training": {"seq_len": 8}}, "training.seq_len=8: give 16", id="rows"),
        pytest.param({"training": {"attention": "math"}}, "training.attention=math: .* give auto", id="attention"),
        pytest.param({"training": {"z_loss": 0.1}}, "training.z_loss=0.1: the model .* predicts no tokens", id="loss"),
        pytest.param(
            {"training": {"loss_terms": {"mine": ZLoss(coefficient=1.0)}}}, "training.loss_terms.mine: ", id="terms"
        ),
        pytest.param({"dataset": {"mask_documents": True}}, "dataset.mask_documents=true: ", id="documents"),
        pytest.param({"metrics": {"layers_every": 3}}, "metrics.layers_every=3: ", id="layers"),
        pytest.param({"evaluation": {"tasks": {"mine": None}}}, "evaluation.tasks.mine: ", id="tasks"),
    ],
)
def test_what_a_family_lacks_is_rejected(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert not list(list_limit_faults(limited(tmp_path)))
    with pytest.raises(ConfigError, match=sentence):
        reject(limited(tmp_path, **changes))


@pytest.mark.full
def test_rows_of_another_format_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset=titan.dataset.schema.Synthetic: its rows are tokens, and .* reads pic"
    ):
        reject(limited(tmp_path, Format))


@pytest.mark.full
def test_settings_without_a_use_and_commands_are_rejected(tmp_path: Path) -> None:
    model = limited(tmp_path).model
    model.check()
    with pytest.raises(ConfigError, match=r"model.rope_factor=2.0: Limited has no use for it; leave it out"):
        replace(model, rope_factor=2.0).check()
    with pytest.raises(ConfigError, match=r"titan.prove: needs a model that predicts tokens"):
        require_tokens(model, "titan.prove")
    require_tokens(compose_tiny_run(tmp_path).model, "titan.prove")
