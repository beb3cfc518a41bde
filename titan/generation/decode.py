"""Batched decoding: all prompts at once, then one token of each row at a time.

    prefill    the model computes the prompts in chunks; each layer caches keys and values, the last token gives logits
    sample     a token for each row, from its own random numbers; rows that ended leave the batch
    step       the model computes the sampled tokens, which gives the next logits

With tensor parallelism all ranks do the same, and use the tokens that the first rank sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import RunError
from titan.generation.cache import CachedForward, Forward, WholeForward, can_cache, use_cache
from titan.model import sampling

Reason = Literal["stop", "length"]
"""Why a continuation ended: at a stop token or text, or at the maximum length."""


_UNFINISHED = "\ufffd"
_CONTEXT = 6
"""Tokens of the prompt that are decoded with what follows: some tokenizers decode a text's first word differently."""


class Detokenizer:
    """The text of one continuation, which grows token by token.

    A character may consist of several tokens: it is returned once it is complete. What may be the beginning of a stop
    text is buffered until it is one, or not.

    Attributes:
        text: the text so far, without the buffer.
        stopped: whether a stop text was generated; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.tokens = list(prompt[-_CONTEXT:])
        self.window_start, self.window_end = 0, len(self.tokens)
        self.buffer, self.text, self.stopped = "", "", False

    def add_token(self, token: int) -> str:
        """Add a token, and return the text that can be shown now."""
        self.tokens.append(token)
        return self._filter_stops(self._decode(last=False))

    def finish(self) -> str:
        """End the text, and return what was buffered."""
        if self.stopped:
            return ""
        rest = self._filter_stops(self._decode(last=True))
        self.text, rest, self.buffer = self.text + self.buffer, rest + self.buffer, ""
        return rest

    def _decode(self, last: bool) -> str:
        """Return the text of the tokens that were not decoded yet; "" while their last character is incomplete."""
        decoded_text = self.tokenizer.decode(self.tokens[self.window_start : self.window_end])
        text = self.tokenizer.decode(self.tokens[self.window_start :])
        if len(text) <= len(decoded_text) or (text.endswith(_UNFINISHED) and not last):
            return ""
        self.window_start, self.window_end = self.window_end, len(self.tokens)
        return text[len(decoded_text) :]

    def _filter_stops(self, new_text: str) -> str:
        """Return what can be shown of the buffer and the new text."""
        text = self.buffer + new_text
        ends = [index for index in (text.find(stop) for stop in self.stop) if index >= 0]
        if ends and not self.stopped:
            self.stopped, released, self.buffer = True, text[: min(ends)], ""
        else:
            released, self.buffer = _split_partial_stop(text, self.stop)
        self.text += released
        return released


def _split_partial_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Split `text` before its longest end that is the beginning of a stop text."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return text[:-size], text[-size:]
    return text, ""


@dataclass(frozen=True)
class SamplingRules:
    """How tokens are sampled, see `titan.model.sampling`, and when a continuation ends: at the token `eos`, or at a
    length.

    Only ids below `vocab` are sampled.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocab: int | None = None
    eos: int | None = None
    max_tokens: int = 128


@dataclass
class Continuation:
    """One continuation of a prompt.

    Attributes:
        prompt: its tokens, at least one.
        sample: its number among the continuations of this prompt.
        detokenizer: its incremental detokenizer; None without a tokenizer.
        on_token: called with each token and the text that it completes.
        tokens: those generated so far, including the one that ends a document.
        reason: why it ended; None while it continues.
    """

    prompt: Sequence[int]
    sample: int = 0
    detokenizer: Detokenizer | None = None
    on_token: Callable[[int, str], None] = lambda token, detokenizer: None
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None

    @property
    def position(self) -> int:
        """The position of the last token."""
        return len(self.prompt) + len(self.tokens) - 1

    def append_token(self, token: int, rules: SamplingRules) -> None:
        """Append a sampled token, and end the row where `rules` say so."""
        self.tokens.append(token)
        if token == rules.eos:
            self.reason = "stop"
        new_text = self.detokenizer.add_token(token) if self.detokenizer is not None and self.reason is None else ""
        if self.detokenizer is not None and self.detokenizer.stopped:
            self.reason = "stop"
        elif self.reason is None and len(self.tokens) >= rules.max_tokens:
            self.reason = "length"
        if self.detokenizer is not None and self.reason is not None:
            new_text += self.detokenizer.finish()
        self.on_token(token, new_text)


class BatchDecoder:
    """A model that continues rows."""

    def __init__(
        self,
        model: Any,
        rules: SamplingRules,
        *,
        device: torch.device,
        chunk: int = 512,
        broadcast: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    ) -> None:
        """Take a model and the rules.

        Args:
            model: a whole `titan.model.decoder.DecoderModel`, or its part on a tensor rank; on `device`.
            chunk: tokens of the prompts that the model computes at a time.
        """
        self.model, self.rules, self.device, self.chunk, self.broadcast = model, rules, device, chunk, broadcast
        self.caches = can_cache(model)  # now: its warning stands before all that is printed of a prompt

    @torch.no_grad()
    def run(self, rows: Sequence[Continuation]) -> None:
        """Continue the rows until each has ended.

        Raises:
            RunError: when the model gives logits that are not finite.
        """
        live = [(row, sampling.make_generator(self.rules.seed, row.prompt, row.sample)) for row in rows]
        length = max(len(row.prompt) for row in rows) + self.rules.max_tokens
        with use_cache(self.model, length, self.device) if self.caches else nullcontext() as cache:
            forward = CachedForward(self.model, cache, self.chunk) if cache else WholeForward(self.model, length)
            logits = self._prefill_prompts(rows, forward)
            while live:
                tokens = self._sample_tokens(logits, [generator for _, generator in live])
                for (row, _), token in zip(live, tokens.tolist(), strict=True):
                    row.append_token(token, self.rules)
                active = [i for i, (row, _) in enumerate(live) if row.reason is None]
                if 0 < len(active) < len(live):
                    forward.select_rows(active)
                tokens, live = tokens[active], [live[i] for i in active]
                if live:
                    logits = self.model.head(forward.step(tokens, [row.position for row, _ in live]))[:, 0]

    def _prefill_prompts(self, rows: Sequence[Continuation], forward: Forward) -> Tensor:
        """Compute the prompts, equal ones once, and return the logits [B, V] after each."""
        prompts = list(dict.fromkeys(tuple(row.prompt) for row in rows))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for line, prompt in zip(tokens, prompts, strict=True):
            line[: len(prompt)] = torch.tensor(prompt)
        hidden = forward.prefill(tokens.to(self.device), (lengths - 1).to(self.device))
        index = [prompts.index(tuple(row.prompt)) for row in rows]
        if index != list(range(len(prompts))):
            forward.select_rows(index)
        logits: Tensor = self.model.head(hidden)[:, 0]
        return logits[index]

    def _sample_tokens(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Return the next token of each row, int64 [B]."""
        if not bool(logits.isfinite().all()):
            raise RunError("the model's logits are not finite: its weights are corrupt, or too large for dtype.")
        rules, uniform = self.rules, sampling.draw_uniform(generators)
        tokens = sampling.sample_tokens(
            logits, uniform, temperature=rules.temperature, top_k=rules.top_k, top_p=rules.top_p, vocab=rules.vocab
        )
        return self.broadcast(tokens)
