"""Reject what a model's family does not support: techniques that it lacks, and, where it predicts no tokens, what reads
text or logits. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from titan.config.kinds import get_kind
from titan.config.settings import format_value
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.run.run import Run


class Technique(NamedTuple):
    """A technique that a family may lack: its setting, what it needs of the model, and what to give instead."""

    setting: str
    value: Callable[[Run], object]
    is_on: Callable[[Run], bool]
    need: str
    way_out: str


TECHNIQUES: Mapping[str, Technique] = {
    "pipeline": Technique(
        "parallelism.pipeline", lambda run: run.layout.pipeline, lambda run: run.layout.pipeline > 1,
        "can't be split into stages", "parallelism.pipeline=1",
    ),
    "context": Technique(
        "parallelism.context", lambda run: run.layout.context, lambda run: run.layout.context > 1,
        "can't be computed from parts of a row", "parallelism.context=1",
    ),
    "sequence_parallel": Technique(
        "parallelism.sequence_parallel", lambda run: run.parallelism.sequence_parallel,
        lambda run: run.parallelism.sequence_parallel and run.layout.tensor > 1,
        "has whole rows between matmuls", "parallelism.sequence_parallel=false",
    ),
    "eight_bit": Technique(
        "precision.matmuls", lambda run: run.precision.matmuls, lambda run: run.precision.eight_bit,
        "is not computed in 8 bits", "precision=bf16",
    ),
}  # fmt: skip
"""What `titan.model.schema.Decoder.LACKS` may name."""


def check_limits(run: Run) -> None:
    """Raise ConfigError for rows, techniques and settings that the model's family does not support."""
    model = run.model
    _check_rows(run)
    for name in model.LACKS:
        technique = TECHNIQUES[name]
        if technique.is_on(run):
            raise ConfigError(
                f"{technique.setting}={format_value(technique.value(run))}: the model {get_kind(type(model))} "
                f"{technique.need}; give {technique.way_out}."
            )
    if not model.predicts_tokens:
        _check_settings(run)
    _check_loss_terms(run)


def _check_rows(run: Run) -> None:
    """Reject data of which the model can't read rows."""
    run.model.check_rows(run.training.seq_len)
    for name, dataset in run.dataset.corpora().items():
        if dataset.row_format != run.model.row_format:
            label = "dataset" if name == "data" else f"dataset.sources.{name}"
            raise ConfigError(
                f"{label}={get_kind(type(dataset))}: its rows are {dataset.row_format or 'tokens'}, and the model "
                f"{get_kind(type(run.model))} reads {run.model.row_format or 'tokens'}; give one that fits the other."
            )


def _check_settings(run: Run) -> None:
    """Reject settings that have a meaning for tokens only."""
    for name, value, default in (
        ("dataset.mask_documents", run.dataset.mask_documents, False),
        ("training.attention", run.training.attention, "auto"),
        ("training.z_loss", run.training.z_loss, 0.0),
        ("training.label_smoothing", run.training.label_smoothing, 0.0),
        ("training.loss_chunk", run.training.loss_chunk, None),
        ("metrics.layers_every", run.metrics.layers_every, 0),
    ):
        if value != default:
            raise ConfigError(
                f"{name}={format_value(value)}: the model {get_kind(type(run.model))} predicts no tokens; give "
                f"{format_value(default)}."
            )
    for name, names in (
        ("training.loss_terms", run.training.loss_terms),
        ("evaluation.sets", run.evaluation.sets),
        ("evaluation.tasks", run.evaluation.tasks),
    ):
        if names:
            raise ConfigError(
                f"{name}.{next(iter(names))}: the model {get_kind(type(run.model))} predicts no tokens; leave it out."
            )


def _check_loss_terms(run: Run) -> None:
    """Reject a term whose value of a token depends on others, where they may be on another rank or in another chunk."""
    chunk = Technique(
        "training.loss_chunk", lambda run: run.training.loss_chunk, lambda run: run.training.loss_chunk is not None,
        "", "training.loss_chunk=null",
    )  # fmt: skip
    for technique in (TECHNIQUES["context"], TECHNIQUES["sequence_parallel"], chunk):
        for name, term in (run.training.loss_terms or {}).items() if technique.is_on(run) else ():
            if term.mixes_tokens():
                raise ConfigError(
                    f"{technique.setting}={format_value(technique.value(run))}: splits rows, and training.loss_terms."
                    f"{name} computes a token's value from other tokens; let it depend on its own token only, or give "
                    f"{technique.way_out}."
                )


def require_tokens(model: Decoder, command: str) -> None:
    """Raise ConfigError where a command needs a model that predicts tokens."""
    if not model.predicts_tokens:
        raise ConfigError(
            f"{command}: needs a model that predicts tokens, and {get_kind(type(model))} does not; use another one."
        )
