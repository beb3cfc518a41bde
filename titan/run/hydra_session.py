"""Hydra, set up for one composition."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar

from hydra._internal import utils as hydra_utils
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from titan.errors import ConfigError
from titan.run.hydra_choices import check_optional, value_error

here = Path(__file__).resolve().parents[1]


CONF = next(p for p in (here / "conf", here.parent / "conf") if p.is_dir())
"""The configuration's folder: inside the package in a wheel, beside it in a checkout."""


CONFIG = "train"


class ExtraConfigs(SearchPathPlugin):
    """Groups of others: packages with an entry point in `titan.plugins`, and the folders in $TITAN_CONF.

    They come after titan's own, so that they add choices and can't replace any. So does what `hydra.searchpath` names
    on the command line: Hydra itself looks there only when it composes, and not for what there is to choose from.
    """

    asked: ClassVar[tuple[str, ...]] = ()
    """The folders that the command line names; Hydra makes the instance."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the other folders."""
        for entry in entry_points(group="titan.plugins"):
            entry.load()  # so that it can register schemas of its own
            search_path.append(entry.name, f"pkg://{entry.value.split(':')[0]}.conf")
        for folder in filter(None, os.environ.get("TITAN_CONF", "").split(os.pathsep)):
            search_path.append("TITAN_CONF", f"file://{os.path.abspath(folder)}")
        for path in self.asked:
            search_path.append("hydra.searchpath in command-line", path)


class Session:
    """Hydra, set up for one composition."""

    def __init__(self, args: argparse.Namespace | None = None) -> None:
        self.folder = getattr(args, "config_path", None) or str(CONF)
        self.extra = getattr(args, "config_dir", None)

    def __enter__(self) -> Hydra:
        GlobalHydra.instance().clear()
        path = hydra_utils.create_automatic_config_search_path(None, None, self.folder)
        if self.extra:
            before = SearchPathQuery(provider="schema")  # Hydra wants that one to stay the last
            path.prepend("command-line", f"file://{os.path.abspath(self.extra)}", before)
        return Hydra.create_main_hydra2("train", path)

    def __exit__(self, *error: object) -> None:
        GlobalHydra.instance().clear()


def compose_config(
    hydra: Hydra, overrides: list[str], name: str | None = None, mode: RunMode = RunMode.RUN
) -> DictConfig:
    """What overrides compose, Hydra's own node included."""
    try:
        cfg = hydra.compose_config(
            config_name=name or CONFIG, overrides=overrides, run_mode=mode, with_log_configuration=False
        )
    except ValueError as error:
        raise ConfigError(value_error(error, overrides)) from error
    check_optional(lambda group: hydra.config_loader.get_group_options(group, ObjectType.CONFIG), cfg)
    return cfg


def without_hydra(cfg: DictConfig) -> DictConfig:
    """The configuration without Hydra's own node."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
