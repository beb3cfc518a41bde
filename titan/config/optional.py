"""Optional packages."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from titan.errors import ConfigError

ANSWER_SECONDS = 60
"""How long a web server may send nothing."""


def advise_extra(extra: str) -> str:
    """Return how the packages of an extra of pyproject.toml are installed.

    titan is installed from its clone; at a package index, its name may be another project's.
    """
    return f"pip install -e '.[{extra}]' in titan's clone"


def import_optional(package: str, setting: str, purpose: str = "", project: str = "") -> Any:
    """Import and return an optional package.

    Args:
        purpose: what stands before "needs the package" where the setting alone does not explain it.
        project: what pip installs, where it has another name.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name, subject = project or package.partition(".")[0], f"{purpose} " if purpose else ""
        raise ConfigError(f"{setting}: {subject}needs the package {name}: pip install {name}") from error


def import_fsspec(setting: str) -> Any:
    """Import and return fsspec; unless the user has configured it, web servers must answer in time."""
    import_optional("fsspec.core", setting)
    fsspec = importlib.import_module("fsspec")
    with contextlib.suppress(ImportError):
        aiohttp = importlib.import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)
        fsspec.config.conf.setdefault("http", {"client_kwargs": {"timeout": timeout}})
    return fsspec
