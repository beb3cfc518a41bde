"""Which matmuls compute in 8 bits, which weights are gathered so, and the bytes of weights as used. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from titan.model.counts import Matmul

QUANT_BLOCK = {"float8": 16, "float8_rowwise": 16, "float8_rowwise_hp": 16, "mxfp8": 32}
"""The number of which a matmul's sizes must be multiples in each 8-bit format: required by the kernels
(`torch._scaled_mm`), or the elements per scale (OCP Microscaling Formats, version 1.0)."""


class Selection(NamedTuple):
    """The matmuls that are in 8 bits (`quantized`), and the reason for each of the others (`exclusions`)."""

    quantized: tuple[str, ...]
    exclusions: Mapping[str, str]

    def describe_exclusions(self) -> str:
        """Return the others with their reasons in one phrase; those of many blocks once."""
        counts = Counter((name.split(".", 2)[-1], reason) for name, reason in self.exclusions.items())
        return ", ".join(
            f"{count} x {name} ({reason})" if count > 1 else f"{name} ({reason})"
            for (name, reason), count in counts.items()
        )


class WeightSharding(NamedTuple):
    """How weights are sharded.

    Attributes:
        tensor: the tensor-parallel degree.
        sharded: ranks over which FSDP shards each tensor-parallel part.
        resharded: whether gathered weights are resharded to fewer ranks, which torch supports for plain weights only.
    """

    tensor: int = 1
    sharded: int = 1
    resharded: bool = False


class MatmulSelection:
    """What follows from the settings of a precision for a model's matmuls."""

    compute: str
    weights: str
    accumulate: str
    matmuls: str
    skip: tuple[str, ...]
    min_size: int
    float8_gather: bool

    @property
    def bytes(self) -> int:
        """Bytes per activation element."""
        return 2 if self.compute == "bf16" else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of a weight and of its gradient."""
        return 2 if self.weights == "bf16" else 4

    @property
    def accumulate_bytes(self) -> int:
        """Bytes per element of a gradient that FSDP accumulates whole."""
        return 2 if self.accumulate == "bf16" else 4

    @property
    def eight_bit(self) -> bool:
        """Whether linear layers compute in 8 bits."""
        return self.matmuls != "compute"

    def select_layers(self, layers: Mapping[str, Matmul], tensor: int = 1) -> Selection:
        """Return which matmuls are in 8 bits.

        Args:
            layers: a model's linear layers and experts, by the name of their module.
            tensor: the tensor-parallel degree.
        """
        if not self.eight_bit:
            return Selection((), {})
        reasons = {name: self._find_exclusion(name, layer.split(tensor)) for name, layer in layers.items()}
        exclusions = {name: reason for name, reason in reasons.items() if reason}
        return Selection(tuple(name for name in layers if name not in exclusions), exclusions)

    def select_gathered(self, layers: Mapping[str, Matmul], sharding: WeightSharding) -> tuple[str, ...]:
        """Return the linear layers whose weights FSDP all-gathers in float8 instead of the compute type.

        Those with per-tensor float8 scaling whose weights shard evenly, except the head, which is gathered alone or is
        tied to the embedding.
        """
        if self.matmuls != "float8" or not self.float8_gather or sharding.sharded == 1 or sharding.resharded:
            return ()
        quantized = (name for name in self.select_layers(layers, sharding.tensor).quantized if name != "head")
        return tuple(name for name in quantized if layers[name].split(sharding.tensor).outputs % sharding.sharded == 0)

    def count_used_bytes(self, layers: Mapping[str, Matmul], sharding: WeightSharding) -> int:
        """Return the bytes of a tensor rank's weights as used, beside the stored ones: as FSDP gathers them, or casts.

        With per-tensor float8 scaling a weight that is not gathered is quantized in the matmul, and no cast is saved.
        """
        gathered = set(self.select_gathered(layers, sharding))
        quantized = set(self.select_layers(layers, sharding.tensor).quantized)
        cast = self.bytes if sharding.sharded > 1 or self.bytes < self.weight_bytes else 0
        uncast = quantized if self.matmuls == "float8" and sharding.sharded == 1 else set()
        element_bytes = {name: 1 if name in gathered else 0 if name in uncast else cast for name in layers}
        return sum(element_bytes[name] * layer.split(sharding.tensor).size for name, layer in layers.items())

    def _find_exclusion(self, name: str, layer: Matmul) -> str | None:
        """Return why a linear layer stays in the compute type; None if it does not."""
        if any(fnmatchcase(name, pattern) for pattern in self.skip):
            return "precision.skip"
        sizes, multiple = (layer.inputs, layer.outputs), QUANT_BLOCK[self.matmuls]
        if min(sizes) < self.min_size:
            return f"{min(sizes)} is below precision.min_size"
        odd = [size for size in sizes if size % multiple]
        return f"{odd[0]} is not a multiple of {multiple}" if odd else None
