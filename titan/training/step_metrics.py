"""What ranks measure in a step: a small vector on the device, summed over the ranks and read by the host later.

`Trainer._step` packs the vector, sums it over all ranks and starts its copy to the host; `Trainer._finalize_step` reads
it while the next step runs. All ranks read the same values, so they agree on stopping, saving and giving up without
another message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.dataset.loader import Batch
from titan.metrics.schema import WARM
from titan.profile.waits import compute_seconds, record_moment
from titan.training.signals import choose_stop_exit_code

LOSS, SQUARES, STOP, REQUEUE, SAVE, PROFILE, END, VOID, VALID, PAIRS, HASH = range(11)
"""Indices into the vector: summed loss, sum of the gradients' squares, requests to stop, to be started again after
that, to save, to profile and (a hook's) to end the run, ranks that had nothing to read, targets that count, pairs of
tokens that attend to each other, first piece of the batch hash."""
HASH_PIECES, PIECE_BITS = 4, 16
"""A 64-bit hash is sent as four 16-bit pieces: in float64 their sums are exact for any number of ranks."""
RANK_SLOTS = HASH + HASH_PIECES
"""The index of the first slot of ranks; see `titan.training.rank_times`."""


def pack_metrics(
    loss: Tensor, batch: Batch, squares: Tensor, requests: Sequence[bool], slots: NDArray[np.float64]
) -> Tensor:
    """Return this rank's part of a step's vector, float64 [RANK_SLOTS + len(slots) + terms] on the device of `loss`.

    Args:
        loss: this rank's summed loss; with loss terms a vector, whose other elements are the last of the result.
        squares: this rank's part of the sum of the gradients' squares, a float64 scalar.
        requests: to stop, to be started again after that, to save, to profile, and (a hook's) to end the run.
        slots: what `titan.training.rank_times` adds.
    """
    counts = [batch.void, batch.valid, batch.pairs]
    pieces = [batch.hash >> (PIECE_BITS * i) & (2**PIECE_BITS - 1) for i in range(HASH_PIECES)]
    rank_values = np.array([requests[0] or batch.void, *requests[1:], *counts, *pieces], dtype=np.float64)
    host = torch.from_numpy(np.concatenate([rank_values, slots]))
    if loss.device.type == "cuda":
        host = host.pin_memory()
    losses = loss.double().flatten()
    first = torch.stack([losses[0], squares])
    return torch.cat([first, host.to(loss.device, non_blocking=True), losses[1:]])


def compute_term_means(names: Sequence[str], metrics: Sequence[float]) -> dict[str, float]:
    """Return the mean of each loss term over the targets that count, by its key in metrics.jsonl."""
    sums = metrics[len(metrics) - len(names) :]
    return {f"loss/{name}": value / max(1, metrics[VALID]) for name, value in zip(names, sums, strict=True)}


def split_metrics(
    values: NDArray[np.float64], slots: int, counts: int
) -> tuple[list[float], NDArray[np.float64], list[float]]:
    """Return a step's vector without the slots of ranks and the counts of experts, the slots, and the counts.

    Args:
        slots: the number of all ranks' slots.
        counts: the number of counts, which are the last values.
    """
    first, end = RANK_SLOTS + slots, len(values) - counts
    return [*values[:RANK_SLOTS].tolist(), *values[first:end].tolist()], values[RANK_SLOTS:first], values[end:].tolist()


def format_batch_hash(metrics: list[float]) -> str:
    """Return the hash of the whole batch, in hexadecimal, from the summed vector."""
    total = sum(int(piece) << (PIECE_BITS * i) for i, piece in enumerate(metrics[HASH:RANK_SLOTS]))
    return f"{total % 2**64:016x}"


class StepTimer:
    """Times a step on its device: from the end of the previous step, where nothing came between, to its own end."""

    def __init__(self, device: torch.device, previous: StepTimer | None) -> None:
        self.on_gpu = device.type == "cuda"
        self.start: Any = previous.end if previous else record_moment(self.on_gpu)
        self.end: Any = None

    def stop(self) -> None:
        """Mark the step's end, in the order of the device's work."""
        self.end = record_moment(self.on_gpu)

    def wait(self) -> float:
        """Wait until the device has reached the step's end, and return how long the step took."""
        if self.on_gpu:
            self.end.synchronize()
        return compute_seconds(self.start, self.end)


@dataclass(frozen=True)
class StartedStep:
    """A step that was started.

    Attributes:
        step: its number; 1 is the first.
        batch: what this rank read.
        lr: the learning rate.
        local_loss: this rank's summed loss, on the device.
    """

    step: int
    batch: Batch
    lr: float
    local_loss: Tensor


@dataclass(frozen=True)
class InFlightStep(StartedStep):
    """A step while its metrics are copied to the host.

    Attributes:
        metrics: the summed vector and the gradient norm behind it, on the host once the timer has waited.
        timer: times the step.
    """

    metrics: Tensor
    timer: StepTimer

    def read(self, num_slots: int, num_counts: int) -> StepResult:
        """Wait for the device, and return what all ranks have measured."""
        seconds = self.timer.wait()
        values: NDArray[np.float64] = self.metrics.numpy()
        metrics, slots, counts = split_metrics(values[:-1], num_slots, num_counts)
        loss = metrics[LOSS] / max(1, metrics[VALID])
        read = metrics, slots, counts, loss, float(values[-1]), seconds
        return StepResult(self.step, self.batch, self.lr, self.local_loss, *read)


@dataclass(frozen=True)
class StepResult(StartedStep):
    """What all ranks have measured in a step that the device has finished.

    Attributes:
        metrics: the summed vector, without slots of ranks and counts of experts.
        rank_slots: see `titan.training.rank_times`.
        expert_counts: see `titan.training.expert_load`.
        loss: the mean over the targets that count.
        grad_norm: before clipping.
        seconds: how long it took.
    """

    metrics: list[float]
    rank_slots: NDArray[np.float64]
    expert_counts: list[float]
    loss: float
    grad_norm: float
    seconds: float

    @property
    def is_void(self) -> bool:
        """Whether a rank had nothing to read, because a signal came while it waited for data: this was no step."""
        return self.metrics[VOID] > 0


class StepTimes:
    """How long the latest steps took, for the figures of result.json."""

    def __init__(self, latest: int = 1000) -> None:
        """Keep the `latest` steps."""
        self.steps: deque[tuple[float, float, float]] = deque(maxlen=latest)

    def add(self, seconds: float, pairs: float, data_seconds: float) -> None:
        """Add a step: its time, its pairs of tokens that attend to each other, and the time that it waited for data."""
        self.steps.append((seconds, pairs, data_seconds))

    def find_median(self) -> tuple[float, float] | None:
        """Return seconds and pairs of the step whose time is the median, without the first `WARM` where there are more.

        None before the first step.
        """
        measured = list(self.steps)
        measured = sorted(measured[WARM:] or measured)
        return measured[len(measured) // 2][:2] if measured else None

    def compute_data_wait(self) -> float | None:
        """Return the share of the steps' time that was spent waiting for data; None before the first step."""
        total = sum(seconds for seconds, _, _ in self.steps)
        return sum(waited for _, _, waited in self.steps) / total if total else None


@dataclass
class Requests:
    """The requests of all ranks, until the trainer has met them: to take no further step, by a signal or by a hook, to
    be started again after that, and to save a checkpoint. `ended_by_hook`: a hook asked to end the run before its last
    step.
    """

    stop: bool = False
    requeue: bool = False
    ended_by_hook: bool = False
    save: bool = False

    def add(self, metrics: Sequence[float], is_last: bool) -> None:
        """Add those of a step.

        Args:
            metrics: the step's vector, summed over the ranks.
            is_last: whether the last step of the run has started: a hook has nothing left to end.
        """
        self.stop = self.stop or metrics[STOP] > 0
        self.requeue = self.requeue or metrics[REQUEUE] > 0
        if metrics[VOID] > 0:  # it was no step
            return
        self.ended_by_hook = self.ended_by_hook or (metrics[END] > 0 and not is_last)
        self.stop = self.stop or self.ended_by_hook
        self.save = self.save or metrics[SAVE] > 0

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the run before its last step."""
        return self.stop and not self.ended_by_hook

    def choose_exit_code(self) -> int:
        """Return the exit code of a rank that has finished its steps, or was interrupted."""
        return choose_stop_exit_code(self.requeue) if self.is_interrupted else 0
