"""The metrics axis: what is reported, how often and where to. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan.config.settings import setting

WARM = 3
"""The first steps of an attempt, which no speed counts: they compile and allocate."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What a run reports beside metrics.jsonl, which every run writes."""

    console_every: int = setting(10, "steps between progress lines where there is no terminal", at_least=1)
    tensorboard: bool = setting(False, "write TensorBoard event files to tensorboard/")
    wandb: bool = setting(False, "log to Weights & Biases, files in wandb/")
    wandb_project: str = setting("titan", "the project at Weights & Biases")
    wandb_entity: str | None = setting(None, "the user or team at Weights & Biases; null: your default one")
    wandb_mode: Literal["offline", "online"] = setting(
        "offline", "offline: files only, for a later `wandb sync`; online: send while training"
    )
    wandb_group: str | None = setting(
        None, "the run's group at Weights & Biases; null: its group id, which the repeats with other seeds share"
    )
    wandb_tags: tuple[str, ...] = setting((), "the run's tags at Weights & Biases, beside the name of its sweep")
    wandb_finish_minutes: float = setting(
        5.0, "minutes that the end of a finished run waits for Weights & Biases to send the rest", above=0, cap=1440
    )
    plot: bool = setting(True, "plot loss.svg at the end")
    sample_tokens: int = setting(64, "tokens sampled from the trained model at the end; 0: none", at_least=0, cap=10**6)
    layers_every: int = setting(
        0,
        "steps between metrics of each layer: norms of gradients and weights, update-to-weight ratio, size of "
        "activations, largest attention logit; 0: never",
        at_least=0,
    )
    spike_window: int = setting(
        100, "steps whose losses decide whether the next one is a spike; 0: no spikes are marked", at_least=0, cap=10**6
    )
    spike_deviations: float = setting(
        7.0, "a loss this many robust standard deviations above the window's median is a spike", above=0, cap=1e6
    )
