"""The state that an attempt begins with: of a checkpoint, or initial weights that the user names."""

from __future__ import annotations

import logging
from pathlib import Path

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import restore_train_state
from titan.files.run_directory import shorten_path
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training.evaluation.averages import MovingAverage
from titan.training.train_step import TrainStep
from titan.weights.load import load_initial_weights

log = logging.getLogger("titan")


def restore_state(
    run: Run,
    attempt: Attempt,
    train_step: TrainStep,
    average: MovingAverage | None,
    reader: CheckpointReader | None,
) -> None:
    """Remove what a killed attempt may have left, and load the state; all ranks call it together.

    Args:
        run: whose directory is cleaned.
        attempt: names the checkpoint or the weights; without any, the train step stays as it is.
        train_step: whose weights, and with a checkpoint optimizer, are loaded.
        average: begins at these weights, where the checkpoint has none.
        reader: the attempt's checkpoint, where it has been opened already.
    """
    if train_step.world.is_rank0:
        manifest.remove_leftovers(Path(run.directory), run.checkpoint.grace, attempt.run_id)
    coordinator, has_average = Coordinator.from_world(train_step.world), False
    if attempt.checkpoint:
        has_average = restore_train_state(train_step, reader or CheckpointReader(attempt.checkpoint), coordinator)
    elif attempt.weights:
        load_initial_weights(train_step, attempt.weights, coordinator)
    for line in describe_source(attempt):
        log.info(line)
    if average is not None and not has_average:
        average.copy_weights()


def describe_source(attempt: Attempt) -> tuple[str, ...]:
    """Return the line that says where the state came from; none where the weights are new."""
    if attempt.checkpoint:
        return (f"weights, optimizer state and data position: from {shorten_path(attempt.checkpoint)}",)
    return (f"weights: from {shorten_path(attempt.weights)}",) if attempt.weights else ()
