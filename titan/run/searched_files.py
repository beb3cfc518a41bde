"""What files of a typed search path may set: no programs and no secrets, unless the user types these or trusts them.

`hydra.searchpath=[...]`, --config-dir and --config-path name a folder for one command, such as one in a repository that
was cloned. Its owner says nothing about its author: who clones owns the files. So a folder is the user's own where
$TITAN_CONF names it, besides titan's and those of installed packages. Free of torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from titan.config.settings import format_value
from titan.console.text import is_secret
from titan.errors import ConfigError
from titan.run import hydra_private, trust

VARIABLE = "TITAN_CONF"
"""The environment variable that names the user's own folders of configuration files."""
SEARCH_PATH = "hydra.searchpath"
"""What the primary configuration of a folder may name: further folders, and packages that Hydra imports."""
LONGEST_VALUE = 200
"""Characters of a value in a message."""
_DECODING = re.compile(r"\s*oc\.(decode|create)\s*:")
"""Resolvers that read a text as a configuration, with the interpolations in it."""
_CALL = re.compile(r"\$\{\s*oc\.env\s*:[^${}]*\}")
_READING = re.compile(r"\s*oc\.env\s*:\s*['\"]?(\w+)['\"]?\s*(,|$)")


def list_own_folders() -> list[str]:
    """Return the folders in $TITAN_CONF, absolute.

    Raises:
        ConfigError: for a folder that does not exist.
    """
    folders = [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"{VARIABLE}={folder}: there is no such folder; correct the variable, or unset it.")
    return [os.path.abspath(folder) for folder in folders]


class FileGuard:
    """Checks the files that a loader merges for one command line."""

    def __init__(self, conf: Path, overrides: Iterable[str]) -> None:
        """Take titan's own folder of configuration files, and the overrides, whose values replace those of files."""
        self.trusted_folders = (conf, conf.parent / "experiments", *map(Path, list_own_folders()))
        self.typed, self.packages = trust.list_typed(overrides), trust.list_packages(overrides)

    def check_primary(self, loader: ConfigLoader, name: str) -> None:
        """Check which folders the primary configuration adds, before Hydra searches them and imports packages."""
        source = next((source for source in loader.get_sources() if source.is_config(name)), None)
        if source is not None:
            result = source.load_config(name)
            searched = OmegaConf.select(result.config, SEARCH_PATH)
            folders = OmegaConf.to_container(searched) if OmegaConf.is_config(searched) else searched
            self._check_content(result, name, {SEARCH_PATH: folders})

    def check_file(self, result: ConfigResult, name: str) -> None:
        """Raise ConfigError where a file of a folder that is not trusted sets what only the user may set.

        Args:
            result: the file's content, below the package that it is merged into.
            name: its path in its folder, without its suffix.
        """
        self._check_content(result, name, OmegaConf.to_container(result.config, resolve=False))

    def _check_content(self, result: ConfigResult, name: str, content: Any) -> None:
        scheme, _, folder = result.path.partition("://")
        path = Path(os.path.normpath(Path(os.path.abspath(folder), f"{name.removesuffix('.yaml')}.yaml")))
        if self._is_trusted(scheme, name, path):
            return
        for key, value in trust.list_leaves("", content):
            risk, leaf = explain_file_risk(key, value), (key.removeprefix(trust.SWEPT), value)
            is_own = leaf[0] in self.typed or trust.is_listed(leaf, self.packages)
            if risk and not is_own and not trust.was_typed((key, value)):
                raise ConfigError(_describe_risk(key, value, risk, path, os.path.abspath(folder)))

    def _is_trusted(self, scheme: str, name: str, path: Path) -> bool:
        """Return whether a file is in a trusted folder, or in a package: who names a package runs its code."""
        if scheme == "file":
            return any(path.is_relative_to(folder) for folder in self.trusted_folders)
        return not os.path.normpath(name).startswith("..")


def explain_file_risk(key: str, value: Any) -> str | None:
    """Return what a setting of a file would do that the user must have typed; None for others."""
    return "reads a secret" if _reads_secret(str(value)) else trust.explain_setting(key, value)


def _reads_secret(text: str) -> bool:
    """Return whether a value's interpolations read a variable of the environment that may be a secret."""
    for call in trust.find_resolvers(text):
        variable = _READING.match(call)
        if "${" in call.partition(":")[0] or (call.lstrip().startswith("oc.env") and variable is None):
            return True
        if variable is not None and is_secret(variable[1]):
            return True
        if (decoding := _DECODING.match(call)) and "$" in _CALL.sub("", call[decoding.end() :]):
            return True
    return False


def _describe_risk(key: str, value: Any, risk: str, path: Path, folder: str) -> str:
    text = format_value(value)
    text = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
    folder = folder if path.is_relative_to(folder) else str(path.parent)
    key, folders = key.removeprefix(trust.SWEPT), os.pathsep.join([*list_own_folders(), folder])
    return (
        f"{key}={text}: {path} sets this, which {risk}, and only the command line names its folder; if you trust the "
        f"folder, make it one of yours with export {VARIABLE}={folders}, or give {key}=VALUE here."
    )


def guard_loader(loader: ConfigLoader, conf: Path, name: str, overrides: Collection[str]) -> None:
    """Let a loader check each file that it merges from now on; see `FileGuard`.

    Raises:
        ConfigError: for the primary configuration `name`, which is checked now.
    """
    guard = FileGuard(conf, overrides)
    guard.check_primary(loader, name)
    hydra_private.watch_files(loader, guard.check_file)
