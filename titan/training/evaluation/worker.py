"""The body of a rank that evaluates: load a checkpoint, weights, or an average of checkpoints, and measure them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import restore_train_state
from titan.cluster.rank_info import RankInfo
from titan.files.atomic import write_atomic
from titan.training.build import build_train_step
from titan.training.evaluation.averages import average_weights
from titan.training.evaluation.evaluator import Evaluator
from titan.training.evaluation.request import RESULT, EvaluationJob
from titan.training.trainer import Trainer
from titan.training.worker import fetch_verified, join_ranks

log = logging.getLogger("titan")


def work(job: EvaluationJob, rank_info: RankInfo) -> int:
    """Evaluate as one of the job's ranks; rank 0 writes the result.

    Raises:
        ConfigError: when a checkpoint or a file can't be used.
        RunError: when the evaluation can't continue.
    """
    run = job.run
    with join_ranks(run, rank_info) as (world, stop):
        folders, reader = list[str](), None
        last = job.attempt.checkpoint
        for step, path in job.checkpoints or (() if last is None else ((job.attempt.step, last),)):
            reader = fetch_verified(run, path, step, world, "step")
            folders.append(str(reader.folder))
        attempt = replace(job.attempt, checkpoint=folders[-1]) if folders else job.attempt
        trainer = Trainer(run, attempt, world, build_train_step(run, world, log.info), stop, reader)
        del reader  # the trainer frees its metadata
        results = _measure(trainer, job, folders[:-1])
        trainer.close()
        if world.is_rank0:
            write_atomic(Path(run.directory) / RESULT, json.dumps(results))
    return 0


def _measure(trainer: Trainer, job: EvaluationJob, earlier: list[str]) -> dict[str, dict[str, float]]:
    """Return the figures by keys of metrics.jsonl: of the weights, and of averages; all ranks call it together.

    Args:
        trainer: with the state of the job's checkpoint, or its weights.
        earlier: the checkpoints before the attempt's, for an average over all of them.
    """
    trainer.restore_state()
    train_step, coordinator = trainer.train_step, Coordinator.from_world(trainer.world)
    evaluator = Evaluator(job.run, train_step, trainer.mix, trainer.reporter.show, lambda: False, job.tokenizer)
    results = {"weights": evaluator.measure()}
    if trainer.average is not None:
        with trainer.average.swap_in():
            results["ema"] = evaluator.measure_parameters()
    if earlier:

        def restore(folder: str) -> object:
            return restore_train_state(train_step, CheckpointReader(folder), coordinator)

        average_weights(train_step, [*(partial(restore, folder) for folder in earlier), trainer.restore_state])
        results[f"average of {len(earlier) + 1}"] = evaluator.measure_parameters()
    return results
