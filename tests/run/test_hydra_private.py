"""Hydra's private names: those of the supported versions, in one module."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet

from titan.run import hydra_private

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ">=1.3.2,<1.4"
"""Versions of Hydra whose private names are those used here."""
USED: dict[str, tuple[str, ...]] = {
    "hydra._internal.utils._run_hydra": ("args", "args_parser", "task_function", "config_path", "config_name"),
    "hydra._internal.utils.get_args_parser": (),
    "hydra._internal.callbacks.Callbacks": ("config",),
    "hydra._internal.hydra.Hydra.compose_config": (
        "self", "config_name", "overrides", "run_mode", "with_log_configuration",
    ),
    "hydra._internal.config_loader_impl.get_overrides_dirname": ("overrides", "exclude_keys", "item_sep", "kv_sep"),
    "hydra._internal.config_loader_impl.ConfigLoaderImpl._apply_overrides_to_config": ("overrides", "cfg"),
    "hydra._internal.config_loader_impl.ConfigLoaderImpl._load_single_config": ("self", "default", "repo"),
    "hydra._internal.config_loader_impl.ConfigLoaderImpl.load_configuration": (
        "self", "config_name", "overrides", "run_mode",
    ),
    "hydra._internal.config_loader_impl.ConfigLoaderImpl.validate_sweep_overrides_legal": (
        "overrides", "run_mode", "from_shell",
    ),
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper.setup": (
        "self", "hydra_context", "task_function", "config",
    ),
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper.validate_batch_is_legal": ("self", "batch"),
    "omegaconf._utils.get_omega_conf_dumper": (),
}  # fmt: skip
"""The private names, with the parameters that titan passes or overrides."""


def resolved(name: str) -> Any:
    """What a dotted name is, in the longest module that can be imported."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_the_installed_version_is_supported() -> None:
    assert version("hydra-core") in SpecifierSet(SUPPORTED)


def test_the_package_asks_for_the_supported_versions() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"hydra-core{SUPPORTED}" in asked


@pytest.mark.parametrize("name", USED)
def test_a_private_name_is_there_with_its_parameters(name: str) -> None:
    assert list(USED[name]) == [
        parameter for parameter in inspect.signature(resolved(name)).parameters if parameter in USED[name]
    ]


def test_the_store_of_choices_has_groups() -> None:
    store = ConfigStore.instance()
    store.store(group="made_up/stripes", name="a", node={})
    store.repo["made_up"]["stripes"].clear()
    assert store.list("made_up/stripes") == []


def test_yaml_is_what_omegaconf_writes() -> None:
    texts = ["1e-4", "yes", "null", "0o7", "${a.b}", "???", "", "ä\n b", "1:20", "2024-01-01"]
    content = {"texts": texts, "numbers": [1e-4, 1e20, 0, True, None], "nested": {"a": {}, "b": [], "1": {"c": "x: y"}}}
    assert hydra_private.dump_yaml(content) == OmegaConf.to_yaml(OmegaConf.create(content))


@pytest.mark.full
def test_no_other_module_uses_private_names() -> None:
    private = re.compile(r"^\s*(from|import) (hydra|omegaconf)\._|\bimport_module\(.hydra\._", re.MULTILINE)
    files = [file for top in ("titan", "launchers", "tests") for file in (ROOT / top).rglob("*.py")]
    users = {str(file.relative_to(ROOT)) for file in files if private.search(file.read_text())}
    assert users == {"titan/run/hydra_private.py"}
