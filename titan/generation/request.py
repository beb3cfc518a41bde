"""Checks a generation's settings against weights and machine, and builds the ranks' job. Free of torch."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from titan.console.numbers import format_count
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.estimate.fit import USABLE
from titan.estimate.overhead import PROCESS_GIB
from titan.estimate.rank_sizes import GIB
from titan.generation.schema import Settings
from titan.parallelism.schema import Layout
from titan.precision.schema import Precision
from titan.run.model_limits import require_tokens

if TYPE_CHECKING:
    from titan.cluster.devices import Machine
    from titan.weights.interface import Weights


@dataclass(frozen=True)
class GenerationJob:
    """The input of the ranks.

    Attributes:
        worker: what the ranks do.
        settings: as the user gave them.
        path: of the weights; for a run, its last checkpoint.
        prompts: the tokens of each, at least one.
        tokenizer: the argument of `load_tokenizer`; None without a tokenizer.
        vocab: only ids below it are sampled.
        eos: the token that ends a continuation; None: no token does.
        layout: the ranks.
        device: their device type.
        precision: the compute type.
    """

    worker: ClassVar[str] = "titan.generation.worker"
    settings: Settings
    path: str
    prompts: tuple[tuple[int, ...], ...]
    tokenizer: str | None
    vocab: int
    eos: int | None
    layout: Layout
    device: Literal["cpu", "cuda"]
    precision: Precision


def build_job(
    settings: Settings, layout: Layout, texts: list[str] | None, weights: Weights, machine: Machine
) -> GenerationJob:
    """Return the job of the ranks, after all checks that are possible before work starts.

    Args:
        texts: the prompts; None for `settings.tokens`.

    Raises:
        ConfigError: when prompts, layout or memory don't fit the model or the machine.
    """
    require_tokens(weights.model, settings.source)
    tokenizer = None if weights.tokenizer is None else load_tokenizer(weights.tokenizer)
    prompts = _encode_prompts(settings, texts, tokenizer)
    model = weights.model
    longest, largest = max(map(len, prompts)), max(map(max, prompts))
    if largest >= model.vocab:
        name, last = "tokens" if settings.tokens is not None else "prompt", model.vocab - 1
        raise ConfigError(f"{name}: id {largest} is outside of the model's vocabulary, 0 to {last}; give others.")
    _check_layout(model, layout, machine)
    compute = settings.dtype if settings.dtype != "auto" else "bf16" if machine.bf16_fast else "fp32"
    precision = Precision(compute=compute)
    _check_memory(settings, longest, model, layout, machine, precision)
    trained_length = getattr(weights, "config", {}).get("max_position_embeddings")
    length = longest + settings.max_tokens
    if trained_length is not None and length > trained_length:
        sentence = f"a prompt with max_tokens has up to {length:,} tokens, but the model was trained on up to "
        print(f"titan: warning: {sentence}{trained_length:,}; later tokens may be of low quality.", file=sys.stderr)
    eos = None if tokenizer is None or settings.ignore_eos else tokenizer.eos
    vocab = model.vocab if tokenizer is None else min(tokenizer.vocab_size, model.vocab)
    origin = (settings, weights.path, prompts, weights.tokenizer, vocab, eos)
    return GenerationJob(*origin, layout, machine.device, precision)


def _encode_prompts(
    settings: Settings, texts: list[str] | None, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each prompt, with the token that begins a document."""
    if texts is None:
        return (settings.tokens or (),)
    if tokenizer is None:
        raise ConfigError(f"{settings.source}: has no tokenizer to read a prompt with; give tokens=[1,2,3].")
    bos_ids = [] if tokenizer.bos is None else [tokenizer.bos]
    encode = tokenizer.encode_markup if settings.markup else tokenizer.encode
    encoded = []
    for text in texts:
        ids = encode(text)
        ids = ids if ids[:1] == bos_ids else [*bos_ids, *ids]
        if not ids:
            raise ConfigError("prompt=: is empty, and no token begins a document; give some text.")
        encoded.append(tuple(ids))
    return tuple(encoded)


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
            f"parallelism.tensor={degree}: this machine has {machine.count} x {machine.name}; give at most "
            f"{machine.count}, or device=cpu."
        )
    if degree > 1:
        from titan.model.module_checks import check_module  # imports torch

        check_module(model, tensor=degree)


def _check_memory(
    settings: Settings, longest: int, model: Any, layout: Layout, machine: Machine, precision: Precision
) -> None:
    if machine.memory_gib is None:
        return
    columns, ranks = (longest + settings.max_tokens) * settings.batch, layout.tensor
    keys_and_values = 2 * model.layers * model.kv_heads * model.head_size * columns
    weights, cache = (count * precision.bytes / GIB for count in (model.parameters(), keys_and_values))
    available = machine.memory_gib * USABLE * (ranks if machine.device == "cuda" else 1)
    available -= PROCESS_GIB * ranks if machine.device == "cpu" else 0
    if weights + cache > available:
        options = ["dtype=bf16"] if precision.bytes > 2 else []
        options += [f"a batch below {settings.batch}"] if cache > 0.1 else []
        options += ["a larger parallelism.tensor" if machine.device == "cuda" else "a machine with more memory"]
        raise ConfigError(
            f"{settings.source}: {format_count(model.parameters())} parameters in {precision.compute} take "
            f"{weights:.1f} GiB and the keys and values of a batch {cache:.1f} GiB, but {ranks} "
            f"rank{'s have' if ranks > 1 else ' has'} {available:.1f} GiB; give {' or '.join(options)}."
        )
