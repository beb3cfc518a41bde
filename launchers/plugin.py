"""Hydra's launchers: `local` runs a sweep on this machine, `slurm` submits it to Slurm; without `-m` one run too.

All trials are composed and checked before the first one starts: an invalid trial rejects the whole sweep. Hydra accepts
launchers only from a module under `hydra_plugins`; `register` makes one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from launchers import trials
from launchers.local import sweep as here
from launchers.slurm import grid as slurm
from launchers.trials import Trial
from titan.config import launcher_hints, settings
from titan.errors import ConfigError
from titan.run import hydra_node, hydra_private
from titan.run.axes import present
from titan.run.ended import is_done
from titan.run.paths import check_length
from titan.run.run import Run
from titan.sweep import ledger, objective
from titan.sweep.ledger import SweepSpec
from titan.sweep.schema import GRID, LAUNCHER_MODULE, LocalLaunch, SlurmLaunch, Sweep

ALONE = "run"
"""The id of the only trial in the ledger of a single run."""


class SweepLauncher(Launcher):
    """Base of all launchers: expand a sweep into trials, check them, then launch them."""

    # Hydra's sweeper makes the instance and returns none of it
    codes: ClassVar[list[int]] = []
    new: ClassVar[list[Path]] = []
    """Folders that this sweep creates, innermost first."""
    dry: ClassVar[bool] = False
    trusted: ClassVar[tuple[str, ...]] = ()
    """Packages that trials may import."""
    kind: ClassVar[Any] = LocalLaunch
    elsewhere: ClassVar[bool] = False
    planned: ClassVar[Callable[[Sequence[Trial]], list[int]] | None] = None
    """Takes the trials in place of a launch."""
    describe: ClassVar[Callable[[Sequence[Trial]], str]] = staticmethod(lambda trials: "")
    """Returns what a dry run prints about trials beside their scripts."""

    def __init__(self, **given: Any) -> None:
        plain = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in given.items()}
        for key, value in plain.items():
            typed = f"hydra.launcher.{key}={settings.format_value(value)}"
            if key not in self.kind.__dataclass_fields__ and (
                advice := launcher_hints.describe_setting(f"hydra.launcher.{key}", typed)
            ):
                raise ConfigError(advice)
        self.how = settings.build(self.kind, plain, "hydra.launcher")

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs."""
        if config.hydra.sweeper.get("max_batch_size") is not None:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={config.hydra.sweeper.max_batch_size}: a sweep is checked as a whole; "
                "leave it out, and set hydra.launcher.at_once to how many trials run at a time."
            )
        self.context, self.config = hydra_context, config
        _check_place(config)
        apart = self.elsewhere or getattr(self.how, "at_once", 1) != 1
        self.calls = hydra_node.Calls(config, elsewhere=apart, made=hydra_context.callbacks)
        folder = Path(config.hydra.sweep.dir)
        settings.check_text(os.path.abspath(folder), f"hydra.sweep.dir={folder}")
        SweepLauncher.new = [f for f in (folder, *folder.parents) if not f.exists()]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Check every trial, then launch the sweep; return one result per trial."""
        if not job_overrides:
            return []
        root = Path(os.path.abspath(self.config.hydra.sweep.dir))
        loader = self.context.config_loader
        overrides = [present(one) for one in job_overrides]
        plan, elsewhere = SweepLauncher.planned, self.elsewhere or SweepLauncher.planned is not None
        SweepLauncher.dry = plan is not None or getattr(self.how, "dry_run", False)
        chosen = trials.expand_trials(
            loader, self.config, overrides, initial_job_idx, elsewhere, self.trusted, self._fixed()
        )
        once = list({trial.id: trial for trial in chosen}.values())
        worst = self._check_feedback(once) if self.learns else None
        codes = plan(once) if plan else self.grid(root, once, spec_of(self.config))
        SweepLauncher.codes += codes
        values = dict(zip([trial.id for trial in once], codes, strict=True))
        return [
            self._returned(trial, one, values[trial.id], worst)
            for trial, one in zip(chosen, job_overrides, strict=True)
        ]

    @property
    def learns(self) -> bool:
        """Whether the sweeper is not titan's: it gets results of trials, and chooses the next ones by them."""
        return str(self.config.hydra.sweeper.get("_target_")) != GRID

    def _fixed(self) -> frozenset[str] | None:
        """Return the settings that the command line fixes for all trials; None for a grid, which shows what varies."""
        if not self.learns:
            return None
        typed = OverridesParser.create().parse_overrides(list(self.config.hydra.overrides.task))
        return frozenset(override.key_or_group for override in typed if not override.is_sweep_override())

    def _check_feedback(self, chosen: Sequence[Trial]) -> float:
        """Return the objective of failed trials, for a sweeper that learns from results.

        Raises:
            ConfigError: when there will be no results, or the settings contradict each other.
        """
        sweeper = self.config.hydra.runtime.choices.get("hydra/sweeper")
        if SweepLauncher.dry:
            raise ConfigError(f"hydra/sweeper={sweeper}: chooses trials by the results of others; plan a grid instead.")
        if not getattr(self.how, "wait", True):
            raise ConfigError(f"hydra.launcher.wait=false: hydra/sweeper={sweeper} needs the results; leave it out.")
        sweep = sweep_of(self.config)
        objective.check(sweep, [trial.run for trial in chosen])
        return objective.worst(sweep, OmegaConf.to_container(self.config.hydra.sweeper))  # type: ignore[arg-type]

    def _returned(self, trial: Trial, overrides: Sequence[str], code: int, worst: float | None) -> JobReturn:
        """Return what the sweeper gets of a trial: its objective, or in a grid, whose sweeper ignores it, the code."""
        of = code if worst is None else objective.value(sweep_of(self.config), Path(trial.run.directory), code, worst)
        return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=of)

    def grid(self, root: Path, chosen: Sequence[Trial], asked: SweepSpec) -> list[int]:
        """Launch checked trials; return their exit codes."""
        return here.LocalSweep(root, chosen, self.how, asked, self._job).launch()

    def _job(self, point: Trial, body: Callable[[], int]) -> int:
        """Run one trial in this process, with its callbacks; return its exit code."""
        return body() if point.config is None else self.calls.around_job(body, point.config)


def _check_place(config: DictConfig) -> None:
    """Raise ConfigError for directories that a sweep can't have, before the sweeper creates them."""
    folder, below = str(config.hydra.sweep.dir), str(OmegaConf.to_container(config.hydra.sweep)["subdir"])  # type: ignore[index, call-overload]
    if not folder.strip():
        raise ConfigError("hydra.sweep.dir=: names no directory; give one, or name=NAME.")
    check_length(os.path.abspath(folder), f"hydra.sweep.dir={folder}")
    there = next(f for f in (Path(folder).absolute(), *Path(folder).absolute().parents) if f.exists())
    if not os.access(there, os.W_OK):
        raise ConfigError(f"hydra.sweep.dir={folder}: {there} can't be written; choose another directory.")
    if not below.strip("/. ") or os.path.isabs(below) or ".." in below.split("/"):
        raise ConfigError(f"hydra.sweep.subdir={below}: must be a folder in the sweep's directory; leave it out.")


class LocalLauncher(SweepLauncher):
    """Runs the trials of a sweep on this machine."""


class SlurmLauncher(SweepLauncher):
    """Submits the trials of a sweep to Slurm."""

    kind, elsewhere = SlurmLaunch, True

    def grid(self, root: Path, chosen: Sequence[Trial], asked: SweepSpec) -> list[int]:
        """Launch checked trials; return their exit codes."""
        return slurm.SlurmSweep(root, chosen, self.how, asked, SweepLauncher.describe).launch()


def _sweeper() -> Any:
    """Return a subclass of Hydra's basic sweeper that leaves composing to the launcher: once per trial, not twice."""
    basic: Any = hydra_private.basic_sweeper()

    class GridSweeper(basic):  # type: ignore[misc]
        def setup(self, **given: Any) -> None:
            super().setup(**given)
            self.config = hydra_node.without_secrets(given["config"])  # it goes into multirun.yaml
            OmegaConf.copy_cache(given["config"], self.config)  # so that ${now:} is the same moment in both

        def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
            return

    return GridSweeper


KINDS = {kind.__name__: kind for kind in (LocalLauncher, SlurmLauncher)}


def sweep_of(cfg: DictConfig) -> Sweep:
    """Return the settings of a composed configuration's sweep."""
    sweep: Sweep = settings.build(Sweep, OmegaConf.to_container(cfg.sweep), "sweep")
    return sweep


def spec_of(cfg: DictConfig) -> SweepSpec:
    """Return what a composed configuration asks of its sweep."""
    sweep = sweep_of(cfg)
    return SweepSpec(sweep.question, {}, dict(sweep.baseline or {}), sweep.margin, sweep.target)


def scheduled_launcher(cfg: DictConfig) -> SweepLauncher | None:
    """Return the launcher of a single run; None where the run stays on this machine.

    Raises:
        ConfigError: for a launcher that is not titan's, and for unknown settings of it.
    """
    node = OmegaConf.to_container(cfg.hydra.launcher)
    name = str(node.pop("_target_", "")).rpartition(".")[2] if isinstance(node, dict) else ""
    if name not in KINDS:
        choice = cfg.hydra.runtime.choices.get("hydra/launcher")
        raise ConfigError(
            f"hydra/launcher={choice}: this launcher is not titan's; choose hydra/launcher=local or slurm."
        )
    launcher = KINDS[name](**node)  # type: ignore[arg-type]
    return launcher if launcher.elsewhere else None


def launch_single(launcher: SweepLauncher, run: Run, cfg: DictConfig) -> int:
    """Launch a single run as a sweep of one trial, with the run's directory; return the exit code.

    That directory identifies the trial: it holds one run.

    Raises:
        ConfigError: when the directory holds something else, or a process is running in it.
    """
    from titan.run import attempts, summary  # only now: --help need not wait for what reads data

    directory = Path(run.directory)
    sweep = ledger.read(directory)
    attempts.check_directory(run, own_job=bool(sweep and any(point.jobs for point in sweep.trials)))
    if is_done(run):
        summary.show_finished(run, attempts.finished_run(run))
        return 0
    point = Trial(ALONE, (), run)
    return launcher.grid(directory, [point], spec_of(cfg))[0]


def register() -> None:
    """Register titan's launchers and sweeper as plugins of Hydra."""
    SweepLauncher.codes, SweepLauncher.new, SweepLauncher.dry = [], [], False
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    module: Any = sys.modules.setdefault(LAUNCHER_MODULE, types.ModuleType(LAUNCHER_MODULE))
    sys.modules["hydra_plugins"].titan = module  # type: ignore[attr-defined]
    module.GridSweeper = _sweeper()
    module.GridSweeper.__module__, module.GridSweeper.__qualname__ = LAUNCHER_MODULE, "GridSweeper"
    Plugins.instance().register(module.GridSweeper)
    for kind in KINDS.values():
        kind.__module__ = LAUNCHER_MODULE
        setattr(module, kind.__name__, kind)
        Plugins.instance().register(kind)


@contextlib.contextmanager
def planned(take: Callable[[Sequence[Trial]], list[int]]) -> Iterator[None]:
    """Hand the trials of sweeps to `take` instead of launching them."""
    SweepLauncher.planned = staticmethod(take)
    try:
        yield
    finally:
        SweepLauncher.planned = None


@contextlib.contextmanager
def described(describe: Callable[[Sequence[Trial]], str]) -> Iterator[None]:
    """Let a dry run print what `describe` returns about its trials."""
    before = SweepLauncher.describe
    SweepLauncher.describe = staticmethod(describe)
    try:
        yield
    finally:
        SweepLauncher.describe = staticmethod(before)


def remove_unused() -> None:
    """Remove the folders and files that the sweeper wrote, after a sweep of which no trial was started."""
    if not SweepLauncher.new or (SweepLauncher.codes and not SweepLauncher.dry):
        return
    if (SweepLauncher.new[0] / ledger.LEDGER).exists():  # it was begun, and failed
        return
    (SweepLauncher.new[0] / "multirun.yaml").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for folder in SweepLauncher.new:
            folder.rmdir()


def exit_code() -> int:
    """Return the exit code of the last sweep: 0 when every trial succeeded.

    Raises:
        ConfigError: when it had no trials.
    """
    if not SweepLauncher.codes:
        raise ConfigError("-m: the sweep has no trials; give values, such as optimizer.lr=1e-3,3e-3.")
    return next((code for code in SweepLauncher.codes if code), 0)
