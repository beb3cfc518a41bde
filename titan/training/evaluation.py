"""Validation: the loss on fixed rows of each source, which no run trains on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from titan.dataset.loader import IGNORED, TARGETS, Reader, fixed_rows
from titan.dataset.mixture import RowMixture
from titan.dataset.mixture import TokenSequences as Source
from titan.errors import RunError
from titan.parallelism.mesh import World
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.train_step import TrainStep

_POLL_SECONDS = 0.5
_TELL_POLLS = 40


@dataclass(frozen=True)
class EvalSet:
    """The fixed rows of one source.

    Attributes:
        rows: this rank's part of them.
        count: targets that count, of all ranks.
        bytes: of the text that these targets stand for; 0 when unknown.
    """

    rows: Microbatches
    count: int
    bytes: int


def eval_sets(
    run: Run, world: World, mix: RowMixture, tell: Callable[[str], None], stopped: Callable[[], bool]
) -> dict[str, EvalSet]:
    """The fixed rows of each source that has any: `metrics.validation_tokens` of each.

    While a source is being prepared this waits until they are there, so that they are the same as afterwards.

    Args:
        run: how many, and how they lie.
        world: this rank's share.
        mix: the sources.
        tell: called now and then while it waits.
        stopped: whether to give up waiting.

    Raises:
        Interrupted: when it gave up.
        RunError: when it waited in vain.
    """
    count, found = run.metrics.validation_tokens // run.training.seq_len, {}
    for source in mix.sources if count else ():
        _wait(source, count, run.cluster.timeout, tell, stopped)
        corpus = source.corpus
        fields = fixed_rows(corpus.validation, run.training.seq_len, count, run.dataset.mask_documents, corpus.masked)
        targets = fields[TARGETS][fields[TARGETS] != IGNORED]
        if targets.size:
            rows = Microbatches(*torch.from_numpy(_own(run, world, fields)).to(world.device).long())
            found[source.name] = EvalSet(rows, targets.size, int(corpus.token_bytes[targets].sum()))
    return found


def evaluate(train_step: TrainStep, world: World, held: Mapping[str, EvalSet]) -> dict[str, float]:
    """The mean loss of a token and bits a byte, over all sources and, where there are several, of each; all ranks call
    it together."""
    losses = {name: world.sum(train_step.evaluate(part.rows).double()).item() for name, part in held.items()}
    found = _figures("", sum(losses.values()), list(held.values()))
    for name, part in held.items() if len(held) > 1 else ():
        found |= _figures(f"/{name}", losses[name], [part])
    return found


def _figures(suffix: str, loss: float, parts: list[EvalSet]) -> dict[str, float]:
    figures = {f"validation_loss{suffix}": loss / sum(part.count for part in parts)}
    if text_bytes := sum(part.bytes for part in parts):
        figures[f"bits_per_byte{suffix}"] = loss / math.log(2) / text_bytes
    return figures


class StopRequested(Exception):
    """A signal came before training had begun."""


def _wait(
    source: Source, count: int, patience: float, tell: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    polls, began = 0, time.monotonic()
    while _is_missing(source, count):
        if stopped():
            raise StopRequested
        done, units = source.corpus.units
        line = f"held-out rows of {source.name}: {done} of {units} units are prepared"
        if time.monotonic() - began > patience:
            raise RunError(f"waited {patience:.0f} s for {line}; prepare more first, or give cluster.timeout.")
        if polls % _TELL_POLLS == 1:
            tell(f"waiting for {line}")
        polls += 1
        time.sleep(_POLL_SECONDS)
        source.corpus.check_alive()
        source.corpus = source.corpus.again()


def _is_missing(source: Source, count: int) -> bool:
    corpus = source.corpus
    return corpus.held_out and not corpus.complete and corpus.validation.rows(source.seq_len) < count


def _own(run: Run, world: World, fields: NDArray[np.int32]) -> NDArray[np.int32]:
    """This rank's share of the rows, in micro-batches: [fields, microbatches, rows, seq_len]."""
    total, share, size = fields.shape[1], world.data_shard, run.microbatch_rows
    own = share.rows(total)
    shape = (math.ceil(share.slots(total) / size), size, run.training.seq_len)
    reader = Reader(run.training.seq_len, run.dataset.mask_documents)
    out = reader.blank(reader.room(shape))
    out.reshape(len(out), -1, shape[-1])[:, : len(own)] = fields[:, own.start : own.stop]
    return out
