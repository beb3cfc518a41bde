"""`hydra/sweeper=optuna`: titan's sweeper that chooses trials by the results of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from launchers.search import space as spaces
from launchers.search import study as studies
from launchers.search.pool import HOOK_OVERRIDE, TrialPool, write_best
from launchers.search.space import Space
from launchers.session import RESULTS, SweepSession, TrialSource
from launchers.trials import Trial
from titan.config import settings
from titan.run import hydra_session
from titan.sweep.schema import OptunaSearch, Sweep


class SearchLauncher(Protocol):
    """What a search needs of `launchers.plugin.SweepLauncher`."""

    session: SweepSession
    root: Path

    def expand(self, overrides: Sequence[Sequence[str]], first: int, fixed: frozenset[str] | None) -> list[Trial]:
        """Return the composed and checked trials of these overrides."""

    def check_inputs(self, batch: Sequence[Trial]) -> None:
        """Raise ConfigError where a trial lacks what it reads."""

    def check_feedback(self, batch: Sequence[Trial]) -> float:
        """Return the objective of failed trials; raises ConfigError where trials will have none."""

    def launch_pool(self, source: TrialSource) -> None:
        """Launch trials that a source chooses while others run."""


class OptunaSweeper(Sweeper):
    """Asks an Optuna study for trials, and launches them through titan's launchers."""

    def __init__(self, params: Any = None, **options: Any) -> None:
        plain = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in options.items()}
        self.settings: OptunaSearch = settings.build(OptunaSearch, plain, "hydra.sweeper")
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `sweep` needs, and make the launcher."""
        self.search_config, self.loader = config, hydra_context.config_loader
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Check the search, then run trials until the study has enough.

        Raises:
            ConfigError: before anything starts, when some of it can't work.
        """
        studies.check_packages(self.settings)
        silence_optuna(bool(self.search_config.hydra.verbose))
        overrides = self._parse(arguments)
        space, fixed = spaces.build_space(overrides), spaces.list_fixed(overrides)
        studies.check_settings(self.settings, space)
        sweep: Sweep = settings.build(Sweep, OmegaConf.to_container(self.search_config.sweep), "sweep")
        run_search(self.launcher, self.settings, sweep, space, fixed, self._save_config)

    def _parse(self, arguments: Sequence[str]) -> list[Override]:
        """Return the overrides of `hydra.sweeper.params` and of the command line, which has the last word."""
        parser = OverridesParser.create(config_loader=self.loader)
        parsed = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        return list({override.key_or_group: override for override in parsed}.values())

    def _save_config(self) -> None:
        """Write multirun.yaml, as Hydra's own sweeper does."""
        root = Path(self.search_config.hydra.sweep.dir)
        root.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(hydra_session.redact_config(self.search_config), root / "multirun.yaml")


def run_search(
    launcher: SearchLauncher, options: OptunaSearch, sweep: Sweep, space: Space, fixed: Sequence[str], begin: Any
) -> None:
    """Run a search through a launcher, and add the exit codes of its trials to the launcher's session.

    Args:
        fixed: the overrides that all trials share.
        begin: called once the search is checked.

    Raises:
        ConfigError: before anything starts, when some of it can't work.
    """
    direction = options.direction or ("minimize" if sweep.direction == "auto" else sweep.direction)
    shared = [*fixed, *([HOOK_OVERRIDE] if options.pruner != "none" else [])]
    keys = frozenset(override.partition("=")[0].lstrip("+~") for override in shared)

    def expand(values: Sequence[str], number: int) -> Trial:
        return launcher.expand([[*shared, *values]], number, keys)[0]

    corners = [expand(spaces.format_values(corner), 0) for corner in spaces.list_corners(space)]
    worst = launcher.check_feedback(corners)
    from launchers.search.stopping import check_pruning  # it imports numpy

    check_pruning(options, sweep, direction, space, [trial.run for trial in corners])
    launcher.check_inputs(corners)
    begin()
    with studies.open_study(launcher.root, options, direction, space, shared) as study:
        pool = TrialPool(study, space, options, sweep, worst, expand)
        try:
            launcher.launch_pool(pool)
        except KeyboardInterrupt:
            pool.print_end(launcher.root)
            raise
        finally:
            launcher.session.codes += pool.codes or [0]
            write_best(study, launcher.root / RESULTS)
        pool.print_end(launcher.root)


def silence_optuna(is_verbose: bool) -> None:
    """Leave out Optuna's lines on each trial, unless `hydra.verbose` asks for all."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.INFO if is_verbose else optuna.logging.WARNING)
