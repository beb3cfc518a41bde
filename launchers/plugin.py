"""Hydra's launchers: `local` runs a sweep on this machine, `slurm_sweep` submits it to Slurm; without `-m` one run too.

All trials are composed and checked before the first one starts: an invalid trial rejects the whole sweep. Hydra accepts
launchers only from a module under `hydra_plugins`; `register_plugins` makes one.
"""

from __future__ import annotations

import glob
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from launchers import trials
from launchers.local import sweep as local_sweep
from launchers.search.sweeper import OptunaSweeper
from launchers.session import Describe, SweepSession, TrialSource, describe_nothing
from launchers.slurm import sweep as slurm_sweep
from launchers.trials import Trial, build_sweep
from titan.config import settings
from titan.config.warning import warn_once
from titan.console.text import is_url
from titan.dataset.schema import Chat, Jsonl, Parquet, Prepared, Text
from titan.errors import ConfigError
from titan.files.run_directory import RUN, check_length
from titan.run import certificate, hydra_private, hydra_session, synonyms
from titan.run.directory import is_done
from titan.run.run import Run
from titan.sweep import ledger, objective
from titan.sweep.labels import clean_override
from titan.sweep.ledger import SweepSpec
from titan.sweep.schema import GRID, LAUNCHER_MODULE, OPTUNA, LocalLaunch, SlurmLaunch, parse_margin

SINGLE_TRIAL_ID = "run"  # the id of the only trial in the ledger of a single run


class SweepLauncher(Launcher):
    """Base of all launchers: expand a sweep into trials, check them, then launch them."""

    settings_class: ClassVar[Any] = LocalLaunch
    remote: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        plain = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in options.items()}
        for key, value in plain.items():
            typed = f"hydra.launcher.{key}={settings.format_value(value)}"
            if key not in self.settings_class.__dataclass_fields__ and (
                advice := synonyms.describe_launcher_setting(f"hydra.launcher.{key}", typed)
            ):
                raise ConfigError(advice)
        self.settings = settings.build(self.settings_class, plain, "hydra.launcher")

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs; the task function is the command's session.

        Raises:
            ConfigError: when the settings of the sweep can't work.
            TypeError: when the task function is no session, which is a bug.
        """
        if config.hydra.sweeper.get("max_batch_size") is not None:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={config.hydra.sweeper.max_batch_size}: a sweep is checked as a whole; "
                "leave it out, and set hydra.launcher.at_once to how many trials run at a time."
            )
        if not isinstance(task_function, SweepSession):
            raise TypeError(f"titan's launchers take a SweepSession as Hydra's task function, not {task_function!r}")
        self.context, self.config, self.session = hydra_context, config, task_function
        self.session.is_dry_run = task_function.planner is not None or getattr(self.settings, "dry_run", False)
        _check_sweep_folder(config)
        searches = str(config.hydra.sweeper.get("_target_")) == OPTUNA
        uses_processes = self.remote or searches or getattr(self.settings, "at_once", 1) != 1
        self.callbacks = hydra_session.HydraCallbacks(config, remote=uses_processes, instances=hydra_context.callbacks)
        folder = Path(config.hydra.sweep.dir)
        settings.check_text(os.path.abspath(folder), f"hydra.sweep.dir={folder}")
        self.session.directory = self.root
        self.session.new_folders = [f for f in (folder, *folder.parents) if not f.exists()]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Check every trial, then launch the sweep; return one result per trial."""
        job_overrides = self.session.given_overrides or job_overrides
        if not job_overrides:
            return []
        batch = self.expand(job_overrides, initial_job_idx, self._find_fixed_settings())
        unique_trials = list({trial.id: trial for trial in batch}.values())
        worst = self.check_feedback(unique_trials) if self.has_learning_sweeper else None
        if not self.has_learning_sweeper and not self.session.given_overrides:
            trials.note_mixed(self.root, unique_trials, build_sweep(self.config).budget != "steps")
        codes = self.start(unique_trials)
        self.session.codes += codes
        codes_by_id = dict(zip([trial.id for trial in unique_trials], codes, strict=True))
        self.session.outcomes += [(trial.run, codes_by_id[trial.id]) for trial in batch]
        returned = []
        for trial, trial_overrides in zip(batch, job_overrides, strict=True):
            value: float = codes_by_id[trial.id]  # which the sweeper of a grid ignores
            if worst is not None:
                directory = Path(trial.run.directory)
                value = objective.read_objective(build_sweep(self.config), directory, codes_by_id[trial.id], worst)
            returned.append(JobReturn(overrides=trial_overrides, status=JobStatus.COMPLETED, _return_value=value))
        return returned

    @property
    def root(self) -> Path:
        """The sweep's directory."""
        return Path(os.path.abspath(self.config.hydra.sweep.dir))

    def expand(self, overrides: Sequence[Sequence[str]], first: int, fixed: frozenset[str] | None) -> list[Trial]:
        """Return the trials of some overrides, composed and checked; see `launchers.trials.expand_trials`."""
        cleaned = [[clean_override(override) for override in trial_overrides] for trial_overrides in overrides]
        loader, planned = self.context.config_loader, self.session.planner is not None
        remote, trusted = self.remote or planned, self.session.trusted
        return trials.expand_trials(loader, self.config, cleaned, first, remote, trusted, fixed, planned)

    def start(self, batch: Sequence[Trial]) -> list[int]:
        """Plan or launch checked trials; return their exit codes."""
        if self.session.planner:
            return self.session.planner(batch)
        return self.launch_trials(self.root, batch, build_spec(self.config), self.session.describe)

    def check_inputs(self, batch: Sequence[Trial]) -> None:
        """Raise ConfigError where a trial lacks a certificate, or reads what is not there, before any trial starts."""
        for number, trial in enumerate(batch, 1):
            certificate.check(trial.run)
            if (missing := find_missing_input(trial.run)) is not None:
                raise ConfigError(
                    f"{missing}: there is no such file or folder; correct the path (trial {number} of the sweep, "
                    f"{trial.label}; nothing was started)."
                )

    @property
    def has_learning_sweeper(self) -> bool:
        """Whether the sweeper is not titan's: it gets results of trials, and chooses the next ones by them."""
        return str(self.config.hydra.sweeper.get("_target_")) != GRID

    def _find_fixed_settings(self) -> frozenset[str] | None:
        """Return the settings that are fixed for all trials; None for a grid, which shows what varies."""
        if self.session.given_overrides:
            return self.session.fixed_settings
        if not self.has_learning_sweeper:
            return None
        typed = OverridesParser.create().parse_overrides(list(self.config.hydra.overrides.task))
        return frozenset(override.key_or_group for override in typed if not override.is_sweep_override())

    def check_feedback(self, batch: Sequence[Trial]) -> float:
        """Return the objective of failed trials, for a sweeper that learns from results."""
        sweep, sweeper = build_sweep(self.config), self.config.hydra.runtime.choices.get("hydra/sweeper")
        if sweep.sizes is not None:
            raise ConfigError(
                f"hydra/sweeper={sweeper}: a ladder has its own order of runs; leave it or sweep.sizes out."
            )
        if self.session.is_dry_run:
            raise ConfigError(f"hydra/sweeper={sweeper}: chooses trials by the results of others; plan a grid instead.")
        if not getattr(self.settings, "wait", True):
            raise ConfigError(f"hydra.launcher.wait=false: hydra/sweeper={sweeper} needs the results; leave it out.")
        objective.check_measured("sweep.objective", sweep.objective, [trial.run for trial in batch])
        return objective.find_worst_value(sweep, OmegaConf.to_container(self.config.hydra.sweeper))  # type: ignore[arg-type]

    def launch_trials(self, root: Path, batch: Sequence[Trial], spec: SweepSpec, describe: Describe) -> list[int]:
        """Launch checked trials; return their exit codes."""
        self.check_inputs(batch)
        codes: list[int] = self._build_sweep(root, batch, spec, describe).launch()
        return codes

    def launch_pool(self, source: TrialSource) -> None:
        """Launch trials that a source chooses while others run."""
        self._build_sweep(self.root, [], build_spec(self.config), describe_nothing).launch_pool(source)

    def _build_sweep(self, root: Path, batch: Sequence[Trial], spec: SweepSpec, describe: Describe) -> Any:
        return local_sweep.LocalSweep(root, batch, self.settings, spec, self._run_trial)

    def _run_trial(self, trial: Trial, body: Callable[[], int]) -> int:
        return body() if trial.config is None else self.callbacks.around_job(body, trial.config)


def _check_sweep_folder(config: DictConfig) -> None:
    folder, subdir = str(config.hydra.sweep.dir), str(OmegaConf.to_container(config.hydra.sweep)["subdir"])  # type: ignore[index, call-overload]
    if not folder.strip():
        raise ConfigError("hydra.sweep.dir=: names no directory; give one, or name=NAME.")
    check_length(os.path.abspath(folder), f"hydra.sweep.dir={folder}")
    existing_folder = next(f for f in (Path(folder).absolute(), *Path(folder).absolute().parents) if f.exists())
    if not os.access(existing_folder, os.W_OK):
        raise ConfigError(f"hydra.sweep.dir={folder}: {existing_folder} can't be written; choose another directory.")
    if not subdir.strip("/. ") or os.path.isabs(subdir) or ".." in subdir.split("/"):
        raise ConfigError(f"hydra.sweep.subdir={subdir}: must be a folder in the sweep's directory; leave it out.")


class LocalLauncher(SweepLauncher):
    """Runs the trials of a sweep on this machine."""


class SlurmLauncher(SweepLauncher):
    """Submits the trials of a sweep to Slurm."""

    settings_class, remote = SlurmLaunch, True

    def check_inputs(self, batch: Sequence[Trial]) -> None:
        """Warn where a trial reads what is not on this machine."""
        for trial in batch:
            if (missing := find_missing_input(trial.run)) is not None:
                warn_once(f"{missing}: is not on this machine; the job fails unless its nodes have it.")

    def _build_sweep(self, root: Path, batch: Sequence[Trial], spec: SweepSpec, describe: Describe) -> Any:
        return slurm_sweep.SlurmSweep(root, batch, self.settings, spec, describe)


def _build_sweeper_class() -> Any:
    """Return a subclass of Hydra's basic sweeper that leaves composing to the launcher: once per trial, not twice."""
    base_class: Any = hydra_private.load_basic_sweeper()

    class GridSweeper(base_class):  # type: ignore[misc]
        def setup(self, **arguments: Any) -> None:
            super().setup(**arguments)
            self.config = hydra_session.redact_config(arguments["config"])  # it goes into multirun.yaml
            OmegaConf.copy_cache(arguments["config"], self.config)  # so that ${now:} is the same moment in both

        def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
            return

        def sweep(self, arguments: list[str]) -> Any:
            sweep = build_sweep(self.config)
            if sweep.sizes is None:
                return super().sweep(arguments)
            from launchers import ladder  # only now: it imports numpy

            parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
            parsed = parser.parse_overrides([*self._parse_config(), *arguments])
            Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
            OmegaConf.save(self.config, Path(self.config.hydra.sweep.dir) / "multirun.yaml")
            return ladder.climb(self.launcher, parsed, sweep)

    return GridSweeper


LAUNCHER_CLASSES = {kind.__name__: kind for kind in (LocalLauncher, SlurmLauncher)}


def build_spec(cfg: DictConfig) -> SweepSpec:
    """Return what a composed configuration asks of its sweep."""
    sweep = build_sweep(cfg)
    parse_margin(sweep.margin)
    return SweepSpec(sweep.question, {}, sweep.baseline_settings, sweep.margin, sweep.target, sweep.budget)


def find_scheduler_launcher(cfg: DictConfig) -> SweepLauncher | None:
    """Return the launcher of a single run; None where the run stays on this machine."""
    node = OmegaConf.to_container(cfg.hydra.launcher)
    name = str(node.pop("_target_", "")).rpartition(".")[2] if isinstance(node, dict) else ""
    if name not in LAUNCHER_CLASSES:
        choice = cfg.hydra.runtime.choices.get("hydra/launcher")
        raise ConfigError(
            f"hydra/launcher={choice}: this launcher is not titan's; choose hydra/launcher=local or slurm."
        )
    launcher = LAUNCHER_CLASSES[name](**node)  # type: ignore[arg-type]
    return launcher if launcher.remote else None


def launch_single(launcher: SweepLauncher, run: Run, cfg: DictConfig, describe: Describe) -> int:
    """Launch a single run as a sweep of one trial, with the run's directory; return the exit code.

    That directory identifies the trial: it holds one run.
    """
    from titan.run import attempts, summary  # only now: --help need not wait for what reads data

    certificate.check(run)
    directory = Path(run.directory)
    sweep = ledger.read(directory)
    attempts.check_directory(run, has_own_job=bool(sweep and any(trial.jobs for trial in sweep.trials)))
    if is_done(run):
        summary.show_finished(run)
        return 0
    trial = Trial(SINGLE_TRIAL_ID, (), run)
    return launcher.launch_trials(directory, [trial], build_spec(cfg), describe)[0]


def register_plugins() -> None:
    """Register titan's launchers and sweepers as plugins of Hydra."""
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    module: Any = sys.modules.setdefault(LAUNCHER_MODULE, types.ModuleType(LAUNCHER_MODULE))
    sys.modules["hydra_plugins"].titan = module  # type: ignore[attr-defined]
    module.GridSweeper = _build_sweeper_class()
    module.GridSweeper.__module__, module.GridSweeper.__qualname__ = LAUNCHER_MODULE, "GridSweeper"
    Plugins.instance().register(module.GridSweeper)
    for kind in (OptunaSweeper, *LAUNCHER_CLASSES.values()):
        kind.__module__ = LAUNCHER_MODULE
        setattr(module, kind.__name__, kind)
        Plugins.instance().register(kind)


FILE_DATASETS = (Chat, Jsonl, Parquet, Prepared, Text)  # datasets whose path is a file, a folder, a glob or a URL


def find_missing_input(run: Run) -> str | None:
    """Return the first setting of a run that names no file or folder of this machine, as typed; None where all do.

    So it is of one that has begun, which needs them no longer or reports it.
    """
    if (Path(run.directory) / RUN).exists():
        return None
    inputs = {"checkpoint.resume": run.checkpoint.resume}
    for name, corpus in run.dataset.corpora().items():
        if isinstance(corpus, FILE_DATASETS):
            inputs["dataset.path" if corpus is run.dataset else f"dataset.sources.{name}.path"] = corpus.path
    for key, path in inputs.items():
        if path and not is_url(path) and not glob.has_magic(path) and not os.path.exists(os.path.expanduser(path)):
            return f"{key}={path}"
    return None
