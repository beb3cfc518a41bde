"""Compose runs as `titan.run.compose.compose_run` does, in half the time, for tests that are not about composing.

What choices (AXIS=CHOICE) compose to is kept, and a copy gets the values: as for the trials of a grid, by the same code
(`launchers.trials`), whose tests compare it with Hydra.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

from omegaconf import OmegaConf

from launchers.trials import Composer
from titan.config import modules
from titan.run import compose
from titan.run.hydra_errors import translate_errors
from titan.run.hydra_session import compose_config, open_hydra
from titan.run.run import Run
from titan.run.synonyms import check_optional

DIRECTORY = "hydra.run.dir="


@cache
def _load_composer(folders: str) -> Composer:
    """Return the composer for what $TITAN_CONF adds to titan's own choices."""
    with open_hydra() as loader:
        return Composer(loader, compose_config([]))


def compose_test_run(overrides: Sequence[str], ranks: int | None = None, remote: bool = False) -> Run:
    """Return the run of a list of overrides; of Hydra's node, it takes the run's directory only."""
    lines = [o for o in overrides if not o.startswith(DIRECTORY)]
    directories = [o.removeprefix(DIRECTORY) for o in overrides if o.startswith(DIRECTORY)]
    if any(o.lstrip("+~").startswith(("hydra", "sweep")) for o in lines):
        return compose.compose_run(overrides, ranks, remote)
    compose.register_configs()
    with translate_errors(lines):
        trusted = modules.list_trusted_packages(lines)
        composer = _load_composer(os.environ.get("TITAN_CONF", ""))
        cfg = composer(lines)
        OmegaConf.clear_cache(cfg)  # the time, which is in the directory's name
        check_optional(composer.list_choices, cfg)
        if directories:
            cfg.hydra.run.dir = directories[-1].strip("'\"")
        return compose.freeze_run(cfg, ranks=ranks, remote=remote, trusted=trusted)
