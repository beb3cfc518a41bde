"""A run: the composed experiment, typed and frozen, and its derived values.

`Recipe` is what the user chose, one field per axis. `Run` adds what follows from it on this machine. Free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan.cluster.devices import Machine
from titan.config.kinds import get_kind
from titan.config.settings import to_plain
from titan.console.notebook import Shown
from titan.console.numbers import format_count
from titan.console.text import redact_nested
from titan.estimate.rank_sizes import count_rank_rows, find_weight_sharding
from titan.parallelism.schema import DIMENSIONS, Layout, StagePlan
from titan.precision.schema import WeightSharding
from titan.run.schema import Recipe


@dataclass(frozen=True, kw_only=True, repr=False)
class Run(Shown, Recipe):
    """A recipe on a machine: what ranks receive."""

    machine: Machine  # the devices here
    layout: Layout  # all degrees as numbers
    microbatches: int  # micro-batches that each rank's rows are split into
    staging: StagePlan  # the pipeline's stages
    compile_why: str = ""  # why `compile=auto` chose the scope; empty where the user has given it
    is_layout_open: bool = False  # whether the layout is still to be searched; `layout` then shards over all devices
    directory: str  # where results go, absolute
    choices: Mapping[str, str] = field(default_factory=dict)  # the option chosen in each config group
    overrides: tuple[str, ...] = ()  # the command line, as typed, with a number for optimizer.lr=auto
    # what Hydra's own files say, by path in the run's directory: `titan.run.hydra_session.build_files`
    hydra: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options: tuple[str, ...] = ()  # options of the command line that say where choices come from, such as --config-dir

    @property
    def weight_sharding(self) -> WeightSharding:
        """How weights are sharded."""
        return find_weight_sharding(self.parallelism, self.layout)

    @property
    def rank_rows(self) -> int:
        """Rows of a global batch per rank, rounded up."""
        return count_rank_rows(self, self.layout)

    @property
    def microbatch_rows(self) -> int:
        """Rows of a micro-batch; where the batch grows there are more micro-batches, of the same size."""
        return -(-self.rank_rows // self.microbatches)

    def list_facts(self) -> dict[str, str]:
        """Return what a reader wants to know first, by name, for notebooks."""
        return {
            "name": self.name,
            "model": f"{self.choices.get('model', '?')}, {self.model.describe_size()}",
            "layout": str(self.layout),
            "steps": f"{self.training.steps:,}",
            "tokens": format_count(self.training.total_tokens),
            "directory": self.directory,
        }

    def __fspath__(self) -> str:
        return self.directory

    def describe(self) -> str:
        """Return the choices that decide how much memory the run needs, for messages.

        That of parallelism is left out where a degree has a number: the choice then does not tell the layout.
        """
        has_numbers = any(getattr(self.parallelism, name) not in (-1, "auto", 1) for name in (*DIMENSIONS, "expert"))
        axes = ("model",) if has_numbers else ("model", "parallelism")
        return " ".join(f"{axis}={self.choices[axis]}" for axis in axes if axis in self.choices)


def as_config(run: Recipe) -> dict[str, Any]:
    """Return the recipe as plain containers without secrets, for run.yaml and for trackers."""
    config = {
        f.name: redact_nested(to_plain(getattr(run, f.name))) for f in dataclasses.fields(Recipe) if f.name != "hooks"
    }
    if run.hooks:  # with the kind of each
        config["hooks"] = {
            name: {"_target_": get_kind(type(hook)), **redact_nested(to_plain(hook))}
            for name, hook in run.hooks.items()
        }
    return config


def flatten_config(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted names."""
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        flattened |= flatten_config(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return flattened


def as_model(run: Recipe) -> dict[str, Any]:
    """Return the model's settings as plain containers, with its kind under `_target_`: `settings.build` reads it."""
    return {"_target_": get_kind(type(run.model)), **to_plain(run.model)}
