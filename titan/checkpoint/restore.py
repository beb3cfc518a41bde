"""Load a checkpoint into an assembled run, whatever layout saved it, once its content is known to be whole.

The ranks share the checking of checksums between them. A damaged checkpoint is set aside (its manifest is renamed), so
that no later attempt takes it up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator, reason
from titan.checkpoint.manifest import Damaged, File
from titan.checkpoint.reader import METADATA, Foreign, Reader
from titan.checkpoint.state import TrainState, train_state_dict
from titan.config.settings import show
from titan.errors import ConfigError, RunError


def damage(folder: Path, coordinator: Coordinator, checksums: bool) -> str | None:
    """What is wrong with a checkpoint; None when it is whole. All ranks call it together, and get the same.

    One that has been retired since it was chosen is as good, as long as it is there.

    Args:
        folder: of the checkpoint, the same for all ranks.
        coordinator: the ranks, each of which reads its share of the files.
        checksums: look at the files' content too, not only at their sizes.

    Raises:
        RunError: when a rank can't read it for a reason that may pass, or lacks what rank 0 has: that is no damage.
    """
    wrong = coordinator.gather(lambda: _whole(folder, coordinator, checksums), lambda found: _judged(folder, found))
    if wrong and wrong.passing:
        raise RunError(
            f"the checkpoint {folder} can't be read by {wrong.words}; see that all ranks can, and give the same "
            "command again. Nothing was changed."
        )
    return wrong.words if wrong else None


class _Wrong(NamedTuple):
    """What is wrong with files: words, whether it is that one is not there, whether it may pass."""

    words: str
    missing: bool = False
    passing: bool = False


def _judged(folder: Path, found: Sequence[_Wrong | None]) -> _Wrong | None:
    """What is wrong with a checkpoint, from what is wrong with each rank's share of it; on rank 0."""
    for rank, wrong in enumerate(found):
        if wrong and (wrong.passing or (wrong.missing and found[0] is None)):
            return _Wrong(f"rank {rank} ({wrong.words})", passing=True)
    first = next((wrong for wrong in found if wrong), None)
    words = None if first else _readable(folder, _listed(folder))
    return first if words is None else _Wrong(words)


def _whole(folder: Path, coordinator: Coordinator, checksums: bool) -> _Wrong | None:
    """What is wrong with this rank's share of the files; rank 0 looks at the sizes of all."""
    try:
        found = manifest.load(folder) or manifest.load(folder, manifest.RETIRED)
        if found is None:
            return _Wrong(f"{manifest.NAME} is missing", missing=True)
        mine = dict(sorted(found.files.items())[coordinator.rank :: coordinator.world_size])
        manifest.sizes(folder, found.files if coordinator.rank == 0 else mine)
        if checksums:
            manifest.verify(folder, mine)
    except (Damaged, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        missing = isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        return _Wrong(reason(error), missing, isinstance(cause, OSError) and not missing)
    return None


def _listed(folder: Path) -> Mapping[str, File]:
    found = manifest.load(folder) or manifest.load(folder, manifest.RETIRED)
    return found.files if found else {}


def _readable(folder: Path, listed: Mapping[str, File]) -> str | None:
    """What is wrong with the metadata; also where a file has no size and checksum to be compared with."""
    try:
        needed = Reader(folder).files()
    except (Foreign, OSError) as error:
        return str(error) if isinstance(error, Foreign) else reason(error)
    missing = sorted({METADATA, *needed} - listed.keys())
    return f"{manifest.NAME} does not list {missing[0]}" if missing else None


def restore(trained: TrainState, folder: Path, coordinator: Coordinator) -> None:
    """Load model and optimizer; all ranks call it together.

    The optimizer must have its state already (`titan.checkpoint.state.init_optimizer_state`).

    Raises:
        ConfigError: when the checkpoint is of another model or optimizer.
        RunError: when it can't be read.
    """
    state, reader = train_state_dict(trained), Reader(folder)
    try:
        _compare(state, reader, coordinator)
        coordinator.run_all(
            lambda: load(state, storage_reader=reader, no_dist=True)
        )  # each rank plans for itself what it reads
    except (CoordinationError, OSError, RuntimeError) as error:
        raise RunError(
            f"the checkpoint {folder} can't be read: {reason(error)}; remove it, and the same command goes on from the "
            "one before it."
        ) from error
    if trained.tied_weights is not None:
        trained.tied_weights.align(trained.optimizer)


def _compare(state: Mapping[str, Tensor], reader: Reader, coordinator: Coordinator) -> None:
    """Refuse a checkpoint of another model or optimizer: a fork may ask for one. All ranks raise the same.

    Each rank compares what it holds, so that of names only those travel that are not as they should be.
    """
    saved: Mapping[str, Any] = coordinator.run_all(reader.read_metadata).state_dict_metadata
    there = {name: tuple(saved[name].size) for name in sorted(saved)}
    mine = {name: tuple(tensor.shape) for name, tensor in state.items()}
    part = _Part({n: shape for n, shape in mine.items() if there.get(n) != shape}, bytes(n in mine for n in there))
    if words := coordinator.gather(lambda: part, lambda parts: _differ(there, parts, reader.path)):
        raise ConfigError(words)


class _Part(NamedTuple):
    """What a rank holds: what is not as it was saved, by name; for each name that was saved, 1 where it holds it."""

    other: dict[str, tuple[int, ...]]
    held: bytes


def _differ(there: Mapping[str, tuple[int, ...]], parts: Sequence[_Part], path: Any) -> str | None:
    """Why a checkpoint is refused, if it is; on rank 0."""
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
