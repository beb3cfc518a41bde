"""The parallelism axis: degrees and their arithmetic. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from titan.settings import Refusal, setting

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""The mesh's dimensions, outermost first: neighbours in the last one are neighbours in a node."""


@dataclass(frozen=True)
class Layout:
    """All degrees together, as numbers."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Ranks in all."""
        return math.prod(self.degrees().values())

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    def degrees(self) -> dict[str, int]:
        """The degree of each dimension, outermost first."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        parts = [f"{name} {degree}" for name, degree in self.degrees().items() if degree > 1]
        return " x ".join(parts) or "one device"


def _degree(help: str) -> int | str:
    help += "; -1: all devices that are left, auto: by rule"
    degree: int | str = setting(1, help, words=("auto",), at_least=-1)
    return degree


@dataclass(frozen=True)
class Parallelism:
    """The degree of each dimension."""

    replicate: int | str = _degree("copies of the model (DDP; with shard: HSDP)")
    shard: int | str = _degree("parts that weights, gradients and optimizer state are cut into (FSDP)")
    context: int | str = _degree("parts of a sequence")
    tensor: int | str = _degree("parts of each matrix")
    pipeline: int | str = _degree("stages of the pipeline")
    microbatches: int | str = setting(
        "auto",
        "micro-batches that a rank's rows are cut into; auto: as few as memory allows",
        words=("auto",),
        at_least=1,
    )
    reshard: bool = setting(True, "free gathered weights after the forward pass (FSDP)")

    def check(self) -> None:
        """Refuse degrees that can't be numbers.

        Raises:
            Refusal: naming the degree.
        """
        rest = [name for name in DIMENSIONS if getattr(self, name) == -1]
        if len(rest) > 1:
            raise Refusal(f"parallelism.{rest[0]}=-1: parallelism.{rest[1]} is -1 too; only one can take the rest.")
        for name in DIMENSIONS:
            if getattr(self, name) == 0:
                raise Refusal(f"parallelism.{name}=0: must be 1 or more, -1 for the rest, or auto.")

    def layout(self, devices: int | None, limits: dict[str, int]) -> Layout:
        """Turn degrees into numbers.

        Args:
            devices: ranks in all; None where there are as many as the layout asks for (a CPU): then each open degree
                is 2, so that any composition can be tried with the fewest ranks.
            limits: the largest useful degree of a dimension that says "auto" (default 2).

        Raises:
            Refusal: when the degrees don't multiply to `devices`.
        """
        degrees: dict[str, int | str] = {name: getattr(self, name) for name in DIMENSIONS}
        if devices is None:
            return Layout(**{name: 2 if d in (-1, "auto") else int(d) for name, d in degrees.items()})
        left = devices // math.prod(int(d) for d in degrees.values() if d not in (-1, "auto"))
        for name in ("tensor", "context", "pipeline", "replicate", "shard"):
            if degrees[name] == "auto":
                degrees[name] = math.gcd(max(1, left), limits.get(name, 2))
                left //= int(degrees[name])
        layout = Layout(**{name: max(1, left) if d == -1 else int(d) for name, d in degrees.items()})
        if layout.devices != devices:
            raise Refusal(
                f"parallelism: {layout} makes {_count(layout.devices, 'rank')}, but there are "
                f"{_count(devices, 'device')}; choose parallelism=ddp or fsdp, change a degree, or give "
                f"cluster.devices={layout.devices}."
            )
        return layout


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
