"""Reject what a model's family does not support: techniques that it lacks, and, where it predicts no tokens, what reads
text or logits. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from titan.config.kinds import get_kind
from titan.config.settings import format_value
from titan.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from titan.model.schema import Decoder
    from titan.run.run import Run


class Technique(NamedTuple):
    """A technique that a family may lack: whether a run uses it, what it needs of the model, and what to give."""

    is_on: bool
    setting: str  # with its value
    need: str
    way_out: str


def _list_techniques(run: Run) -> dict[str, Technique]:
    """Return what `titan.model.schema.Decoder.LACKS` may name, and chunks of the loss."""
    layout, chunk = run.layout, run.training.loss_chunk
    return {
        "pipeline": Technique(
            layout.pipeline > 1, f"parallelism.pipeline={layout.pipeline}", "can't be split into stages",
            "parallelism.pipeline=1",
        ),
        "context": Technique(
            layout.context > 1, f"parallelism.context={layout.context}", "can't be computed from parts of a row",
            "parallelism.context=1",
        ),
        "sequence_parallel": Technique(
            run.parallelism.sequence_parallel and layout.tensor > 1, "parallelism.sequence_parallel=true",
            "has whole rows between matmuls", "parallelism.sequence_parallel=false",
        ),
        "eight_bit": Technique(
            run.precision.eight_bit, f"precision.matmuls={run.precision.matmuls}", "is not computed in 8 bits",
            "precision=bf16",
        ),
        "loss_chunk": Technique(chunk is not None, f"training.loss_chunk={chunk}", "", "training.loss_chunk=null"),
    }  # fmt: skip


def list_limit_faults(run: Run, remote: bool = False) -> Iterator[str]:
    """Rows, techniques and settings that the model's family does not support."""
    kind, techniques, training = get_kind(type(run.model)), _list_techniques(run), run.training
    run.model.check_rows(training.seq_len)
    for name, dataset in run.dataset.corpora().items():
        if dataset.row_format != run.model.row_format:
            label = "dataset" if name == "data" else f"dataset.sources.{name}"
            yield (
                f"{label}={get_kind(type(dataset))}: its rows are {dataset.row_format or 'tokens'}, and the model "
                f"{kind} reads {run.model.row_format or 'tokens'}; give one that fits the other."
            )
    for technique in map(techniques.__getitem__, run.model.LACKS):
        if technique.is_on:
            yield f"{technique.setting}: the model {kind} {technique.need}; give {technique.way_out}."
    if not run.model.predicts_tokens:
        yield from _list_token_settings(run, kind)
    # a term whose value of a token depends on others, which may be on another rank or in another chunk
    for technique in (techniques[name] for name in ("context", "sequence_parallel", "loss_chunk")):
        for name, term in (training.loss_terms or {}).items() if technique.is_on else ():
            if term.mixes_tokens():
                yield (
                    f"{technique.setting}: splits rows, and training.loss_terms.{name} computes a token's value from "
                    "other tokens; let it depend on its own token only, or give "
                    f"{technique.way_out}."
                )


def _list_token_settings(run: Run, kind: str) -> Iterator[str]:
    """Settings that have a meaning for tokens only."""
    training = run.training
    for name, value, default in (
        ("dataset.mask_documents", run.dataset.mask_documents, False),
        ("training.attention", training.attention, "auto"),
        ("training.z_loss", training.z_loss, 0.0),
        ("training.label_smoothing", training.label_smoothing, 0.0),
        ("training.loss_chunk", training.loss_chunk, None),
        ("metrics.layers_every", run.metrics.layers_every, 0),
    ):
        if value != default:
            yield f"{name}={format_value(value)}: the model {kind} predicts no tokens; give {format_value(default)}."
    for name, names in (
        ("training.loss_terms", training.loss_terms),
        ("evaluation.sets", run.evaluation.sets),
        ("evaluation.tasks", run.evaluation.tasks),
    ):
        if names:
            yield f"{name}.{next(iter(names))}: the model {kind} predicts no tokens; leave it out."


def require_tokens(model: Decoder, command: str) -> None:
    """Raise ConfigError where a command needs a model that predicts tokens."""
    if not model.predicts_tokens:
        raise ConfigError(
            f"{command}: needs a model that predicts tokens, and {get_kind(type(model))} does not; use another one."
        )
