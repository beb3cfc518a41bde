"""The body of a rank that evaluates: load a checkpoint, weights, or an average of checkpoints, and measure them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import restore_train_state
from titan.cluster.rank_info import RankInfo
from titan.training.build import build_train_step
from titan.training.evaluation.averages import average_weights
from titan.training.evaluation.evaluator import Evaluator
from titan.training.evaluation.job import EvaluationJob, write_result
from titan.training.side_jobs.ranks import fetch_verified, join_ranks
from titan.training.trainer import Trainer

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
        for step, path in _list_checkpoints(job):
            reader = fetch_verified(run, path, step, world, "step")
            folders.append(str(reader.folder))
        attempt = replace(job.attempt, checkpoint=folders[-1]) if folders else job.attempt
        trainer = CheckpointEvaluator(run, attempt, world, build_train_step(run, world, log.info), stop, reader)
        del reader  # the trainer frees its metadata
        results = trainer.evaluate(job, folders[:-1])
        trainer.close()
        if world.is_rank0:
            write_result(job, results)
    return 0


def _list_checkpoints(job: EvaluationJob) -> tuple[tuple[int, str], ...]:
    path = job.attempt.checkpoint
    return job.checkpoints or (() if path is None else ((job.attempt.step, path),))


class CheckpointEvaluator(Trainer):
    """Has the state of a checkpoint, or weights, and measures it."""

    def evaluate(self, job: EvaluationJob, earlier: list[str]) -> dict[str, dict[str, float]]:
        """Return the figures by keys of metrics.jsonl: of the weights, and of averages; all ranks call it together.

        Args:
            earlier: the checkpoints before the attempt's, for an average over all of them.
        """
        self._restore_state()
        evaluator = Evaluator(self.run, self.train_step, self.mix, self.reporter.show, lambda: False, job.tokenizer)
        results = {"weights": evaluator.measure()}
        if self.average is not None:
            with self.average.swap_in():
                results["ema"] = evaluator.measure_parameters()
        if earlier:
            average_weights(self.train_step, [*map(self._build_restore, earlier), lambda: self._restore_state()])
            results[f"average of {len(earlier) + 1}"] = evaluator.measure_parameters()
        return results

    def _build_restore(self, folder: str) -> Any:
        coordinator = Coordinator.from_world(self.world)
        return lambda: restore_train_state(self.train_step, CheckpointReader(folder), coordinator)
