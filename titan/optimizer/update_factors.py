"""Factors that a model asks for in the updates of its parameters, applied to any torch optimizer's groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan.config.kinds import get_kind
from titan.errors import ConfigError, RunError
from titan.model.schema import UpdateFactors

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.optimizer.schema import Optimizer


def build_optimizer(
    settings: Optimizer, model: Decoder, parameters: Iterable[tuple[str, Tensor]]
) -> torch.optim.Optimizer:
    """Return the optimizer of `parameters`, given with their names in the whole model, with the model's factors.

    Raises:
        ConfigError: for a factor of eps where the optimizer has no eps.
        RunError: where a user's own class builds something else than an optimizer.
    """
    named: list[Any] = list(parameters)
    optimizer: object = settings.build(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        builder = f"{get_kind(type(settings))}.build"
        raise RunError(f"{builder} returned {type(optimizer).__name__}; return a torch.optim.Optimizer.")
    if factors := model.update_factors(settings):
        scale_groups(optimizer, {parameter: factors.get(name, UpdateFactors()) for name, parameter in named})
    return optimizer


def scale_groups(optimizer: torch.optim.Optimizer, factors: Mapping[Tensor, UpdateFactors]) -> None:
    """Split the parameter groups by the factors of their parameters, and multiply each group's settings by its factors.

    `titan.schedule.optimizer_schedule` sets learning rates from the key `factor`.
    """
    scaled = []
    for group in optimizer.param_groups:
        split: dict[UpdateFactors, list[Tensor]] = {}
        for parameter in group["params"]:
            split.setdefault(factors.get(parameter, UpdateFactors()), []).append(parameter)
        for shared, members in split.items():
            if shared.eps != 1 and "eps" not in group:
                raise ConfigError(
                    f"model.update_factors: the model scales eps, which {get_kind(type(optimizer))} does not have; "
                    "give an optimizer with eps, such as optimizer=adamw."
                )
            scaled.append({**group, "params": members, "factor": group.get("factor", 1.0) * shared.lr})
            scaled[-1] |= {key: group[key] * factor for key, factor in shared._asdict().items() if key in group}
    optimizer.param_groups[:] = scaled
