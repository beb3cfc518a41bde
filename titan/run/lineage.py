"""What a run starts from: its data, and another run's checkpoint (a fork), initial weights, or neither.

The first attempt decides the latter, and it is part of the run's science: later attempts continue from what was
recorded then, even if the other run has changed since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.checkpoint import select
from titan.checkpoint.manifest import Manifest, check_resumable
from titan.checkpoint.select import CheckpointCandidate
from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.console.text import redact_nested
from titan.dataset import corpora, permutation
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.run.run import Run, as_model

if TYPE_CHECKING:
    from titan.weights.interface import Weights


@dataclass(frozen=True)
class Parent:
    """What a run starts from."""

    id: str | None = None  # "science_id@step" of a checkpoint, or "weights:digest" of initial weights; None for neither
    checkpoint: CheckpointCandidate | None = None  # the checkpoint to fork from, where the run itself has none
    weights: str | None = None  # the folder of initial weights, where the run itself has no checkpoint


def find_parent(run: Run, attempts: list[dict[str, Any]], mix: RowMixture, has_checkpoint: bool) -> Parent:
    """Return what `run` starts from.

    Args:
        has_checkpoint: whether the run itself has a checkpoint, and so no longer needs its parent.

    Raises:
        ConfigError: when it is missing, does not fit, or is another one than the first attempt's.
    """
    resume, weights = run.checkpoint.resume, run.checkpoint.weights
    _reject_both(run)
    recorded = attempts[0].get("parent") if attempts else None
    if recorded and has_checkpoint:
        last, names = attempts[-1]["config"].get("checkpoint", {}), ("resume", "weights")
        if all(redact_nested(getattr(run.checkpoint, name)) == redact_nested(last.get(name)) for name in names):
            return Parent(str(recorded))
    if weights:
        return _find_weights(run, weights, recorded)
    if resume and recorded:
        return _find_recorded_fork(run, resume, recorded)
    if resume:
        checkpoint = _load_fork(run, resume)
        count_rows_read(run, mix, checkpoint.manifest)
        return Parent(checkpoint.id, checkpoint)
    return Parent()


def check_start(run: Run) -> None:
    """Check what a new run starts from, before its data are prepared, which may take hours."""
    _reject_both(run)
    if run.checkpoint.resume:
        _load_fork(run, run.checkpoint.resume)
    elif run.checkpoint.weights:
        _open_weights(run, run.checkpoint.weights)


def _reject_both(run: Run) -> None:
    """Raise ConfigError where a run would start from a checkpoint and from other weights."""
    resume, weights = run.checkpoint.resume, run.checkpoint.weights
    if resume and weights:
        raise ConfigError(
            f"checkpoint.weights={weights}: checkpoint.resume={resume} contains weights already; give one of the two."
        )


def _load_fork(run: Run, resume: str) -> CheckpointCandidate:
    checkpoint = select.load_named(resume)
    check_resumable(checkpoint.manifest, resume)
    model, saved_model = as_model(run), checkpoint.manifest.model
    differences = "; ".join(
        f"model.{k} is {format_value(saved_model.get(k))} there and {format_value(model.get(k))} here"
        for k in sorted(model.keys() | saved_model.keys())
        if model.get(k) != saved_model.get(k)
    )
    if differences:
        raise ConfigError(
            f"checkpoint.resume={resume}: was saved with another model: {differences}; give the same model."
        )
    if checkpoint.manifest.step >= run.training.steps:
        raise ConfigError(
            f"training.steps={run.training.steps}: the checkpoint to start from has done {checkpoint.manifest.step} "
            "steps already; give more steps."
        )
    return checkpoint


def _find_recorded_fork(run: Run, resume: str, recorded: str) -> Parent:
    """Return the checkpoint that a fork started from; its run may have continued since."""
    step = recorded.rpartition("@")[2]
    for source in (resume, f"{resume}/checkpoints/step-{step}", f"{resume}/step-{step}"):
        with contextlib.suppress(ConfigError):
            if (checkpoint := select.load_named(source)).id == recorded:
                return Parent(recorded, checkpoint)
    raise ConfigError(
        f"checkpoint.resume={resume}: step {step}, which the fork in {run.directory} started from, is not there; "
        "choose another name for a new fork."
    )


def _find_weights(run: Run, path: str, recorded: str | None) -> Parent:
    """Return initial weights that fit the model and are those of the first attempt."""
    from titan.weights.formats import compute_digest

    weights = _open_weights(run, path)
    identity = f"weights:{compute_digest(weights)[:12]}"
    if recorded and recorded != identity:
        raise ConfigError(
            f"checkpoint.weights={path}: are not the weights that the run in {run.directory} started from; name the "
            "checkpoint or folder that has them, or choose another name."
        )
    return Parent(identity, weights=weights.path)


def _open_weights(run: Run, path: str) -> Weights:
    """Return initial weights; raise ConfigError when they are of another model."""
    from titan.weights.formats import open_weights
    from titan.weights.model_config import check_model

    weights = open_weights(path)
    check_model(run.model, weights.model, f"checkpoint.weights={path}")
    return weights


def count_rows_read(run: Run, mix: RowMixture, saved: Manifest) -> int:
    """Return how many rows a checkpoint has read, if this run would have read the same ones."""
    rows = permutation.check_state(saved.data, mix.compute_fingerprint)
    if rows != run.training.count_rows_before(saved.step + 1):
        raise ConfigError(
            f"training.global_batch={run.training.global_batch}: the checkpoint read {format_plural(rows, 'row')} in "
            f"{format_plural(saved.step, 'step')}; give the checkpoint's global_batch and grow, up to that step."
        )
    return rows


def count_work(run: Run, mix: RowMixture, checkpoint: CheckpointCandidate | None) -> tuple[int, int]:
    """Return the updates done and the rows read in a checkpoint; none without one."""
    return (checkpoint.manifest.step, count_rows_read(run, mix, checkpoint.manifest)) if checkpoint else (0, 0)


def prepare_data(run: Run, progress: Callable[[str], None] | None = None) -> RowMixture:
    """Prepare what is missing of a run's data, which may take hours, and return all rows that it may read.

    Raises:
        ConfigError: for data that the model or the batch can't use; the message names both sides.
    """
    opened = corpora.prepare_corpora(run.dataset, progress)
    mix = corpora.build_mixture(run.dataset, run.training, opened)
    for rows in mix.sources:
        corpus = rows.corpus
        if corpus.max_token >= run.model.vocab:
            raise ConfigError(
                f"model.vocab={run.model.vocab}: the data has token ids up to {corpus.max_token} "
                f"(tokenizer {corpus.tokenizer['name']}); give model.vocab={corpus.vocab_size} or another tokenizer."
            )
        if corpus.complete and rows.split.count_rows(run.training.seq_len) < 1:
            raise ConfigError(
                f"training.seq_len={run.training.seq_len}: the training data has only {rows.split.tokens} tokens, "
                "less than one row; give a smaller training.seq_len or more data."
            )
    corpora.check_epochs(run.dataset, run.training, mix)
    return mix
