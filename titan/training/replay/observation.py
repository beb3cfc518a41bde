"""What a rank sees of a step, and the file that it leaves. Free of torch.

A file is numpy's `.npz` with one JSON text in it and no pickles: the ranks of another interpreter write one too, so its
content is checked as that of a stranger.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.mixture import RowMixture
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError, RunError
from titan.files import untrusted
from titan.numerics.differences import BLOCKS, WIDTH, Fingerprint, Key, Operation, Replica, Samples

VERSION = 1
"""Of the file."""
LARGEST = 1 << 31
"""Bytes of an array in a file that are read."""
UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError,
    NotImplementedError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What reading a file raises that no rank has written."""


@dataclass(frozen=True)
class ActivationTotals:
    """Sums over some elements: of squares, of values, the largest absolute value, and their number."""

    squares: float
    values: float
    largest: float
    count: int


@dataclass(frozen=True)
class Seen:
    """What one rank, or all of them, saw of a step.

    Attributes:
        record: the step's line of metrics.jsonl, with metrics of the layers.
        notes: what was applied to the model.
        groups: the parameter group of each parameter.
        routes: the experts of each token, by the router's name.
        unobserved: modules whose outputs could not be seen, and why.
        figures: further numbers, such as seconds; of all ranks their sums.
        operations: of the module that was asked for, in its first micro-batch, on the first rank that has it.
    """

    record: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    groups: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    routes: Mapping[str, Samples] = field(default_factory=dict, kw_only=True)
    unobserved: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    figures: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    operations: tuple[Operation, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class RankReplay(Seen):
    """What one rank saw of the step.

    Attributes:
        totals: of hidden states and of their gradients, in the order of the forward pass.
        samples: likewise.
        losses: the largest ones.
        fingerprints: of its tensors, by kind and name.
    """

    totals: Mapping[Key, ActivationTotals]
    samples: Mapping[Key, Samples]
    losses: tuple[TokenLoss, ...] = ()
    fingerprints: Mapping[Key, Fingerprint] = field(default_factory=dict)

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


def read_rank_replays(directory: Path, name: str) -> list[RankReplay]:
    """Return what all ranks of a replay saw in a pass.

    Raises:
        RunError: where there is no file, or one is not what `RankReplay.write` writes.
    """
    ranks = 1
    while _get_rank_file(directory, name, ranks).is_file():
        ranks += 1
    return [read_rank_replay(_get_rank_file(directory, name, rank)) for rank in range(ranks)]


def read_rank_replay(file: Path) -> RankReplay:
    """Return what a rank saw.

    Raises:
        RunError: where the file is missing or is not what `RankReplay.write` writes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            largest = max((entry.file_size for entry in archive.infolist()), default=0)
        if largest > LARGEST:
            raise ValueError(f"an array has {largest:,} bytes")
        with np.load(file, allow_pickle=False) as arrays:
            return _parse_replay(arrays)
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"{file}: is not what a rank of this version leaves ({reason}); replay again.") from error


def _parse_replay(arrays: Any) -> RankReplay:
    """Return the content of a file; raises where a key that is shown is missing or of another type."""
    content = untrusted.parse_object(arrays["json"].tobytes().decode())
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']!r}, not {VERSION}")
    record = content["record"]
    float(record["loss"]), float(record["grad_norm"]), float(record["lr"]), int(record["step"])
    first, last = record["rows"]
    keys = [(str(direction), str(name)) for direction, name in content["samples"]]
    return RankReplay(
        record={**record, "rows": [int(first), int(last)], "batch_hash": str(record["batch_hash"])},
        totals={(str(d), str(n)): ActivationTotals(**totals) for d, n, totals in content["totals"]},
        samples={key: _parse_samples(arrays, f"samples{number}", "f") for number, key in enumerate(keys)},
        losses=tuple(TokenLoss(**loss) for loss in content["losses"]),
        notes=tuple(map(str, content["notes"])),
        fingerprints={
            (str(kind), str(name)): _parse_fingerprint(shape, arrays[f"sketch{number}"], squares, bits)
            for number, (kind, name, shape, squares, bits) in enumerate(content["fingerprints"])
        },
        groups={str(key): str(value) for key, value in content["groups"].items()},
        routes={str(n): _parse_samples(arrays, f"routes{number}", "i") for number, n in enumerate(content["routes"])},
        unobserved={str(key): str(value) for key, value in content["unobserved"].items()},
        figures={str(key): float(value) for key, value in content["figures"].items()},
        operations=tuple(
            Operation(str(module), str(name), tuple(tuple(map(int, s)) for s in shapes), tuple(map(float, sums)))
            for module, name, shapes, sums in content["operations"]
        ),
    )


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


CONTEXT_TOKENS = 24
"""Tokens of text before a token that is shown."""


@dataclass(frozen=True)
class Statistics:
    """Of a hidden state or its gradient, over all elements: root mean square, mean and largest absolute value."""

    rms: float
    mean: float
    largest: float

    @classmethod
    def from_totals(cls, totals: Sequence[ActivationTotals]) -> Statistics:
        """Return the statistics over all ranks."""
        count = max(1, sum(t.count for t in totals))
        squares, values = math.fsum(t.squares for t in totals), math.fsum(t.values for t in totals)
        return cls(math.sqrt(squares / count), values / count, max((t.largest for t in totals), default=0.0))


@dataclass(frozen=True)
class Token:
    """A token with a large loss: the row's number in the data, its position there, its text and the text before it."""

    loss: float
    row: int
    position: int
    text: str
    before: str


@dataclass(frozen=True)
class ReplayedStep(Seen):
    """What a replay saw of a step, over all ranks.

    Attributes:
        statistics: in the order of the forward pass, then of the backward pass.
        samples: likewise.
        tokens: the largest losses.
        tensors: by kind and name, one replica for each value that ranks have.
        seq_len: tokens of a row.
    """

    statistics: Mapping[Key, Statistics]
    samples: Mapping[Key, Samples]
    tokens: tuple[Token, ...] = ()
    tensors: Mapping[Key, tuple[Replica, ...]] = field(default_factory=dict)
    seq_len: int = 1


def merge_ranks(
    parts: Sequence[RankReplay], mix: RowMixture | None, first: int, tokens: int, seq_len: int = 1
) -> ReplayedStep:
    """Return what all ranks saw.

    Args:
        mix: the rows; None: no tokens are shown.
        first: rows read before the step.
    """
    order = sort_keys({key for part in parts for key in part.totals}, [list(part.totals) for part in parts])
    totals = {key: [part.totals[key] for part in parts if key in part.totals] for key in order}
    losses = [loss for part in parts for loss in part.losses]
    losses.sort(key=lambda token: (-math.inf if math.isnan(token.loss) else -token.loss, token.row, token.position))
    figures = dict.fromkeys(key for part in parts for key in part.figures)
    return ReplayedStep(
        record=parts[0].record,
        statistics={key: Statistics.from_totals(rank_totals) for key, rank_totals in totals.items()},
        samples={key: join_samples(part.samples[key] for part in parts if key in part.samples) for key in order},
        tokens=tuple(_build_token(loss, mix, first) for loss in losses[:tokens]) if mix is not None else (),
        notes=parts[0].notes,
        tensors=_join_tensors(parts),
        groups={name: group for part in parts for name, group in part.groups.items()},
        routes=join_routes(parts),
        unobserved={name: reason for part in parts for name, reason in part.unobserved.items()},
        figures={key: math.fsum(part.figures.get(key, 0.0) for part in parts) for key in figures},
        seq_len=seq_len,
        operations=next((part.operations for part in parts if part.operations), ()),
    )


def sort_keys(keys: Iterable[Key], rank_keys: Sequence[Sequence[Key]]) -> list[Key]:
    """Return keys in the order of the forward pass, then of the backward pass.

    Args:
        rank_keys: the keys of each rank, in the order in which it saw those of the forward pass.
    """
    positions = {name: i for part in rank_keys for i, (direction, name) in enumerate(part) if direction == "forward"}

    def build_sort_key(key: Key) -> tuple[int, int, int]:
        parts = key[1].split(".")
        in_block = parts[0] == "layers"
        group = 1 if in_block else 2 if key[1] == "norm" else 0
        return group, int(parts[1]) if in_block else 0, positions.get(key[1], 0)

    by_pass = {d: [key for key in keys if key[0] == d] for d in ("forward", "backward")}
    return [*sorted(by_pass["forward"], key=build_sort_key), *sorted(by_pass["backward"], key=build_sort_key)[::-1]]


def join_samples(parts: Iterable[Samples]) -> Samples:
    """Return the samples of all ranks by token; of ranks that have the same token those of the first."""
    rank_samples = list(parts)
    if not rank_samples:
        none = np.zeros(0, np.int64)
        return Samples(none, np.zeros((0, 1), np.float32), none, none)
    columns = [np.concatenate([getattr(part, key) for part in rank_samples]) for key in Samples.__dataclass_fields__]
    tokens, order = np.unique(columns[0], return_index=True)
    return Samples(tokens, *(column[order] for column in columns[1:]))


def join_routes(parts: Sequence[RankReplay]) -> dict[str, Samples]:
    """Return the experts of all ranks' tokens, by router; tokens are sorted."""
    routers = dict.fromkeys(name for part in parts for name in part.routes)
    return {name: join_samples(part.routes[name] for part in parts if name in part.routes) for name in routers}


def _join_tensors(parts: Sequence[RankReplay]) -> dict[Key, tuple[Replica, ...]]:
    ranks: dict[Key, dict[int, tuple[list[int], Fingerprint]]] = {}
    for rank, part in enumerate(parts):
        for key, fingerprint in part.fingerprints.items():
            ranks.setdefault(key, {}).setdefault(fingerprint.bits, ([], fingerprint))[0].append(rank)
    return {
        key: tuple(Replica(tuple(numbers), fingerprint) for numbers, fingerprint in replicas.values())
        for key, replicas in ranks.items()
    }


def _build_token(token_loss: TokenLoss, mix: RowMixture, first: int) -> Token:
    """Return a token with its text."""
    numbers = mix.compute_row_numbers(np.array([first + token_loss.row]))
    source_indices, rows = mix.locate_rows(numbers)
    source = mix.sources[int(source_indices[0])]
    row_ids = source.corpus.train.read(int(rows[0]) * source.seq_len, source.seq_len + 1)
    target_index = token_loss.position + 1
    ids_before, ids = np.split(row_ids[: target_index + 1], [target_index])
    text_before = _decode_text(source.corpus, ids_before[-CONTEXT_TOKENS:].tolist())
    text = _decode_text(source.corpus, ids.tolist())
    return Token(token_loss.loss, int(numbers[0]), token_loss.position, text, text_before)


def _decode_text(corpus: Any, ids: list[int]) -> str:
    """Return the text of tokens; their ids where there is no tokenizer."""
    try:
        if corpus.tokenizer["fingerprint"] != "none":
            return load_tokenizer(corpus.tokenizer_path).decode(ids)
    except ConfigError:
        pass
    return " ".join(map(str, ids))


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token: its row in the step, its position in the row, and the token that was to be predicted."""

    loss: float
    row: int
    position: int
    target: int
