"""Hydra in, checked Run out.

A command line becomes a run in two steps: Hydra composes `conf/` and the overrides; `freeze_run` turns the result into
    a
typed, frozen `Run` and checks it; errors are one sentence and exit code 2. Hydra's main would exit with 1, print
several lines and create the run's directory before the checks: so titan calls Hydra itself, and leaves to its main what
only prints (`--cfg`, `--info`, completion) and sweeps (`-m`), whose trials titan's launcher runs.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from titan.cluster import devices
from titan.cluster.checks import check_cluster
from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.config import modules, settings
from titan.config.warning import warn_once
from titan.console.numbers import format_rounded
from titan.console.text import is_secret, redact, redact_nested
from titan.errors import ConfigError, UnknownSettingError
from titan.estimate import fit
from titan.files.run_directory import check_length, check_name
from titan.run import command_line, hydra_private, hydra_session, synonyms, trust
from titan.run.axes import PLUGGABLE
from titan.run.hydra_errors import list_names, translate_errors
from titan.run.hydra_session import CONF, ExtraConfigs, compose_config, open_hydra
from titan.run.resolve import resolve, resolve_open_layout
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.sweep.schema import GRID, LAUNCHER_MODULE, LAUNCHERS, OPTUNA, OptunaSearch, Sweep
from titan.training.schema import LossTerm

if TYPE_CHECKING:
    from titan.run.run import Run

MachineFinder = Callable[[Cluster, bool], Machine]


def register_configs() -> None:
    """Register schemas, search path and launchers with Hydra; idempotent."""
    store = hydra_private.adapt_hydra()
    if "run.yaml" not in store.repo.get("schema", {}):  # others may have stored theirs before
        kinds = {(f"schema/{axis}", kind): cls for axis, classes in PLUGGABLE.items() for kind, cls in classes.items()}
        for (group, name), cls in (kinds | {("schema/loss_term", "base"): LossTerm}).items():
            store.store(name=name, group=group, node=settings.collect_defaults(cls))
        run_node = settings.collect_defaults(Recipe) | dict.fromkeys(PLUGGABLE, settings.MISSING)
        store.store(name="run", group="schema", node=run_node | {"sweep": settings.collect_defaults(Sweep)})
        store.repo.setdefault("hooks", {})  # without choices yet: else Hydra takes its override for a value
    Plugins.instance().register(ExtraConfigs)
    store.repo["hydra"]["launcher"].clear()  # of Hydra's and of plugins
    for (group, name), node in _build_plugin_nodes().items():
        store.store(group=f"hydra/{group}", name=name, node=node, provider="titan")


@cache
def _build_plugin_nodes() -> dict[tuple[str, str], DictConfig]:
    """Return the nodes of titan's launchers and sweepers, made once: composing begins with registering them."""
    nodes: dict[tuple[str, str], dict[str, Any]] = {
        ("launcher", name): {"_target_": f"{LAUNCHER_MODULE}.{cls}", **settings.collect_defaults(schema)}
        for name, (cls, schema) in LAUNCHERS.items()
    }
    nodes["sweeper", "grid"] = {"_target_": GRID, "max_batch_size": None, "params": None}
    nodes["sweeper", "optuna"] = {"_target_": OPTUNA, **settings.collect_defaults(OptunaSearch), "params": None}
    return {name: OmegaConf.create(node) for name, node in nodes.items()}


def compose_run(overrides: Sequence[str], ranks: int | None = None, remote: bool = False) -> Run:
    """Return the checked Run of a list of overrides; see `freeze_run`; raises `ConfigError`."""
    register_configs()
    with translate_errors(overrides), open_hydra():
        trusted = modules.list_trusted_packages(overrides)
        return freeze_run(compose_config(overrides), ranks=ranks, remote=remote, trusted=trusted)


def get_machine(cluster: Cluster, remote: bool) -> Machine:
    """Return this machine, or the node that a scheduler will provide."""
    return devices.describe_remote_node(cluster) if remote else devices.detect_machine(cluster.device)


def freeze_run(
    cfg: DictConfig,
    directory: str | None = None,
    ranks: int | None = None,
    remote: bool = False,
    find_machine: MachineFinder = get_machine,
    trusted: tuple[str, ...] = (),
    is_searched: bool = False,
) -> Run:
    """Return a typed and checked `Run` for what Hydra composed, its own node included.

    Args:
        directory: where results go; None: `hydra.run.dir`.
        remote: the run is for the nodes that `cluster` describes, not for this machine.
        find_machine: see `get_machine`.
        trusted: packages that may be imported: `titan.config.modules.list_trusted_packages`.
        is_searched: whether its layout is searched, so that it need not work: `titan.run.resolve`.
    """
    HydraConfig.instance().set_config(cfg)
    node = cfg.hydra
    if str(cfg.name) and not str(node.run.dir).strip():  # the name first: the directory follows from it
        raise ConfigError("hydra.run.dir=: names no directory; give one, or name=NAME.")
    hydra_session.check_node(cfg)
    directory = os.path.abspath(directory or str(node.run.dir))
    settings.check_text(directory, f"hydra.run.dir={directory}")
    with read_write(node.runtime), open_dict(node.runtime):  # as Hydra does when a job begins
        node.runtime.output_dir = directory
    recipe = _build_recipe(cfg, trusted)
    machine = find_machine(recipe.cluster, remote)
    check_name(recipe.name)
    check_length(directory, f"hydra.run.dir={directory}")
    resolve_recipe, axes = resolve_open_layout if is_searched else resolve, recipe.axes()
    typed: Any = OmegaConf.to_container(node.overrides.task)
    return resolve_recipe(
        recipe,
        machine,
        directory,
        ranks=ranks,
        remote=remote,
        choices={str(k): str(v) for k, v in node.runtime.choices.items() if k in axes},
        overrides=tuple(redact(str(override)) for override in typed),
        hydra=hydra_session.build_files(cfg),
        options=hydra_session.build_options(cfg),
    )


def _build_recipe(cfg: DictConfig, trusted: tuple[str, ...]) -> Recipe:
    HydraConfig.instance().set_config(cfg)
    own_config = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
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
    for name in _ENVIRONMENT.findall(written) if isinstance(written, str) else ():
        if is_secret(name) and (os.environ.get(name) or "\n") in str(content):
            warn_once(
                f"{path}={written}: the value of {name} goes into run.yaml and to trackers; let the library that needs "
                "it read it from the environment."
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
    with translate_errors(args.overrides), open_hydra(args):
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
        node = OmegaConf.select(cfg, "dataset.weights")
        weights: Any = OmegaConf.to_container(node) if isinstance(node, DictConfig) else {}
        kept = {name: weight for name, weight in weights.items() if weight and name not in named}
        if kept and named & weights.keys():
            whole = settings.format_value({**weights, **dict.fromkeys(kept, 0)})
            raise ConfigError(
                f"{word}: is merged with the weights of the other sources ({settings.format_value(kept)}); give "
                f"dataset.weights={whole} to leave these out, or dataset.weights.NAME=VALUE to change one."
            )


LARGE_MODEL = 100_000_000
"""Parameters from which a model is not for tests."""
SHORT_SHARE = 8
"""Rows are far shorter than the context before RoPE scaling if they have less than this fraction of its tokens."""
SAVED_SHARE = 0.05
"""Share of a rank's memory that a recommended setting saves at least."""
FEW_TOKENS = 2048
"""Tokens of a GPU in a step below which reading and gathering weights takes longer than computing with them."""


def warn_of_small_work(run: Run, planned: bool = False) -> None:
    """Warn of rows that are far shorter than the context before RoPE scaling, of few tokens for each GPU, or of experts
    that ranks do not share.

    Args:
        run: the run; on a CPU, with a small model, or on one GPU if it is not planned, there is no warning.
    """
    _recommend_shared_experts(run)
    is_relevant = planned or run.layout.devices > 1
    is_large = run.machine.device == "cuda" and run.model.parameters() >= LARGE_MODEL
    if is_relevant and is_large and (sentence := describe_small_work(run)):
        warn_once(sentence)


def _recommend_shared_experts(run: Run) -> None:
    """Warn where each tensor rank has whole experts, and `expert=auto` needs less memory."""
    layout, device = run.layout, run.machine.device
    if layout.tensor == 1 or layout.expert > 1 or not run.parallelism.sequence_parallel:
        return
    node = fit.count_node_devices(run, run.machine)
    degree = math.gcd(layout.sharded * layout.tensor, fit.find_largest_degrees(run, node)["expert"])
    if degree == 1:
        return
    present, less = (
        fit.estimate_memory(run, candidate, run.microbatches, device).gib
        for candidate in (layout, replace(layout, expert=degree))
    )
    if less < present * (1 - SAVED_SHARE):
        warn_once(
            f"parallelism.expert=1: each of {layout.tensor} tensor ranks has whole experts; with "
            f"parallelism.expert=auto, which shares them among {degree} ranks, a rank needs {format_rounded(less)} "
            f"instead of {format_rounded(present)} GiB."
        )


def describe_small_work(run: Run) -> str:
    """Return what a run has little of, with the settings to change; empty where it has enough."""
    training, model = run.training, run.model
    context = model.rope_original if model.rope_factor != 1 else 0  # without RoPE scaling nothing names the context
    tokens = run.rank_rows * training.seq_len // run.layout.context
    is_short, is_few = SHORT_SHARE * training.seq_len < context, tokens < FEW_TOKENS
    reasons = [f"rows are far shorter than the {context:,} tokens of model.rope_original"] * is_short
    rows, ranks = training.rows, run.layout.data_ranks
    reasons += [f"only {rows:,} of {ranks:,} data-parallel ranks have a row"] * (rows < ranks)
    reasons += [f"each GPU computes only {tokens:,} tokens per step"] * is_few
    if not reasons:
        return ""
    seq_len = context if is_short else training.seq_len
    rank_rows = math.ceil(FEW_TOKENS * run.layout.context / seq_len)  # that give each GPU enough tokens
    batch = max(ranks * rank_rows, math.ceil(training.global_batch / seq_len)) * seq_len
    changes = [f"training.seq_len={seq_len}"] * is_short
    changes += [f"training.global_batch={batch} or more"] * (batch != training.global_batch)
    settings = f"training.seq_len={training.seq_len} training.global_batch={training.global_batch}"
    is_chosen = any(override.lstrip("+").startswith("recipe=") for override in run.overrides)
    files = sorted((CONF / "recipe").glob("train_*.yaml")) if is_short and is_few and not is_chosen else []
    recipe = next((f.stem for f in files if f"/model: {run.choices.get('model')}\n" in f.read_text()), None)
    complete = f"; recipe={recipe} is a complete choice for a real run" if recipe else ""
    return f"{settings}: {', and '.join(reasons)}; give {' and '.join(changes)}{complete}."
