"""What a run has reached at its end: the content of result.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan.checkpoint import manifest
from titan.dataset.mixture import RowMixture
from titan.dataset.tokenizers.load import load_tokenizer
from titan.hooks.calls import Hooks
from titan.metrics.columns import read_loss_curves
from titan.metrics.reader import METRICS
from titan.metrics.recorder import peak_memory_gib, replace_non_finite
from titan.metrics.svg import plot_losses
from titan.model import sampling
from titan.parallelism.mesh import RunContext
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training.evaluation.averages import use_evaluation_weights
from titan.training.train_step import TrainStep


@dataclass(frozen=True)
class RunEnd:
    """How an attempt ended: whether no step is left, the updates and the rows that were read for them, when it began
    (in seconds of the monotonic clock), how long it waited for saves, a sampled text, and `find_ended_by`.
    """

    finished: bool
    step: int
    rows: int
    start_time: float
    stalled_seconds: float
    sample: Mapping[str, str] | None
    ended_by: Mapping[str, Any]


def find_ended_by(hooks: Hooks, world: RunContext) -> dict[str, Any]:
    """Return which hook ended the run and why, as `ended_by`; all ranks call it together."""
    requests = world.all_gather_object(hooks.stop_request)
    hook, reason = next(request for request in requests if request is not None)
    return {"ended_by": {"hook": hook, "reason": reason}}


def build_result(
    run: Run,
    attempt: Attempt,
    world: RunContext,
    end: RunEnd,
    latest_metrics: Mapping[str, float],
    speed: Mapping[str, float | None],
) -> dict[str, Any]:
    """Return the content of result.json.

    Args:
        world: whose rank 0 this is.
        latest_metrics: figures of the last evaluation, and the last ones of hooks.
        speed: of a typical step, and how much of the steps waited for data.
    """
    directory, seconds = Path(run.directory), time.monotonic() - end.start_time
    checkpoints = manifest.list_complete(directory)
    curves = read_loss_curves(directory / METRICS)
    plot = plot_losses(curves, directory / "loss.svg") if run.metrics.plot else None
    return {
        "finished": end.finished,
        "step": end.step,
        "tokens": end.rows * run.training.seq_len,
        "attempt": attempt.number,
        "science_id": attempt.ids.science,
        "first_loss": curves.first,
        "last_loss": curves.last,
        **{name: replace_non_finite(value) for name, value in latest_metrics.items()},
        **end.ended_by,
        **speed,
        "checkpoint_stall_seconds": end.stalled_seconds,
        "memory_gib": peak_memory_gib(world.device),
        "seconds": seconds,
        "pipeline_idle": run.staging.idle,
        "checkpoint": str(checkpoints[-1]) if checkpoints else None,
        "plot": str(plot) if plot else None,
        "sample": end.sample,
    }


_PROMPT_TOKENS = 16


def sample_text(run: Run, train_step: TrainStep, mix: RowMixture) -> dict[str, str] | None:
    """Return the start of the first evaluation row and a sampled continuation, as text; all ranks call it together.

    Returns:
        {"start": ..., "text": ...}; None where `metrics.sample_tokens` is 0 or the data have no tokenizer.
    """
    count, seq_len = run.metrics.sample_tokens, run.training.seq_len
    corpus = mix.sources[0].corpus
    if not count or corpus.tokenizer["fingerprint"] == "none":
        return None
    split = corpus.validation if corpus.validation.count_rows(seq_len) else corpus.train
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    start = [int(t) for t in split.read(0, min(_PROMPT_TOKENS, seq_len // 2))]
    vocab, seed = min(tokenizer.vocab_size, run.model.vocab), run.training.seed
    with use_evaluation_weights(train_step):
        tokens = sample_continuation(train_step.compute_logits, start, count, window=seq_len, vocab=vocab, seed=seed)
    return {"start": tokenizer.decode(start), "text": tokenizer.decode(tokens)}


@torch.no_grad()
def sample_continuation(
    logits: Callable[[list[int]], Tensor],
    start: list[int],
    count: int,
    *,
    window: int,
    vocab: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 40,
) -> list[int]:
    """Sample `count` tokens that follow `start`; all ranks call it together, and all get the same tokens.

    Args:
        logits: gives the logits [vocab] of the token that follows others.
        window: the longest input, in tokens.
        vocab: only ids below it are sampled (a model's vocabulary may be larger than the tokenizer's).
    """
    generators = [sampling.make_generator(seed, start, 0)]
    tokens = list(start)
    with torch.compiler.set_stance("force_eager"):  # or every new length would be compiled
        for _ in range(count):
            uniform = sampling.draw_uniform(generators)
            next_logits = logits(tokens[-window:])[None].cpu()
            tokens += sampling.sample_tokens(
                next_logits, uniform, temperature=temperature, top_k=top_k, vocab=vocab
            ).tolist()
    return tokens[len(start) :]
