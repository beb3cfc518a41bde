"""Tails and quantiles of Student's t and Fisher's F distribution, so that a law needs no scipy."""

from __future__ import annotations

import math

TINY = 1e-300
MAX_TERMS = 300


def compute_beta(x: float, p: float, q: float) -> float:
    """Return the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, Lentz's method)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (p + 1) / (p + q + 2):
        return 1 - compute_beta(1 - x, q, p)
    log_front = math.lgamma(p + q) - math.lgamma(p) - math.lgamma(q) + p * math.log(x) + q * math.log1p(-x)
    return math.exp(log_front) / (p * _sum_fraction(x, p, q))


def _sum_fraction(x: float, p: float, q: float) -> float:
    value = c = 1.0
    d = 0.0
    for m in range(1, MAX_TERMS):
        k, odd = divmod(m, 2)
        term = (
            -(p + k) * (p + q + k) / ((p + 2 * k) * (p + 2 * k + 1))
            if odd
            else k * (q - k) / ((p + 2 * k - 1) * (p + 2 * k))
        )
        d = 1 / ((1 + term * x * d) or TINY)
        c = (1 + term * x / c) or TINY
        value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value


def compute_f_tail(value: float, numerator: float, denominator: float) -> float:
    """Return the probability that Fisher's F with these degrees of freedom exceeds a value."""
    if value <= 0:
        return 1.0
    return compute_beta(denominator / (denominator + numerator * value), denominator / 2, numerator / 2)


def compute_t_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t for a probability of at least 0.5, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        above = compute_f_tail(middle**2, 1, freedom) / 2
        low, high = (middle, high) if above > 1 - probability else (low, middle)
    return (low + high) / 2
