"""Settings of the checkpoint axis. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan.config.settings import setting
from titan.config.text_kinds import Input, Output


@dataclass(frozen=True)
class Checkpoint:
    """When and where to save, which checkpoints to keep, and what to start from."""

    mode: Literal["sync", "async", "off"] = setting(
        "sync", "sync: training waits until it is written; async: only until it is copied; off: nothing is saved"
    )
    every: int = setting(100, "steps between checkpoints; 0: not by steps (the end is always saved)", at_least=0)
    minutes: float = setting(0.0, "minutes between checkpoints; 0: not by time", at_least=0, cap=1e6)
    keep: int = setting(2, "number of latest checkpoints to keep", at_least=1)
    keep_tokens: int = setting(0, "also keep one checkpoint per this many tokens permanently; 0: none", at_least=0)
    at: tuple[int, ...] = setting(
        (),
        "steps after which to save too, and whose checkpoints are kept permanently",
        at_least=1,
        in_ids=False,
        later=True,
    )
    grace: float = setting(
        60.0, "seconds between retiring a checkpoint and deleting its files", at_least=0, cap=1e9, unit="seconds"
    )
    on_stop: bool = setting(True, "save when a signal ends the run early")
    path: Output | None = setting(
        None, "a folder or URL (s3://bucket/x) to copy checkpoints to in the background; null: none"
    )
    fingerprints: bool = setting(
        True, "before each save, compare fingerprints of replicated weights and optimizer state between ranks"
    )
    verify: bool = setting(True, "verify checksums before a checkpoint is used; false: sizes only")
    resume: Input | None = setting(None, "another run's directory or checkpoint to start from")
    decay_steps: int | None = setting(
        None,
        "with resume: the steps that follow, in which wsd falls; it decides training.steps and schedule.decay; null: "
        "those are as given",
        at_least=1,
        in_ids=False,
    )
    weights: Input | None = setting(
        None, "initial weights: a checkpoint, or a folder in the format of Hugging Face or Meta"
    )
    export: Literal["hf", "meta"] | None = setting(
        None, "also write the weights in Hugging Face's or Meta's format, in each checkpoint's folder"
    )
    export_dtype: Literal["fp32", "bf16", "fp16"] = setting("bf16", "dtype of the exported weights")
