"""Strategies as a user writes them: another dimension, another mesh, another wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan.parallelism.schema import Layout
from titan.parallelism.strategy import ModelSharding, Strategy


@dataclass(frozen=True, kw_only=True)
class Columns(Strategy):
    """Shards matrices along their columns."""

    def dimension(self, name: str, shape: Sequence[int]) -> int:
        return len(shape) - 1


@dataclass(frozen=True, kw_only=True)
class Pairs(Strategy):
    """Shards over two ranks, however many there are."""

    def shards(self, layout: Layout) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class Kept(Strategy):
    """Keeps parameters gathered after the forward pass."""

    def wrap(self, modules: list[Any], mesh: Any, options: Mapping[str, Any]) -> None:
        super().wrap(modules, mesh, {**options, "reshard_after_forward": False})


@dataclass(frozen=True, kw_only=True)
class Idle(Strategy):
    """Forgets to shard."""

    def wrap(self, modules: list[Any], mesh: Any, options: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class IdleModel(ModelSharding):
    """Forgets to shard the model."""

    def wrap(self, modules: list[Any], mesh: Any, options: Mapping[str, Any]) -> None:
        pass
