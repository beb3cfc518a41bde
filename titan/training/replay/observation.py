"""What a rank sees of a step, and the file that it leaves. Free of torch.

A file is numpy's `.npz` with one JSON text in it and no pickles: the ranks of another interpreter write one too, so its
content is checked as that of a stranger.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.errors import RunError
from titan.files import untrusted
from titan.training.token_loss import TokenLoss

BLOCKS, WIDTH = 16, 16
"""Blocks of consecutive rows of a tensor, and random projections of each, in its fingerprint."""
VERSION = 1
"""Of the file."""
LARGEST = 1 << 31
"""Bytes of an array in a file that are read."""
UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError,
    NotImplementedError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What reading a file raises that no rank has written."""

Key = tuple[str, str]
"""A direction, "forward" or "backward", and the name of a module."""
START, STATE, GRADIENT, UPDATE = "weights", "optimizer state", "gradients", "updates"
"""The kinds of tensors that have fingerprints."""


@dataclass(frozen=True)
class ActivationTotals:
    """Sums over some elements: of squares, of values, the largest absolute value, and their number."""

    squares: float
    values: float
    largest: float
    count: int


@dataclass(frozen=True)
class Fingerprint:
    """Of a whole tensor; see `titan.training.replay.fingerprints`.

    Attributes:
        shape: of the tensor.
        sketch: projections of blocks of consecutive rows, float64 [blocks, WIDTH].
        squares: the sum of squares.
        bits: equal where all elements are, modulo 2**64.
    """

    shape: tuple[int, ...]
    sketch: NDArray[np.float64]
    squares: float
    bits: int


@dataclass(frozen=True)
class Samples:
    """Sampled tokens.

    Attributes:
        tokens: their indices in the step, row * seq_len + position; int64 [tokens].
        values: projections of their activations, float32 [tokens, width]; of routers the experts, int64 [tokens, K].
        microbatches: int64 [tokens].
        ranks: int64 [tokens].
    """

    tokens: NDArray[np.int64]
    values: NDArray[Any]
    microbatches: NDArray[np.int64]
    ranks: NDArray[np.int64]


@dataclass(frozen=True)
class Operation:
    """An operation inside of a module.

    Attributes:
        module: the innermost module that called it.
        name: as torch names it.
        shapes: of its results.
        sums: of each, a weighted sum of the elements, and one of their absolute values.
    """

    module: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[float, ...]


@dataclass(frozen=True)
class RankReplay:
    """What one rank saw of the step.

    Attributes:
        record: the step's line of metrics.jsonl.
        totals: of hidden states and of their gradients, in the order of the forward pass.
        samples: likewise.
        losses: the largest ones.
        notes: what was applied to the model.
        fingerprints: of its tensors, by kind and name.
        groups: the parameter group of each parameter.
        routes: the experts of each token, by the router's name.
        unobserved: modules whose outputs could not be seen, and why.
        figures: further numbers, such as seconds.
        operations: of the module that was asked for, in its first micro-batch.
    """

    record: Mapping[str, Any]
    totals: Mapping[Key, ActivationTotals]
    samples: Mapping[Key, Samples]
    losses: tuple[TokenLoss, ...] = ()
    notes: tuple[str, ...] = ()
    fingerprints: Mapping[Key, Fingerprint] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    routes: Mapping[str, Samples] = field(default_factory=dict)
    unobserved: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()

    def write(self, directory: Path, name: str, rank: int) -> None:
        """Write it into the replay's directory, as what a pass saw."""
        arrays: dict[str, NDArray[Any]] = {}
        _add_samples(arrays, "samples", {" ".join(key): sample for key, sample in self.samples.items()})
        _add_samples(arrays, "routes", self.routes)
        for number, fingerprint in enumerate(self.fingerprints.values()):
            arrays[f"sketch{number}"] = fingerprint.sketch
        arrays["json"] = np.frombuffer(json.dumps(self._describe()).encode(), np.uint8)
        with _get_rank_file(directory, name, rank).open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def _describe(self) -> dict[str, Any]:
        """Return what is no array, for JSON."""
        return {
            "version": VERSION,
            "record": dict(self.record),
            "totals": [[*key, asdict(totals)] for key, totals in self.totals.items()],
            "samples": [list(key) for key in self.samples],
            "losses": [asdict(loss) for loss in self.losses],
            "notes": list(self.notes),
            "fingerprints": [[*key, list(f.shape), f.squares, f.bits] for key, f in self.fingerprints.items()],
            "groups": dict(self.groups),
            "routes": list(self.routes),
            "unobserved": dict(self.unobserved),
            "figures": dict(self.figures),
            "operations": [[o.module, o.name, o.shapes, o.sums] for o in self.operations],
        }


def _add_samples(arrays: dict[str, NDArray[Any]], prefix: str, samples: Mapping[str, Samples]) -> None:
    for number, sample in enumerate(samples.values()):
        arrays |= {f"{prefix}{number}.{key}": getattr(sample, key) for key in Samples.__dataclass_fields__}


def _get_rank_file(directory: Path, name: str, rank: int) -> Path:
    return directory / f"replayed-{name}-{rank}.npz"


def read_rank_replays(directory: Path, name: str, ranks: int) -> list[RankReplay]:
    """Return what all ranks of a replay saw in a pass.

    Raises:
        RunError: where a file is missing, or is not what `RankReplay.write` writes.
    """
    return [read_rank_replay(_get_rank_file(directory, name, rank)) for rank in range(ranks)]


def count_rank_files(directory: Path, name: str) -> int:
    """Return how many ranks have left what they saw in a pass."""
    ranks = 0
    while _get_rank_file(directory, name, ranks).is_file():
        ranks += 1
    return ranks


def read_rank_replay(file: Path) -> RankReplay:
    """Return what a rank saw.

    Raises:
        RunError: where the file is missing or is not what `RankReplay.write` writes.
    """
    try:
        _check_sizes(file)
        with np.load(file, allow_pickle=False) as arrays:
            return _parse_replay(arrays)
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"{file}: is not what a rank of this version leaves ({reason}); replay again.") from error


def _check_sizes(file: Path) -> None:
    """Raise ValueError where an array of the archive is larger than any that a rank writes."""
    with zipfile.ZipFile(file) as archive:
        largest = max((entry.file_size for entry in archive.infolist()), default=0)
    if largest > LARGEST:
        raise ValueError(f"an array has {largest:,} bytes")


def _parse_replay(arrays: Any) -> RankReplay:
    content = untrusted.parse_object(arrays["json"].tobytes().decode())
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']!r}, not {VERSION}")
    fingerprints = {
        (str(kind), str(name)): _parse_fingerprint(shape, arrays[f"sketch{number}"], squares, bits)
        for number, (kind, name, shape, squares, bits) in enumerate(content["fingerprints"])
    }
    keys = [(str(direction), str(name)) for direction, name in content["samples"]]
    return RankReplay(
        record=_check_record(content["record"]),
        totals={(str(d), str(n)): ActivationTotals(**totals) for d, n, totals in content["totals"]},
        samples={key: _parse_samples(arrays, f"samples{number}", "f") for number, key in enumerate(keys)},
        losses=tuple(TokenLoss(**loss) for loss in content["losses"]),
        notes=tuple(map(str, content["notes"])),
        fingerprints=fingerprints,
        groups=_check_texts(content["groups"]),
        routes={str(n): _parse_samples(arrays, f"routes{number}", "i") for number, n in enumerate(content["routes"])},
        unobserved=_check_texts(content["unobserved"]),
        figures={str(key): float(value) for key, value in content["figures"].items()},
        operations=tuple(_parse_operation(*operation) for operation in content["operations"]),
    )


def _check_record(record: Any) -> dict[str, Any]:
    """Return a record; raises where a key that is shown is missing or no number."""
    float(record["loss"]), float(record["grad_norm"]), float(record["lr"]), int(record["step"])
    first, last = record["rows"]
    return {**record, "rows": [int(first), int(last)], "batch_hash": str(record["batch_hash"])}


def _check_texts(texts: Any) -> dict[str, str]:
    return {str(key): str(value) for key, value in texts.items()}


def _parse_operation(module: Any, name: Any, shapes: Any, sums: Any) -> Operation:
    return Operation(str(module), str(name), tuple(tuple(map(int, s)) for s in shapes), tuple(map(float, sums)))


def _parse_fingerprint(shape: Any, sketch: Any, squares: Any, bits: Any) -> Fingerprint:
    array = np.asarray(sketch, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] != WIDTH or len(array) > BLOCKS:
        raise ValueError(f"a fingerprint has the shape {array.shape}")
    return Fingerprint(tuple(map(int, shape)), array, float(squares), int(bits))


def _parse_samples(arrays: Any, prefix: str, kind: str) -> Samples:
    tokens, values, microbatches, ranks = (arrays[f"{prefix}.{key}"] for key in Samples.__dataclass_fields__)
    numbers = [np.asarray(x, np.int64) for x in (tokens, microbatches, ranks)]
    if values.ndim != 2 or values.dtype.kind != kind or any(x.shape != (len(values),) for x in numbers):
        raise ValueError(f"the arrays {prefix} have the shapes {[x.shape for x in (*numbers, values)]}")
    return Samples(numbers[0], values, numbers[1], numbers[2])
