"""The error budget of a campaign: how much evidence an idea needs, so that hardly any useless one is ever kept.

An idea is screened first, then confirmed on seeds that nothing in the campaign has used. The j-th confirmation is
passed at an e-value of j (j + 1) / a, where a is the budget. Whatever was known and chosen before it, a useless idea
passes it with a probability of at most a / (j (j + 1)) (`titan.evidence.paired`), and these add up to a over any number
of confirmations, since 1 / (j (j + 1)) = 1 / j - 1 / (j + 1). So ideas may be chosen in the light of all results, and
the screen needs no correction: it decides only which ideas get a confirmation, and a useless one gets one with a
probability of at most 1 / `SCREEN`. Spending an error probability over a sequence of tests: Foster and Stine 2008,
https://doi.org/10.1111/j.1467-9868.2007.00643.x.
"""

from __future__ import annotations

import math

SCREEN = 10.0
"""The e-value at which an idea has passed the screen."""


def find_threshold(budget: float, number: int) -> float:
    """Return the e-value at which a confirmation is passed.

    Args:
        budget: the chance that any useless idea is ever kept.
        number: of the confirmation in the campaign, from 1.
    """
    return number * (number + 1) / budget


def compute_share(budget: float, number: int) -> float:
    """Return the part of the budget that a confirmation spends, whatever becomes of it.

    Args:
        budget: see `find_threshold`.
        number: see `find_threshold`.
    """
    return 1 / find_threshold(budget, number)


def is_futile(log_e_value: float, remaining_pairs: int, threshold: float) -> bool:
    """Return whether no further pairs can reach a threshold: a pair at most doubles an e-value."""
    return log_e_value + remaining_pairs * math.log(2) < math.log(threshold) - 1e-9
