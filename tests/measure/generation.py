"""Measure the speed of generation: `python -m tests.measure suite=generate`.

With the key-value cache, relative to recomputing all tokens for each next one, as the trainer's samples do because that
works on every layout. Weights are random, because speed does not depend on them. Rounds alternate, because other work
on the machine slows both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tests.measure.common import time_in_turn
from titan.cluster.rank_info import RankInfo
from titan.generation.decode import BatchDecoder, Continuation, SamplingRules
from titan.model import init_weights
from titan.parallelism import mesh
from titan.run.run import Run
from titan.training import build
from titan.training.result_json import sample_continuation

PROMPT = 16
"""Tokens of each prompt."""
ROWS = 8
"""Rows of a batch."""


def suite(run: Run, rounds: int, lengths: tuple[int, ...] = (64, 256, 512)) -> list[dict[str, Any]]:
    """Measure a model with random weights and print one line per length.

    Args:
        run: gives the model, its type and the device.
        rounds: number of rounds.
        lengths: numbers of tokens to generate.

    Returns:
        For each length the median tokens/s, and the ratio of cached to recomputed in each round.
    """
    world = mesh.connect_world(RankInfo(), run.layout, run.machine.device, run.cluster.timeout)
    model = build.build_for_generation(run.model, run.precision, world)
    init_weights.materialise_model(model, model.initial(), 0, world.device)
    batch = f"batch of {ROWS}, cache"
    print(f"\n{'tokens/s of':>10} {'no cache':>15} {'cache':>16} {'ratio':>6} {batch:>18}")
    return [_measure_length(model, world.device, length, rounds) for length in lengths]


def _measure_length(model: Any, device: torch.device, length: int, rounds: int) -> dict[str, Any]:
    def make_cached(rows: int) -> Callable[[], None]:
        decoding = BatchDecoder(model, SamplingRules(temperature=0.8, top_k=40, max_tokens=length), device=device)
        return lambda: decoding.run([Continuation(range(PROMPT), sample) for sample in range(rows)])

    variants = {
        "uncached": lambda: _recompute(model, device, length),
        "cache": make_cached(1),
        "rows": make_cached(ROWS),
    }
    times = time_in_turn(variants, rounds, device)
    rates = {name: length / statistics.median(durations) for name, durations in times.items()}
    rates["rows"] *= ROWS
    ratios = [uncached / cached for uncached, cached in zip(times["uncached"], times["cache"], strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"{length:>10} {rates['uncached']:>15,.0f} {rates['cache']:>16,.0f} {ratio:>6.2f} {rates['rows']:>18,.0f}",
        flush=True,
    )
    return {"new_tokens": length, "tokens_per_second": rates, "ratios": ratios}


def _recompute(model: Any, device: torch.device, length: int) -> None:
    """Generate as the trainer's samples do: all tokens go through the model for each next one."""

    def compute_logits(tokens: list[int]) -> torch.Tensor:
        row = torch.tensor([tokens], device=device)
        return model.head(model(row))[0, -1].float()  # type: ignore[no-any-return]

    sample_continuation(
        compute_logits, list(range(PROMPT)), length, window=PROMPT + length, vocab=model.config.vocab, seed=0
    )
