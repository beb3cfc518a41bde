"""Checks of an optimizer's groups of parameters. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from titan.config.kinds import get_kind
from titan.config.settings import format_value, suggest_nearest, suggest_pattern
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.model.schema import Decoder, UpdateFactors
    from titan.optimizer.schema import Group


def check_groups(groups: Mapping[str, Group], names: Sequence[str]) -> None:
    """Raise ConfigError for a group without patterns, and for a pattern that matches no parameter.

    Args:
        names: of the model's parameters.
    """
    for group, content in groups.items():
        if not content.match:
            raise ConfigError(
                f"optimizer.groups.{group}.match=[]: matches no parameter; give patterns such as ['*norm.weight']."
            )
        for pattern in content.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"optimizer.groups.{group}.match={format_value(content.match)}: no parameter of the model "
                    f"matches {pattern}; names are such as {names[0]}, {names[1]} and "
                    f"{names[-1]}{suggest_pattern(pattern, names)}"
                )


def check_update_factors(factors: Mapping[str, UpdateFactors], model: Decoder) -> None:
    """Raise ConfigError for a factor that is negative or not finite, and for one of a parameter that is none.

    Args:
        factors: by the parameters' names.
    """
    names = frozenset(model.parameter_names()) if factors else frozenset()
    for name, values in factors.items():
        if name not in names:
            raise ConfigError(
                f"model={get_kind(type(model))}: update_factors names {name}, and no parameter has this name; correct "
                f"the name{suggest_nearest(name, sorted(names))}"
            )
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ConfigError(
                f"model={get_kind(type(model))}: update_factors gives {name} the factors "
                f"{format_value(tuple(values))}; return finite factors of at least 0."
            )
