"""Save a run's state with torch.distributed.checkpoint, synchronously or in the background.

A save is one job of all ranks, in a separate thread:

1. every rank sends rank 0 a description of its tensors, or its digest if it has not changed since the last save
   (`plans`); rank 0 creates the folder and sends each rank what to write, if that has changed;
2. every rank writes its tensors with checksums, and sends rank 0 its files' sizes and checksums;
3. rank 0 writes the manifest, which makes the checkpoint complete, and sends the number of bytes to all;
4. rank 0 removes the checkpoints that are not kept;
5. post-save hooks: exported weights, a copy at `checkpoint.path`.

`mode=sync` waits for steps 1 to 3; `mode=async` continues once the state is copied (`staging`), and the training thread
only starts that copy. A failed job leaves no files behind and is reported by `completed`; the run goes on. Tensors have
the model's parameter names, so a checkpoint is independent of the layout that saved it.
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
from titan.checkpoint.coordinator import CoordinationError, Coordinator, reason
from titan.checkpoint.manifest import Corrupt, File, Manifest
from titan.checkpoint.plans import Part, Plans, Proposal, Written
from titan.checkpoint.schema import Checkpoint
from titan.checkpoint.staging import Staging
from titan.checkpoint.state import TrainState, evaluation_state_dict, train_state_dict
from titan.checkpoint.writer import Writer

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended with a single process
Copied = tuple[dict[str, File], str | None]
"""A tokenizer's files in a folder by name, and the tokenizer's name there."""
CopyTokenizer = Callable[[str | None, Path], Copied]
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
        after: why a post-save hook failed; None if none did.
    """

    step: int
    stall: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    after: str | None = None


class _Job:
    """A running save."""

    def __init__(self, step: int) -> None:
        self.step, self.began = step, time.monotonic()
        self.stall = self.seconds = 0.0
        self.bytes = 0
        self.error: str | None = None
        self.after: str | None = None
        self.unstaged: Exception | None = None
        self.written, self.ended = threading.Event(), threading.Event()

    def outcome(self) -> SaveOutcome:
        return SaveOutcome(self.step, self.stall, self.seconds, self.bytes, self.error, self.after)


class Manager:
    """The checkpoints of one run, seen from one rank."""

    def __init__(
        self,
        directory: Path,
        how: Checkpoint,
        trained: TrainState,
        coordinator: Coordinator,
        copy_tokenizer: CopyTokenizer,
        after: tuple[PostSaveHook, ...] = (),
    ) -> None:
        """Create the manager; nothing is written yet.

        Args:
            directory: the run's directory.
            how: the checkpoint settings.
            trained: the state to save; its optimizer must be initialised (`init_optimizer_state`).
            coordinator: the ranks; not used by others while a save is running.
            copy_tokenizer: copies the tokenizer into a checkpoint.
            after: the post-save hooks.
        """
        self.directory, self.how, self.trained = directory, how, trained
        self.coordinator, self.after, self.copy_tokenizer = coordinator, after, copy_tokenizer
        self.jobs: list[_Job] = []
        self.plans = Plans(coordinator.rank)
        self.staging = Staging(trained.device) if how.mode == "async" else None
        self.thread = ThreadPoolExecutor(1, "titan-checkpoint", _set_device, (trained.device,))

    def save(self, about: Manifest, tokenizer: str | None = None) -> None:
        """Start saving the state, and with `mode=sync` wait for it; all ranks call it together.

        Args:
            about: the manifest, without its files and tokenizer.
            tokenizer: a file to copy into the checkpoint, or a built-in tokenizer's name.
        """
        job = _Job(about.step)
        with _stalled(job):
            for earlier in self.jobs:
                earlier.ended.wait()  # one at a time: they share the coordinator and the staging buffers
            staged = self._staged(job)
            self.jobs.append(job)
            self.thread.submit(self._work, job, staged, about, tokenizer)
            if self.staging is None:
                job.written.wait()

    def _staged(self, job: _Job) -> dict[str, Tensor]:
        """Return the tensors to write. If the copy fails, so does the job: the other ranks must learn of it."""
        try:
            state = train_state_dict(self.trained) | evaluation_state_dict(self.trained)
            return state if self.staging is None else self.staging.start(state)
        except Exception as error:
            job.unstaged = error
            return {}

    def rerun_post_save(self, step: int) -> None:
        """Rerun the post-save hooks of a complete checkpoint; all ranks call it together."""
        self.jobs.append(job := _Job(step))
        self.thread.submit(self._rerun, job)

    def wait_for_staging(self) -> None:
        """Wait until a running save has copied the state; call it before the state changes."""
        if self.staging is not None and self.jobs and not self.jobs[-1].written.is_set():
            with _stalled(self.jobs[-1]):
                self.staging.done()

    def running(self) -> tuple[int, float] | None:
        """Return the step of the oldest save that is not complete, and when it began (monotonic); None without any."""
        return next(((job.step, job.began) for job in self.jobs if not job.written.is_set()), None)

    def completed(self) -> list[SaveOutcome]:
        """Return the outcomes of the saves that have ended since the last call."""
        ended = [job for job in self.jobs if job.ended.is_set()]
        self.jobs = [job for job in self.jobs if job not in ended]
        return [job.outcome() for job in ended]

    def finish(self) -> list[SaveOutcome]:
        """Wait for the running saves and return their outcomes; all ranks call it together before they exit."""
        for job in self.jobs:
            with _stalled(job):
                job.ended.wait()
        self.coordinator.part()
        return self.completed()

    def close(self) -> None:
        """End the threads once the running saves have ended."""
        self.thread.shutdown()
        self.coordinator.leave()
        if self.staging is not None:
            self.staging.close()

    def _work(self, job: _Job, state: Mapping[str, Tensor], about: Manifest, tokenizer: str | None) -> None:
        """Run a whole job in the thread."""
        folder = manifest.folder_of(self.directory, about.step)
        try:
            about, job.bytes = self._write(job, folder, state, about, tokenizer)
        except BaseException as error:  # DCP's error is not an Exception
            job.error = reason(error)
            self.plans.forget()
            # with a manifest the checkpoint is complete: another rank exited while it was notified
            if self.coordinator.rank == 0 and manifest.read(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # frees the space on a full disk
        job.seconds = time.monotonic() - job.began
        job.written.set()
        if job.error is None:
            job.after = self._run_post_save_hooks(folder, about)
        job.ended.set()

    def _ready(self, job: _Job) -> None:
        """Wait for the copy.

        Raises:
            Exception: when it failed.
        """
        if job.unstaged is not None:
            raise job.unstaged
        if self.staging is not None:
            self.staging.ready()

    def _rerun(self, job: _Job) -> None:
        folder = manifest.folder_of(self.directory, job.step)
        job.written.set()
        try:
            job.after = self._run_post_save_hooks(
                folder, self.coordinator.run_all(lambda: _complete_manifest(folder, self.coordinator.rank == 0))
            )
        except BaseException as error:
            job.after = reason(error)
        job.ended.set()

    def _write(
        self, job: _Job, folder: Path, state: Mapping[str, Tensor], about: Manifest, tokenizer: str | None
    ) -> tuple[Manifest, int]:
        copy = partial(self.copy_tokenizer, tokenizer)
        return _Save(folder, state, about, copy, self.plans, partial(self._ready, job)).work(self.coordinator)

    def _run_post_save_hooks(self, folder: Path, about: Manifest) -> str | None:
        """Remove old checkpoints and run all post-save hooks, also after one has failed.

        Returns:
            The errors, the same on all ranks; None if there are none.
        """
        errors = [_error_of(lambda: self.coordinator.only_on_rank0(self._prune))]
        errors += [_error_of(partial(after, folder, about)) for after in self.after]
        mine = [error for error in errors if error]
        try:
            return (
                self.coordinator.gather(lambda: mine, _join_errors)
                if self.after
                else self.coordinator.broadcast(_join_errors([mine]))
            )
        except Exception as error:  # another rank has exited
            return _join_errors([[*mine, reason(error)]])

    def _prune(self) -> None:
        retention.prune(self.directory, self.how.keep, self.how.keep_tokens, self.how.grace)


class _Save:
    """The steps of one save, on one rank."""

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        about: Manifest,
        copy_tokenizer: Callable[[Path], Copied],
        plans: Plans,
        ready: Callable[[], None],
    ) -> None:
        """Create the save; `ready` waits until `state` can be read. Nothing is written yet."""
        self.folder, self.state, self.about, self.copy_tokenizer = folder, state, about, copy_tokenizer
        self.plans, self.ready, self.writer = plans, ready, Writer(folder)

    def work(self, coordinator: Coordinator) -> tuple[Manifest, int]:
        """Save, all ranks together.

        Returns:
            The manifest, with all files on rank 0 and the rank's own on other ranks; the total size of all files.

        Raises:
            CoordinationError: on all ranks, when it failed on any.
        """
        self.writer.fs.advance = coordinator.activity.advance_save
        self.plans.accept(coordinator.scatter(self._propose, self._assign))
        try:
            name, size = coordinator.gather(self._write, self._conclude)
        except CoordinationError as error:
            if error.damaged:
                self._remove_written()
            raise
        if coordinator.rank == 0:
            return self.about, size
        return replace(self.about, files=self.writer.files, tokenizer=name), size

    def _propose(self) -> Proposal:
        self.ready()
        return self.plans.propose(self.state)

    def _assign(self, proposals: list[Proposal]) -> list[Part]:
        files, name = _new_folder(self.folder, self.copy_tokenizer)
        self.about = replace(self.about, files=files, tokenizer=name)
        return self.plans.settle(proposals)

    def _write(self) -> tuple[Written, dict[str, File]]:
        return self.plans.write(self.writer), self.writer.files

    def _conclude(self, written: list[tuple[Written, dict[str, File]]]) -> tuple[str | None, int]:
        """On rank 0: write the metadata and the manifest.

        Raises:
            Damaged: when rank 0 does not see a file that another rank has written.
        """
        self.plans.conclude(self.writer, [of_rank for of_rank, _ in written])
        files = [self.about.files, *(files for _, files in written), self.writer.files]
        self.about = replace(self.about, files={name: file for part in files for name, file in part.items()})
        _check_visible(self.folder, self.about)
        manifest.write(self.folder, self.about)
        return self.about.tokenizer, sum(file.bytes for file in self.about.files.values())

    def _remove_written(self) -> None:
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
def _stalled(job: _Job) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        job.stall += time.monotonic() - began


def _error_of(work: Callable[[], object]) -> str | None:
    """Run `work` and return its error message, or None."""
    try:
        work()
    except BaseException as error:  # DCP's error is not an Exception
        return reason(error)
    return None


def _new_folder(folder: Path, copy_tokenizer: Callable[[Path], Copied]) -> Copied:
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


def _check_visible(folder: Path, about: Manifest) -> None:
    try:
        manifest.sizes(folder, about.files)
    except Corrupt as error:
        raise Corrupt(f"{error}: all ranks must see the run's directory, {folder.parent.parent}") from error


def _complete_manifest(folder: Path, look: bool) -> Manifest:
    """Return the manifest of a complete checkpoint; `look`: check its files too, which one rank does for all."""
    found = manifest.inspect(folder) if look else manifest.load(folder)
    if found is None:
        raise FileNotFoundError(2, f"{manifest.NAME} is missing", str(folder))
    return found
