"""Hydra, set up for one composition."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from titan.errors import ConfigError
from titan.run import hydra_private, searched_files
from titan.run.hydra_choices import check_optional, describe_value_error

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
    """The folder of --config-dir, within a `HydraSession`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the other folders."""
        for entry in entry_points(group="titan.plugins"):
            entry.load()  # so that it can register schemas
            search_path.append(entry.name, f"pkg://{entry.value.split(':')[0]}.conf")
        for folder in searched_files.list_own_folders():
            search_path.append(searched_files.VARIABLE, f"file://{folder}")
        for path in self.search_folders:
            search_path.append("hydra.searchpath in command-line", path)
        if self.config_dir:
            search_path.append("command-line", f"file://{os.path.abspath(self.config_dir)}")


class HydraSession:
    """Hydra, initialized for one composition. A context manager; gives the loader, which knows the choices."""

    def __init__(self, args: argparse.Namespace | None = None) -> None:
        self.folder = getattr(args, "config_path", None) or str(CONF)
        self.extra = getattr(args, "config_dir", None)

    def __enter__(self) -> ConfigLoader:
        GlobalHydra.instance().clear()
        ExtraConfigs.config_dir = self.extra
        try:
            initialize_config_dir(os.path.abspath(self.folder), job_name="train", version_base=BASE)
        finally:
            ExtraConfigs.config_dir = None
        return GlobalHydra.instance().config_loader()

    def __exit__(self, *error: object) -> None:
        GlobalHydra.instance().clear()


def compose_config(overrides: Sequence[str], name: str | None = None, mode: RunMode = RunMode.RUN) -> DictConfig:
    """Return what overrides compose, Hydra's own node included, within a `HydraSession`.

    Raises:
        ConfigError: for a choice that does not exist, or has no name, and for a file that sets what only the user may.
    """
    loader = GlobalHydra.instance().config_loader()

    def list_choices(group: str) -> list[str]:
        return loader.get_group_options(group, ObjectType.CONFIG)

    searched_files.guard_loader(loader, CONF, name or CONFIG, overrides)
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
