"""From settings and weights to what the ranks are given: prompts as tokens, and everything checked. Free of torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan.console.numbers import billions
from titan.dataset.tokenizers.base import Tokenizer, load_tokenizer
from titan.errors import ConfigError
from titan.estimate.fit import GIB, USABLE
from titan.estimate.overhead import PROCESS_GIB
from titan.generation.schema import Settings
from titan.parallelism.schema import Layout
from titan.precision.schema import Precision

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.weights.formats import Weights


@dataclass(frozen=True)
class Job:
    """What the ranks are given.

    Attributes:
        settings: as the user gave them.
        path: where the weights lie: of a run, the checkpoint that was its last.
        prompts: the tokens of each, at least one.
        tokenizer: what `load_tokenizer` takes; None without one.
        vocab: ids below it may be drawn.
        eos: the token that ends a continuation; None: none does.
        layout: the ranks.
        device: their kind.
        precision: the type to compute in.
    """

    settings: Settings
    path: str
    prompts: tuple[tuple[int, ...], ...]
    tokenizer: str | None
    vocab: int
    eos: int | None
    layout: Layout
    device: Literal["cpu", "cuda"]
    precision: Precision


def plan(settings: Settings, layout: Layout, texts: list[str] | None, weights: Weights, machine: Machine) -> Job:
    """Check what can be checked before work starts.

    Args:
        settings: as the user gave them.
        layout: the ranks.
        texts: the prompts; None for `settings.tokens`.
        weights: the opened weights.
        machine: the devices here.

    Raises:
        ConfigError: for what can't work.
    """
    tokenizer = None if weights.tokenizer is None else load_tokenizer(weights.tokenizer)
    prompts = _prompts(settings, texts, tokenizer)
    model = weights.model
    _check_ids(prompts, model.vocab, settings)
    _check_layout(model, layout, machine)
    compute = settings.dtype if settings.dtype != "auto" else "bf16" if machine.bf16_fast else "fp32"
    precision = Precision(compute=compute)
    _check_memory(settings, max(map(len, prompts)), model, layout, machine, precision)
    _warn_of_length(max(map(len, prompts)) + settings.max_tokens, weights)
    eos = None if tokenizer is None or settings.ignore_eos else tokenizer.eos
    vocab = model.vocab if tokenizer is None else min(tokenizer.vocab_size, model.vocab)
    return Job(settings, weights.path, prompts, weights.tokenizer, vocab, eos, layout, machine.device, precision)


def _prompts(settings: Settings, texts: list[str] | None, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of each prompt, begun as documents begin."""
    if texts is None:
        return (settings.tokens or (),)
    if tokenizer is None:
        raise ConfigError(f"from={settings.from_}: has no tokenizer to read a prompt with; give tokens=[1,2,3].")
    beginning = [] if tokenizer.bos is None else [tokenizer.bos]
    encode = tokenizer.encode_markup if settings.markup else tokenizer.encode
    found = []
    for text in texts:
        ids = encode(text)
        ids = ids if ids[:1] == beginning else [*beginning, *ids]
        if not ids:
            raise ConfigError("prompt=: is empty, and documents begin without a token of their own; give some text.")
        found.append(tuple(ids))
    return tuple(found)


def _check_ids(prompts: Sequence[Sequence[int]], vocab: int, settings: Settings) -> None:
    largest = max(map(max, prompts))
    if largest >= vocab:
        how = "tokens" if settings.tokens is not None else "prompt"
        raise ConfigError(f"{how}: id {largest} is none of the model's, which are 0 to {vocab - 1}; give others.")


def _check_layout(model: Any, layout: Layout, machine: Machine) -> None:
    degree = layout.tensor
    for name in ("kv_heads", "heads", "ffn", "vocab"):
        if (size := getattr(model, name)) % degree:
            raise ConfigError(
                f"parallelism.tensor={degree}: does not divide the model's {name}, {size}; "
                f"give a divisor of it, such as {math.gcd(degree, size)}."
            )
    if machine.device == "cuda" and degree > machine.count:
        raise ConfigError(
            f"parallelism.tensor={degree}: here are {machine.count} x {machine.name}; give {machine.count} at most, "
            "or device=cpu."
        )


def demand(settings: Settings, longest: int, model: Any, precision: Precision) -> tuple[float, float]:
    """GiB of all weights, and of the keys and values of one batch."""
    columns = (longest + settings.max_tokens) * settings.batch
    cache = 2 * model.layers * model.kv_heads * model.head_size * columns
    return model.parameters() * precision.bytes / GIB, cache * precision.bytes / GIB


def _check_memory(
    settings: Settings, longest: int, model: Any, layout: Layout, machine: Machine, precision: Precision
) -> None:
    if machine.memory_gib is None:
        return
    weights, cache = demand(settings, longest, model, precision)
    ranks = layout.tensor
    here = machine.memory_gib * USABLE * (ranks if machine.device == "cuda" else 1)
    here -= PROCESS_GIB * ranks if machine.device == "cpu" else 0
    if weights + cache > here:
        ways = [
            *(["dtype=bf16"] if precision.bytes > 2 else []),
            *([f"a batch below {settings.batch}"] * (cache > 0.1)),
        ]
        ways += ["a larger parallelism.tensor" if machine.device == "cuda" else "a machine with more memory"]
        raise ConfigError(
            f"from={settings.from_}: {billions(model.parameters())} parameters in {precision.compute} take "
            f"{weights:.1f} GiB and the keys and values of a batch {cache:.1f} GiB, and here are {here:.1f} GiB on "
            f"{ranks} rank{'s' * (ranks > 1)}; give {' or '.join(ways)}."
        )


def _warn_of_length(longest: int, weights: Weights) -> None:
    trained = getattr(weights, "config", {}).get("max_position_embeddings")
    if trained is not None and longest > trained:
        print(
            f"titan: warning: a prompt and max_tokens make up to {longest:,} tokens, and the model was trained on up "
            f"to {trained:,}: what comes later may make no sense.",
            file=sys.stderr,
        )
