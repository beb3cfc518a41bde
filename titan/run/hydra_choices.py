"""Error messages for config groups: unknown choices, and values in place of choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePath

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from titan.config.settings import suggest_nearest
from titan.errors import ConfigError
from titan.run.experiments import describe_experiment_choice
from titan.run.schema import Recipe
from titan.run.synonyms import CHOICES

FILE_KINDS = ("jsonl", "parquet")
"""Datasets that are named after the ending of their files."""
OPTIONAL_GROUPS = ("recipe", "sweep")
"""Config groups that need no choice."""


def check_optional(list_choices: Callable[[str], Sequence[str]], cfg: DictConfig) -> None:
    """Raise ConfigError for an unknown recipe or sweep, which Hydra ignores since these groups are optional.

    Raises:
        ConfigError: naming the choices.
    """
    for group in OPTIONAL_GROUPS:
        choice = cfg.hydra.runtime.choices.get(group)
        if choice not in (None, "null") and choice not in (choices := list_choices(group)):
            raise ConfigError(describe_unknown_choice(group, str(choice), choices))


def describe_unknown_choice(axis: str, choice: str, options: Sequence[str]) -> str:
    """Return the error message for an unknown choice, with the known ones and where others are looked for."""
    if experiment := describe_experiment_choice(axis, choice):
        return f"{axis}={choice}: there is no such choice; {experiment}."
    own = f"your own are files {axis}/NAME.yaml in a folder of $TITAN_CONF"
    choices = f" Choices: {', '.join(options)}; {own}." if options else f" There are none here; {own}."
    return f"{axis}={choice}: there is no such choice{_suggest_choice(axis, choice, options)}{choices}"


def _suggest_choice(axis: str, choice: str, options: Sequence[str]) -> str:
    """Return the end of a sentence, with what the user may have meant by an unknown choice."""
    path = PurePath(choice)
    if axis == "dataset" and (path.suffix or "/" in choice):
        kind = next((kind for kind in FILE_KINDS if f".{kind}" in path.suffixes), "text")
        return f"; files are dataset={kind} dataset.path={choice}."
    if axis == "model" and "/" in choice:
        return f"; weights of a folder or the hub are checkpoint.weights={choice}, with the model that they are of."
    word = path.name.removesuffix(".yaml").removesuffix(".yml").lower()
    parts = [set(re.split(r"[\W_]+", text)) for text in (word, *options)]  # tp+fsdp is fsdp_tp
    same = options[parts.index(parts[0], 1) - 1] if parts[0] in parts[1:] else None
    meant = word if word in options else CHOICES.get(axis, {}).get(word, same)
    return f"; did you mean {meant!r}?" if meant in options else suggest_nearest(choice, options)


def describe_unknown_hook(name: str) -> str:
    """Return the error message for a hook without a file."""
    if experiment := describe_experiment_choice("hooks", name):
        return f"hooks=[{name}]: there is no such choice; {experiment}."
    return (
        f"hooks=[{name}]: there is no such choice; put a file hooks/{name}.yaml into a folder of $TITAN_CONF, or write "
        f"+hooks.{name.rpartition('.')[2]}={{_target_:{name if '.' in name else 'MODULE.CLASS'}}}."
    )


def describe_value_error(
    error: ValueError, overrides: Sequence[str], list_choices: Callable[[str], Sequence[str]] = lambda group: ()
) -> str:
    """Return the error message for a `ValueError` of Hydra: mostly for an axis whose choice is a number or null."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in ("", *Recipe.axes()) and not isinstance(override.value(), (str, list)):
            choices = ", ".join(list_choices(key)) if key else ""
            way_out = f"choose one of {choices}" if choices else "see --help"
            return f"{override.input_line}: expected the name of a choice, AXIS=CHOICE; {way_out}."
    return f"{' '.join(str(error).split()).rstrip('.')}."
