"""Save a run's state with torch.distributed.checkpoint, synchronously or in the background.

A save is one job of all ranks, in a separate thread:

1. every rank sends rank 0 a description of its tensors, or its digest if it has not changed since the last save
   (`plans`); rank 0 creates the folder and sends each rank what to write, if that has changed;
2. every rank writes its tensors with checksums, and sends rank 0 its files' sizes and checksums;
3. rank 0 writes the manifest, which makes the checkpoint complete, and sends the number of bytes to all;
4. rank 0 removes the checkpoints that are not kept;
5. post-save hooks: exported weights, a copy at `checkpoint.path`.

`mode=sync` waits for steps 1 to 3; `mode=async` continues once the state is copied (`staging`), and the training thread
only starts that copy. A failed job leaves no files behind and is reported by `pop_outcomes`; the run goes on. Tensors
have the model's parameter names, so a checkpoint is independent of the layout that saved it.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from titan.checkpoint import manifest, retention
from titan.checkpoint.coordinator import CoordinationError, Coordinator, find_reason
from titan.checkpoint.manifest import CorruptCheckpointError, Manifest, ManifestFile
from titan.checkpoint.plans import ItemMask, LocalPlan, Plans, Written
from titan.checkpoint.schema import Checkpoint
from titan.checkpoint.staging import Staging
from titan.checkpoint.state import TrainState, evaluation_state_dict, train_state_dict
from titan.checkpoint.writer import CheckpointWriter

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended with a single process
TokenizerFiles = tuple[dict[str, ManifestFile], str | None]
"""A tokenizer's files in a folder by name, and the tokenizer's name there."""
CopyTokenizer = Callable[[str | None, Path], TokenizerFiles]
PostSaveHook = Callable[[Path, Manifest], None]
"""Called by all ranks with a complete checkpoint; all ranks raise `CoordinationError` together.

The manifest lists all files on rank 0; on the other ranks it may list only the files that the rank has written. All
work that can fail on one rank must be run by the coordinator (`Coordinator.run_all`).
"""


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a save.

    Attributes:
        step: the step of the saved state.
        stall: seconds for which training waited.
        seconds: from the call to the end.
        bytes: total size of all files; 0 if it failed.
        error: why there is no checkpoint; None if it is complete.
        post_save_error: why a post-save hook failed; None if none did.
    """

    step: int
    stall: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    post_save_error: str | None = None


class _SaveJob:
    """A running save."""

    def __init__(self, step: int) -> None:
        self.step, self.start_time = step, time.monotonic()
        self.stall = self.seconds = 0.0
        self.bytes = 0
        self.error: str | None = None
        self.post_save_error: str | None = None
        self.staging_error: Exception | None = None
        self.written, self.ended = threading.Event(), threading.Event()

    def build_outcome(self) -> SaveOutcome:
        return SaveOutcome(self.step, self.stall, self.seconds, self.bytes, self.error, self.post_save_error)


class CheckpointManager:
    """The checkpoints of one run, seen from one rank."""

    def __init__(
        self,
        directory: Path,
        settings: Checkpoint,
        train_state: TrainState,
        coordinator: Coordinator,
        copy_tokenizer: CopyTokenizer,
        post_save_hooks: tuple[PostSaveHook, ...] = (),
    ) -> None:
        """Create the manager; nothing is written yet.

        Args:
            directory: the run's directory.
            settings: the checkpoint settings.
            train_state: the state to save; its optimizer must be initialised (`init_optimizer_state`).
            coordinator: the ranks; not used by others while a save is running.
            copy_tokenizer: copies the tokenizer into a checkpoint.
            post_save_hooks: the post-save hooks.
        """
        self.directory, self.settings, self.train_state = directory, settings, train_state
        self.coordinator, self.post_save_hooks, self.copy_tokenizer = coordinator, post_save_hooks, copy_tokenizer
        self.jobs: list[_SaveJob] = []
        self.plans = Plans(coordinator.rank)
        self.staging = Staging(train_state.device) if settings.mode == "async" else None
        self.thread = ThreadPoolExecutor(1, "titan-checkpoint", _set_device, (train_state.device,))

    def save(self, checkpoint_manifest: Manifest, tokenizer: str | None = None) -> None:
        """Start saving the state, and with `mode=sync` wait for it; all ranks call it together.

        Args:
            checkpoint_manifest: the manifest, without its files and tokenizer.
            tokenizer: a file to copy into the checkpoint, or a built-in tokenizer's name.
        """
        job = _SaveJob(checkpoint_manifest.step)
        with _measure_stall(job):
            for earlier_job in self.jobs:
                earlier_job.ended.wait()  # one at a time: they share the coordinator and the staging buffers
            state = self._stage_state(job)
            self.jobs.append(job)
            self.thread.submit(self._run_save, job, state, checkpoint_manifest, tokenizer)
            if self.staging is None:
                job.written.wait()

    def _stage_state(self, job: _SaveJob) -> dict[str, Tensor]:
        """Return the tensors to write. If the copy fails, so does the job: the other ranks must learn of it."""
        try:
            state = train_state_dict(self.train_state) | evaluation_state_dict(self.train_state)
            return state if self.staging is None else self.staging.start_copy(state)
        except Exception as error:
            job.staging_error = error
            return {}

    def rerun_post_save(self, step: int) -> None:
        """Rerun the post-save hooks of a complete checkpoint; all ranks call it together."""
        self.jobs.append(job := _SaveJob(step))
        self.thread.submit(self._rerun_hooks, job)

    def wait_for_staging(self) -> None:
        """Wait until a running save has copied the state; call it before the state changes."""
        if self.staging is not None and self.jobs and not self.jobs[-1].written.is_set():
            with _measure_stall(self.jobs[-1]):
                self.staging.wait_before_update()

    def find_running_save(self) -> tuple[int, float] | None:
        """Return the step of the oldest save that is not complete, and when it began (monotonic); None without any."""
        return next(((job.step, job.start_time) for job in self.jobs if not job.written.is_set()), None)

    def pop_outcomes(self) -> list[SaveOutcome]:
        """Return the outcomes of the saves that have ended since the last call."""
        ended = [job for job in self.jobs if job.ended.is_set()]
        self.jobs = [job for job in self.jobs if job not in ended]
        return [job.build_outcome() for job in ended]

    def finish(self) -> list[SaveOutcome]:
        """Wait for the running saves and return their outcomes; all ranks call it together before they exit."""
        for job in self.jobs:
            with _measure_stall(job):
                job.ended.wait()
        self.coordinator.drain()
        return self.pop_outcomes()

    def close(self) -> None:
        """End the threads once the running saves have ended."""
        self.thread.shutdown()
        self.coordinator.abort()
        if self.staging is not None:
            self.staging.close()

    def _run_save(
        self, job: _SaveJob, state: Mapping[str, Tensor], checkpoint_manifest: Manifest, tokenizer: str | None
    ) -> None:
        """Run a whole job in the thread."""
        folder = manifest.folder_of(self.directory, checkpoint_manifest.step)
        try:
            checkpoint_manifest, job.bytes = self._write_checkpoint(job, folder, state, checkpoint_manifest, tokenizer)
        except BaseException as error:  # DCP's error is not an Exception
            job.error = find_reason(error)
            self.plans.forget_plan()
            # with a manifest the checkpoint is complete: another rank exited while it was notified
            if self.coordinator.rank == 0 and manifest.read(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # frees the space on a full disk
        job.seconds = time.monotonic() - job.start_time
        job.written.set()
        if job.error is None:
            job.post_save_error = self._run_post_save_hooks(folder, checkpoint_manifest)
        job.ended.set()

    def _wait_for_copy(self, job: _SaveJob) -> None:
        """Wait for the copy.

        Raises:
            Exception: when it failed.
        """
        if job.staging_error is not None:
            raise job.staging_error
        if self.staging is not None:
            self.staging.wait_for_copies()

    def _rerun_hooks(self, job: _SaveJob) -> None:
        folder = manifest.folder_of(self.directory, job.step)
        job.written.set()
        try:
            job.post_save_error = self._run_post_save_hooks(
                folder, self.coordinator.run_all(lambda: _load_complete(folder, self.coordinator.rank == 0))
            )
        except BaseException as error:
            job.post_save_error = find_reason(error)
        job.ended.set()

    def _write_checkpoint(
        self,
        job: _SaveJob,
        folder: Path,
        state: Mapping[str, Tensor],
        checkpoint_manifest: Manifest,
        tokenizer: str | None,
    ) -> tuple[Manifest, int]:
        copy_files = partial(self.copy_tokenizer, tokenizer)
        return _Save(folder, state, checkpoint_manifest, copy_files, self.plans, partial(self._wait_for_copy, job)).run(
            self.coordinator
        )

    def _run_post_save_hooks(self, folder: Path, checkpoint_manifest: Manifest) -> str | None:
        """Remove old checkpoints and run all post-save hooks, also after one has failed.

        Returns:
            The errors, the same on all ranks; None if there are none.
        """
        errors = [_catch_error(lambda: self.coordinator.only_on_rank0(self._prune_checkpoints))]
        errors += [_catch_error(partial(hook, folder, checkpoint_manifest)) for hook in self.post_save_hooks]
        rank_errors = [error for error in errors if error]
        try:
            return (
                self.coordinator.gather(lambda: rank_errors, _join_errors)
                if self.post_save_hooks
                else self.coordinator.broadcast(_join_errors([rank_errors]))
            )
        except Exception as error:  # another rank has exited
            return _join_errors([[*rank_errors, find_reason(error)]])

    def _prune_checkpoints(self) -> None:
        retention.prune(self.directory, self.settings.keep, self.settings.keep_tokens, self.settings.grace)


class _Save:
    """The steps of one save, on one rank."""

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        checkpoint_manifest: Manifest,
        copy_tokenizer: Callable[[Path], TokenizerFiles],
        plans: Plans,
        wait_for_copy: Callable[[], None],
    ) -> None:
        """Create the save; `wait_for_copy` waits until `state` can be read. Nothing is written yet."""
        self.folder, self.state, self.manifest, self.copy_tokenizer = folder, state, checkpoint_manifest, copy_tokenizer
        self.plans, self.wait_for_copy, self.writer = plans, wait_for_copy, CheckpointWriter(folder)

    def run(self, coordinator: Coordinator) -> tuple[Manifest, int]:
        """Save, all ranks together.

        Returns:
            The manifest, with all files on rank 0 and the rank's own on other ranks; the total size of all files.

        Raises:
            CoordinationError: on all ranks, when it failed on any.
        """
        self.writer.fs.advance = coordinator.activity.record_save_progress
        self.plans.set_plan(coordinator.scatter(self._local_plan, self._global_plan))
        try:
            tokenizer, total_bytes = coordinator.gather(self._write_data, self._finish)
        except CoordinationError as error:
            if error.is_corrupt:
                self._remove_files()
            raise
        if coordinator.rank == 0:
            return self.manifest, total_bytes
        return replace(self.manifest, files=self.writer.files, tokenizer=tokenizer), total_bytes

    def _local_plan(self) -> LocalPlan:
        self.wait_for_copy()
        return self.plans.local_plan(self.state)

    def _global_plan(self, local_plans: list[LocalPlan]) -> list[ItemMask]:
        files, tokenizer = _create_folder(self.folder, self.copy_tokenizer)
        self.manifest = replace(self.manifest, files=files, tokenizer=tokenizer)
        return self.plans.global_plan(local_plans)

    def _write_data(self) -> tuple[Written, dict[str, ManifestFile]]:
        return self.plans.write_data(self.writer), self.writer.files

    def _finish(self, written: list[tuple[Written, dict[str, ManifestFile]]]) -> tuple[str | None, int]:
        """On rank 0: write the metadata and the manifest.

        Raises:
            CorruptCheckpointError: when rank 0 does not see a file that another rank has written.
        """
        self.plans.finish(self.writer, [rank_written for rank_written, _ in written])
        files = [self.manifest.files, *(files for _, files in written), self.writer.files]
        self.manifest = replace(
            self.manifest, files={name: file for listing in files for name, file in listing.items()}
        )
        _check_visible(self.folder, self.manifest)
        manifest.write(self.folder, self.manifest)
        return self.manifest.tokenizer, sum(file.bytes for file in self.manifest.files.values())

    def _remove_files(self) -> None:
        """Remove this rank's files from a folder that rank 0 does not see."""
        for name in self.writer.files:
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it still has other ranks' files, or is removed already
            self.folder.rmdir()


def _join_errors(errors: list[list[str]]) -> str | None:
    """Join all ranks' error messages, each once."""
    return "; ".join(dict.fromkeys(message for rank in errors for message in rank)) or None


def _set_device(device: torch.device) -> None:
    """Select the rank's GPU in a thread: the current device is a per-thread setting."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def _measure_stall(job: _SaveJob) -> Iterator[None]:
    start_time = time.monotonic()
    try:
        yield
    finally:
        job.stall += time.monotonic() - start_time


def _catch_error(work: Callable[[], object]) -> str | None:
    """Run `work` and return its error message, or None."""
    try:
        work()
    except BaseException as error:  # DCP's error is not an Exception
        return find_reason(error)
    return None


def _create_folder(folder: Path, copy_tokenizer: Callable[[Path], TokenizerFiles]) -> TokenizerFiles:
    """Create a checkpoint's folder with the tokenizer's files.

    Returns:
        Those files, and the tokenizer's name there.
    """
    if folder.is_dir():
        shutil.rmtree(folder)  # from a killed save, or corrupt
    else:
        folder.unlink(missing_ok=True)
    folder.mkdir(parents=True)
    return copy_tokenizer(folder)


def _check_visible(folder: Path, checkpoint_manifest: Manifest) -> None:
    try:
        manifest.check_sizes(folder, checkpoint_manifest.files)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error}: all ranks must see the run's directory, {folder.parent.parent}"
        ) from error


def _load_complete(folder: Path, check_files: bool) -> Manifest:
    """Return the manifest of a complete checkpoint; `check_files`: check its files too, which one rank does for all."""
    checkpoint_manifest = manifest.inspect(folder) if check_files else manifest.load(folder)
    if checkpoint_manifest is None:
        raise FileNotFoundError(2, f"{manifest.NAME} is missing", str(folder))
    return checkpoint_manifest
