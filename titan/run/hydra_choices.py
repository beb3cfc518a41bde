"""Choices that are none, and values in place of choices: what a user has typed for a config group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from titan.config.settings import nearest
from titan.errors import ConfigError
from titan.run.schema import Recipe

OPTIONAL_GROUPS = ("recipe", "sweep")
"""Groups of which none need be chosen."""


def check_optional(known: Callable[[str], Sequence[str]], cfg: DictConfig) -> None:
    """Refuse an unknown recipe or sweep, which Hydra passes over because these groups are optional.

    Args:
        known: the choices that there are in a group.
        cfg: what was composed.

    Raises:
        ConfigError: with those that there are.
    """
    for group in OPTIONAL_GROUPS:
        choice = cfg.hydra.runtime.choices.get(group)
        if choice not in (None, "null") and choice not in (there := known(group)):
            raise ConfigError(no_such_choice(group, str(choice), there))


def no_such_choice(axis: str, choice: str, known: Sequence[str]) -> str:
    """The sentence that refuses a choice, with those that there are."""
    choices = f" Choices: {', '.join(known)}." if known else " There are none here."
    return f"{axis}={choice}: there is no such choice{nearest(choice, known)}{choices}"


def value_error(error: ValueError, overrides: Sequence[str]) -> str:
    """What to say of a `ValueError` of Hydra's: mostly of an axis whose choice is a number or null."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in ("", *Recipe.axes()) and not isinstance(override.value(), (str, list)):
            return f"{override.input_line}: expected the name of a choice, AXIS=CHOICE; see --help."
    return f"{' '.join(str(error).split()).rstrip('.')}."
