"""Save a run's state with torch.distributed.checkpoint, in the foreground or behind training's back.

A save is one job, done by all ranks together in a thread of its own:

1. every rank gives rank 0 what it holds, where that has changed since the last save (`plans`); rank 0 makes the folder
   and gives each what it is to write, where that has changed;
2. every rank writes its part of the tensors, with checksums, and gives rank 0 its files' sizes and checksums;
3. rank 0 writes the manifest, which makes the checkpoint count, and gives all the number of bytes;
4. rank 0 lets go of the checkpoints that are not kept;
5. what follows from it, rank by rank: exported weights, a copy elsewhere.

`mode=sync` waits for the job, up to its third point; `mode=async` goes on once the state is copied (`staging`): the
thread that trains does nothing but begin that copy. A job
that fails leaves no file behind and is told by `news`; the run goes on. Tensors go by the model's own parameter names,
so a checkpoint knows nothing of the layout that saved it.
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
from titan.checkpoint.manifest import Damaged, File, Manifest
from titan.checkpoint.plans import Part, Places, Plans, Proposal
from titan.checkpoint.schema import Checkpoint
from titan.checkpoint.staging import Staging
from titan.checkpoint.state import TrainState, train_state_dict
from titan.checkpoint.writer import Writer

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is a single process
Copied = tuple[dict[str, File], str | None]
"""A tokenizer's files in a folder by name, and what the tokenizer is called there."""
CopyTokenizer = Callable[[str | None, Path], Copied]
PostSaveHook = Callable[[Path, Manifest], None]
"""What is done with a checkpoint once it counts; all ranks call it together, and raise `Unsaved` together.

The manifest names all files on rank 0; on the others it need not name more than those that the rank has written.
Between two things that it says to the other ranks, nothing may fail on one rank alone: `Talk.each` sees to that.
"""


@dataclass(frozen=True)
class SaveOutcome:
    """How a save went.

    Attributes:
        step: of the state that was to be saved.
        stall: seconds for which training waited.
        seconds: from the call to the end.
        bytes: of all files; 0 where it failed.
        error: why there is no checkpoint; None when it is complete.
        after: why what was to follow did not happen (exported weights, a copy elsewhere).
    """

    step: int
    stall: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    after: str | None = None


class _Job:
    """A save under way."""

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
        """Take what is to be saved and where; nothing is written yet.

        Args:
            directory: the run's.
            how: when and what to keep.
            trained: whose state is saved; its optimizer must have its state already (`init_optimizer_state`).
            coordinator: the ranks; nobody else talks while a save is under way.
            copy_tokenizer: copies the tokenizer into a checkpoint.
            after: what follows a save.
        """
        self.directory, self.how, self.trained, self.coordinator, self.after = (
            directory,
            how,
            trained,
            coordinator,
            after,
        )
        self.copy_tokenizer = copy_tokenizer
        self.jobs: list[_Job] = []
        self.plans = Plans(coordinator.rank)
        self.staging = Staging(trained.device) if how.mode == "async" else None
        self.thread = ThreadPoolExecutor(1, "titan-checkpoint", _set_device, (trained.device,))

    def save(self, about: Manifest, tokenizer: str | None = None) -> None:
        """Begin to save the state, and wait for it where that is asked for; all ranks call it together.

        Args:
            about: what the manifest is to say; its files and tokenizer are filled in.
            tokenizer: a file that is copied into the checkpoint, or a built-in tokenizer's name.
        """
        job = _Job(about.step)
        with _stalled(job):
            for earlier in self.jobs:
                earlier.ended.wait()  # one at a time: they share the ranks' messages and the copies' memory
            staged = self._staged(job, train_state_dict(self.trained))
            self.jobs.append(job)
            self.thread.submit(self._work, job, staged, about, tokenizer)
            if self.staging is None:
                job.written.wait()

    def _staged(self, job: _Job, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the job is to write. No memory for a copy is the job's failure, which all ranks have to hear of."""
        try:
            return state if self.staging is None else self.staging.start(state)
        except Exception as error:
            job.unstaged = error
            return {}

    def rerun_post_save(self, step: int) -> None:
        """Do again what follows a save, for a checkpoint that counts already; all ranks call it together."""
        self.jobs.append(job := _Job(step))
        self.thread.submit(self._rerun, job)

    def wait_for_staging(self) -> None:
        """Call it before the state changes: waits until a save under way has its copy."""
        if self.staging is not None and self.jobs and not self.jobs[-1].written.is_set():
            with _stalled(self.jobs[-1]):
                self.staging.done()

    def completed(self) -> list[SaveOutcome]:
        """How the saves went that have ended since the last call."""
        ended = [job for job in self.jobs if job.ended.is_set()]
        self.jobs = [job for job in self.jobs if job not in ended]
        return [job.outcome() for job in ended]

    def finish(self) -> list[SaveOutcome]:
        """Wait for what is under way; then as `news`. All ranks call it together: afterwards any may end."""
        for job in self.jobs:
            with _stalled(job):
                job.ended.wait()
        self.coordinator.part()
        return self.completed()

    def close(self) -> None:
        """End the threads, once what is under way has ended."""
        self.thread.shutdown()
        self.coordinator.leave()
        if self.staging is not None:
            self.staging.close()

    def _work(self, job: _Job, state: Mapping[str, Tensor], about: Manifest, tokenizer: str | None) -> None:
        """The job, from its first to its last point, in the thread."""
        folder = manifest.folder_of(self.directory, about.step)
        try:
            about, job.bytes = self._write(job, folder, state, about, tokenizer)
        except BaseException as error:  # DCP's own is no Exception
            job.error = reason(error)
            self.plans.forget()
            if (
                self.coordinator.rank == 0 and manifest.read(folder) is None
            ):  # else a rank went as it was told of success
                shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room
        job.seconds = time.monotonic() - job.began
        job.written.set()
        if job.error is None:
            job.after = self._run_post_save_hooks(folder, about)
        job.ended.set()

    def _ready(self, job: _Job) -> None:
        """Wait for the copy.

        Raises:
            Exception: why there is none.
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
        """Let go of old checkpoints, and do what is to follow, each whatever became of the others.

        Returns:
            What went wrong, the same on all ranks; None where nothing did.
        """
        wrong = [_error_of(lambda: self.coordinator.only_on_rank0(self._prune))]
        wrong += [_error_of(partial(after, folder, about)) for after in self.after]
        mine = [words for words in wrong if words]
        try:
            return (
                self.coordinator.gather(lambda: mine, _join_errors)
                if self.after
                else self.coordinator.broadcast(_join_errors([mine]))
            )
        except Exception as error:  # a rank is gone
            return _join_errors([[*mine, reason(error)]])

    def _prune(self) -> None:
        retention.prune(self.directory, self.how.keep, self.how.keep_tokens, self.how.grace)


class _Save:
    """One save's way to a checkpoint, from one rank."""

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        about: Manifest,
        copy_tokenizer: Callable[[Path], Copied],
        plans: Plans,
        ready: Callable[[], None],
    ) -> None:
        """Take what is to be saved, and what waits until `state` can be read; nothing is written yet."""
        self.folder, self.state, self.about, self.copy_tokenizer = folder, state, about, copy_tokenizer
        self.plans, self.ready, self.writer = plans, ready, Writer(folder)

    def work(self, coordinator: Coordinator) -> tuple[Manifest, int]:
        """Save, all ranks together.

        Returns:
            The manifest, with all files on rank 0 and its own on another rank; the bytes of all files.

        Raises:
            Unsaved: on all ranks, when it failed on any.
        """
        self.plans.accept(coordinator.scatter(self._propose, self._settle))
        try:
            name, size = coordinator.gather(self._write, self._conclude)
        except CoordinationError as error:
            if error.damaged:
                self._remove_written()
            raise
        return (
            self.about if coordinator.rank == 0 else replace(self.about, files=self.writer.files, tokenizer=name)
        ), size

    def _propose(self) -> Proposal:
        self.ready()
        return self.plans.propose(self.state)

    def _settle(self, proposals: list[Proposal]) -> list[Part]:
        files, name = _new_folder(self.folder, self.copy_tokenizer)
        self.about = replace(self.about, files=files, tokenizer=name)
        return self.plans.settle(proposals)

    def _write(self) -> tuple[Places | None, dict[str, File]]:
        return self.plans.write(self.writer), self.writer.files

    def _conclude(self, written: list[tuple[Places | None, dict[str, File]]]) -> tuple[str | None, int]:
        """On rank 0: make it count.

        Raises:
            Damaged: when rank 0 does not see a file that another rank has written.
        """
        self.plans.conclude(self.writer, [places for places, _ in written])
        files = [self.about.files, *(files for _, files in written), self.writer.files]
        self.about = replace(self.about, files={name: file for part in files for name, file in part.items()})
        _check_visible(self.folder, self.about)
        manifest.write(self.folder, self.about)
        return self.about.tokenizer, sum(file.bytes for file in self.about.files.values())

    def _remove_written(self) -> None:
        """Remove what this rank has written, into a folder that rank 0 does not see."""
        for name in self.writer.files:
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others' files are there still, or it is gone
            self.folder.rmdir()


def _join_errors(wrong: list[list[str]]) -> str | None:
    """All ranks' words on what went wrong, each once."""
    return "; ".join(dict.fromkeys(words for rank in wrong for words in rank)) or None


def _set_device(device: torch.device) -> None:
    """Let a thread use the rank's GPU: which one is current is a matter of each thread."""
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
    """Do something; what went wrong, if anything did."""
    try:
        work()
    except BaseException as error:  # DCP's own is no Exception
        return reason(error)
    return None


def _new_folder(folder: Path, copy_tokenizer: Callable[[Path], Copied]) -> Copied:
    """A new, empty folder for a checkpoint, with the tokenizer's files where it has some.

    Returns:
        Those files, and what the tokenizer is called there.
    """
    if folder.is_dir():
        shutil.rmtree(folder)  # what a killed save may have left, or a damaged one
    else:
        folder.unlink(missing_ok=True)
    folder.mkdir(parents=True)
    return copy_tokenizer(folder)


def _check_visible(folder: Path, about: Manifest) -> None:
    try:
        manifest.sizes(folder, about.files)
    except Damaged as error:
        raise Damaged(f"{error}: all ranks must see the run's directory, {folder.parent.parent}") from error


def _complete_manifest(folder: Path, look: bool) -> Manifest:
    """The manifest of a checkpoint that counts; `look` at its files too, which one rank does for all."""
    found = manifest.inspect(folder) if look else manifest.load(folder)
    if found is None:
        raise FileNotFoundError(2, f"{manifest.NAME} is missing", str(folder))
    return found
