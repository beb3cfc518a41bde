"""When a run saves, and what it says of how that went.

A save that fails - a full disk, a folder that is gone - does not end the run: it says so, and tries again after a
while, at the latest when the next save is due. Only the last save has to succeed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from titan.checkpoint import transfer
from titan.checkpoint.coordinator import Coordinator, describing
from titan.checkpoint.manager import Manager, PostSaveHook, SaveOutcome
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.select import post_save_pending
from titan.dataset import permutation
from titan.dataset.mixture import RowMixture
from titan.errors import RunError
from titan.run.attempts import Attempt
from titan.run.run import Run, as_model
from titan.training.train_step import TrainStep
from titan.weights import export, tokenizer_files
from titan.weights.formats import open_weights

log = logging.getLogger("titan")

SAVE_FILE = "save"
"""A file of this name in the run's directory asks for a checkpoint; it is removed when one is made."""
RETRY_SECONDS, LONGEST_SECONDS = 10.0, 600.0
"""How long after a save that failed the next one is tried; twice as long each time, up to the longest."""
ATTEMPTS = 3
"""How often the last save is tried."""
META_BYTES = 20e9
"""About how large a file in Meta's format may be: it is held in memory while it is written."""
POLL_SECONDS = 1.0
"""How often the directory is looked at for a file that asks for a checkpoint."""


class CheckpointPolicy:
    """An attempt's checkpoints, seen from one rank."""

    def __init__(
        self, run: Run, attempt: Attempt, train_step: TrainStep, mix: RowMixture, tell: Callable[[str], None]
    ) -> None:
        """Take what is saved; nothing is written yet.

        Args:
            run, attempt: what it belongs to.
            train_step: whose state is saved; its optimizer must have its state already.
            mix: the rows, for the data's position and tokenizer.
            tell: shows a warning.
        """
        self.run, self.attempt, self.mix, self.tell = run, attempt, mix, tell
        world = train_step.world
        coordinator = Coordinator(world.rank_info.rank, world.rank_info.world_size, world.aside)
        self.is_rank0, self.off = world.is_rank0, run.checkpoint.mode == "off"
        how = (
            Path(run.directory),
            run.checkpoint,
            train_step,
            coordinator,
            tokenizer_files.copy_listed,
            _post_save_hooks(run, coordinator),
        )
        self.manager = None if self.off else Manager(*how)
        self.tokenizer = _tokenizer(mix)
        self.saved_step = self.begun_step = attempt.step
        self.saved_at = self.looked_at = time.monotonic()
        self.retry_at: float | None = None
        self.delay, self.ending = RETRY_SECONDS, False
        self.wrong: str | None = None
        self.stalled = 0.0

    def resume_post_save(self) -> None:
        """Begin what was to follow the checkpoint that the attempt begins from, where a kill came between.

        All ranks call it together.
        """
        run, step = self.run, self.attempt.step
        if self.manager and self.manager.coordinator.on_rank0(
            lambda: post_save_pending(run.checkpoint, Path(run.directory), step)
        ):
            self.manager.rerun_post_save(step)

    def due(self) -> bool:
        """Whether it is time to save, for reasons that all ranks have to be told of."""
        if self.off or not self.is_rank0:
            return False
        now = time.monotonic()
        timed = 0 < self.run.checkpoint.minutes * 60 <= now - self.saved_at
        return timed or (self.retry_at is not None and now >= self.retry_at) or self._asked(now)

    def _asked(self, now: float) -> bool:
        if now - self.looked_at < POLL_SECONDS:
            return False
        self.looked_at = now
        return (Path(self.run.directory) / SAVE_FILE).exists()

    def save(self, step: int, rows: int) -> None:
        """Save the state after `step` updates and `rows` rows; all ranks call it together."""
        if self.manager is None or step == self.begun_step:
            return
        self.begun_step, self.saved_at, self.retry_at = step, time.monotonic(), None
        if self.is_rank0:
            with contextlib.suppress(OSError):
                (Path(self.run.directory) / SAVE_FILE).unlink()
        self.manager.save(self._about(step, rows), self.tokenizer)

    def wait_for_staging(self) -> None:
        """Call it before the weights change."""
        if self.manager is not None:
            self.manager.wait_for_staging()

    def poll_finished(self) -> list[dict[str, Any]]:
        """Take note of the saves that have ended; a record of each that succeeded, for the metrics."""
        return [] if self.manager is None else self._record_outcomes(self.manager.completed())

    def finish(self, step: int, rows: int) -> list[dict[str, Any]]:
        """Save the state after the last step, unless that is done, with all that follows; all ranks together.

        Returns:
            Records of the saves that succeeded.

        Raises:
            RunError: when it can't be saved.
        """
        if self.manager is None:
            return []
        records = self.wait()
        self.ending = True
        for attempt in range(ATTEMPTS):
            if self.saved_step == step and self.wrong is None:
                break
            time.sleep(attempt**2)
            if self.saved_step == step:
                self.manager.rerun_post_save(step)
            else:
                self.save(step, rows)
            records += self.wait()
        self._check_last(step)
        return records

    def _check_last(self, step: int) -> None:
        if self.saved_step != step:
            raise RunError(
                f"the last checkpoint, of step {step}, could not be saved in {ATTEMPTS} attempts; mend what stands "
                f"above, and give the same command again: it goes on from step {self.saved_step}."
            )
        if self.wrong is not None:
            raise RunError(
                f"the last checkpoint, of step {step}, is complete in {self.run.directory}, but not all that was to "
                f"follow it ({self.wrong}); mend that, and give the same command again."
            )

    def wait(self) -> list[dict[str, Any]]:
        """Wait for what is under way; then as `hear`."""
        return [] if self.manager is None else self._record_outcomes(self.manager.finish())

    def close(self) -> None:
        """End what runs beside training."""
        if self.manager is not None:
            self.manager.close()

    def _record_outcomes(self, outcomes: list[SaveOutcome]) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for outcome in outcomes:
            self.stalled += outcome.stall
            if outcome.error:
                self._failed(outcome)
                continue
            log.info("saved step %d in %.2f s, %.2f s of it waiting", outcome.step, outcome.seconds, outcome.stall)
            self.saved_step, self.delay = max(self.saved_step, outcome.step), RETRY_SECONDS
            self.retry_at = None
            self.wrong = outcome.after
            if outcome.after:
                self.tell(f"step {outcome.step}: the checkpoint is complete, but: {outcome.after}")
            records += [_record(outcome)] if outcome.bytes else []
        return records

    def _failed(self, outcome: SaveOutcome) -> None:
        late = outcome.step < self.begun_step  # heard of once a later one is under way
        again = f"that of step {self.begun_step} has begun" if late else f"it is tried again in {self.delay:.0f} s"
        more = "" if self.ending else f"; training goes on, and {again}"
        self.tell(
            f"step {outcome.step}: no checkpoint could be saved ({outcome.error}){more}. "
            f"The last one is of step {self.saved_step}."
        )
        if not late:
            self.begun_step, self.retry_at = self.saved_step, time.monotonic() + self.delay
        self.delay = min(2 * self.delay, LONGEST_SECONDS)

    def _about(self, step: int, rows: int) -> Manifest:
        return Manifest(
            step=step,
            tokens=rows * self.run.training.seq_len,
            data=permutation.state(rows, self.mix.fingerprint(rows)),
            science_id=self.attempt.ids.science,
            run_id=self.attempt.run_id,
            layout=self.run.layout.degrees(),
            model=as_model(self.run),
            tokenizer=None,
            seq_len=self.run.training.seq_len,
        )


def _tokenizer(mix: RowMixture) -> str | None:
    """The tokenizer's file or name; looked for once, since the data may be out of reach for a moment later."""
    corpus = mix.sources[0].corpus
    return None if corpus.tokenizer["fingerprint"] == "none" else corpus.tokenizer_path


def _post_save_hooks(run: Run, coordinator: Coordinator) -> tuple[PostSaveHook, ...]:
    """What follows each save."""
    how = run.checkpoint
    copies = (
        (transfer.copying(how, how.path, run.directory, coordinator),) if how.path else ()
    )  # first: it is what may be lost
    return (*copies, _export_hook(how.export, how.export_dtype, coordinator)) if how.export else copies


def _export_hook(format: Literal["hf", "meta"], dtype: str, coordinator: Coordinator) -> PostSaveHook:
    """What writes the weights of each checkpoint in another format, into a folder in its own; each rank some files."""

    def write(folder: Path, about: Manifest) -> None:
        with describing(f"the export to {folder / format}"):
            weights, out = coordinator.run_all(lambda: open_weights(folder)), folder / format
            how: dict[str, Any] = {"format": format, "dtype": dtype, "meta_ranks": _meta_ranks(weights.model)}
            coordinator.on_rank0(lambda: out.mkdir(exist_ok=True))
            coordinator.run_all(
                lambda: export.export(weights, out, part=(coordinator.rank, coordinator.world_size), **how)
            )
            coordinator.on_rank0(lambda: export.finish(weights, out, **how))

    return write


def _meta_ranks(model: Any) -> int:
    """For how many tensor parallel ranks Meta's files are cut: as many as make none too large for memory."""
    ranks = 1
    while 2 * model.parameters() / ranks > META_BYTES and model.kv_heads % (2 * ranks) == 0:
        ranks *= 2
    return ranks


def _record(outcome: SaveOutcome) -> dict[str, Any]:
    return {
        "checkpoint_step": outcome.step,
        "checkpoint_seconds": outcome.seconds,
        "checkpoint_stall_seconds": outcome.stall,
        "checkpoint_gib": outcome.bytes / 2**30,
    }
