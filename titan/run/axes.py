"""The axes' schemas, and the former names of their settings."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from titan.config import former, settings
from titan.dataset.schema import KINDS, Dataset
from titan.model.schema import Llama, Qwen3
from titan.optimizer.schema import SGD, AdamW, Muon, Optimizer
from titan.run.schema import Recipe

PLUGGABLE: dict[str, dict[str, Any]] = {
    "model": {"llama": Llama, "qwen3": Qwen3},
    "dataset": {**KINDS, "base": Dataset},
    "optimizer": {"adamw": AdamW, "sgd": SGD, "muon": Muon, "base": Optimizer},
}
"""Schemas of the axes that have several kinds: YAML files take their defaults from `/schema/AXIS/KIND`. Datasets and
optimizers of the user's take the settings that all kinds share from `/schema/AXIS/base`."""


def present(overrides: Sequence[str], *, warn: bool = True) -> list[str]:
    """Return overrides with the present names of settings; warn of former ones."""
    return former.rename_overrides(overrides, _former(), warn=warn)


def present_key(key: str) -> str:
    """Return the present name of a setting that a file names, such as `precision.matmuls`."""
    return former.present_key(key, _former())


def present_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration that a file holds with the present names of settings."""
    return former.present_config(config, _former())


def moved(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Hydra composed with the settings that moved to another axis there; warn of those."""
    return former.moved(content, _former(), settings.defaults(Recipe))


@functools.cache
def _former() -> dict[str, str]:
    """The former keys of all axes."""
    declared = typing.get_type_hints(Recipe)
    schemas = [(axis, cls) for axis in Recipe.axes() for cls in (declared[axis], *PLUGGABLE.get(axis, {}).values())]
    return former.former_keys(schemas)
