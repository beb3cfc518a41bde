"""How far figures, activations, gradients and other tensors of two computations are apart, and where. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.console.numbers import format_plural

FP32_BOUND = 1e-5
"""Relative difference in fp32 above which two layouts do not differ by rounding alone (law 3)."""
TINY = 1e-30
"""Figures below it count as that large."""
BLOCKS, WIDTH = 16, 16
"""Blocks of consecutive rows of a tensor, and random projections of each, in its fingerprint."""
LEAST_SHARE = 0.25
"""Rows whose size is below this share of the typical one count as that large: rounding comes from larger sums."""
NAMED_TOKENS = 1e-2
"""A token is named where its difference is more than this share of the largest one."""
Key = tuple[str, str]
"""A direction, "forward" or "backward", and the name of a module."""
START, STATE, GRADIENT, UPDATE = "weights", "optimizer state", "gradients", "updates"
"""The kinds of tensors that have fingerprints."""


@dataclass(frozen=True)
class Fingerprint:
    """Of a whole tensor, see `titan.numerics.fingerprints`: its shape, projections of blocks of consecutive rows,
    float64 [blocks, WIDTH], its sum of squares, and bits that are equal where all elements are, modulo 2**64.
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
    """An operation inside of a module, the innermost one that called it: its name in torch, and of each of its results
    the shape, a weighted sum of the elements, and one of their absolute values.
    """

    module: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[float, ...]


@dataclass(frozen=True)
class Replica:
    """A tensor as some ranks have it, bitwise the same on all of them."""

    ranks: tuple[int, ...]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Difference:
    """How far a module's activations or a tensor are from those of the other side, and where; see `Key`.

    The norm of the difference, relative to the size; infinite where only one side is finite or exists. `where` names
    ranks, micro-batch and rows; it is empty where both are equal.
    """

    key: Key
    relative: float
    where: str = ""

    @property
    def name(self) -> str:
        """The module or tensor."""
        return self.key[1]


Replicas = Mapping[Key, tuple[Replica, ...]]
"""By kind and name of a tensor, one replica for each value that ranks have."""


# --- figures


def compare_figures(x: float, y: float) -> float:
    """Return the difference of two figures relative to `y`; infinite where one is not finite and they differ."""
    return float(compare_series(np.array([x]), np.array([y]))[0])


def compare_series(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the relative difference of each figure, as of `compare_figures`."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gaps, finite = np.where(same, 0.0, math.inf), np.isfinite(a) & np.isfinite(b)
    gaps[finite] = np.abs(a[finite] - b[finite]) / np.maximum(np.abs(b[finite]), TINY)
    return gaps


# --- activations


def compare_activations(a: Mapping[Key, Samples], b: Mapping[Key, Samples], seq_len: int) -> list[Difference]:
    """Return how far each module's output, and then its gradient, is from that of `b`, in the order of computation."""
    return [compare_samples(key, a[key], b[key], seq_len) for key in a if key in b]


def compare_samples(key: Key, a: Samples, b: Samples, seq_len: int) -> Difference:
    """Return how far the activations of a module are apart."""
    common, a_indices, b_indices = np.intersect1d(a.tokens, b.tokens, assume_unique=True, return_indices=True)
    if len(common) < max(len(a.tokens), len(b.tokens)):
        missing = max(len(a.tokens), len(b.tokens)) - len(common)
        return Difference(key, math.inf, f"{format_plural(missing, 'token')} on one side only")
    x, y = a.values[a_indices].astype(np.float64), b.values[b_indices].astype(np.float64)
    if np.array_equal(x, y, equal_nan=True):
        return Difference(key, 0.0)
    errors = np.linalg.norm(x - y, axis=1)
    if not np.isfinite(errors).all():
        return Difference(key, math.inf, _describe_tokens(b, b_indices, ~np.isfinite(errors), seq_len))
    size = float(np.linalg.norm(y)) or float(np.linalg.norm(x))
    where = _describe_tokens(b, b_indices, errors > NAMED_TOKENS * errors.max(), seq_len)
    return Difference(key, float(np.linalg.norm(errors)) / size, where)


def _describe_tokens(samples: Samples, indices: NDArray[np.int64], chosen: NDArray[np.bool_], seq_len: int) -> str:
    """Return where chosen tokens are: how many, and row, position, rank and micro-batch of the first."""
    first = indices[int(np.argmax(chosen))]
    row, position = divmod(int(samples.tokens[first]), seq_len)
    count = int(chosen.sum())
    share = "all tokens" if count == len(chosen) else f"{count} of {len(chosen)} tokens"
    at = f"row {row}, token {position}, rank {samples.ranks[first]}, micro-batch {samples.microbatches[first]}"
    return f"{share}, the first at {at}"


# --- tensors


def compare_tensors(a: Replicas, b: Replicas, kind: str) -> list[Difference]:
    """Return how far each tensor of a kind is from that of `b`, on any rank."""
    keys = dict.fromkeys(key for side in (a, b) for key in side if key[0] == kind)
    return [_compare_replicas(key, a.get(key), b.get(key)) for key in keys]


def _compare_replicas(key: Key, a: Sequence[Replica] | None, b: Sequence[Replica] | None) -> Difference:
    if not a or not b:
        return Difference(key, math.inf, f"only {'B' if not a else 'A'} has it")
    pairs = [(x, y, *compare_fingerprints(x.fingerprint, y.fingerprint)) for x in a for y in b]
    x, y, relative, rows = max(pairs, key=lambda pair: pair[2])
    if not relative:
        return Difference(key, relative)
    sides = (("A's", a, x), ("B's", b, y))  # where ranks have different replicas, name those with the worse one
    ranks = [f"on {side} {format_ranks(r.ranks)} only" for side, replicas, r in sides if len(replicas) > 1]
    return Difference(key, relative, ", ".join([rows, *ranks]))


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks by their numbers."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def compare_fingerprints(a: Fingerprint, b: Fingerprint) -> tuple[float, str]:
    """Return how far two tensors are apart: relative to the size of the rows that differ most, and these rows."""
    if a.shape != b.shape:
        return math.inf, f"shapes {list(a.shape)} and {list(b.shape)}"
    if a.bits == b.bits:
        return 0.0, ""
    errors = np.linalg.norm(a.sketch - b.sketch, axis=1)
    if not np.isfinite(errors).all():
        return math.inf, "not finite on one side"
    sizes = np.linalg.norm(b.sketch, axis=1)
    typical = math.sqrt(max(a.squares, b.squares) * b.sketch.shape[1] / len(sizes))
    relative = errors / np.maximum(sizes, LEAST_SHARE * typical) if typical else errors
    return float(relative.max()), _describe_blocks(a, b, relative)


def _describe_blocks(a: Fingerprint, b: Fingerprint, relative: NDArray[np.float64]) -> str:
    count = math.prod(a.shape[:-1]) if len(a.shape) > 1 else math.prod(a.shape)
    (numbers,) = np.nonzero(relative > NAMED_TOKENS * relative.max())
    first, last = int(numbers[0]), int(numbers[-1])
    start, stop = -(-first * count // len(relative)), -(-(last + 1) * count // len(relative))
    rows = "all rows" if len(numbers) == len(relative) else f"rows {start} to {stop - 1} of {count}"
    factor = _find_factor(a, b)
    return rows if factor is None else f"{rows}, B's times {factor:.4g}"


def _find_factor(a: Fingerprint, b: Fingerprint) -> float | None:
    """Return the factor between both, where they differ by one; None elsewhere."""
    product = float((a.sketch * b.sketch).sum())
    square = float((b.sketch * b.sketch).sum())
    factor = product / square if square else 0.0
    rest = float(np.linalg.norm(a.sketch - factor * b.sketch))
    is_factor = rest <= 1e-4 * float(np.linalg.norm(a.sketch)) and abs(factor - 1) > 1e-3
    return factor if is_factor else None


# --- replicas, and experts


def list_unequal(tensors: Replicas, kind: str) -> list[Difference]:
    """Return the tensors of which ranks have different values, with the ranks that differ from the first."""
    differences = []
    for key, replicas in tensors.items():
        for replica in replicas[1:] if key[0] == kind else ():
            relative, rows = compare_fingerprints(replica.fingerprint, replicas[0].fingerprint)
            where = f"{rows}, {format_ranks(replica.ranks)} against {format_ranks(replicas[0].ranks)}"
            differences.append(Difference(key, relative, where))
    return differences


def compare_routes(a: Mapping[str, Samples], b: Mapping[str, Samples]) -> dict[str, float]:
    """Return the share of tokens that have other experts, by router, in the order of the forward pass."""
    shares = {}
    for name in sort_layers(a.keys() & b.keys()):
        _, left, right = np.intersect1d(a[name].tokens, b[name].tokens, assume_unique=True, return_indices=True)
        x, y = np.sort(a[name].values[left], -1), np.sort(b[name].values[right], -1)
        shares[name] = float((x != y).any(-1).mean()) if len(x) else 0.0
    return shares


def compare_operations(module: str, a: Sequence[Operation], b: Sequence[Operation], bound: float) -> list[str]:
    """Return sentences: the first operation in a module whose result differs, and how many have other shapes."""
    if not a or not b:
        return [f"operations of {module}: none were recorded on {'A' if not a else 'B'}"]
    words = [[(o.module, o.name, o.shapes) for o in side] for side in (a, b)]
    blocks = SequenceMatcher(None, words[0], words[1], autojunk=False).get_matching_blocks()
    pairs = [(a[m.a + i], b[m.b + i]) for m in blocks for i in range(m.size)]
    first = next((pair for pair in pairs if _differ(*pair, bound)), None)
    count = (
        f"{len(pairs)} operations of {module} were compared; {len(a) - len(pairs)} of A and {len(b) - len(pairs)} of B"
    )
    sentences = [f"{count} have no counterpart of the same shape"]
    if first is None:
        return [*sentences, *["the results of those that were compared agree"] * bool(pairs)]
    x, y = first
    place = f"{x.name} in {x.module}, results {' '.join(str(list(shape)) for shape in x.shapes)}"
    return [
        *sentences,
        f"the first operation whose result differs is {place}: sums {x.sums[0]:.9g} and {y.sums[0]:.9g}",
    ]


def _differ(a: Operation, b: Operation, bound: float) -> bool:
    """Whether results differ, relative to the sums of absolute values; what is not finite equals only its like."""
    for x, y, size, other in zip(a.sums[::2], b.sums[::2], a.sums[1::2], b.sums[1::2], strict=True):
        if not math.isfinite(size + other):
            if compare_figures(x, y) or compare_figures(size, other):
                return True
        elif not abs(x - y) <= bound * max(size, other):
            return True
    return False


def get_layer_name(name: str) -> str:
    """Return the layer of a parameter or module: layers.3 for layers.3.attention.wq.weight."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def sort_layers(names: Iterable[str]) -> list[str]:
    """Return names of modules by the numbers of their layers."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])


# --- random rounding

LARGEST_RATIO = 3.0
"""A difference that is more times the spread is not explained by random rounding. Of pairs without a fault it is up to
1.7: layouts, compiled or not, in bf16 and in 8 bits."""


@dataclass(frozen=True)
class Spread:
    """Of `count` randomly rounded repetitions: of activations, relative to their mean's size, the standard deviation of
    one repetition; of loss and gradient norm mean and standard error.
    """

    count: int
    deviations: Mapping[Key, float]
    figures: Mapping[str, tuple[float, float]]

    def find_excess(self, differences: Sequence[Difference]) -> tuple[Difference, float] | None:
        """Return the first difference that is larger than rounding explains, and how many times the spread it is."""
        for difference in differences:
            deviation = self.deviations.get(difference.key, 0.0)
            if difference.relative > LARGEST_RATIO * deviation and difference.relative > 0:
                return difference, difference.relative / deviation if deviation else math.inf
        return None

    def describe(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
        """Return mean and standard error of the figures, and how far those of two records are from the mean."""
        parts = []
        for key, (mean, error) in self.figures.items():
            distances = f"A {float(a[key]) - mean:+.1g}, B {float(b[key]) - mean:+.1g}"
            parts.append(f"{key} {mean:.6g} ± {error:.1g} ({distances})")
        return f"mean of {self.count} randomly rounded repetitions ± its standard error: {', '.join(parts)}"


def measure_spread(samples: Sequence[Mapping[Key, Samples]], records: Sequence[Mapping[str, Any]]) -> Spread:
    """Return the spread of repetitions of a step, from the activations and the record of each."""
    deviations, count = {}, len(records)
    for key in samples[0]:
        if all(key in repetition for repetition in samples):
            stacked = np.stack([repetition[key].values.astype(np.float64) for repetition in samples])
            mean = stacked.mean(0)
            size = float(np.linalg.norm(mean))
            spread = math.sqrt(float(np.square(stacked - mean).sum()) / (count - 1))
            deviations[key] = spread / size if size else 0.0
    figures = {}
    for name in ("loss", "grad_norm"):
        values = [float(record[name]) for record in records]
        figures[name] = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(count)
    return Spread(count, deviations, figures)
