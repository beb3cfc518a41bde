"""Whether a model's plan for tensor parallelism fits its modules; see `titan.model.decoder.Placement`."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping

from torch import nn

from titan.model.decoder import Placement

SPLIT = {"vocab": 0, "colwise": 0, "rowwise": 1}
"""The dimension of a weight that ranks split, by its placement; others stay whole."""


def find_plan_errors(model: nn.Module, degree: int) -> Iterator[str]:
    """Yield what is wrong with a model's plan."""
    try:
        plan: Mapping[str, Placement] = model.tensor_plan()  # type: ignore[operator]
    except AttributeError:
        yield "it declares no BLOCK_PLAN"
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, placement in plan.items():
        yield from _find_entry_errors(name, placement, modules, parameters, degree)
    planned_names = {f"{name}.weight" for name, placement in plan.items() if placement != "region"}
    for name in sorted(parameters.keys() - planned_names):
        yield f"its plan has no entry for the parameter {name}"


def _find_entry_errors(
    name: str, placement: str, modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], degree: int
) -> Iterator[str]:
    """Yield what is wrong with one entry of a plan."""
    placements = typing.get_args(Placement)
    if name not in modules:
        yield f"its plan names {name}, which is no module"
    elif placement not in placements:
        yield f"its plan has {placement} for {name}, which is none of {', '.join(placements)}"
    elif placement != "region":
        weight = parameters.get(f"{name}.weight")
        if weight is None:
            yield f"its plan has {placement} for {name}, which has no weight"
        elif not hasattr(modules[name], "get_weight"):
            yield f"{name} is a {type(modules[name]).__name__} and no layer of titan.model.layers"
        elif placement in SPLIT and weight.shape[SPLIT[placement]] % degree:
            yield f"{degree} does not divide dimension {SPLIT[placement]} of {name}.weight {tuple(weight.shape)}"
