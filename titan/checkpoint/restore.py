"""Verify a checkpoint and load it into a built run, on any layout.

The ranks divide the verification of checksums. A damaged checkpoint is marked (its manifest is renamed), so that no
later attempt uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator, find_reason
from titan.checkpoint.manifest import CorruptCheckpointError
from titan.checkpoint.reader import METADATA, CheckpointReader, ProgressLoadPlanner, UnknownContentError
from titan.checkpoint.state import EVALUATION, TrainState, is_average, train_state_dict
from titan.config.settings import format_value
from titan.errors import ConfigError, RunError


def find_corruption(reader: CheckpointReader, coordinator: Coordinator, checksums: bool) -> str | None:
    """Return what is wrong with a checkpoint; None if nothing is. All ranks call it together and get the same result.

    A checkpoint that was retired after it was chosen is valid while its files exist. With `checksums` each rank reads a
    part of the files, otherwise only sizes are verified.

    Raises:
        RunError: when a rank can't read it for a temporary reason, or doesn't see a file that rank 0 sees.
    """
    problem = coordinator.gather(
        lambda: _check_rank_files(reader, coordinator, checksums), lambda problems: _combine_problems(reader, problems)
    )
    if problem and problem.temporary:
        raise RunError(
            f"the checkpoint {reader.folder} can't be read by {problem.message}; make it readable for all ranks and "
            "rerun the same command. Nothing was changed."
        )
    return problem.message if problem else None


class _Problem(NamedTuple):
    """A problem with files: a message, whether a file is missing, whether the cause may be temporary."""

    message: str
    missing: bool = False
    temporary: bool = False


def _combine_problems(reader: CheckpointReader, problems: Sequence[_Problem | None]) -> _Problem | None:
    """On rank 0: return the checkpoint's problem from those of each rank's files."""
    for rank, problem in enumerate(problems):
        if problem and (problem.temporary or (problem.missing and problems[0] is None)):
            return _Problem(f"rank {rank} ({problem.message})", temporary=True)
    first = next((problem for problem in problems if problem), None)
    message = None if first else _check_metadata(reader)
    return first if message is None else _Problem(message)


def _check_rank_files(reader: CheckpointReader, coordinator: Coordinator, checksums: bool) -> _Problem | None:
    """Return the problem of this rank's part of the files; rank 0 checks the sizes of all files."""
    try:
        folder, checkpoint_manifest = reader.folder, reader.read_manifest()
        if checkpoint_manifest is None:
            return _Problem(f"{manifest.NAME} is missing", missing=True)
        rank_files = dict(sorted(checkpoint_manifest.files.items())[coordinator.rank :: coordinator.world_size])
        manifest.check_sizes(folder, checkpoint_manifest.files if coordinator.rank == 0 else rank_files)
        if checksums:
            manifest.verify_checksums(folder, rank_files, coordinator.activity.record_progress)
        if METADATA in checkpoint_manifest.files:  # else rank 0 says so
            reader.check_tensors(rank_files, coordinator.activity.record_progress)
    except UnknownContentError as error:
        return _Problem(str(error))
    except (CorruptCheckpointError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        missing = isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        return _Problem(find_reason(error), missing, isinstance(cause, OSError) and not missing)
    return None


def _check_metadata(reader: CheckpointReader) -> str | None:
    """Return what is wrong with the metadata, such as a file that the manifest doesn't list."""
    checkpoint_manifest = reader.read_manifest()
    listed = checkpoint_manifest.files if checkpoint_manifest else {}
    try:
        needed = reader.list_files()
    except (UnknownContentError, OSError) as error:
        return str(error) if isinstance(error, UnknownContentError) else find_reason(error)
    missing = sorted({METADATA, *needed} - listed.keys())
    return f"{manifest.NAME} does not list {missing[0]}" if missing else None


def restore_train_state(train_state: TrainState, reader: CheckpointReader, coordinator: Coordinator) -> bool:
    """Load model and optimizer; all ranks call it together.

    The optimizer must have its state already (`titan.checkpoint.state.init_optimizer_state`).

    Returns:
        Whether all was in the checkpoint: one from a run without a moving average of the weights lacks that.

    Raises:
        ConfigError: when the checkpoint has another model or optimizer.
        RunError: when it can't be read.
    """
    state = train_state_dict(train_state)
    try:
        complete = _compare_tensors(state, reader, coordinator)
        planner = ProgressLoadPlanner(coordinator.activity.record_progress)  # each rank plans for itself what it reads
        coordinator.run_all(lambda: load(state, storage_reader=reader, planner=planner, no_dist=True))
    except (CoordinationError, OSError, RuntimeError) as error:
        raise RunError(
            f"the checkpoint {reader.folder} can't be read: {find_reason(error)}; remove it and rerun the same "
            "command, which resumes from the one before it."
        ) from error
    if train_state.tied_weights is not None:
        train_state.tied_weights.align(train_state.optimizer)
    return complete


def _compare_tensors(state: dict[str, Tensor], reader: CheckpointReader, coordinator: Coordinator) -> bool:
    """Raise ConfigError on all ranks when the checkpoint has another model or optimizer.

    Each rank compares its own tensors, so that only differing names are sent. A moving average that only one of both
    has is left out, of `state` too; returns False where the checkpoint lacks it.
    """
    content: Mapping[str, Any] = coordinator.run_all(reader.read_metadata).state_dict_metadata
    saved = {name: metadata for name, metadata in content.items() if not name.startswith(EVALUATION)}
    has_average, needs_average = any(map(is_average, saved)), any(map(is_average, state))
    saved_shapes = {name: tuple(saved[name].size) for name in sorted(saved) if needs_average or not is_average(name)}
    for name in [name for name in state if is_average(name) and not has_average]:
        del state[name]
    rank_shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differing = {n: shape for n, shape in rank_shapes.items() if saved_shapes.get(n) != shape}
    presence = bytes(n in rank_shapes for n in saved_shapes)
    if message := coordinator.gather(
        lambda: (differing, presence), lambda parts: _describe_difference(saved_shapes, parts, reader.folder)
    ):
        raise ConfigError(message)
    return has_average or not needs_average


def _describe_difference(
    saved_shapes: Mapping[str, tuple[int, ...]], parts: Sequence[tuple[dict[str, tuple[int, ...]], bytes]], path: Any
) -> str | None:
    """On rank 0: return the message about a checkpoint of another model or optimizer, or None.

    Args:
        parts: of each rank the tensors that differ from the saved ones, by name; for each saved name 1 if it has it.
    """
    differing = {name: shape for rank_differing, _ in parts for name, shape in rank_differing.items()}
    presence = map(any, zip(*(rank_presence for _, rank_presence in parts), strict=True))
    differ = sorted(
        differing.keys() | {name for name, is_present in zip(saved_shapes, presence, strict=True) if not is_present}
    )
    if not differ:
        return None
    name = differ[0]
    suffix = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
    return (
        f"checkpoint.resume={path}: was saved with another model or optimizer: it "
        f"{_describe_tensor(saved_shapes, name)}, this run {_describe_tensor(differing, name)}{suffix}; give the "
        f"model and optimizer of the run that saved it, or take its weights alone with checkpoint.weights={path}."
    )


def _describe_tensor(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return f"has {name} in the shape {format_value(shapes[name])}" if name in shapes else f"has no {name}"
