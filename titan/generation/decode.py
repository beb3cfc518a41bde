"""From prompts to what follows them: all prompts at once, then a token of each row at a time.

    prefill    the prompts go through the model in chunks; each layer keeps keys and values, the last token gives logits
    draw       a token for each row, from its own random numbers; rows that ended leave the batch
    step       the drawn tokens go through the model, which gives the next logits

Under tensor parallelism all ranks do the same; they take the tokens that the first of them drew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from titan.errors import RunError
from titan.generation.cache import Cache, cached
from titan.generation.text import Text
from titan.model import sampling

Reason = Literal["stop", "length"]
"""Why a continuation ended: by a token or a text that ends it, or because it is long enough."""


@dataclass(frozen=True)
class Rules:
    """How tokens are drawn, and when a continuation ends.

    Attributes:
        temperature, top_k, top_p, seed: see `titan.model.sampling`.
        vocab: ids below it may be drawn.
        eos: the token that ends a document; None: there is none, or it ends nothing.
        max_tokens: where every continuation ends.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocab: int | None = None
    eos: int | None = None
    max_tokens: int = 128


@dataclass
class Row:
    """One continuation of a prompt.

    Attributes:
        prompt: its tokens, at least one.
        sample: its number among the continuations of this prompt.
        text: where its text is put together; None without a tokenizer.
        show: told what there is to show after each token: the token, and the text that came with it.
        tokens: those generated so far, the one that ends a document included.
        reason: why it ended; None while it goes on.
    """

    prompt: Sequence[int]
    sample: int = 0
    text: Text | None = None
    show: Callable[[int, str], None] = lambda token, text: None
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None

    @property
    def place(self) -> int:
        """The position of the last token."""
        return len(self.prompt) + len(self.tokens) - 1

    def take(self, token: int, rules: Rules) -> None:
        """Take the token that was drawn."""
        self.tokens.append(token)
        if token == rules.eos:
            self.reason = "stop"
        shown = self.text.add(token) if self.text is not None and self.reason is None else ""
        if self.text is not None and self.text.stopped:
            self.reason = "stop"
        elif self.reason is None and len(self.tokens) >= rules.max_tokens:
            self.reason = "length"
        if self.text is not None and self.reason is not None:
            shown += self.text.end()
        self.show(token, shown)


class Decoding:
    """A model that continues rows."""

    def __init__(
        self,
        model: Any,
        rules: Rules,
        *,
        device: torch.device,
        chunk: int = 512,
        agree: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    ) -> None:
        """Take what it needs.

        Args:
            model: a whole `titan.model.decoder.Decoder`, perhaps cut over tensor ranks; on `device`.
            rules: how to draw, when to end.
            device: where the model is.
            chunk: how many tokens of the prompts go through the model at a time.
            agree: gives all ranks the same tokens in the place of their own.
        """
        self.model, self.rules, self.device, self.chunk, self.agree = model, rules, device, chunk, agree

    @torch.no_grad()
    def run(self, rows: Sequence[Row]) -> None:
        """Continue the rows until each has ended.

        Raises:
            RunError: when the model gives logits that are not finite.
        """
        live = [(row, sampling.source(self.rules.seed, row.prompt, row.sample)) for row in rows]
        longest = max(len(row.prompt) for row in rows)
        with cached(self.model, longest + self.rules.max_tokens, self.device) as cache:
            logits = self._prefill(rows, cache)
            while live:
                tokens = self._draw(logits, [generator for _, generator in live])
                going = self._take(tokens.tolist(), [row for row, _ in live])
                if 0 < len(going) < len(live):
                    cache.select(going)
                tokens, live = tokens[going], [live[i] for i in going]
                if live:
                    logits = self._step(tokens, [row.place for row, _ in live], cache)

    def _take(self, tokens: Sequence[int], rows: Sequence[Row]) -> list[int]:
        """Give each row its token; the indices of those that go on."""
        for row, token in zip(rows, tokens, strict=True):
            row.take(token, self.rules)
        return [i for i, row in enumerate(rows) if row.reason is None]

    def _prefill(self, rows: Sequence[Row], cache: Cache) -> Tensor:
        """Take the prompts into the cache, equal ones once; the logits [B, V] after each."""
        prompts = list(dict.fromkeys(tuple(row.prompt) for row in rows))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for line, prompt in zip(tokens, prompts, strict=True):
            line[: len(prompt)] = torch.tensor(prompt)
        hidden = self._last_hidden(tokens.to(self.device), (lengths - 1).to(self.device), cache)
        index = [prompts.index(tuple(row.prompt)) for row in rows]
        if index != list(range(len(prompts))):
            cache.select(index)
        return self._logits(hidden)[index]

    def _last_hidden(self, tokens: Tensor, last: Tensor, cache: Cache) -> Tensor:
        """The hidden states [B, 1, D] at each row's place `last`, int64 [B]; tokens [B, T] go in chunk by chunk."""
        out: Tensor | None = None
        for start in range(0, tokens.shape[1], self.chunk):
            part = tokens[:, start : start + self.chunk]
            hidden = self.model(part, cache.extend(start, part.shape[1]))
            place = (last - start).clamp(0, part.shape[1] - 1)
            found = hidden[torch.arange(len(last), device=self.device), place][:, None]
            out = found if out is None else torch.where((last >= start)[:, None, None], found, out)
        if out is None:
            raise ValueError("prompts without tokens")
        return out

    def _step(self, tokens: Tensor, places: list[int], cache: Cache) -> Tensor:
        """The logits [B, V] after one more token of each row."""
        return self._logits(self.model(tokens[:, None], cache.step(places)))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.head(hidden)[:, 0]
        return logits

    def _draw(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """The next token of each row, int64 [B]."""
        rules = self.rules
        if not bool(logits.isfinite().all()):
            raise RunError("the model's logits are not finite: its weights are damaged, or too large for dtype.")
        uniform = sampling.draw_uniform(generators)
        how = {"temperature": rules.temperature, "top_k": rules.top_k, "top_p": rules.top_p, "vocab": rules.vocab}
        return self.agree(sampling.choose(logits, uniform, **how))  # type: ignore[arg-type]
