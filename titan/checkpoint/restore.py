"""Load a checkpoint into an assembled run, whatever layout saved it, once its content is known to be whole.

The ranks share the checking of checksums between them. A damaged checkpoint is set aside (its manifest is renamed), so
that no later life takes it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from titan.checkpoint import manifest
from titan.checkpoint.loading import load_weights
from titan.checkpoint.manager import state_of
from titan.checkpoint.manifest import Damaged
from titan.checkpoint.reader import Foreign, Reader
from titan.checkpoint.talk import Talk, Unsaved, reason
from titan.checkpoint.weights import open_weights
from titan.engine import Engine
from titan.settings import Failure, Refusal, show


def damage(folder: Path, talk: Talk, checksums: bool) -> str | None:
    """What is wrong with a checkpoint; None when it is whole. All ranks call it together, and get the same.

    One that has been retired since it was chosen is as good, as long as it is there.

    Args:
        folder: of the checkpoint, the same for all ranks.
        talk: the ranks, each of which reads its share of the files.
        checksums: look at the files' content too, not only at their sizes.

    Raises:
        Failure: when a rank can't read it for a reason that may pass, or lacks what rank 0 has: that is no damage.
    """
    found = talk.gather(_whole(folder, talk, checksums))
    for rank, wrong in enumerate(found):
        if wrong and (wrong.passing or (wrong.missing and found[0] is None)):
            raise Failure(
                f"the checkpoint {folder} can't be read by rank {rank} ({wrong.words}); see that all ranks can, and "
                "give the same command again. Nothing was changed."
            )
    first = next((wrong.words for wrong in found if wrong), None)
    return first or talk.tell(_readable(folder) if talk.rank == 0 else None)


class _Wrong(NamedTuple):
    """What is wrong with files: words, whether it is that one is not there, whether it may pass."""

    words: str
    missing: bool = False
    passing: bool = False


def _whole(folder: Path, talk: Talk, checksums: bool) -> _Wrong | None:
    """What is wrong with this rank's share of the files."""
    try:
        found = manifest.inspect(folder) or manifest.inspect(folder, manifest.RETIRED)
        if found is None:
            return _Wrong(f"{manifest.NAME} is missing", missing=True)
        if checksums:
            manifest.verify(folder, dict(sorted(found.files.items())[talk.rank :: talk.size]))
    except (Damaged, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        missing = isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        return _Wrong(reason(error), missing, isinstance(cause, OSError) and not missing)
    return None


def _readable(folder: Path) -> str | None:
    """What is wrong with the metadata."""
    try:
        Reader(folder).read_metadata()
    except (Foreign, OSError) as error:
        return str(error) if isinstance(error, Foreign) else reason(error)
    return None


def restore(engine: Engine, folder: Path, talk: Talk) -> None:
    """Load model and optimizer; all ranks call it together.

    The optimizer must have its state already (`titan.checkpoint.manager.prime`).

    Raises:
        Refusal: when the checkpoint is of another model or optimizer.
        Failure: when it can't be read.
    """
    state, reader = state_of(engine), Reader(folder)
    try:
        _compare(state, reader, talk)
        load(state, storage_reader=reader, process_group=talk.group, no_dist=talk.size == 1)
    except (CheckpointException, Unsaved, OSError, RuntimeError) as error:
        raise Failure(
            f"the checkpoint {folder} can't be read: {reason(error)}; remove it, and the same command goes on from the "
            "one before it."
        ) from error
    if engine.twins is not None:
        engine.twins.align(engine.optimizer)


def start_from(engine: Engine, path: str, talk: Talk) -> None:
    """Load given weights, of any format, and leave the optimizer as new; all ranks call it together.

    Raises:
        Refusal: when they don't fit, or a file is broken.
    """
    parameters = {name: parameter.detach() for name, parameter in engine.named_parameters()}
    load_weights(parameters, open_weights(path), no_dist=talk.size == 1, process_group=talk.group)
    if engine.twins is not None:
        engine.twins.align(engine.optimizer)


def _compare(state: Mapping[str, Tensor], reader: Reader, talk: Talk) -> None:
    """Refuse a checkpoint of another model or optimizer: a fork may ask for one. All ranks raise the same.

    Each rank compares what it holds, so that of names only those travel that are not as they should be.
    """
    saved: Mapping[str, Any] = talk.each(reader.read_metadata).state_dict_metadata
    there = {name: tuple(saved[name].size) for name in sorted(saved)}
    mine = {name: tuple(tensor.shape) for name, tensor in state.items()}
    parts = talk.gather({name: shape for name, shape in mine.items() if there.get(name) != shape})
    here = {name: shape for part in parts for name, shape in part.items()}
    held = talk.any([name in mine for name in there])
    differ = sorted(here.keys() | {name for name, somewhere in zip(there, held, strict=True) if not somewhere})
    if not differ:
        return
    name = differ[0]
    more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
    raise Refusal(
        f"checkpoint.resume={reader.path}: was saved with another model or optimizer: it {_has(there, name)}, this run "
        f"{_has(here, name)}{more}; give the model and optimizer of the run that saved it, or take its weights alone "
        f"with checkpoint.weights={reader.path}."
    )


def _has(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return f"has {name} in the shape {show(shapes[name])}" if name in shapes else f"has no {name}"
