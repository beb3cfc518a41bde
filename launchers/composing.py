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

from titan.run.hydra_private import ConfigLoaderImpl, get_overrides_dirname


class Composer:
    """Composes trials as `loader.load_sweep_config(config, overrides)` would, with the sweep's Hydra `config`."""

    def __init__(self, loader: ConfigLoaderImpl, config: DictConfig) -> None:
        self.loader, self.config = loader, config
        self.shared: list[str] = list(OmegaConf.to_container(config.hydra.overrides.hydra))  # type: ignore[arg-type]
        self.name = config.hydra.job.config_name
        self.parsed: dict[str, Override] = {}
        self.groups: dict[str, bool] = {}
        self.options: dict[str, list[str]] = {}
        self.bases: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Return the composed configuration of one trial."""
        lines = [*self.shared, *overrides]
        self._parse(lines)
        parsed = [self.parsed[line] for line in lines]
        chosen = tuple(o.input_line or "" for o in parsed if self._chooses(o))
        values = [o for o in parsed if not self._chooses(o)]
        cfg = self._base(chosen)
        try:
            self._apply(cfg, values, parsed)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException from error
        OmegaConf.copy_cache(from_config=self.config, to_config=cfg)
        return cfg

    def known(self, group: str) -> list[str]:
        """Return the choices in a group."""
        if group not in self.options:
            self.options[group] = self.loader.get_group_options(group, ObjectType.CONFIG)
        return self.options[group]

    def _parse(self, lines: Sequence[str]) -> None:
        new = [line for line in dict.fromkeys(lines) if line not in self.parsed]
        if new:
            self.parsed |= dict(zip(new, OverridesParser.create().parse_overrides(new), strict=True))

    def _chooses(self, override: Override) -> bool:
        """Return whether an override decides what is merged, as Hydra sees it; so do overrides of Hydra itself."""
        key = override.key_or_group
        if key not in self.groups:
            self.groups[key] = self.loader.repository.group_exists(key)
        group = self.groups[key] and not isinstance(override.value(), dict)
        return group or override.package is not None or override.is_hydra_override()

    def _base(self, chosen: tuple[str, ...]) -> DictConfig:
        """Return a new configuration with these choices and no other values."""
        if chosen not in self.bases:
            self.bases[chosen] = self.loader.load_configuration(self.name, list(chosen), RunMode.RUN)
        return copy.deepcopy(self.bases[chosen])

    def _apply(self, cfg: DictConfig, values: list[Override], parsed: list[Override]) -> None:
        """Set a trial's values, and what Hydra records of overrides."""
        self.loader.validate_sweep_overrides_legal(values, RunMode.RUN, from_shell=True)
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        own = [o for o in parsed if not o.is_hydra_override()]
        cfg.hydra.overrides.task = [o.input_line for o in own]
        how = cfg.hydra.job.config.override_dirname
        cfg.hydra.job.override_dirname = get_overrides_dirname(own, how.exclude_keys, how.item_sep, how.kv_sep)
