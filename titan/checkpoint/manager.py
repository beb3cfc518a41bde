"""Save a run's state with torch.distributed.checkpoint, synchronously or in the background.

Before a save, the ranks compare fingerprints of replicas (`titan.checkpoint.manager`), in the training thread. If some
differ, the checkpoint is written all the same, for inspection, with a manifest of another name, so that it is not used.

A save is one job of all ranks, in a separate thread:

1. all ranks write the checkpoint, until rank 0's manifest makes it complete (`titan.checkpoint.save`);
2. rank 0 removes the checkpoints that are not kept;
3. post-save hooks: exported weights, a copy at `checkpoint.path`.

`mode=sync` waits for step 1; `mode=async` continues once the state is copied (`state.Staging`), and the training thread
only starts that copy. A failed job leaves no files behind and is reported by `pop_outcomes`; the run goes on. Tensors
have the model's parameter names, so a checkpoint is independent of the layout that saved it.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import Coordinator, find_reason, prefix_errors
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.remote import Remote, open_remote
from titan.checkpoint.save import CheckpointSave, TokenizerFiles
from titan.checkpoint.save_planner import CachingSavePlanner
from titan.checkpoint.schema import Checkpoint
from titan.checkpoint.state import Staging, TrainState, evaluation_state_dict, train_state_dict
from titan.errors import RunError
from titan.parallelism.mesh import World
from titan.parallelism.replicas import ReplicaDifference, find_difference, find_replicas
from titan.precision.low_precision import unwrap_tensor

POSITION = "the step and the position in the data"


@dataclass
class Compared:
    """This rank's tensors; see `titan.parallelism.replicas.find_difference`."""

    tensors: dict[str, Tensor]
    stages: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)


def compare_replicas(
    train_state: TrainState, world: World, state: Mapping[str, Tensor], manifest: Manifest
) -> ReplicaDifference | None:
    """Return the first difference between replicas of what is saved; all ranks call it together."""
    compared = collect_compared(state, train_state)
    position = json.dumps([manifest.step, manifest.tokens, manifest.data, manifest.run_id], sort_keys=True)
    digest = int.from_bytes(blake2b(position.encode(), digest_size=8).digest(), "little", signed=True)
    compared.tensors[POSITION], compared.stages[POSITION] = torch.tensor(digest), "all"
    return find_difference(compared.tensors, world, compared.stages, compared.copies)


def collect_compared(state: Mapping[str, Tensor], train_state: TrainState) -> Compared:
    """Return what is compared of a state: its tensors, and buffers, which are not all saved."""
    compared = Compared(dict(state))
    _add_tied(compared, train_state)
    for index, stage in enumerate(train_state.stages):
        for name, buffer in stage.named_buffers():
            if name.count(".") > 1:  # of a module that only some stages have
                compared.tensors[f"buffer.{index}.{name}"] = buffer
                continue
            key = f"buffer.{name}"
            (compared.tensors if index == 0 else compared.copies)[key] = buffer
            compared.stages[key] = "all"
    return compared


def _add_tied(compared: Compared, train_state: TrainState) -> None:
    """Mark a tied weight that both ends of a pipeline have, with its optimizer state."""
    tied = train_state.tied_weights
    if tied is None:
        return
    parameter = tied.first if tied.first is not None else tied.last
    name = next(name for name, p in train_state.named_parameters() if p is parameter)
    prefix = f"optimizer.{name}."
    names = [key for key in compared.tensors if key == f"model.{name}" or key.startswith(prefix)]
    compared.stages |= dict.fromkeys(names, "tied")
    if tied.first is not None and tied.last is not None:
        second = train_state.optimizer.state.get(tied.last, {})
        compared.copies |= {
            key: second[key.removeprefix(prefix)] if key.startswith(prefix) else unwrap_tensor(tied.last)
            for key in names
        }


def describe_compared(state: Mapping[str, Tensor], train_state: TrainState, world: World) -> str:
    """Return how much of a state has replicas, in one line; empty with one rank.

    Raises:
        RunError: for a tensor of which it is not known which ranks must have the same.
    """
    if world.rank_info.world_size == 1:
        return ""
    compared = collect_compared(state, train_state)
    tensors, stages = compared.tensors, compared.stages
    try:
        replicated = [n for n, t in tensors.items() if find_replicas(n, t, world).groups or n in stages]
    except RunError as error:
        raise RunError(f"{str(error).removesuffix('.')}; give checkpoint.fingerprints=false.") from error
    return (
        f"each save compares replicas of {len(replicated)} of {len(tensors)} tensors; "
        "of the others each part exists once"
    )


warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended with a single process
CopyTokenizer = Callable[[str | None, Path], TokenizerFiles]
PostSaveHook = Callable[[Path, Manifest], None]
"""Called by all ranks with a complete checkpoint; all ranks raise `CoordinationError` together.

The manifest lists all files on rank 0; on the other ranks it may list only the files that the rank has written. All
work that can fail on one rank must be run by the coordinator (`Coordinator.run_all`).
"""


CompareReplicas = Callable[[Mapping[str, Tensor], Manifest], ReplicaDifference | None]
"""Called by all ranks with the tensors to save; returns the same on all."""


@dataclass
class SaveOutcome:
    """The outcome of a save.

    Attributes:
        step: the step of the saved state.
        stall: seconds for which training waited.
        seconds: from the call to the end.
        bytes: total size of all files; 0 if it failed.
        error: why there is no checkpoint; None if it is complete.
        post_save_error: why a post-save hook failed; None if none did.
        compare_seconds: seconds of the stall in which replicas were compared.
    """

    step: int
    stall: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    post_save_error: str | None = None
    compare_seconds: float = 0.0


class _SaveJob:
    """A running save."""

    def __init__(self, step: int) -> None:
        self.outcome, self.start_time = SaveOutcome(step), time.monotonic()
        self.difference: ReplicaDifference | None = None
        self.staging_error: Exception | None = None
        self.written, self.ended = threading.Event(), threading.Event()


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
        compare_replicas: CompareReplicas | None = None,
    ) -> None:
        """Create the manager; nothing is written yet.

        Args:
            train_state: the state to save; its optimizer must be initialised (`init_optimizer_state`).
            coordinator: the ranks; not used by others while a save is running.
            compare_replicas: compares replicas before a save; None: nothing does.
        """
        self.compare_replicas = compare_replicas
        self.directory, self.settings, self.train_state = directory, settings, train_state
        self.coordinator, self.post_save_hooks, self.copy_tokenizer = coordinator, post_save_hooks, copy_tokenizer
        self.jobs: list[_SaveJob] = []
        self.planner = CachingSavePlanner(coordinator.rank)
        self.staging = Staging(train_state.device) if settings.mode == "async" else None
        device = train_state.device  # the current one is a setting of each thread
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "titan-checkpoint", set_device)

    def save(self, checkpoint_manifest: Manifest, tokenizer: str | None = None) -> ReplicaDifference | None:
        """Start saving the state, and with `mode=sync` wait for it; all ranks call it together.

        Args:
            checkpoint_manifest: the manifest, without its files and tokenizer.
            tokenizer: a file to copy into the checkpoint, or a built-in tokenizer's name.

        Returns:
            The first difference between replicas, the same on all ranks, because of which it is no checkpoint.
        """
        job = _SaveJob(checkpoint_manifest.step)
        with _measure_stall(job):
            for earlier_job in self.jobs:
                earlier_job.ended.wait()  # one at a time: they share the coordinator and the staging buffers
            state = self._stage_state(job, checkpoint_manifest)
            self.jobs.append(job)
            self.coordinator.activity.begin_save(job.outcome.step)
            self.thread.submit(self._run_save, job, state, checkpoint_manifest, tokenizer)
            if self.staging is None:
                job.written.wait()
        return job.difference

    def _stage_state(self, job: _SaveJob, checkpoint_manifest: Manifest) -> dict[str, Tensor]:
        """Return the tensors to write. If the copy fails, so does the job: the other ranks must learn of it.

        What fails in the comparison of replicas ends the rank: others are in the same collectives.
        """
        state = train_state_dict(self.train_state) | evaluation_state_dict(self.train_state)
        if self.compare_replicas is not None:
            start_time = time.monotonic()
            job.difference = self.compare_replicas(state, checkpoint_manifest)
            job.outcome.compare_seconds = time.monotonic() - start_time
        try:
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

    def pop_outcomes(self) -> list[SaveOutcome]:
        """Return the outcomes of the saves that have ended since the last call."""
        ended = [job for job in self.jobs if job.ended.is_set()]
        self.jobs = [job for job in self.jobs if job not in ended]
        return [job.outcome for job in ended]

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

        def wait_for_state() -> Mapping[str, Tensor]:
            if job.staging_error is not None:
                raise job.staging_error
            if self.staging is not None:
                self.staging.wait_for_copies()
            return state

        try:
            copy_tokenizer = partial(self.copy_tokenizer, tokenizer)
            name = manifest.NAME if job.difference is None else manifest.DIFFERS
            save = CheckpointSave(folder, checkpoint_manifest, self.planner, wait_for_state, copy_tokenizer, name)
            checkpoint_manifest, job.outcome.bytes = save.run(self.coordinator)
        except BaseException as error:  # DCP's error is not an Exception
            job.outcome.error = find_reason(error)
            _catch_error(partial(self._remove_failed, folder))  # training waits for this thread, whatever happens here
        job.outcome.seconds = time.monotonic() - job.start_time
        self.coordinator.activity.end_save(job.outcome.step)
        job.written.set()
        if job.outcome.error is None and job.difference is None:
            job.outcome.post_save_error = self._run_post_save_hooks(folder, checkpoint_manifest)
        job.ended.set()

    def _remove_failed(self, folder: Path) -> None:
        """Forget the plan of a failed save, and free the space that it takes on a full disk."""
        self.planner.forget_plan()
        # with a manifest the checkpoint is complete: another rank exited while it was notified
        if self.coordinator.rank == 0 and manifest.read(folder) is None:
            manifest.remove(folder)

    def _rerun_hooks(self, job: _SaveJob) -> None:
        folder = manifest.folder_of(self.directory, job.outcome.step)
        job.written.set()
        try:
            job.outcome.post_save_error = self._run_post_save_hooks(
                folder, self.coordinator.run_all(lambda: _load_complete(folder, self.coordinator.rank == 0))
            )
        except BaseException as error:
            job.outcome.post_save_error = find_reason(error)
        job.ended.set()

    def _run_post_save_hooks(self, folder: Path, checkpoint_manifest: Manifest) -> str | None:
        """Remove old checkpoints and run all post-save hooks, also after one has failed.

        Returns:
            The errors, the same on all ranks; None if there are none.
        """
        kept = self.settings
        prune = partial(
            manifest.prune,
            self.directory, kept.keep, kept.keep_tokens, kept.grace, checkpoint_manifest.run_id, kept.at
        )  # fmt: skip
        errors = [_catch_error(lambda: self.coordinator.only_on_rank0(prune))]
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


def _join_errors(errors: list[list[str]]) -> str | None:
    """Join all ranks' error messages, each once."""
    return "; ".join(dict.fromkeys(message for rank in errors for message in rank)) or None


@contextmanager
def _measure_stall(job: _SaveJob) -> Iterator[None]:
    start_time = time.monotonic()
    try:
        yield
    finally:
        job.outcome.stall += time.monotonic() - start_time


def _catch_error(work: Callable[[], object]) -> str | None:
    """Run `work` and return its error message, or None."""
    try:
        work()
    except BaseException as error:  # DCP's error is not an Exception
        return find_reason(error)
    return None


def _load_complete(folder: Path, check_files: bool) -> Manifest:
    """Return the manifest of a complete checkpoint; `check_files`: check its files too, which one rank does for all."""
    checkpoint_manifest = manifest.inspect(folder) if check_files else manifest.load(folder)
    if checkpoint_manifest is None:
        raise FileNotFoundError(2, f"{manifest.NAME} is missing", str(folder))
    return checkpoint_manifest


def make_copy_hook(settings: Checkpoint, path: str, directory: str, coordinator: Coordinator) -> PostSaveHook:
    """Return the post-save hook that copies each checkpoint to `path`, which all ranks do together."""
    remote = open_remote(path, directory)

    def publish(folder: Path, checkpoint_manifest: Manifest) -> dict[int, list[str]]:
        run_file = folder.parent.parent / "run.yaml"
        if run_file.is_file():
            remote.write_file("run.yaml", run_file.read_bytes())
        return remote.publish(folder, checkpoint_manifest, settings)

    def copy_checkpoint(folder: Path, checkpoint_manifest: Manifest) -> None:
        advance, rank, size = coordinator.activity.record_save_progress, coordinator.rank, coordinator.world_size
        rank_files = manifest.select_rank_files(checkpoint_manifest.files, rank, size)
        with prefix_errors(f"the copy to {remote.url}"):
            coordinator.on_rank0(lambda: remote.begin_upload(checkpoint_manifest))
            coordinator.run_all(lambda: remote.upload_files(folder, rank_files, advance))
            retired_files = coordinator.on_rank0(lambda: publish(folder, checkpoint_manifest))
            coordinator.run_all(lambda: remote.remove_files(sorted(retired_files.items())[rank::size]))
            if retired_files:
                coordinator.on_rank0(lambda: remote.record_removal(retired_files))

    return copy_checkpoint


def fetch_checkpoint(remote: Remote, step: int, directory: Path, coordinator: Coordinator) -> Path:
    """Fetch a checkpoint into the run's directory as a complete checkpoint; all ranks call it together."""
    folder = manifest.folder_of(directory, step)

    def begin_fetch() -> Manifest:
        checkpoint_manifest = remote.read_manifest(step)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (manifest.NAME, manifest.RETIRED, manifest.DAMAGED):
            (folder / name).unlink(missing_ok=True)
        return checkpoint_manifest

    checkpoint_manifest = coordinator.on_rank0(begin_fetch)
    rank_files = dict(sorted(checkpoint_manifest.files.items())[coordinator.rank :: coordinator.world_size])
    coordinator.run_all(lambda: remote.fetch_files(step, folder, rank_files, coordinator.activity.record_progress))
    coordinator.on_rank0(lambda: manifest.write(folder, checkpoint_manifest))
    return folder
