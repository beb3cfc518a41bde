"""The checkpoint axis. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan.config.settings import setting


@dataclass(frozen=True)
class Checkpoint:
    """When to save, where, what to keep, and where to start from."""

    mode: Literal["sync", "async", "off"] = setting(
        "sync", "sync: training waits while it is written; async: it goes on after a copy; off: nothing is saved"
    )
    every: int = setting(100, "steps between checkpoints; 0: not by steps (the end is always saved)", at_least=0)
    minutes: float = setting(0.0, "minutes between checkpoints; 0: not by time", at_least=0, cap=1e6)
    keep: int = setting(2, "how many of the latest checkpoints to keep", at_least=1)
    keep_tokens: int = setting(0, "keep one checkpoint for each so many tokens for good; 0: none", at_least=0)
    grace: float = setting(
        60.0, "seconds that a checkpoint stays readable after it has ceased to count", at_least=0, cap=1e9
    )
    on_stop: bool = setting(True, "save when a signal ends the run early")
    path: str | None = setting(
        None, "a folder or URL (s3://bucket/x) that checkpoints are copied to in the background; null: nowhere"
    )
    verify: bool = setting(True, "compare checksums before a checkpoint is used; false: sizes only")
    resume: str | None = setting(None, "another run's directory or checkpoint to start from (a fork)")
    weights: str | None = setting(
        None, "weights to start from: a checkpoint, or a folder in the format of Hugging Face or Meta"
    )
    export: Literal["hf", "meta"] | None = setting(
        None, "also write the weights in Hugging Face's or Meta's format, in each checkpoint's folder"
    )
    export_dtype: Literal["fp32", "bf16", "fp16"] = setting("bf16", "type of the exported weights")
