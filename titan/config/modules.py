"""Which third-party packages a configuration may import: those that the user names, never those that only a file names.

The user names them on the command line (`modules=[mine]`) or in the environment (`TITAN_MODULES=mine,theirs`). A recipe
or a site's file may ask for some, which raises ConfigError until the user allows it. Free of torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from titan.config.kinds import describe_library
from titan.config.settings import format_value
from titan.errors import ConfigError

VARIABLE = "TITAN_MODULES"
LOGGING_PACKAGES = ("titan", "experiments", "logging", "colorlog", "sys")
HYDRA_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "callbacks": ("titan", "experiments", "hydra.experimental.callbacks"),
    "hydra_logging": LOGGING_PACKAGES,
    "job_logging": LOGGING_PACKAGES,
    "launcher": ("hydra_plugins.titan",),  # an installed one of another package may run programs of its settings
    "sweeper": ("hydra_plugins",),
}
"""Packages whose classes a part of Hydra's own settings may name; others import or call what they are given."""


def list_trusted_packages(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that the user allows: those of `modules=` on a command line, and of $TITAN_MODULES."""
    names = {name: f"{VARIABLE}={name}" for name in re.split(r"[\s,:]+", os.environ.get(VARIABLE, "")) if name}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group == "modules":
            names |= {name: f"modules=[{name}]" for name in _iterate_names(override.value())}
    for name, typed in names.items():
        if library := describe_library(name.partition(".")[0]):
            raise ConfigError(f"{typed}: {library}; name your own packages only.")
    return tuple(names)


def _iterate_names(value: Any) -> Iterator[str]:
    """Yield the names in the value of an override, without interpolations, which files could set."""
    if isinstance(value, ChoiceSweep):
        for choice in value.list:
            yield from _iterate_names(Override._convert_value(choice))
    elif isinstance(value, list):
        yield from (str(name) for name in value if "${" not in str(name))


def check_modules(modules: Any, trusted: Sequence[str]) -> None:
    """Raise ConfigError for `modules` of the composed configuration that the user has not named."""
    if not isinstance(modules, list):
        raise ConfigError(f"modules={modules}: expected a list, such as modules=[mine].")
    if unknown := [str(name) for name in modules if str(name) not in trusted]:
        raise ConfigError(
            f"modules={format_value(unknown)}: a configuration file asks for it, and only you may let code be "
            f"imported; if you trust it, give modules={format_value(unknown)} on the command line, or set "
            f"{VARIABLE}={','.join(unknown)}."
        )


def check_hydra(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError for parts of Hydra's settings that would import what the user has not named."""
    trusted = list_trusted_packages(overrides)
    content: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    for part, packages in HYDRA_PACKAGES.items():
        for name in _iterate_imports(content.get(part)):
            is_own = name.startswith(tuple(f"{package}." for package in packages))
            is_trusted = is_own or name.startswith(tuple(f"{package}." for package in trusted))
            if name.startswith("logging.config") or not is_trusted:
                if library := describe_library(name.partition(".")[0]):
                    reason = f"and {library}; take it out"
                elif part in ("launcher", "sweeper"):
                    reason = f"which is no {part}; leave it out, and choose hydra/{part}=CHOICE"
                else:
                    own = f"give modules=[{name.partition('.')[0]}]"
                    reason = f"and only you may let code be imported; take it out, or {own}"
                raise ConfigError(f"hydra.{part}: names {name}, {reason}.")
            if part == "callbacks" and is_own:
                _check_callback(name)


def _check_callback(name: str) -> None:
    """Raise ConfigError for what is no class of callbacks: Hydra would call it."""
    module, _, attribute = name.rpartition(".")
    target = None
    with contextlib.suppress(ImportError):  # Hydra reports it
        target = getattr(importlib.import_module(module), attribute, None)
    if target is not None and not (isinstance(target, type) and issubclass(target, Callback)):
        raise ConfigError(
            f"hydra.callbacks: names {name}, which is no hydra.experimental.callback.Callback; take it out."
        )


def _iterate_imports(content: Any) -> Iterator[str]:
    """Yield what Hydra or Python's logging would import for a part of the settings."""
    if isinstance(content, str) and content.startswith("ext://"):
        yield content.removeprefix("ext://")
    items = content.items() if isinstance(content, Mapping) else enumerate(content if isinstance(content, list) else ())
    for key, value in items:
        if key in ("_target_", "class", "()") and isinstance(value, str):
            yield value
        yield from _iterate_imports(value)
