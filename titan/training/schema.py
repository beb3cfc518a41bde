"""The training axis: how long, on how much, from which seed, and the learning rate at every step. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from titan.config.settings import setting, show
from titan.errors import ConfigError


@dataclass(frozen=True)
class Training:
    """How long to train, and on how much at a time."""

    steps: int = setting(200, "optimizer updates", at_least=1, cap=10**9)
    global_batch: int = setting(2048, "tokens an update, over all devices", at_least=1, cap=10**10)
    grow: tuple[tuple[int, int], ...] = setting(
        (),
        "larger global batches later: [[tokens,global_batch],...], each from the step that begins at or after tokens",
    )
    seq_len: int = setting(256, "tokens a row", at_least=2, cap=10**9)
    seed: int = setting(0, "decides the initial weights and the order of the data", at_least=0, below=2**63)
    repeat: int = setting(0, "number of a repeat, to run the same thing again; changes nothing else", science=False)
    schedule: Literal["wsd", "cosine", "linear"] = setting("wsd", "learning rate after warm-up: wsd, cosine or linear")
    warmup: int | str = setting(
        "auto",
        "steps in which the learning rate rises from zero; auto: a tenth of them, 2,000 at most",
        words=("auto",),
        at_least=0,
    )
    decay: float = setting(0.2, "share of the steps in which wsd falls at the end", at_least=0, at_most=1)
    final_lr: float = setting(0.0, "learning rate at the end, as a share of optimizer.lr", at_least=0, at_most=1)
    clip_norm: float | None = setting(1.0, "largest norm of the gradient; null: no clipping", above=0)
    bad_steps: int = setting(
        3, "steps in a row with a loss or gradient that is not finite, to give up at", at_least=1, cap=10**9
    )
    loss_chunk: int | None = setting(
        None,
        "tokens whose logits there are at a time, in head and loss: less memory; null: those of all",
        science=False,
        at_least=1,
    )
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "flex"] = setting(
        "auto",
        "the kernel of attention: flash, cudnn, efficient, math or flex; auto: the fastest that can; on CUDA "
        "flex for documents that are kept apart",
        science=False,
    )
    gc_every: int = setting(50, "steps between collections of Python's garbage", science=False, at_least=1)

    @property
    def rows(self) -> int:
        """Rows in the first global batch, which is the smallest."""
        return self.global_batch // self.seq_len

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The stretches of steps that have the same batch."""
        phases = [Phase(1, 0, self.rows)]
        for tokens, batch in self.grow:
            last = phases[-1]
            step = last.step + max(0, math.ceil((tokens / self.seq_len - last.before) / last.rows))
            phases.append(Phase(step, last.before + (step - last.step) * last.rows, batch // self.seq_len))
        return tuple(phases)

    def phase(self, step: int) -> Phase:
        """The phase that `step` (1 is the first) belongs to."""
        return [phase for phase in self.phases if phase.step <= step][-1]

    def rows_before(self, step: int) -> int:
        """Rows that are read in the steps before `step`."""
        phase = self.phase(step)
        return phase.before + (step - phase.step) * phase.rows

    @property
    def tokens(self) -> int:
        """Tokens that all steps read."""
        return self.rows_before(self.steps + 1) * self.seq_len

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises from zero."""
        return min(2000, self.steps // 10) if self.warmup == "auto" else int(self.warmup)

    def check(self) -> None:
        """Refuse what fits no row, and a schedule without room.

        Raises:
            ConfigError: naming the setting to change.
        """
        self._check_rows("training.global_batch", self.global_batch)
        self._check_growth()
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                f"training.warmup={self.warmup}: must be below training.steps={self.steps}; "
                f"give training.warmup={self.steps // 10}, for example."
            )

    def _check_rows(self, name: str, batch: int) -> None:
        if batch % self.seq_len:
            near = max(1, round(batch / self.seq_len)) * self.seq_len
            raise ConfigError(
                f"{name}={batch}: must be a multiple of training.seq_len={self.seq_len}; the nearest is {near}."
            )

    def _check_growth(self) -> None:
        before = (0, self.global_batch)
        for tokens, batch in self.grow:
            self._check_rows("training.grow: a batch", batch)
            if tokens <= before[0] or batch <= before[1]:
                raise ConfigError(
                    f"training.grow={show(self.grow)}: both numbers must grow from one pair to the next, from "
                    f"[0,{self.global_batch}] on; give them in order."
                )
            before = tokens, batch


@dataclass(frozen=True)
class Phase:
    """Steps that have the same batch: from `step` on, before which `before` rows were read, `rows` rows each."""

    step: int
    before: int
    rows: int
