"""Hydra in, checked Run out.

A command line becomes a run in two steps: Hydra composes `conf/` and the overrides; `freeze_run` turns the result into
    a
typed, frozen `Run` and checks it; errors are one sentence and exit code 2. Hydra's main would exit with 1, print
several lines and create the run's directory before the checks: so titan calls Hydra itself, and leaves to its main what
only prints (`--cfg`, `--info`, completion) and sweeps (`-m`), whose trials titan's launcher runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from titan.cluster import devices
from titan.cluster.checks import check_cluster
from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.config import modules, settings
from titan.config.warning import warn_once
from titan.console.text import is_secret, redact, redact_nested
from titan.errors import ConfigError, UnknownSettingError
from titan.run import command_line, hydra_node, hydra_private, synonyms, trust
from titan.run.axes import PLUGGABLE
from titan.run.hydra_errors import HydraErrors, list_names
from titan.run.hydra_session import CONF, CONFIG, ExtraConfigs, HydraSession, compose_config, drop_hydra_node
from titan.run.open_layout import resolve_open_layout
from titan.run.paths import check_name
from titan.run.resolve import resolve
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.sweep.schema import GRID, LAUNCHER_MODULE, LAUNCHERS, OPTUNA, OptunaSearch, Sweep
from titan.training.schema import LossTerm


def register_configs() -> None:
    """Register schemas, search path and launchers with Hydra; idempotent."""
    store = hydra_private.share_store()
    hydra_private.open_own_classes()
    if "run.yaml" not in store.repo.get("schema", {}):  # others may have stored theirs before
        _register_schemas(store)
    Plugins.instance().register(ExtraConfigs)
    _register_launchers(store)


def _register_schemas(store: ConfigStore) -> None:
    for axis, kinds in PLUGGABLE.items():
        for kind, cls in kinds.items():
            store.store(name=kind, group=f"schema/{axis}", node=settings.collect_defaults(cls))
    store.store(name="base", group="schema/loss_term", node=settings.collect_defaults(LossTerm))
    fixed_nodes = settings.collect_defaults(Recipe)
    choice_nodes = dict.fromkeys(PLUGGABLE, settings.MISSING)
    store.store(
        name="run", group="schema", node=fixed_nodes | choice_nodes | {"sweep": settings.collect_defaults(Sweep)}
    )
    hydra_private.add_group(store, "hooks")


def _register_launchers(store: ConfigStore) -> None:
    """Register titan's launchers and sweepers, in place of those of Hydra and of plugins."""
    hydra_private.clear_group(store, "hydra", "launcher")
    for name, node in _build_launcher_nodes().items():
        store.store(group="hydra/launcher", name=name, node=node, provider="titan")
    sweeper = {"_target_": GRID, "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="grid", node=sweeper, provider="titan")
    search = {"_target_": OPTUNA, **settings.collect_defaults(OptunaSearch), "params": None}
    store.store(group="hydra/sweeper", name="optuna", node=search, provider="titan")


@cache
def _build_launcher_nodes() -> dict[str, DictConfig]:
    """Return the node of each launcher, made once: composing begins with registering them."""
    nodes = {
        n: {"_target_": f"{LAUNCHER_MODULE}.{cls}", **settings.collect_defaults(s)} for n, (cls, s) in LAUNCHERS.items()
    }
    return {name: OmegaConf.create(node) for name, node in nodes.items()}


def compose_run(overrides: Sequence[str], ranks: int | None = None, remote: bool = False) -> Run:
    """Return the checked Run of a list of overrides; see `freeze_run`; raises `ConfigError`."""
    register_configs()
    with HydraErrors(overrides), HydraSession():
        trusted = modules.list_trusted_packages(overrides)
        return freeze_run(compose_config(overrides), ranks=ranks, remote=remote, trusted=trusted)


def freeze_run(
    cfg: DictConfig,
    directory: str | None = None,
    ranks: int | None = None,
    remote: bool = False,
    find_machine: Callable[[Cluster], Machine] | None = None,
    trusted: tuple[str, ...] = (),
    is_searched: bool = False,
) -> Run:
    """Return a typed and checked `Run` for what Hydra composed, its own node included.

    Args:
        directory: where results go; None: `hydra.run.dir`.
        ranks: see `titan.run.resolve.resolve`.
        remote: the run is for the nodes that `cluster` describes, not for this machine.
        find_machine: returns the machine of the run; None: detect it.
        trusted: packages that may be imported: `titan.config.modules.list_trusted_packages`.
        is_searched: whether its layout is searched, so that it need not work: `titan.run.open_layout`.

    Raises:
        ConfigError: when the run can't work.
    """
    HydraConfig.instance().set_config(cfg)
    if str(cfg.name) and not str(cfg.hydra.run.dir).strip():  # the name first: the directory follows from it
        raise ConfigError("hydra.run.dir=: names no directory; give one, or name=NAME.")
    hydra_node.check(cfg)
    directory = os.path.abspath(directory or str(cfg.hydra.run.dir))
    settings.check_text(directory, f"hydra.run.dir={directory}")
    hydra_node.set_output_dir(cfg, directory)
    recipe = _build_recipe(cfg, trusted)
    if find_machine is None:
        machine = (
            devices.describe_remote_node(recipe.cluster) if remote else devices.detect_machine(recipe.cluster.device)
        )
    else:
        machine = find_machine(recipe.cluster)
    choices = {str(k): str(v) for k, v in cfg.hydra.runtime.choices.items() if k in recipe.axes()}
    typed: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    overrides = tuple(redact(str(override)) for override in typed)
    resolve_recipe = resolve_open_layout if is_searched else resolve
    return resolve_recipe(
        recipe,
        machine,
        directory,
        ranks=ranks,
        remote=remote,
        choices=choices,
        overrides=overrides,
        hydra=hydra_node.build_files(cfg),
        options=hydra_node.build_options(cfg, str(CONF), CONFIG),
    )


def _build_recipe(cfg: DictConfig, trusted: tuple[str, ...]) -> Recipe:
    HydraConfig.instance().set_config(cfg)
    own_config = drop_hydra_node(cfg)
    content: Any = OmegaConf.to_container(own_config, resolve=True)
    if not isinstance(content, dict):
        raise ConfigError("the configuration is not a mapping.")
    _warn_of_secrets(OmegaConf.to_container(own_config, resolve=False), redact_nested(content))
    settings.build(Sweep, content.pop("sweep", {}), "sweep")
    if cfg.hydra.job.env_set and isinstance(content.get("cluster"), dict):
        environment = content["cluster"].get("environment") or {}
        hydra_environment = OmegaConf.to_container(cfg.hydra.job.env_set)
        content["cluster"]["environment"] = {**environment, **hydra_environment}  # type: ignore[dict-item]
    modules.check_modules(content.get("modules") or [], trusted)
    settings.check_targets(content, trusted)
    try:
        if settings.is_foreign(content):
            _check_before_import(content)
        typed_recipe: Recipe = settings.build(Recipe, content, allowed=trusted)
    except UnknownSettingError as error:  # a name in a file, or added by `+`
        raise synonyms.build_error(error.typed, error.key, frozenset(list_names(content))) or error from None
    return typed_recipe


def _check_before_import(content: dict[str, Any]) -> None:
    """Raise ConfigError for errors that need no third-party code to find, before that is imported."""
    check_name(str(content.get("name")))
    own_settings = {axis: value for axis, value in content.items() if not settings.is_foreign(value)}
    schemas = settings.build_fields(Recipe, own_settings)
    for axis in ("model", "training", "parallelism", "dataset"):
        if axis in schemas:
            schemas[axis].check()
    if "cluster" in schemas:
        check_cluster(schemas["cluster"])
    if {"schedule", "training"} <= schemas.keys():
        schemas["schedule"].check(schemas["training"].steps)


def _warn_of_secrets(written: Any, content: Any, path: str = "") -> None:
    """Warn when `${oc.env:NAME}` in files (`written`) puts a secret into `content`, which run.yaml will have."""
    if isinstance(written, dict):
        for key, value in written.items():
            _warn_of_secrets(value, content[key], f"{path}.{key}".lstrip("."))
    elif isinstance(written, list):
        for value, text in zip(written, content, strict=True):
            _warn_of_secrets(value, text, path)
    elif isinstance(written, str):
        for name in _ENVIRONMENT.findall(written):
            if is_secret(name) and (os.environ.get(name) or "\n") in str(content):
                warn_once(
                    f"{path}={written}: the value of {name} goes into run.yaml and to trackers; let the library that "
                    "needs it read it from the environment."
                )


_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)")


def compose_recipe(arguments: Sequence[str]) -> Recipe:
    """Return the typed recipe of a command line, whether or not this machine can run it.

    Raises:
        ConfigError: for an unknown choice or setting, and for options that only print something.
    """
    register_configs()
    args = command_line.parse(arguments)
    command_line.reject_shown(args)
    with HydraErrors(args.overrides), HydraSession(args):
        command_line.check(args)
        cfg = compose_config(args.overrides, args.config_name)
        check_weights(cfg, args.typed)
        return _build_recipe(cfg, modules.list_trusted_packages(args.typed))


def check_weights(cfg: DictConfig, typed: Sequence[str]) -> None:
    """Raise ConfigError where a typed mapping of a mixture's weights leaves out sources, whose weights Hydra keeps.

    Args:
        typed: the overrides of the command line, without those of a run that it resumes.
    """
    for word in (word for word in typed if word.lstrip("+").startswith("dataset.weights=")):
        named = {key.removeprefix("dataset.weights.") for key in trust.list_typed([word])}
        weights: Any = OmegaConf.to_container(OmegaConf.select(cfg, "dataset.weights") or OmegaConf.create({}))
        kept = {name: weight for name, weight in weights.items() if weight and name not in named}
        if kept and named & weights.keys():
            whole = settings.format_value({**weights, **dict.fromkeys(kept, 0)})
            raise ConfigError(
                f"{word}: is merged with the weights of the other sources ({settings.format_value(kept)}); give "
                f"dataset.weights={whole} to leave these out, or dataset.weights.NAME=VALUE to change one."
            )
