"""The loss on the evaluation set of each source, fixed rows that no run trains on, and on files of text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from titan.dataset.loader import IGNORED, TARGETS, BatchBuilder, read_first_rows
from titan.dataset.mixture import RowMixture
from titan.dataset.mixture import TokenSequences as Source
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import RunError
from titan.evaluation.sets import read_validation_set
from titan.parallelism.mesh import World
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.train_step import TrainStep

_POLL_SECONDS = 0.5
_POLLS_PER_MESSAGE = 40


@dataclass(frozen=True)
class EvalSet:
    """The evaluation set of one source.

    Attributes:
        rows: this rank's rows of it.
        count: targets that count, of all ranks.
        bytes: bytes of text of these targets; 0 when unknown.
    """

    rows: Microbatches
    count: int
    bytes: int


def build_eval_sets(
    run: Run, world: World, mix: RowMixture, show: Callable[[str], None], stopped: Callable[[], bool]
) -> dict[str, EvalSet]:
    """Return the evaluation set of each source that has one: `evaluation.tokens` of each.

    While a source is being prepared this waits until the rows exist, so that they are the same as afterwards.

    Args:
        world: this rank's data-parallel shard.
        show: called with a line now and then while it waits, and where a set is empty.
        stopped: whether a signal asks to stop waiting.

    Raises:
        StopRequestedError: when a signal came while it waited.
        RunError: when the rows are not prepared within `cluster.timeout`.
    """
    count, sets = run.evaluation.tokens // run.training.seq_len, {}
    for source in mix.sources if count else ():
        _wait_for_rows(source, count, run.cluster.timeout, show, stopped)
        corpus = source.corpus
        fields = read_first_rows(
            corpus.validation,
            run.training.seq_len,
            count,
            run.dataset.mask_documents,
            corpus.masked,
            run.model.uses_keys,
        )
        targets = fields[TARGETS][fields[TARGETS] != IGNORED]
        if targets.size:
            sets[source.name] = _build_eval_set(run, world, fields, corpus.token_bytes)
        elif run.dataset.validation:
            share = f"dataset.validation={run.dataset.validation}"
            show(f"{source.name}: no validation loss: {share} of its documents are none; give more, or 0.")
    if run.evaluation.tokens and not count:
        show(f"evaluation.tokens={run.evaluation.tokens}: no validation loss: it is less than training.seq_len.")
    return sets


def build_file_sets(run: Run, world: World, tokenizer: Tokenizer | None) -> dict[str, EvalSet]:
    """Return the sets of `evaluation.sets` by their names.

    Raises:
        ConfigError: when a file can't be read.
    """
    sets: dict[str, EvalSet] = {}
    if tokenizer is None:
        return sets
    for name, validation_set in (run.evaluation.sets or {}).items():
        split = read_validation_set(validation_set, tokenizer, f"evaluation.sets.{name}")
        seq_len = run.training.seq_len
        fields = read_first_rows(split, seq_len, split.count_rows(seq_len), run.dataset.mask_documents, masked=True)
        sets[name] = _build_eval_set(run, world, fields, tokenizer.count_token_bytes())
    return sets


def _build_eval_set(run: Run, world: World, fields: NDArray[np.int32], token_bytes: NDArray[np.uint16]) -> EvalSet:
    """Return the set of whole rows, which all ranks have read."""
    targets = fields[TARGETS][fields[TARGETS] != IGNORED]
    local_fields = torch.from_numpy(_select_local_rows(run, world, fields)).to(world.device).long()
    rows = Microbatches.from_fields(local_fields)
    text_bytes = int(token_bytes[targets].sum()) if run.model.predicts_tokens else 0
    return EvalSet(rows, targets.size, text_bytes)


def evaluate_sets(train_step: TrainStep, world: World, sets: Mapping[str, EvalSet]) -> dict[str, float]:
    """Return the mean loss per token and bits per byte, over all sources and, where there are several, of each.

    With the model's `evaluation_figures`, over all sources. All ranks call it together.
    """
    names = train_step.stages[0].model.config.evaluation_figures
    sums = {
        name: world.all_reduce(train_step.evaluate(eval_set.rows).double()).reshape(-1).tolist()
        for name, eval_set in sets.items()
    }
    losses = {name: values[0] for name, values in sums.items()}
    metrics = _compute_metrics("", sum(losses.values()), list(sets.values()))
    for name, eval_set in sets.items() if len(sets) > 1 else ():
        metrics |= _compute_metrics(f"/{name}", losses[name], [eval_set])
    count = sum(eval_set.count for eval_set in sets.values())
    totals = [sum(values) for values in zip(*sums.values(), strict=True)]
    return metrics | {f"evaluation/{name}/loss": total / count for name, total in zip(names, totals[1:], strict=True)}


def evaluate_files(train_step: TrainStep, world: World, sets: Mapping[str, EvalSet]) -> dict[str, float]:
    """Return loss, perplexity and bits per byte of each set of a file; all ranks call it together."""
    metrics: dict[str, float] = {}
    for name, eval_set in sets.items():
        loss = world.all_reduce(train_step.evaluate(eval_set.rows).double()).item()
        mean = loss / eval_set.count
        metrics |= {f"evaluation/{name}/loss": mean, f"evaluation/{name}/perplexity": math.exp(min(mean, 700))}
        if eval_set.bytes:
            metrics[f"evaluation/{name}/bits_per_byte"] = loss / math.log(2) / eval_set.bytes
    return metrics


def _compute_metrics(suffix: str, loss: float, sets: list[EvalSet]) -> dict[str, float]:
    metrics = {f"validation_loss{suffix}": loss / sum(eval_set.count for eval_set in sets)}
    if text_bytes := sum(eval_set.bytes for eval_set in sets):
        metrics[f"bits_per_byte{suffix}"] = loss / math.log(2) / text_bytes
    return metrics


class StopRequestedError(Exception):
    """A signal came before training had begun."""


def _wait_for_rows(
    source: Source, count: int, timeout: float, show: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    """Wait until the evaluation rows of a source are prepared."""
    polls, start = 0, time.monotonic()
    while _is_missing(source, count):
        if stopped():
            raise StopRequestedError
        done_jobs, all_jobs = source.corpus.shard_jobs
        line = f"the evaluation set of {source.name}: {done_jobs} of {all_jobs} shard jobs are done"
        if time.monotonic() - start > timeout:
            raise RunError(f"waited {timeout:.0f} s for {line}; prepare more data first, or raise cluster.timeout.")
        if polls % _POLLS_PER_MESSAGE == 1:
            show(f"waiting for {line}")
        polls += 1
        time.sleep(_POLL_SECONDS)
        source.corpus.check_alive()
        source.corpus = source.corpus.reopen()


def _is_missing(source: Source, count: int) -> bool:
    corpus = source.corpus
    return corpus.has_validation and not corpus.complete and corpus.validation.count_rows(source.seq_len) < count


def _select_local_rows(run: Run, world: World, fields: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return this rank's rows, in micro-batches: [fields, microbatches, rows, seq_len]."""
    total, shard, size = fields.shape[1], world.data_shard, run.microbatch_rows
    rank_rows = shard.slice_rows(total)
    shape = (math.ceil(shard.count_slots(total) / size), size, run.training.seq_len)
    reader = BatchBuilder(run.training.seq_len, run.dataset.mask_documents, run.model.uses_keys)
    out = reader.fill_padding(reader.allocate(shape))
    out.reshape(len(out), -1, shape[-1])[:, : len(rank_rows)] = fields[:, rank_rows.start : rank_rows.stop]
    return out
