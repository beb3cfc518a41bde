"""Steps whose loss or gradients are not finite: where that began, and when there are too many of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import torch

from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.dataset.loader import Batch
from titan.dataset.mixture import RowMixture
from titan.errors import RunError
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training import not_finite
from titan.training.step_metrics import StepResult
from titan.training.timeouts import Timeouts
from titan.training.train_step import TrainStep


@dataclass(frozen=True)
class BadStep:
    """A step that left the weights unchanged.

    Attributes:
        step: its number.
        symptom: what was not finite, on which ranks, and the step's rows.
        cause: where the first value that is not finite came from.
    """

    step: int
    symptom: str
    cause: str


class BadSteps:
    """Examines steps for values that are not finite; all ranks call it together.

    Attributes:
        latest: whether the latest step was bad, bool [] on the device. The weights wait then until the host has found
            the cause.
        count: how many steps in a row were bad, of those whose metrics were read.
    """

    def __init__(
        self,
        run: Run,
        train_step: TrainStep,
        mix: RowMixture,
        timeouts: Timeouts,
        to_device: Callable[[Batch], Microbatches],
        warn: Callable[[str], None],
    ) -> None:
        """Take what repeats a step.

        Args:
            timeouts: of the ranks: a repeated step takes longer.
            warn: writes a warning to the log and the terminal.
        """
        self.run, self.train_step, self.mix, self.timeouts = run, train_step, mix, timeouts
        self.to_device, self.warn = to_device, warn
        self.latest, self.count = torch.zeros((), dtype=torch.bool, device=train_step.device), 0

    def examine(self, result: StepResult) -> BadStep | None:
        """Return the cause of a bad step, and warn of it; None for a finite step."""
        if isfinite(result.loss + result.grad_norm):
            self.count = 0
            return None
        self.count += 1
        self.latest = torch.zeros_like(self.latest)  # the weights need not wait for the next step
        symptom = self._describe_symptom(result)
        cause = self._find_cause(result)
        self.warn(f"step {result.step}: not finite: {symptom}: {cause}; the weights are unchanged")
        return BadStep(result.step, symptom, cause)

    def build_error(self, last: BadStep, saved_step: int) -> RunError:
        """Return the error that ends the run after too many bad steps.

        Args:
            saved_step: the step of the last checkpoint.
        """
        return RunError(
            f"{format_plural(self.count, 'step')} in a row without finite values, the last one step {last.step}: "
            f"{last.symptom}: "
            f"{last.cause}; lower optimizer.lr={format_value(self.run.optimizer.lr)}, or raise "
            f"training.bad_steps={self.run.training.bad_steps}. The last checkpoint is from step {saved_step}."
        )

    def _describe_symptom(self, result: StepResult) -> str:
        losses = self.train_step.world.all_gather_object(float(result.local_loss.flatten()[0]))
        ranks = [rank for rank, loss in enumerate(losses) if not isfinite(loss)]
        origin = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradients (the loss is finite)"
        return f"{origin}, rows {result.batch.first} to {result.batch.last}"

    def _find_cause(self, result: StepResult) -> str:
        """Repeat a step, and return where its first value that is not finite came from; details are in `debug/`."""
        self.timeouts.allow_task()
        rows, scale = self.to_device(result.batch), 1 / self.run.training.count_step_tokens(result.step)
        row_number_of = self._build_row_numbering(result.step)
        report = not_finite.investigate_step(self.run, self.train_step, rows, scale, row_number_of)
        if self.train_step.world.is_rank0:
            report.write(Path(self.run.directory), result.step)
        return report.sentence

    def _build_row_numbering(self, step: int) -> Callable[[int], int | None]:
        """Return the function that gives the number in the data of this rank's rows of a step, None for padding."""
        training = self.run.training
        rank_rows = self.train_step.world.data_shard.slice_rows(training.find_phase(step).rows)
        indices = np.arange(rank_rows.start, rank_rows.stop) + training.count_rows_before(step)
        numbers = self.mix.compute_row_numbers(indices).tolist()
        return lambda index: numbers[index] if index < len(numbers) else None
