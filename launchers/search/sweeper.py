"""`hydra/sweeper=optuna`: titan's sweeper that chooses trials by the results of others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from launchers.trials import build_sweep
from titan.config import settings
from titan.config.optional import advise_extra
from titan.errors import ConfigError
from titan.run import hydra_session
from titan.sweep.schema import OptunaSearch

OLDEST_OPTUNA = 4  # the first version of Optuna that has what is used


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
        check_packages(self.settings)
        import optuna

        from launchers.search import pool, study

        is_verbose = bool(self.search_config.hydra.verbose)
        optuna.logging.set_verbosity(optuna.logging.INFO if is_verbose else optuna.logging.WARNING)
        parser = OverridesParser.create(config_loader=self.loader)
        parsed = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        overrides = list({override.key_or_group: override for override in parsed}.values())  # the last word counts
        space = study.build_space(overrides)
        study.check_settings(self.settings, space)
        fixed = [
            f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in overrides if not o.is_sweep_override()
        ]
        sweep = build_sweep(self.search_config)
        pool.run_search(self.launcher, self.settings, sweep, space, fixed, self._save_config)

    def _save_config(self) -> None:
        """Write multirun.yaml, as Hydra's own sweeper does."""
        root = Path(self.search_config.hydra.sweep.dir)
        root.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(hydra_session.redact_config(self.search_config), root / "multirun.yaml")


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
