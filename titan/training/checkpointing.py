"""When a run saves, and what is reported of each save.

A save that fails - a full disk, a folder that is gone - does not end the run: it is reported and retried after a while,
at the latest with the next regular save. Only the last save has to succeed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from titan.checkpoint import manager, manifest
from titan.checkpoint.coordinator import Coordinator, prefix_errors
from titan.checkpoint.manager import (
    CheckpointManager,
    CompareReplicas,
    PostSaveHook,
    SaveOutcome,
    compare_replicas,
    describe_compared,
)
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import restore_train_state
from titan.checkpoint.select import is_post_save_pending
from titan.checkpoint.state import train_state_dict
from titan.dataset import permutation
from titan.dataset.mixture import RowMixture
from titan.errors import RunError
from titan.files.run_directory import shorten_path
from titan.parallelism.replicas import ReplicaDifference
from titan.run.attempts import Attempt
from titan.run.run import Run, as_model
from titan.training.evaluation.averages import MovingAverage
from titan.training.train_step import TrainStep
from titan.weights import export, tokenizer_files
from titan.weights.formats import open_weights
from titan.weights.load import load_initial_weights

log = logging.getLogger("titan")

SAVE_FILE = "save"
"""A file of this name in the run's directory requests a checkpoint; it is removed when one is made."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 600.0
"""Seconds between a failed save and its retry; they double with each failure, up to the maximum."""
MAX_SAVE_ATTEMPTS = 3
"""How many times the last save is tried."""
META_BYTES = 20e9
"""The approximate size limit of a file in Meta's format: the whole file is in memory while it is written."""
POLL_SECONDS = 1.0
"""Seconds between two looks at the directory for a file that requests a checkpoint."""


class CheckpointPolicy:
    """Decides when an attempt saves, retries failed saves and reports them; one for each rank."""

    def __init__(
        self, run: Run, attempt: Attempt, train_step: TrainStep, mix: RowMixture, warn: Callable[[str], None]
    ) -> None:
        """Take what is saved; nothing is written yet.

        Args:
            train_step: whose state is saved; its optimizer must have its state already.
        """
        self.run, self.attempt, self.mix, self.warn = run, attempt, mix, warn
        world = train_step.world
        coordinator = Coordinator.from_world(world)
        self.is_rank0, self.is_off = world.is_rank0, run.checkpoint.mode == "off"
        self.manager: CheckpointManager | None = None
        if not self.is_off:
            compare: CompareReplicas | None = None
            if run.checkpoint.fingerprints:
                if described := describe_compared(train_state_dict(train_step), train_step, world):
                    log.info(described)
                compare = partial(compare_replicas, train_step, world)
            hooks, copy = _build_post_save_hooks(run, coordinator), tokenizer_files.copy_files
            directory = Path(run.directory)
            self.manager = CheckpointManager(directory, run.checkpoint, train_step, coordinator, copy, hooks, compare)
        corpus = mix.sources[0].corpus  # now, since the data may be out of reach for a moment later
        self.tokenizer = None if corpus.tokenizer["fingerprint"] == "none" else corpus.tokenizer_path
        if run.checkpoint.export:
            label = f"checkpoint.export={run.checkpoint.export}"
            tokenizer_files.check_packages(self.tokenizer, run.checkpoint.export, label)
        self.saved_step = self.started_step = attempt.step
        self.saved_at = self.polled_at = time.monotonic()
        self.retry_at: float | None = None
        self.retry_delay, self.is_ending = RETRY_SECONDS, False
        self.post_save_error: str | None = None
        self.stalled_seconds = 0.0

    def resume_post_save(self) -> None:
        """Rerun the post-save hooks of the checkpoint that the attempt starts from, where a kill interrupted them.

        All ranks call it together.
        """
        run, step = self.run, self.attempt.step
        if self.manager and self.manager.coordinator.on_rank0(
            lambda: is_post_save_pending(run.checkpoint, Path(run.directory), step)
        ):
            self.manager.rerun_post_save(step)

    def should_save(self) -> bool:
        """Whether this rank requests a save: rank 0 does so by time, for a retry, and for the file `save`."""
        if self.is_off or not self.is_rank0:
            return False
        current_time = time.monotonic()
        is_due = 0 < self.run.checkpoint.minutes * 60 <= current_time - self.saved_at
        if is_due or (self.retry_at is not None and current_time >= self.retry_at):
            return True
        if current_time - self.polled_at < POLL_SECONDS:
            return False
        self.polled_at = current_time
        return (Path(self.run.directory) / SAVE_FILE).exists()

    def save(self, step: int, rows: int) -> None:
        """Start to save the state after `step` updates and `rows` rows; all ranks call it together."""
        if self.manager is None or step == self.started_step:
            return
        self.started_step, self.saved_at, self.retry_at = step, time.monotonic(), None
        if self.is_rank0:
            with contextlib.suppress(OSError):
                (Path(self.run.directory) / SAVE_FILE).unlink()
        difference = self.manager.save(self._build_manifest(step, rows), self.tokenizer)
        if difference is not None:
            self._stop_run(step, difference)

    def _stop_run(self, step: int, difference: ReplicaDifference) -> None:
        """End the run, once the state with the difference is written; raises DifferingRanksError always."""
        outcomes = [] if self.manager is None else self.manager.finish()
        self._record_outcomes([outcome for outcome in outcomes if outcome.step != step])
        marked = Path("checkpoints") / f"step-{step}" / manifest.DIFFERS
        start = f"resumes from step {self.saved_step}" if self.saved_step else "starts from the beginning"
        raise difference.build_error(
            f"step {step}: {difference.describe()}; these must be equal, so a machine computes or stores wrong values. "
            f"The checkpoint is not used ({marked}). Repeat the command {difference.advise()}: it {start}."
        )

    def wait_for_staging(self) -> None:
        """Wait until the last save has copied the state; call it before the weights change."""
        if self.manager is not None:
            self.manager.wait_for_staging()

    def poll_finished(self) -> list[dict[str, Any]]:
        """Process the saves that have finished, and return a metrics record of each that succeeded."""
        return [] if self.manager is None else self._record_outcomes(self.manager.pop_outcomes())

    def finish_saving(self, step: int, rows: int) -> list[dict[str, Any]]:
        """Save the state after the last step, unless it is saved, and run post-save hooks; all ranks call it together.

        Returns:
            Metrics records of the saves that succeeded.

        Raises:
            RunError: when the save or a post-save hook fails in all of `MAX_SAVE_ATTEMPTS` tries.
        """
        if self.manager is None:
            return []
        records = self.wait_for_saves()
        self.is_ending = True
        for attempt in range(MAX_SAVE_ATTEMPTS):
            if self.saved_step == step and self.post_save_error is None:
                break
            time.sleep(attempt**2)
            if self.saved_step == step:
                self.manager.rerun_post_save(step)
            else:
                self.save(step, rows)
            records += self.wait_for_saves()
        self._check_last_save(step)
        return records

    def save_initial(self, rows: int) -> None:
        """Save the state that a run begins with as that of step 0, as `finish_saving` does; a run never does this."""
        self.saved_step = self.started_step = -1
        self.finish_saving(0, rows)

    def _check_last_save(self, step: int) -> None:
        if self.saved_step != step:
            raise RunError(
                f"the last checkpoint, of step {step}, could not be saved in {MAX_SAVE_ATTEMPTS} attempts; fix the "
                f"error above and rerun the same command: it resumes from step {self.saved_step}."
            )
        if self.post_save_error is not None:
            raise RunError(
                f"the last checkpoint, of step {step}, is complete in {self.run.directory}, but its copy or export "
                f"failed ({self.post_save_error}); fix this and rerun the same command."
            )

    def wait_for_saves(self) -> list[dict[str, Any]]:
        """Wait for saves in progress, then do as `poll_finished`."""
        return [] if self.manager is None else self._record_outcomes(self.manager.finish())

    def close(self) -> None:
        """Stop the background threads."""
        if self.manager is not None:
            self.manager.close()

    def _record_outcomes(self, outcomes: list[SaveOutcome]) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for outcome in outcomes:
            self.stalled_seconds += outcome.stall
            if outcome.error:
                self._retry_later(outcome)
                continue
            log.info("saved step %d in %.2f s; training waited %.2f s", outcome.step, outcome.seconds, outcome.stall)
            self.saved_step, self.retry_delay = max(self.saved_step, outcome.step), RETRY_SECONDS
            self.retry_at = None
            self.post_save_error = outcome.post_save_error
            if outcome.post_save_error:
                self.warn(f"step {outcome.step}: the checkpoint is complete, but: {outcome.post_save_error}")
            if outcome.bytes:  # the line of metrics.jsonl for a save
                records.append(
                    {
                        "checkpoint_step": outcome.step,
                        "checkpoint_seconds": outcome.seconds,
                        "checkpoint_stall_seconds": outcome.stall,
                        "checkpoint_compare_seconds": outcome.compare_seconds,
                        "checkpoint_gib": outcome.bytes / 2**30,
                    }
                )
        return records

    def _retry_later(self, outcome: SaveOutcome) -> None:
        is_late = outcome.step < self.started_step  # known only after a later save has started
        next_save = (
            f"the save of step {self.started_step} has started" if is_late else f"retrying in {self.retry_delay:.0f} s"
        )
        consequence = "" if self.is_ending else f"; training continues, {next_save}"
        self.warn(
            f"step {outcome.step}: saving the checkpoint failed ({outcome.error}){consequence}. "
            f"The last complete checkpoint is of step {self.saved_step}."
        )
        if not is_late:
            self.started_step, self.retry_at = self.saved_step, time.monotonic() + self.retry_delay
        self.retry_delay = min(2 * self.retry_delay, MAX_RETRY_SECONDS)

    def _build_manifest(self, step: int, rows: int) -> Manifest:
        return Manifest(
            step=step,
            tokens=rows * self.run.training.seq_len,
            data=permutation.build_state(rows, self.mix.compute_fingerprint(rows)),
            science_id=self.attempt.ids.science,
            run_id=self.attempt.run_id,
            layout=self.run.layout.degrees(),
            model=as_model(self.run),
            tokenizer=None,
            seq_len=self.run.training.seq_len,
        )


def _build_post_save_hooks(run: Run, coordinator: Coordinator) -> tuple[PostSaveHook, ...]:
    """Return what runs after each save: the copy elsewhere and the export."""
    settings, hooks = run.checkpoint, list[PostSaveHook]()
    if settings.path:  # first: it is what protects against loss
        hooks.append(manager.make_copy_hook(settings, settings.path, run.directory, coordinator))
    if settings.export:
        hooks.append(_build_export_hook(settings.export, settings.export_dtype, coordinator))
    return tuple(hooks)


def _build_export_hook(format: Literal["hf", "meta"], dtype: str, coordinator: Coordinator) -> PostSaveHook:
    """Return what exports each checkpoint's weights into a folder inside of it; each rank writes some of the files."""

    def export_checkpoint(folder: Path, manifest: Manifest) -> None:
        with prefix_errors(f"the export to {folder / format}"):
            weights, out = coordinator.run_all(lambda: open_weights(folder)), folder / format
            model: Any = weights.model
            meta_ranks = 1  # tensor parallel ranks that Meta's files are split for: each file has to fit into memory
            while 2 * model.parameters() / meta_ranks > META_BYTES and model.kv_heads % (2 * meta_ranks) == 0:
                meta_ranks *= 2
            exported = export.Export(weights, format, dtype, meta_ranks=meta_ranks)
            coordinator.on_rank0(lambda: out.mkdir(exist_ok=True))
            coordinator.run_all(lambda: exported.write_tensors(out, (coordinator.rank, coordinator.world_size)))
            coordinator.on_rank0(lambda: exported.finish(out))

    return export_checkpoint


def restore_state(
    run: Run,
    attempt: Attempt,
    train_step: TrainStep,
    average: MovingAverage | None,
    reader: CheckpointReader | None,
) -> None:
    """Remove what a killed attempt may have left, and load the state; all ranks call it together.

    Args:
        attempt: names the checkpoint or the weights; without any, the train step stays as it is.
        average: begins at these weights, where the checkpoint has none.
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
