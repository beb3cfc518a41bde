"""The sweep node: what a grid of runs asks, and what its variants are compared with. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titan.config.settings import setting


@dataclass(frozen=True)
class Sweep:
    """What a named grid says of itself; nothing of it changes a run."""

    question: str | None = setting(None, "what the grid is to answer", any_text=True)
    baseline: Mapping[str, str] | None = setting(
        None, "the variant that the others are compared with, such as {parallelism:single}; null: the first"
    )
    margin: float = setting(0.02, "difference in validation loss, in nats, that counts as none", above=0, cap=1e6)
    target: float | None = setting(None, "validation loss to come to; null: none", above=0)
