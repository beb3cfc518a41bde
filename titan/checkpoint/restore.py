"""Verify a checkpoint and load it into a built run, on any layout.

The ranks divide the verification of checksums. A damaged checkpoint is marked (its manifest is renamed), so that no
later attempt uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator, reason
from titan.checkpoint.manifest import Corrupt, File
from titan.checkpoint.reader import METADATA, Foreign, LoadPlanner, Reader
from titan.checkpoint.state import EVALUATION, TrainState, is_average, train_state_dict
from titan.config.settings import show
from titan.errors import ConfigError, RunError


def corruption(folder: Path, coordinator: Coordinator, checksums: bool) -> str | None:
    """Return what is wrong with a checkpoint; None if nothing is. All ranks call it together and get the same result.

    A checkpoint that was retired after it was chosen is valid while its files exist.

    Args:
        folder: the checkpoint's folder, the same on all ranks.
        coordinator: the ranks, each of which reads a part of the files.
        checksums: verify checksums, not only sizes.

    Raises:
        RunError: when a rank can't read it for a temporary reason, or doesn't see a file that rank 0 sees.
    """
    wrong = coordinator.gather(
        lambda: _check_share(folder, coordinator, checksums), lambda found: _combine(folder, found)
    )
    if wrong and wrong.temporary:
        raise RunError(
            f"the checkpoint {folder} can't be read by {wrong.message}; make it readable for all ranks and rerun the "
            "same command. Nothing was changed."
        )
    return wrong.message if wrong else None


class _Problem(NamedTuple):
    """A problem with files: a message, whether a file is missing, whether the cause may be temporary."""

    message: str
    missing: bool = False
    temporary: bool = False


def _combine(folder: Path, found: Sequence[_Problem | None]) -> _Problem | None:
    """On rank 0: return the checkpoint's problem from those of each rank's files."""
    for rank, wrong in enumerate(found):
        if wrong and (wrong.temporary or (wrong.missing and found[0] is None)):
            return _Problem(f"rank {rank} ({wrong.message})", temporary=True)
    first = next((wrong for wrong in found if wrong), None)
    message = None if first else _check_metadata(folder, _listed(folder))
    return first if message is None else _Problem(message)


def _check_share(folder: Path, coordinator: Coordinator, checksums: bool) -> _Problem | None:
    """Return the problem of this rank's part of the files; rank 0 checks the sizes of all files."""
    try:
        found = manifest.load(folder) or manifest.load(folder, manifest.RETIRED)
        if found is None:
            return _Problem(f"{manifest.NAME} is missing", missing=True)
        mine = dict(sorted(found.files.items())[coordinator.rank :: coordinator.world_size])
        manifest.sizes(folder, found.files if coordinator.rank == 0 else mine)
        if checksums:
            manifest.verify(folder, mine, coordinator.activity.advance)
    except (Corrupt, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        missing = isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        return _Problem(reason(error), missing, isinstance(cause, OSError) and not missing)
    return None


def _listed(folder: Path) -> Mapping[str, File]:
    found = manifest.load(folder) or manifest.load(folder, manifest.RETIRED)
    return found.files if found else {}


def _check_metadata(folder: Path, listed: Mapping[str, File]) -> str | None:
    """Return what is wrong with the metadata, such as a file that the manifest doesn't list."""
    try:
        needed = Reader(folder).files()
    except (Foreign, OSError) as error:
        return str(error) if isinstance(error, Foreign) else reason(error)
    missing = sorted({METADATA, *needed} - listed.keys())
    return f"{manifest.NAME} does not list {missing[0]}" if missing else None


def restore(trained: TrainState, folder: Path, coordinator: Coordinator) -> bool:
    """Load model and optimizer; all ranks call it together.

    The optimizer must have its state already (`titan.checkpoint.state.init_optimizer_state`).

    Returns:
        Whether all was in the checkpoint: one from a run without a moving average of the weights lacks that.

    Raises:
        ConfigError: when the checkpoint has another model or optimizer.
        RunError: when it can't be read.
    """
    state, reader = train_state_dict(trained), Reader(folder)
    try:
        complete = _compare(state, reader, coordinator)
        planner = LoadPlanner(coordinator.activity.advance)  # each rank plans for itself what it reads
        coordinator.run_all(lambda: load(state, storage_reader=reader, planner=planner, no_dist=True))
    except (CoordinationError, OSError, RuntimeError) as error:
        raise RunError(
            f"the checkpoint {folder} can't be read: {reason(error)}; remove it and rerun the same command, which "
            "resumes from the one before it."
        ) from error
    if trained.tied_weights is not None:
        trained.tied_weights.align(trained.optimizer)
    return complete


def _compare(state: dict[str, Tensor], reader: Reader, coordinator: Coordinator) -> bool:
    """Raise ConfigError on all ranks when the checkpoint has another model or optimizer.

    Each rank compares its own tensors, so that only differing names are sent. A moving average that only one of both
    has is left out, of `state` too; returns False where the checkpoint lacks it.
    """
    content: Mapping[str, Any] = coordinator.run_all(reader.read_metadata).state_dict_metadata
    saved = {name: about for name, about in content.items() if not name.startswith(EVALUATION)}
    has, asks = any(map(is_average, saved)), any(map(is_average, state))
    there = {name: tuple(saved[name].size) for name in sorted(saved) if asks or not is_average(name)}
    for name in [name for name in state if is_average(name) and not has]:
        del state[name]
    mine = {name: tuple(tensor.shape) for name, tensor in state.items()}
    part = _Part({n: shape for n, shape in mine.items() if there.get(n) != shape}, bytes(n in mine for n in there))
    if message := coordinator.gather(lambda: part, lambda parts: _difference(there, parts, reader.path)):
        raise ConfigError(message)
    return has or not asks


class _Part(NamedTuple):
    """A rank's tensors: those that differ from the saved ones, by name; for each saved name 1 if the rank has it."""

    other: dict[str, tuple[int, ...]]
    held: bytes


def _difference(there: Mapping[str, tuple[int, ...]], parts: Sequence[_Part], path: Any) -> str | None:
    """On rank 0: return the message about a checkpoint of another model or optimizer, or None."""
    here = {name: shape for part in parts for name, shape in part.other.items()}
    held = map(any, zip(*(part.held for part in parts), strict=True))
    differ = sorted(here.keys() | {name for name, somewhere in zip(there, held, strict=True) if not somewhere})
    if not differ:
        return None
    name = differ[0]
    more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
    return (
        f"checkpoint.resume={path}: was saved with another model or optimizer: it {_has(there, name)}, this run "
        f"{_has(here, name)}{more}; give the model and optimizer of the run that saved it, or take its weights alone "
        f"with checkpoint.weights={path}."
    )


def _has(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return f"has {name} in the shape {show(shapes[name])}" if name in shapes else f"has no {name}"
