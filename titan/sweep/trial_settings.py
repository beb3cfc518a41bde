"""What trials of one directory differ in beside the settings that their command varied: for labels, and for a note.

Several commands may add trials to a directory. The ledger has the settings of each that differ from their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.console.text import sanitize_line
from titan.run import identity
from titan.run.directory import REPEATS
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.sweep.labels import count_distinguishing_digits, format_label
from titan.sweep.ledger import TrialState

Settings = Mapping[str, Any]
BUDGETS = ("training.tokens", "training.hours")  # settings that decide the steps
MOST_NAMED, MOST_VALUES, LONGEST_VALUE = 4, 3, 40
"""Settings that a note names, values of each, and characters of a value."""
NO_VARIANT = re.compile(
    r"name|modules|training\.(seed|repeat|gc_every|tokens|hours|measured|step_seconds)"  # steps stand for the budget
    r"|cluster\..*"  # layout and hardware stand for it
    r"|metrics\.(?!valid).*"
    r"|checkpoint\.(?!mode|every|minutes).*"
    r"|dataset\.(.*\.)?(cache|prefetch|workers)"
    r"|evaluation\.(sets|tasks)\..*\.path"  # the content decides, for each figure
)
"""Settings that distinguish no variants."""


def collect_settings(run: Run) -> dict[str, Any]:
    """Return the settings that identify a trial and differ from their defaults, as the ledger keeps them."""
    settings: dict[str, Any] = json.loads(json.dumps(identity.select_trial_settings(run)))
    return settings


def label_trials(trials: Sequence[TrialState]) -> list[str]:
    """Return a label for each trial: what its command varied, after settings that tell it apart from others."""
    digits = count_distinguishing_digits([trial.overrides for trial in trials])
    labels = [format_label(t.overrides, digits) or sanitize_line(Path(t.directory).name) for t in trials]
    groups: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    for indices in groups.values():
        if len(indices) > 1:
            for index, text in zip(indices, _distinguish([trials[i] for i in indices]), strict=True):
                labels[index] = sanitize_line(f"{text} {labels[index]}")
    return labels


def _distinguish(trials: Sequence[TrialState]) -> list[str]:
    """Return a text for each trial of one label: the fewest settings that differ, or else its folder."""
    texts = [""] * len(trials)
    known = [trial.settings for trial in trials if trial.settings is not None]
    for name in _list_differing(known) if len(known) == len(trials) else ():
        longer = [f"{text} {name}={_format(name, own)}".strip() for text, own in zip(texts, known, strict=True)]
        texts = longer if len(set(longer)) > len(set(texts)) else texts
    return texts if len(set(texts)) == len(trials) else [Path(trial.directory).name for trial in trials]


def _list_differing(all_settings: Sequence[Settings]) -> list[str]:
    """Return the settings that differ, first those with the most values, then in the order of the axes."""
    values = {
        name: {_format(name, settings) for settings in all_settings} for name in sorted(set().union(*all_settings))
    }
    axes = {axis: rank for rank, axis in enumerate(identity.SCIENCE)}
    differing = [name for name, texts in values.items() if len(texts) > 1]
    return sorted(differing, key=lambda name: (-len(values[name]), axes.get(name.partition(".")[0], len(axes))))


def describe_mixed(
    new: Sequence[tuple[Sequence[str], Settings]],
    earlier: Sequence[TrialState],
    repeated: Sequence[Settings],
    has_budget: bool,
) -> str | None:
    """Return a sentence on settings that no command varied and in which new trials differ from all that there are.

    Each new trial is compared with the earlier one that differs least. Seeds and repeats may differ, steps that a
    budget decides, what decides no variant, and what differs between trials of the command: it follows from an axis.

    Args:
        new: the overrides that the command varies, and the settings, of each trial that the directory does not have.
        earlier: the trials that the directory has.
        repeated: settings of those that the command asks for too.

    Returns:
        None where there is nothing to say.
    """
    known = [(trial.overrides, trial.settings) for trial in earlier if trial.settings is not None]
    varied = {_find_name(o) for overrides, _ in [*new, *known] for o in overrides} | {*REPEATS}
    varied |= {"training.steps"} if has_budget else set()
    varied |= set(_list_differing([*(settings for _, settings in new), *repeated]))
    signatures = {_sign(overrides, settings, varied): settings for overrides, settings in known}
    groups: dict[Signature, list[Settings]] = {}
    for overrides, settings in new:
        groups.setdefault(_sign(overrides, settings, varied), []).append(settings)
    differing: dict[str, tuple[set[str], set[str]]] = {}
    count = 0
    for signature, group in groups.items():
        fitting = [other for other in signatures if other[0] == signature[0]]  # with the same wide choices
        if not fitting:
            continue
        nearest = signatures[min(fitting, key=lambda other: len(other[1] ^ signature[1]))]
        names = _list_unvaried(group[0], nearest, varied)
        count += len(group) * bool(names)
        for name in names:
            there, here = differing.setdefault(name, (set(), set()))
            there.add(_format(name, nearest))
            here.add(_format(name, group[0]))
    return _build_sentence(count, len(known), differing) if differing else None


def _list_unvaried(settings: Settings, nearest: Settings, varied: Iterable[str]) -> list[str]:
    """Return the settings that no command varied in which a trial differs from the nearest earlier one."""
    names = (
        n for n in _list_differing([settings, nearest]) if not _is_varied(n, varied) and not NO_VARIANT.fullmatch(n)
    )
    return [n for n in names if n != "training.steps" or not any(budget in settings for budget in BUDGETS)]


Signature = tuple[frozenset[str], frozenset[tuple[str, str]]]
"""The choices of groups that set several axes, and the settings that no command varied."""


def _sign(overrides: Sequence[str], settings: Settings, varied: Iterable[str]) -> Signature:
    axes = {field.name for field in dataclasses.fields(Recipe)}
    wide = frozenset(override for override in overrides if _find_name(override).partition(".")[0] not in axes)
    return wide, frozenset((n, _format(n, settings)) for n in settings if not _is_varied(n, varied))


def _find_name(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _is_varied(name: str, varied: Iterable[str]) -> bool:
    """Return whether an override of a command set a setting, or the group or mapping that has it."""
    return any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in varied)


def _build_sentence(new: int, earlier: int, differing: Mapping[str, tuple[set[str], set[str]]]) -> str:
    def join(values: Iterable[str]) -> str:
        texts = [text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..." for text in sorted(values)]
        more = [f"{len(texts) - MOST_VALUES} more"] if len(texts) > MOST_VALUES else []
        return " or ".join([*texts[:MOST_VALUES], *more])

    texts = [f"{name} (there {join(there)}, here {join(here)})" for name, (there, here) in differing.items()]
    more = [f"and {len(texts) - MOST_NAMED} more"] if len(texts) > MOST_NAMED else []
    return (
        f"{format_plural(new, 'new trial')} {'differs' if new == 1 else 'differ'} from the {earlier:,} that the "
        f"directory has in settings that no command varies: {', '.join([*texts[:MOST_NAMED], *more])}. titan.compare "
        "takes them for other variants; another name keeps them apart."
    )


def _format(name: str, settings: Settings) -> str:
    return format_value(settings[name]) if name in settings else _find_default(name)


@lru_cache(1024)
def _find_default(name: str) -> str:
    """Return the default of a setting as text; "default" where its class is the user's choice."""
    kind: Any = Recipe
    *parts, last = name.split(".")
    for part in parts:
        kind = typing.get_type_hints(kind).get(part) if dataclasses.is_dataclass(kind) else None
    default = getattr(kind, last, dataclasses.MISSING)
    is_plain = dataclasses.is_dataclass(kind) and not callable(default) and default is not dataclasses.MISSING
    return format_value(default) if is_plain else "default"
