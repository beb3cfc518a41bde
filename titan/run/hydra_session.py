"""Hydra, set up for one composition, with a guard of the files that it may merge."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from titan.config.settings import format_value
from titan.console.text import is_secret
from titan.errors import ConfigError
from titan.run import hydra_private, trust
from titan.run.synonyms import check_optional, describe_value_error

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
    """Return the folders in $TITAN_CONF, absolute."""
    folders = [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"{VARIABLE}={folder}: there is no such folder; correct the variable, or unset it.")
    return [os.path.abspath(folder) for folder in folders]


def guard_loader(loader: ConfigLoader, name: str, overrides: Collection[str]) -> None:
    """Let a loader check what each file that it merges from now on sets; raise ConfigError for the file `name` now.

    The files of a typed search path may start no programs and read no secrets, unless the user types these or trusts
    them. `hydra.searchpath=[...]`, --config-dir and --config-path name a folder for one command, such as one in a
    repository that was cloned. Its owner says nothing about its author: who clones owns the files. So a folder is the
    user's own where $TITAN_CONF names it, besides titan's and those of installed packages.
    """
    trusted_folders = (CONF, CONF.parent / "experiments", *map(Path, list_own_folders()))
    typed, packages = trust.list_typed(overrides), trust.list_packages(overrides)

    def check_file(result: ConfigResult, name: str, content: Any = None) -> None:
        scheme, _, folder = result.path.partition("://")
        path = Path(os.path.normpath(Path(os.path.abspath(folder), f"{name.removesuffix('.yaml')}.yaml")))
        is_in_trusted_folder = scheme == "file" and any(path.is_relative_to(folder) for folder in trusted_folders)
        # who names a package runs its code
        if is_in_trusted_folder or (scheme != "file" and not os.path.normpath(name).startswith("..")):
            return
        if content is None:
            content = OmegaConf.to_container(result.config, resolve=False)
        for key, value in trust.list_leaves("", content):
            risk, leaf = explain_file_risk(key, value), (key.removeprefix(trust.SWEPT), value)
            is_own = leaf[0] in typed or trust.is_listed(leaf, packages)
            if risk and not is_own and not trust.was_typed((key, value)):
                raise ConfigError(_describe_risk(key, value, risk, path, os.path.abspath(folder)))

    source = next((source for source in loader.get_sources() if source.is_config(name)), None)
    if source is not None:  # which folders it adds, before Hydra searches them and imports packages
        result = source.load_config(name)
        searched = OmegaConf.select(result.config, SEARCH_PATH)
        folders = OmegaConf.to_container(searched) if OmegaConf.is_config(searched) else searched
        check_file(result, name, {SEARCH_PATH: folders})
    hydra_private.watch_files(loader, check_file)


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


PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(p for p in (PACKAGE / "conf", PACKAGE.parent / "conf") if p.is_dir())
"""The folder of configuration files: inside the package in a wheel, beside it in a checkout."""
CONFIG = "train"
"""The primary configuration in it."""
BASE = "1.3"
"""The version of Hydra whose defaults hold, as `hydra.runtime.version_base` records it."""


class ExtraConfigs(SearchPathPlugin):
    """Groups of others: packages with an entry point in `titan.plugins`, and the folders in $TITAN_CONF.

    They come after titan's own, so that they add choices and can't replace any. So do the folders that
    `hydra.searchpath` and --config-dir name on the command line: Hydra itself looks into the former only to compose,
    and not for the choices of a group.
    """

    search_folders: ClassVar[tuple[str, ...]] = ()
    """The folders of `hydra.searchpath`. A class variable, since Hydra makes the instance."""
    config_dir: ClassVar[str | None] = None
    """The folder of --config-dir, within `open_hydra`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the other folders."""
        for entry in entry_points(group="titan.plugins"):
            entry.load()  # so that it can register schemas
            search_path.append(entry.name, f"pkg://{entry.value.split(':')[0]}.conf")
        for folder in list_own_folders():
            search_path.append(VARIABLE, f"file://{folder}")
        for path in self.search_folders:
            search_path.append("hydra.searchpath in command-line", path)
        if self.config_dir:
            search_path.append("command-line", f"file://{os.path.abspath(self.config_dir)}")


@contextmanager
def open_hydra(args: argparse.Namespace | None = None) -> Iterator[ConfigLoader]:
    """Initialize Hydra for one composition; give the loader, which knows the choices."""
    GlobalHydra.instance().clear()
    ExtraConfigs.config_dir = getattr(args, "config_dir", None)
    folder = getattr(args, "config_path", None) or str(CONF)
    try:
        initialize_config_dir(os.path.abspath(folder), job_name="train", version_base=BASE)
    finally:
        ExtraConfigs.config_dir = None
    try:
        yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()


def compose_config(overrides: Sequence[str], name: str | None = None, mode: RunMode = RunMode.RUN) -> DictConfig:
    """Return what overrides compose, Hydra's own node included, within `open_hydra`.

    Raises:
        ConfigError: for a choice that does not exist, or has no name, and for a file that sets what only the user may.
    """
    loader = GlobalHydra.instance().config_loader()

    def list_choices(group: str) -> list[str]:
        return loader.get_group_options(group, ObjectType.CONFIG)

    guard_loader(loader, name or CONFIG, overrides)
    try:
        if mode == RunMode.RUN:
            cfg = compose(name or CONFIG, list(overrides), return_hydra_config=True)
        else:
            cfg = hydra_private.compose_mode(overrides, name or CONFIG, mode)
    except ValueError as error:
        raise ConfigError(describe_value_error(error, overrides, list_choices)) from error
    check_optional(list_choices, cfg)
    return cfg


def drop_hydra_node(cfg: DictConfig) -> DictConfig:
    """Return the configuration without Hydra's own node."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
