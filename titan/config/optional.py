"""Optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from titan.errors import ConfigError


def import_optional(package: str, setting: str) -> Any:
    """Import and return an optional package.

    Raises:
        ConfigError: when it isn't installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ConfigError(f"{setting}: needs the package {name}: pip install {name}") from error
