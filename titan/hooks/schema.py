"""A hook's settings: the base of the dataclasses that `hooks.NAME._target_` names. Free of torch."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from titan.errors import ConfigError

MOMENTS = (
    "on_run_start",
    "before_optimizer",
    "on_step_end",
    "on_validation",
    "on_checkpoint",
    "on_not_finite",
    "on_run_end",
)
"""The methods of a hook: each is called with a `titan.hooks.context.Context`, and a hook has some of them."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """The settings of a hook.

    Attributes:
        science: whether the hook changes what is learned: then it and its settings are part of science_id.
    """

    science: ClassVar[bool] = False

    @abstractmethod
    def build(self) -> Any:
        """Return an object with some of the methods `MOMENTS`; each rank calls it once, before the first step."""
        raise NotImplementedError


def check_hooks(hooks: Mapping[str, Hook] | None) -> None:
    """Raise ConfigError for names that metrics can't have.

    Raises:
        ConfigError: naming the entry.
    """
    for name in hooks or {}:
        if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            raise ConfigError(
                f"hooks.{name}: names the hook's metrics; give it a name of letters, digits, - and _, such as norms."
            )
