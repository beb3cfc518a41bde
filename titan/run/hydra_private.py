"""Everything that titan uses of Hydra and OmegaConf beside their public APIs: no other module imports it.

Hydra's public API composes one run (`initialize_config_dir`, `compose`), which `titan.run.hydra_session` uses. Sweeps,
callbacks, the command line's options and what --cfg and --info show have none. tests/run/test_hydra_private.py fails
when another Hydra than the supported ones is installed, or lacks one of these names.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from hydra._internal import utils
from hydra._internal.callbacks import Callbacks as Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl as ConfigLoaderImpl
from hydra._internal.config_loader_impl import get_overrides_dirname as get_overrides_dirname
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from titan.config.settings import is_foreign

build_option_parser: Callable[[], argparse.ArgumentParser] = utils.get_args_parser
"""Returns the parser of Hydra's options."""


def compose_mode(overrides: Sequence[str], name: str, mode: RunMode, log: bool = False) -> DictConfig:
    """Compose as `hydra.compose` does, within `open_hydra`, for a sweep too.

    Args:
        log: configure logging by `hydra.verbose`, and print what the configuration was composed from.
    """
    hydra: Any = GlobalHydra.instance().hydra
    cfg: DictConfig = hydra.compose_config(name, list(overrides), run_mode=mode, with_log_configuration=log)
    return cfg


_apply_to_closed = ConfigLoaderImpl._apply_overrides_to_config


def _apply_overrides(overrides: Sequence[Override], cfg: DictConfig) -> None:
    for override in overrides:
        group = override.key_or_group.rpartition(".")[0]
        while group and not group.startswith("hydra"):
            target = OmegaConf.select(cfg, f"{group}._target_", throw_on_resolution_failure=False)
            if is_foreign({"_target_": target}):
                OmegaConf.set_struct(OmegaConf.select(cfg, group), False)
            group = group.rpartition(".")[0]
        _apply_to_closed([override], cfg)


def hand_over(args: argparse.Namespace, task: Callable[[DictConfig], Any], folder: str, name: str) -> None:
    """Let Hydra carry out a sweep, --cfg, --info or completion."""
    utils._run_hydra(args, build_option_parser(), task, folder, name)


def load_basic_sweeper() -> type[Any]:
    """Return the class of Hydra's own sweeper: Hydra imports its plugins anew when it looks for them."""
    Plugins.instance()
    sweeper: type[Any] = importlib.import_module("hydra._internal.core_plugins.basic_sweeper").BasicSweeper
    return sweeper


def watch_files(loader: Any, check: Callable[[ConfigResult, str], None]) -> None:
    """Let a loader call `check` with each file that it merges, and the file's path in its folder."""

    def load_and_check(default: Any, repo: Any) -> ConfigResult:
        result: ConfigResult = ConfigLoaderImpl._load_single_config(loader, default, repo)
        check(result, default.config_path)
        return result

    loader._load_single_config = load_and_check


def adapt_hydra() -> ConfigStore:
    """Change what Hydra does, and return its store of schemas.

    Overrides may name fields of a class outside of titan without a `+`; who imports and builds it checks them. The
    store becomes one that copies of Hydra's repositories share: Hydra copies the repository for each composition, with
    all schemas in it, and never changes those; what it loads from the store is a copy. That copy would take an eighth
    of the time to compose.
    """
    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply_overrides)  # type: ignore[method-assign]
    store = ConfigStore.instance()
    store.__dict__["__deepcopy__"] = lambda memo: store
    return store


def dump_yaml(content: Any) -> str:
    """Return plain containers as the text that `OmegaConf.to_yaml` gives, which makes nodes of each value first."""
    dumper = get_omega_conf_dumper()
    text: str = yaml.dump(content, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=dumper)
    return text
