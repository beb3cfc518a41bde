"""The axes' schemas, and the former names of their settings."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from titan.config import renamed_settings, settings
from titan.config.settings import format_value
from titan.dataset.schema import KINDS, Dataset
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.optimizer.schema import SGD, AdamW, Muon, Optimizer
from titan.run.schema import Recipe
from titan.schedule import schema as schedule

PLUGGABLE: dict[str, dict[str, Any]] = {
    "model": {
        "llama": Llama,
        "qwen3": Qwen3,
        "qwen3_moe": Qwen3Moe,
        "deepseek_v3": DeepseekV3,
        "llama4": Llama4,
        "base": Decoder,
    },
    "dataset": {**KINDS, "base": Dataset},
    "optimizer": {"adamw": AdamW, "sgd": SGD, "muon": Muon, "base": Optimizer},
    "schedule": {**schedule.KINDS, "base": schedule.Schedule},
}
"""Schemas of the axes that have several kinds: YAML files take their defaults from `/schema/AXIS/KIND`. A user's own
kind takes the settings that all kinds share from `/schema/AXIS/base`."""

CHOICES = {"training.schedule": "schedule"}
"""Former settings that are the choice on an axis now."""


def translate_overrides(overrides: Sequence[str], *, warn: bool = True) -> list[str]:
    """Return overrides with the present names of settings; warn of former ones."""
    return renamed_settings.rename_overrides(overrides, _collect_former_keys(), warn=warn)


def translate_key(key: str) -> str:
    """Return the present name of a setting that a file names, such as `precision.matmuls`."""
    return renamed_settings.find_present_key(key, _collect_former_keys())


def translate_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document of run.yaml with the present names of settings, and with choices on axes that it lacks."""
    config, science, choices = document["config"], document["science"], document.get("choices") or {}
    overrides = document.get("overrides") or []
    present = renamed_settings.rename_config(config, _collect_former_keys())
    for old, axis in renamed_settings.find_moved_keys(config, CHOICES).items():
        choice = str(renamed_settings.get_value(config, old))
        defaults = settings.collect_defaults(PLUGGABLE[axis].get(choice, PLUGGABLE[axis]["base"]))
        moved = {name: value for name, value in present.get(axis, {}).items() if name in defaults}
        present, choices = {**present, axis: {**defaults, **moved}}, {**choices, axis: choice}
        # settings that the choice ignored were part of the ids, and are none of its class
        science = {key: v for key, v in science.items() if _has_setting(defaults, axis, key)}
        overrides = [o for o in overrides if _has_setting(defaults, axis, o.partition("=")[0].lstrip("+"))]
    translated = {"overrides": overrides, "choices": choices}
    return {**document, "config": present, "science": science, **{k: v for k, v in translated.items() if v}}


def _has_setting(defaults: Mapping[str, Any], axis: str, key: str) -> bool:
    """Return whether a dotted key, present or former, is of another axis or one of the known settings of this one."""
    group, _, name = translate_key(key).partition(".")
    return group != axis or not name or name in defaults


def move_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Hydra composed with the settings of configuration files that moved to another axis there.

    Raises:
        ConfigError: for a setting that became a choice, which files have to make otherwise.
    """
    for old, new in renamed_settings.find_moved_keys(config, CHOICES).items():
        choice = format_value(renamed_settings.get_value(config, old))
        raise ConfigError(
            f"{old}={choice}: a configuration file has a setting that is now called {new}; write `override "
            f"/{new}: {choice}` in the defaults list there."
        )
    return renamed_settings.move_settings(config, _collect_former_keys(), settings.collect_defaults(Recipe))


@functools.cache
def _collect_former_keys() -> dict[str, str]:
    """The former keys of all axes."""
    declared = typing.get_type_hints(Recipe)
    schemas = [(axis, cls) for axis in Recipe.axes() for cls in (declared[axis], *PLUGGABLE.get(axis, {}).values())]
    return renamed_settings.former_keys(schemas) | CHOICES
