"""The training axis: steps, batch sizes, seed and loss. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from titan.config.settings import format_value, setting
from titan.config.text_kinds import Input
from titan.errors import ConfigError
from titan.training.loss_terms import LabelSmoothing, ZLoss
from titan.training.loss_terms import LossTerm as LossTerm  # other packages import schemas only

MOST_STEPS = 10**9
"""The most accepted steps."""


@dataclass(frozen=True)
class Training:
    """The number of steps and the global batch."""

    steps: int = setting(200, "optimizer updates", at_least=1, cap=MOST_STEPS)
    global_batch: int = setting(2048, "tokens per update, over all devices", at_least=1, cap=10**10, unit="powers")
    grow: tuple[tuple[int, int], ...] = setting(
        (),
        "larger global batches later: [[tokens,global_batch],...], each from the step that begins at or after tokens",
        unit="powers",
    )
    seq_len: int = setting(256, "tokens per row", at_least=2, cap=10**9, unit="powers")
    seed: int = setting(0, "decides the initial weights and the order of the data", at_least=0, below=2**63)
    repeat: int = setting(0, "number of a repeated run with the same settings; changes nothing else", science=False)
    clip_norm: float | None = setting(1.0, "maximum norm of the gradient; null: no clipping", above=0)
    bad_steps: int = setting(
        3, "consecutive steps with a loss or gradient that is not finite, after which to fail", at_least=1, cap=10**9
    )
    loss_chunk: int | None = setting(
        None,
        "tokens per chunk of logits in head and loss, to save memory; null: all tokens at once",
        science=False,
        at_least=1,
        unit="powers",
    )
    z_loss: float = setting(0.0, "coefficient of the mean squared logsumexp of the logits in the loss", at_least=0)
    label_smoothing: float = setting(
        0.0, "probability that targets spread evenly over the vocabulary", at_least=0, below=1
    )
    loss_terms: Mapping[str, LossTerm] | None = setting(
        None, "your own terms of the loss, by names that you choose: {NAME: {_target_: mine.Term, coefficient: 0.1}}"
    )
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "flex"] = setting(
        "auto",
        "attention kernel: flash, cudnn, efficient, math or flex; auto: the fastest one available; on CUDA flex "
        "with document masks",
        science=False,
    )
    gc_every: int = setting(50, "steps between runs of Python's garbage collection", science=False, at_least=1)
    tokens: float | None = setting(
        None, "tokens to read, in place of steps; null: steps decides", above=0, cap=1e19, science=False, later=True
    )
    hours: float | None = setting(
        None,
        "device-hours of training steps, in place of steps: by step_seconds, or the predicted time of a step; null: "
        "steps decides",
        above=0,
        cap=1e12,
        science=False,
        later=True,
    )
    step_seconds: float | None = setting(
        None,
        "with hours: seconds of a step, as measured; null: as predicted",
        above=0,
        cap=1e9,
        science=False,
        later=True,
    )

    measured: Input | None = setting(
        None,
        "with hours or sweep.budget=time: a finished run, or a sweep of such, whose measured steps give the time of a "
        "step; null: as predicted",
        science=False,
        in_ids=False,
        later=True,
    )

    @property
    def rows(self) -> int:
        """Rows of the first global batch, which is the smallest."""
        return self.global_batch // self.seq_len

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of training, each with one batch size."""
        phases = [Phase(1, 0, self.rows)]
        for tokens, batch in self.grow:
            previous = phases[-1]
            step = previous.step + max(0, math.ceil((tokens / self.seq_len - previous.rows_before) / previous.rows))
            phases.append(
                Phase(step, previous.rows_before + (step - previous.step) * previous.rows, batch // self.seq_len)
            )
        return tuple(phases)

    def find_phase(self, step: int) -> Phase:
        """The phase that `step` (1 is the first) belongs to."""
        return [phase for phase in self.phases if phase.step <= step][-1]

    def count_rows_before(self, step: int) -> int:
        """Return the rows that are read before `step`."""
        phase = self.find_phase(step)
        return phase.rows_before + (step - phase.step) * phase.rows

    def count_step_tokens(self, step: int) -> int:
        """Return the tokens of a step."""
        return self.find_phase(step).rows * self.seq_len

    @property
    def total_tokens(self) -> int:
        """Tokens of all steps."""
        return self.count_rows_before(self.steps + 1) * self.seq_len

    @property
    def terms(self) -> dict[str, LossTerm]:
        """The terms of the loss next to cross-entropy, by name."""
        terms: dict[str, LossTerm] = {}
        if self.z_loss:
            terms["z_loss"] = ZLoss(coefficient=self.z_loss)
        if self.label_smoothing:
            terms["label_smoothing"] = LabelSmoothing(coefficient=self.label_smoothing)
        return terms | dict(self.loss_terms or {})

    def check(self) -> None:
        """Raise ConfigError for batches that are no whole rows, and for batches that don't grow."""
        grown = [("training.grow: a batch", *pair) for pair in self.grow]
        previous = (-1, -1)
        for name, tokens, batch in (("training.global_batch", 0, self.global_batch), *grown):
            if batch % self.seq_len:
                nearest = max(1, round(batch / self.seq_len)) * self.seq_len
                raise ConfigError(
                    f"{name}={batch}: must be a multiple of training.seq_len={self.seq_len}; the nearest is {nearest}."
                )
            if tokens <= previous[0] or batch <= previous[1]:
                raise ConfigError(
                    f"training.grow={format_value(self.grow)}: both numbers must increase from one pair to the next, "
                    f"starting above [0,{self.global_batch}]; give them in ascending order."
                )
            previous = tokens, batch
        for name in self.loss_terms or {}:
            if name in ("z_loss", "label_smoothing"):
                raise ConfigError(f"training.loss_terms.{name}: is the name of training.{name}; choose another name.")


@dataclass(frozen=True)
class Phase:
    """Steps of `rows` rows each, from `step` on; `rows_before` rows are read before it."""

    step: int
    rows_before: int
    rows: int
