"""Optuna's study of a search: in one file beside the trials, opened by one command at a time.

The file is Optuna's journal: one line per change, so that a kill at any moment costs at most the last line.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.search.space import MAX_COMBINATIONS, Space, list_values
from titan.config.optional import advise_extra
from titan.errors import ConfigError
from titan.files import locks
from titan.sweep.schema import OptunaSearch

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

OLDEST_OPTUNA = 4
"""The first version of Optuna that has what is used."""
STORAGE = "study.journal"
"""The study's file in a sweep's directory."""
FIXED = "fixed"
"""The attribute of a study that has the settings which do not vary."""
FREE = ("cluster.", "hydra.", "name=", "metrics.")
"""Beginnings of settings that may change when a study continues."""


def check_packages(settings: OptunaSearch) -> None:
    """Raise ConfigError where a package is missing or too old."""
    try:
        version = importlib.metadata.version("optuna")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"hydra/sweeper=optuna: needs optuna; {advise_extra('sweep')}.") from None
    if int(version.partition(".")[0]) < OLDEST_OPTUNA:
        raise ConfigError(
            f"hydra/sweeper=optuna: needs optuna {OLDEST_OPTUNA}, and {version} is installed; {advise_extra('sweep')}."
        )
    if settings.sampler == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise ConfigError(f"hydra.sweeper.sampler=cmaes: needs cmaes; {advise_extra('sweep')}, or use another sampler.")


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
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    file = Path(os.path.abspath(settings.storage or root / STORAGE))
    with _lock_storage(file):
        _drop_incomplete_line(file)
        try:
            storage = JournalStorage(JournalFileBackend(str(file), lock_obj=_NoLock()))  # type: ignore[arg-type]
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
            _enqueue_grid(study, space)
        yield study


class _NoLock:
    """In place of Optuna's lock, which a kill would leave behind: `_lock_storage` has the file."""

    def acquire(self) -> bool:
        """Do nothing."""
        return True

    def release(self) -> None:
        """Do nothing."""


@contextmanager
def _lock_storage(file: Path) -> Iterator[None]:
    setting = f"hydra.sweeper.storage={file}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = locks.open_lock(file.with_name(f".{file.name}.lock"))
    except OSError as error:
        raise ConfigError(f"{setting}: can't be written ({error.strerror}); choose another file.") from error
    try:
        try:
            locks.acquire(lock, setting, patience=0)
        except BlockingIOError:
            raise ConfigError(
                f"{setting}: another command has this study; wait until it ends, or choose another name."
            ) from None
        yield
    finally:
        os.close(lock)


def _drop_incomplete_line(file: Path) -> None:
    """Cut off the line that a kill left without its end: Optuna would write the next one behind it."""
    if not file.exists():
        return
    content = file.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)


def _check_same(study: Study, file: Path, direction: str, space: Space, fixed: Sequence[str]) -> None:
    """Raise ConfigError where a study was begun with other settings; else record those of a new one."""
    from optuna.distributions import check_distribution_compatibility

    other = f"hydra.sweeper.study_name={study.study_name}: {file} has this study with other settings"
    advice = "choose another name for this sweep."
    if study.direction.name.lower() != direction:
        raise ConfigError(f"{other} (direction={study.direction.name.lower()}); {advice}")
    for trial in study.get_trials(deepcopy=False):
        if different := _find_other_names(trial, space):
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


def _find_other_names(trial: FrozenTrial, space: Space) -> list[str]:
    """Return what varied in a trial and does not now, or the reverse; a kill may have left a trial with some values."""
    if not trial.state.is_finished() or trial.values is None:
        return sorted(trial.distributions.keys() - space.keys())
    return sorted(trial.distributions.keys() ^ space.keys())


def build_sampler(settings: OptunaSearch, trials: int) -> BaseSampler:
    """Return the sampler of a study with so many trials: a study that continues draws other values than it had."""
    from optuna import samplers
    from optuna.exceptions import ExperimentalWarning

    seed = settings.seed + trials
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if settings.sampler == "tpe":
            is_parallel = settings.n_jobs > 1  # then running trials count, so that no two are alike
            return samplers.TPESampler(seed=seed, n_startup_trials=settings.startup_trials, constant_liar=is_parallel)
        if settings.sampler == "cmaes":
            return samplers.CmaEsSampler(seed=seed, n_startup_trials=max(1, settings.startup_trials))
    return samplers.RandomSampler(seed=seed)


def build_pruner(settings: OptunaSearch) -> BasePruner:
    """Return Optuna's pruner, for margin one that prunes nothing; its steps are the numbers of evaluations."""
    from optuna import pruners

    if settings.pruner == "median":
        return pruners.MedianPruner(settings.startup_trials, settings.pruner_warmup)
    if settings.pruner == "successive_halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1)
    if settings.pruner == "hyperband":
        return pruners.HyperbandPruner(min_resource=1)
    return pruners.NopPruner()


def _enqueue_grid(study: Study, space: Space) -> None:
    """Let the study ask for each combination once, in the order of a grid."""
    values = [list_values(name, distribution) for name, distribution in space.items()]
    if (count := math.prod(map(len, values))) > MAX_COMBINATIONS:
        raise ConfigError(f"hydra.sweeper.sampler=grid: has {count:,} combinations; give fewer values.")
    for combination in itertools.product(*values):
        study.enqueue_trial(dict(zip(space, combination, strict=True)), skip_if_exists=True)
