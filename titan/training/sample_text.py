"""Text sampled from a model under training, to see what it has learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan.dataset.mixture import RowMixture
from titan.dataset.tokenizers.load import load_tokenizer
from titan.model import sampling
from titan.run.run import Run
from titan.training.evaluation.averages import use_evaluation_weights
from titan.training.train_step import TrainStep

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
        start: token ids, at least one.
        window: the longest input, in tokens.
        vocab: only ids below it are sampled (a model's vocabulary may be larger than the tokenizer's).
        temperature: see `titan.model.sampling.sample_tokens`.
        top_k: see `sample_tokens`.
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
