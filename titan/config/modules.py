"""Which third-party packages a configuration may import: those that the user names, never those that only a file names.

The user names them on the command line (`modules=[mine]`) or in the environment (`TITAN_MODULES=mine,theirs`). A recipe
or a site's file may ask for some, which raises ConfigError until the user allows it. Free of torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import DictConfig, OmegaConf

from titan.config.settings import format_value
from titan.errors import ConfigError

VARIABLE = "TITAN_MODULES"
HYDRA_PACKAGES = ("titan", "experiments", "hydra.experimental.callbacks", "logging", "colorlog", "sys")
"""Packages whose classes Hydra's own settings may name; `hydra.utils` and others import what they are given."""


def list_trusted_packages(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that the user allows: those of `modules=` on a command line, and of $TITAN_MODULES."""
    names = dict.fromkeys(filter(None, re.split(r"[\s,:]+", os.environ.get(VARIABLE, ""))))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group == "modules":
            names |= dict.fromkeys(_iterate_names(override.value()))
    return tuple(names)


def _iterate_names(value: Any) -> Iterator[str]:
    """Yield the names in the value of an override, without interpolations, which files could set."""
    if isinstance(value, ChoiceSweep):
        for choice in value.list:
            yield from _iterate_names(Override._convert_value(choice))
    elif isinstance(value, list):
        yield from (str(name) for name in value if "${" not in str(name))


def check_modules(modules: Any, trusted: Sequence[str]) -> None:
    """Raise ConfigError for `modules` of the composed configuration that the user has not named.

    Raises:
        ConfigError: naming them, and how to allow them.
    """
    if not isinstance(modules, list):
        raise ConfigError(f"modules={modules}: expected a list, such as modules=[mine].")
    if unknown := [str(name) for name in modules if str(name) not in trusted]:
        raise ConfigError(
            f"modules={format_value(unknown)}: a configuration file asks for it, and only you may let code be "
            f"imported; if you trust it, give modules={format_value(unknown)} on the command line, or set "
            f"{VARIABLE}={','.join(unknown)}."
        )


def check_hydra(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError for callbacks and loggers in Hydra's settings that would import what the user has not named.

    Raises:
        ConfigError: naming the first.
    """
    roots = (*HYDRA_PACKAGES, *list_trusted_packages(overrides))
    content: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    for part in ("callbacks", "hydra_logging", "job_logging"):
        for name in _iterate_imports(content.get(part)):
            if name.startswith("logging.config") or not name.startswith(tuple(f"{r}." for r in roots)):
                raise ConfigError(
                    f"hydra.{part}: names {name}, and only you may let code be imported; take it out, or give "
                    f"modules=[{name.partition('.')[0]}]."
                )


def _iterate_imports(content: Any) -> Iterator[str]:
    """Yield what Hydra or Python's logging would import for a part of the settings."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if key in ("_target_", "class", "()") and isinstance(value, str):
                yield value
            yield from _iterate_imports(value)
    elif isinstance(content, list):
        for value in content:
            yield from _iterate_imports(value)
    elif isinstance(content, str) and content.startswith("ext://"):
        yield content.removeprefix("ext://")
