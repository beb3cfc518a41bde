"""Compose the trials of a grid: what is the same between them is done once. Free of torch.

Hydra composes in two steps: the choices on the command line (AXIS=CHOICE) decide which files are merged, and then the
single values replace what these say. Trials of a sweep differ mostly in values, so the result of the first step is kept
for each set of choices, and what Hydra would compose anew for each trial is a copy of it with the trial's own values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan.run import searched_files
from titan.run.hydra_private import ConfigLoaderImpl, get_overrides_dirname
from titan.run.hydra_session import CONF


class Composer:
    """Composes trials as `loader.load_sweep_config(config, overrides)` would, with the sweep's Hydra `config`."""

    def __init__(self, loader: ConfigLoaderImpl, config: DictConfig) -> None:
        self.loader, self.config = loader, config
        self.hydra_overrides: list[str] = list(OmegaConf.to_container(config.hydra.overrides.hydra))  # type: ignore[arg-type]
        self.config_name = config.hydra.job.config_name
        self.parsed_overrides: dict[str, Override] = {}
        self.groups: dict[str, bool] = {}
        self.options: dict[str, list[str]] = {}
        self.bases: dict[tuple[str, ...], DictConfig] = {}
        typed = [*self.hydra_overrides, *OmegaConf.to_container(config.hydra.overrides.task)]  # type: ignore[misc]
        searched_files.guard_loader(loader, CONF, self.config_name, typed)

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Return the composed configuration of one trial."""
        lines = [*self.hydra_overrides, *overrides]
        self._parse_overrides(lines)
        parsed = [self.parsed_overrides[line] for line in lines]
        choices = tuple(o.input_line or "" for o in parsed if self._is_choice(o))
        values = [o for o in parsed if not self._is_choice(o)]
        cfg = self._copy_base(choices)
        try:
            self._apply_values(cfg, values, parsed)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException from error
        OmegaConf.copy_cache(from_config=self.config, to_config=cfg)
        return cfg

    def list_choices(self, group: str) -> list[str]:
        """Return the choices in a group."""
        if group not in self.options:
            self.options[group] = self.loader.get_group_options(group, ObjectType.CONFIG)
        return self.options[group]

    def _parse_overrides(self, lines: Sequence[str]) -> None:
        new_lines = [line for line in dict.fromkeys(lines) if line not in self.parsed_overrides]
        if new_lines:
            self.parsed_overrides |= dict(
                zip(new_lines, OverridesParser.create().parse_overrides(new_lines), strict=True)
            )

    def _is_choice(self, override: Override) -> bool:
        """Return whether an override decides what is merged, as Hydra sees it; so do overrides of Hydra itself."""
        key = override.key_or_group
        if key not in self.groups:
            self.groups[key] = self.loader.repository.group_exists(key)
        group = self.groups[key] and not isinstance(override.value(), dict)
        return group or override.package is not None or override.is_hydra_override()

    def _copy_base(self, choices: tuple[str, ...]) -> DictConfig:
        """Return a new configuration with these choices and no other values."""
        if choices not in self.bases:
            self.bases[choices] = self.loader.load_configuration(self.config_name, list(choices), RunMode.RUN)
        return copy.deepcopy(self.bases[choices])

    def _apply_values(self, cfg: DictConfig, values: list[Override], parsed: list[Override]) -> None:
        """Set a trial's values, and what Hydra records of overrides."""
        self.loader.validate_sweep_overrides_legal(values, RunMode.RUN, from_shell=True)
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        task_overrides = [o for o in parsed if not o.is_hydra_override()]
        cfg.hydra.overrides.task = [o.input_line for o in task_overrides]
        dirname_settings = cfg.hydra.job.config.override_dirname
        cfg.hydra.job.override_dirname = get_overrides_dirname(
            task_overrides, dirname_settings.exclude_keys, dirname_settings.item_sep, dirname_settings.kv_sep
        )
