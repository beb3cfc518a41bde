"""`optimizer=external`: an optimizer of any package, by its class. Free of torch until a run is composed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan.config.settings import format_value, setting
from titan.config.text_kinds import ImportPath, OpenValue
from titan.errors import ConfigError
from titan.optimizer.external.packages import find_version
from titan.optimizer.schema import GroupSettings, Optimizer, is_block_matrix

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter

    from titan.model.schema import Decoder
    from titan.optimizer.external.classify import Verdict

SPLITS = ("elements", "matrices", "whole")
"""What an optimizer updates by itself, from the smallest on."""
WORKING_COPIES = 3
"""Copies of a gathered parameter beside its state: itself, its gradient, and what its update computes."""


@dataclass(frozen=True, kw_only=True)
class External(Optimizer):
    """An optimizer of any package; what it needs of a parameter is measured (`titan.optimizer.external.classify`)."""

    cls: ImportPath = setting(help="its class, such as torch.optim.Adafactor")
    args: Mapping[str, OpenValue] | None = setting(
        None, "further arguments of its constructor, {NAME: VALUE,...}; lr and weight_decay are titan's", hashed=False
    )
    parameters: Literal["all", "matrices"] = setting(
        "all", "what it updates; matrices: those of blocks, each expert's by itself, and AdamW updates the rest"
    )
    split: Literal["auto", "elements", "matrices", "whole"] = setting(
        "auto",
        "what it may update by itself; auto: as measured; whole: gather whole parameters in any case",
        science=False,
    )
    measured: Mapping[str, OpenValue] | None = setting(
        None, "what titan has measured, which run.yaml records; leave it out", in_ids=False, hashed=False
    )

    def check(self, model: Decoder, weight_bytes: int = 4) -> None:
        """Raise ConfigError for weights in bf16, and for a weight decay that the class lacks; see `Optimizer.check`."""
        super().check(model, weight_bytes)
        if weight_bytes < 4:
            raise ConfigError(
                "precision.weights=bf16: what an external optimizer does is measured with weights in fp32; give "
                "precision.weights=fp32."
            )
        decays = [self.weight_decay, *(group.weight_decay or 0.0 for group in (self.groups or {}).values())]
        if any(decays) and "weight_decay" not in _load(self.cls, self._pack_arguments()).takes:
            raise ConfigError(
                f"optimizer.weight_decay={format_value(max(decays))}: {self.cls} has no argument weight_decay; give 0."
            )

    def measure(self, model: Decoder) -> External:
        """Return the same with what was measured; raise ConfigError for a class with which layouts would differ."""
        stacked = self.parameters == "matrices"
        verdict = _measure(self.cls, self._pack_arguments(), _list_shapes(model, stacked), stacked)
        if self.split != "auto" and SPLITS.index(self.split) < SPLITS.index(verdict.split):
            raise ConfigError(
                f"optimizer.split={self.split}: {self.cls} needs more than that: {verdict.reason}; give auto."
            )
        return dataclasses.replace(self, measured=verdict.to_document())

    @property
    def chosen_split(self) -> str:
        """What the optimizer updates by itself in this run."""
        return str((self.measured or {}).get("split", "whole")) if self.split == "auto" else self.split

    def _pack_arguments(self) -> str:
        return json.dumps(dict(self.args or {}), sort_keys=True)

    def choose_settings(self, name: str, dimensions: int) -> GroupSettings:
        """Return the same, with `orthogonal` for what the class updates."""
        updated = self.parameters == "all" or is_block_matrix(name, dimensions)
        return super().choose_settings(name, dimensions)._replace(orthogonal=updated)

    def build(self, parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for `parameters`, which runs the class on plain tensors."""
        from titan.optimizer.external.sharded import ShardedOptimizer, ShardedOptimizerWithModes

        updater, named = _load(self.cls, self._pack_arguments()), list(parameters)
        kind = ShardedOptimizerWithModes if updater.has_modes else ShardedOptimizer
        return kind(self, updater, self.param_groups(named), {parameter: name for name, parameter in named})

    def list_packages(self) -> tuple[str, ...]:
        """Return the package of the class."""
        return (self.cls.partition(".")[0],)

    def describe(self) -> str:
        """Return the class, its package's version, and what is gathered for it."""
        measured = self.measured or {}
        gathers = {
            "elements": "updates each shard by itself",
            "matrices": "gathers each matrix",
            "whole": "gathers each parameter",
        }[self.chosen_split]
        rest = " of the blocks; adamw for the rest" if self.parameters == "matrices" else ""
        words = f"{self.cls} ({measured.get('package', '')}) {gathers}{rest}"
        return "; ".join(filter(None, [words, super().describe()]))

    def state_bytes(self, matrices: int, other_parameters: int, weight_bytes: int = 4) -> int:
        """Return the bytes of state, by what was measured of the model's parameters; see `Optimizer.state_bytes`."""
        measured = self.measured or {}
        per_matrix, per_other = (float(measured.get(key, 0.0)) for key in ("matrix_bytes", "other_bytes"))
        return int(per_matrix * matrices + per_other * other_parameters)

    def working_bytes(self, matrix: int, elements: int, device: str) -> int:
        """Return the bytes of a whole parameter, its gradient and its state, before and after; see `WORKING_COPIES`."""
        measured = self.measured or {}
        if self.chosen_split == "elements":
            return 4 * elements
        return int(4 * WORKING_COPIES * measured.get("largest", matrix) + 2 * measured.get("largest_bytes", 0))


@functools.cache
def _load(path: str, packed: str) -> Any:
    from titan.optimizer.external.state import load_updater

    return load_updater(path, json.loads(packed))


@functools.cache
def _measure(path: str, packed: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], is_stacked: bool) -> Verdict:
    """Return the verdict on a class, measured once in a process; raise ConfigError where it is rejected."""
    from titan.optimizer.external.classify import RejectedError, classify

    try:
        verdict = classify(_load(path, packed), dict(shapes), is_stacked)
    except RejectedError as error:
        hint = error.advice or "choose another optimizer"
        matrices = {name: shape for name, shape in shapes if is_block_matrix(name, len(shape))}
        if not error.advice and not is_stacked:  # does it take the matrices of blocks only?
            with contextlib.suppress(RejectedError):
                classify(_load(path, packed), matrices, True)
                hint = "give optimizer.parameters=matrices"
        raise ConfigError(f"optimizer.cls={path}: {error}; {hint}.") from error
    return verdict._replace(package=find_version(path.partition(".")[0]))


@functools.cache
def _list_shapes(model: Decoder, is_stacked: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the parameters of a model that the class updates, with their shapes."""
    import torch

    with torch.device("meta"):
        shapes = [(name, tuple(parameter.shape)) for name, parameter in model.build().named_parameters()]
    return tuple((n, s) for n, s in shapes if not is_stacked or is_block_matrix(n, len(s)))
