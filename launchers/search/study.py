"""What a search varies, and Optuna's study of it: in one file beside the trials, opened by one command at a time.

Values of overrides become Optuna's distributions, and drawn values overrides. The file is Optuna's journal: one line
per change, so that a kill at any moment costs at most the last line. Imported only where Optuna is installed.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from hydra.core.override_parser.types import Override
from optuna import Study, pruners, samplers
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
)
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from titan.errors import ConfigError
from titan.files import locks
from titan.sweep.labels import clean_override
from titan.sweep.schema import OptunaSearch

Space = dict[str, BaseDistribution]  # the distribution of each setting that varies, by its name as typed
MAX_COMBINATIONS = 10_000  # combinations of a grid that Optuna is given
STORAGE = "study.journal"  # the study's file in a sweep's directory
FIXED = "fixed"  # the attribute of a study that has the settings which do not vary
FREE = ("cluster.", "hydra.", "name=", "metrics.")  # beginnings of settings that may change when a study continues


def build_space(overrides: Sequence[Override]) -> Space:
    """Return the distributions of the overrides that have several values.

    Raises:
        ConfigError: where nothing varies, or an interval has no values.
    """
    space = {str(o.get_key_element()): _build_distribution(o) for o in overrides if o.is_sweep_override()}
    if not space:
        raise ConfigError(
            "hydra/sweeper=optuna: nothing varies; give values, such as 'optimizer.lr=tag(log,interval(1e-4,1e-2))'."
        )
    return space


def _build_distribution(override: Override) -> BaseDistribution:
    try:
        if override.is_interval_sweep():
            interval: Any = override.value()
            low, high, is_log = interval.start, interval.end, "log" in interval.tags
            is_whole = isinstance(low, int) and isinstance(high, int)
            return IntDistribution(low, high, log=is_log) if is_whole else FloatDistribution(low, high, log=is_log)
        if override.is_range_sweep():
            return _build_range([float(value) for value in override.sweep_string_iterator()], override.value())
        return CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
    except ValueError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{override.input_line}: {reason}; correct the values.") from error


def _build_range(values: Sequence[float], sweep: Any) -> BaseDistribution:
    """Return the distribution of a range; as in a grid, its end is not in it."""
    if not values:
        raise ValueError("the range is empty")
    if all(isinstance(number, int) for number in (sweep.start, sweep.stop, sweep.step)):
        return IntDistribution(int(min(values)), int(max(values)), step=abs(sweep.step))
    bounds = [add_steps(float(sweep.start), float(sweep.step), count) for count in (0, len(values) - 1)]
    return FloatDistribution(min(bounds), max(bounds), step=abs(float(sweep.step)))


def add_steps(low: float, step: float, count: int) -> float:
    """Return low + count * step as in decimal numbers: Optuna leaves out an end that is a rounding error away."""
    return float(Decimal(str(low)) + count * Decimal(str(step)))


def format_values(values: Mapping[str, Any]) -> list[str]:
    """Return drawn values as overrides."""
    return [clean_override(f"{name}={value}") for name, value in values.items()]


def list_corners(space: Space) -> list[dict[str, Any]]:
    """Return two combinations, of the first and of the last values, by which a search is checked before it starts."""
    kinds: dict[str, Any] = dict(space)
    bounds = {name: getattr(kind, "choices", None) or (kind.low, kind.high) for name, kind in kinds.items()}
    return [{name: values[index] for name, values in bounds.items()} for index in (0, -1)]


def list_values(name: str, distribution: Any) -> list[Any]:
    """Return all values of a distribution, for a grid; raise ConfigError where it has infinitely many, or too many."""
    if choices := getattr(distribution, "choices", None):
        return list(choices)
    if distribution.step is None or distribution.log:
        raise ConfigError(
            f"hydra.sweeper.sampler=grid: {name} has an interval; give values or range(START,STOP,STEP), or take "
            "another sampler."
        )
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    if count > MAX_COMBINATIONS:
        raise ConfigError(f"hydra.sweeper.sampler=grid: {name} has {count:,} values; give fewer.")
    if isinstance(distribution.low, int):
        return [distribution.low + index * distribution.step for index in range(count)]
    return [add_steps(distribution.low, distribution.step, index) for index in range(count)]


def check_settings(settings: OptunaSearch, space: Space) -> None:
    """Raise ConfigError where the sampler can't choose values of a setting, or the storage is no file."""
    choices = [name for name, distribution in space.items() if hasattr(distribution, "choices")]
    if settings.sampler == "cmaes" and choices:  # Optuna would draw them at random
        raise ConfigError(
            f"hydra.sweeper.sampler=cmaes: {' and '.join(choices)} {'is' if len(choices) == 1 else 'are'} a choice of "
            "values, which it can't learn from; take hydra.sweeper.sampler=tpe, or give an interval."
        )
    if settings.storage is not None and "://" in settings.storage:
        raise ConfigError(f"hydra.sweeper.storage={settings.storage}: is no file; give a path, or leave it out.")


@contextmanager
def open_study(
    root: Path, settings: OptunaSearch, direction: str, space: Space, fixed: Sequence[str]
) -> Iterator[Study]:
    """Open the study of a sweep while the block runs: a new one, or the one that its file has.

    Args:
        direction: "minimize" or "maximize".
        fixed: the overrides that all trials share.

    Raises:
        ConfigError: where another command has the file, or the study in it is of other settings.
    """
    file = Path(os.path.abspath(settings.storage or root / STORAGE))
    setting = f"hydra.sweeper.storage={file}"
    busy = f"{setting}: another command has this study; wait until it ends, or choose another name."
    with locks.hold_file(file.with_name(f".{file.name}.lock"), setting, "choose another file", busy):
        if file.exists() and not (content := file.read_bytes()).endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)  # a line that a kill cut short: the next one would follow in it
        try:
            no_lock: Any = SimpleNamespace(acquire=lambda: True, release=lambda: None)  # a kill would leave Optuna's
            storage = JournalStorage(JournalFileBackend(str(file), lock_obj=no_lock))
            study = optuna.create_study(
                storage=storage,
                study_name=settings.study_name or root.name,
                direction=direction,
                load_if_exists=True,
                pruner=build_pruner(settings),
            )
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"hydra.sweeper.storage={file}: can't be read as a study ({error}); choose another file."
            ) from error
        _check_same(study, file, direction, space, fixed)
        study.sampler = build_sampler(settings, len(study.get_trials(deepcopy=False)))
        if settings.sampler == "grid":
            for combination in list_combinations(space):  # in the order of a grid, each once
                study.enqueue_trial(dict(zip(space, combination, strict=True)), skip_if_exists=True)
        yield study


def _check_same(study: Study, file: Path, direction: str, space: Space, fixed: Sequence[str]) -> None:
    """Raise ConfigError where a study was begun with other settings; else record those of a new one."""
    other = f"hydra.sweeper.study_name={study.study_name}: {file} has this study with other settings"
    advice = "choose another name for this sweep."
    if study.direction.name.lower() != direction:
        raise ConfigError(f"{other} (direction={study.direction.name.lower()}); {advice}")
    for trial in study.get_trials(deepcopy=False):
        # a kill may have left a trial with some values
        is_whole = trial.state.is_finished() and trial.values is not None
        there = trial.distributions.keys()
        if different := sorted(there ^ space.keys() if is_whole else there - space.keys()):
            raise ConfigError(f"{other} (of {', '.join(different)} one varies there, or here, alone); {advice}")
        for name in space.keys() & trial.distributions.keys():
            try:
                check_distribution_compatibility(trial.distributions[name], space[name])
            except ValueError:
                raise ConfigError(f"{other} ({name} has other choices); {advice}") from None
    kept = sorted(override for override in fixed if not override.lstrip("+~").startswith(FREE))
    recorded = study.user_attrs.get(FIXED, kept)
    if different := sorted(set(recorded) ^ set(kept)):
        raise ConfigError(f"{other} ({', '.join(different[:3])}); {advice}")
    if FIXED not in study.user_attrs:
        study.set_user_attr(FIXED, kept)


def build_sampler(settings: OptunaSearch, trials: int) -> samplers.BaseSampler:
    """Return the sampler of a study with so many trials: a study that continues draws other values than it had."""
    seed = settings.seed + trials
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if settings.sampler == "tpe":
            is_parallel = settings.n_jobs > 1  # then running trials count, so that no two are alike
            return samplers.TPESampler(seed=seed, n_startup_trials=settings.startup_trials, constant_liar=is_parallel)
        if settings.sampler == "cmaes":
            return samplers.CmaEsSampler(seed=seed, n_startup_trials=max(1, settings.startup_trials))
    return samplers.RandomSampler(seed=seed)


def build_pruner(settings: OptunaSearch) -> pruners.BasePruner:
    """Return Optuna's pruner, for margin one that prunes nothing; its steps are the numbers of evaluations."""
    if settings.pruner == "median":
        return pruners.MedianPruner(settings.startup_trials, settings.pruner_warmup)
    if settings.pruner == "successive_halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1)
    if settings.pruner == "hyperband":
        return pruners.HyperbandPruner(min_resource=1)
    return pruners.NopPruner()


def list_combinations(space: Space) -> Iterator[tuple[Any, ...]]:
    """Return the combinations of a grid; raises ConfigError for intervals, and for too many."""
    values = [list_values(name, distribution) for name, distribution in space.items()]
    if (count := math.prod(map(len, values))) > MAX_COMBINATIONS:
        raise ConfigError(f"hydra.sweeper.sampler=grid: has {count:,} combinations; give fewer values.")
    return itertools.product(*values)
