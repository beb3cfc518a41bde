"""A sweeper that learns from the trials it has had, one at a time, as those of Hydra's plugins do."""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

MODULE = "hydra_plugins.learning_sweeper"


class Learning(Sweeper):
    """Tries the values of the one choice that varies, in turn, and at last the best one again twice in one batch."""

    results: ClassVar[list[tuple[tuple[str, ...], Any]]] = []

    def __init__(self, direction: str | None = None) -> None:
        self.direction = direction

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        Learning.results = []

    def sweep(self, arguments: list[str]) -> None:
        parsed = OverridesParser.create().parse_overrides(arguments)
        fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
        (varied,) = [o for o in parsed if o.is_sweep_override()]
        for number, value in enumerate(varied.sweep_string_iterator()):
            self._launch([(*fixed, f"{varied.key_or_group}={value}")], number)
        best = min(self.results, key=lambda result: float(result[1]))[0]
        self._launch([best, best], len(self.results))

    def _launch(self, batch: list[tuple[str, ...]], number: int) -> None:
        returned = self.launcher.launch(batch, initial_job_idx=number)
        Learning.results += [
            (overrides, result.return_value) for overrides, result in zip(batch, returned, strict=True)
        ]


def register_sweeper() -> None:
    """Register the sweeper as hydra/sweeper=learning."""
    plugins = Plugins.instance()  # first: it looks through the package hydra_plugins
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    module: Any = sys.modules.setdefault(MODULE, types.ModuleType(MODULE))
    sys.modules["hydra_plugins"].learning_sweeper = module  # type: ignore[attr-defined]
    Learning.__module__ = MODULE
    module.Learning = Learning
    plugins.register(Learning)
    node = {"_target_": f"{MODULE}.Learning", "direction": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="learning", node=node)
