"""The result of each variant, and the order of variants by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titan.report.findings import Interval, Quality, Variant


def select_verdict(variant: Variant) -> Quality | None:
    """Return the comparison with the baseline that decides the answer; None without one."""
    return next(iter(variant.quality), None)


def uses_bits(variants: Sequence[Variant]) -> bool:
    """Return whether variants are compared in bits per byte, because their tokens differ."""
    return any(quality.measure == "bits per byte" for variant in variants for quality in variant.quality)


def select_result(variant: Variant, bits: bool = False) -> Interval | None:
    """Return the final validation loss of a variant in nats per token, or in bits per byte."""
    return variant.bits if bits else variant.validation


def list_token_counts(variants: Sequence[Variant]) -> list[int]:
    """Return the different numbers of tokens that finished runs saw, in rising order."""
    return sorted({run.tokens for variant in variants for run in variant.runs if run.state == "finished"})


def rank_variants(variants: Sequence[Variant]) -> list[int]:
    """Return the indices of the variants, the best first.

    Layouts of one recipe by their speed; others by the share of seeds that diverged, then by loss. Where the numbers of
    tokens differ, losses do not rank them: by the tokens to the target where there is one, else as they are.
    """
    indices = range(len(variants))
    if len(variants) > 1 and all(variant.same_science for variant in variants):
        return sorted(indices, key=lambda i: -_read_speed(variants[i]))
    if len(list_token_counts(variants)) > 1:
        return sorted(indices, key=lambda i: _read_tokens_to_target(variants[i]))
    bits = uses_bits(variants)
    return sorted(indices, key=lambda i: compute_merit(variants[i], bits))


def _read_speed(variant: Variant) -> float:
    return variant.speed.estimate if variant.speed else 0.0


def _read_tokens_to_target(variant: Variant) -> float:
    return variant.reached.median_tokens if variant.reached and variant.reached.median_tokens else math.inf


def compute_merit(variant: Variant, bits: bool = False) -> tuple[float, float]:
    """Return the sort key of a variant at equal tokens, the best first."""
    interval = select_result(variant, bits)
    return compute_diverged_share(variant), interval.estimate if interval else math.inf


def compute_diverged_share(variant: Variant) -> float:
    """Return the share of seeds that diverged, of those with an outcome."""
    return variant.outcomes.diverged / variant.outcomes.known if variant.outcomes.known else 0.0
