"""Group runs into variants, find the settings that distinguish them, and find the baseline."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from titan.config import kinds
from titan.config.settings import format_value, to_plain
from titan.errors import ConfigError
from titan.report.collect import Raw, neat
from titan.run.identity import SCIENCE
from titan.run.same_experiment import flat
from titan.run.schema import Recipe

IGNORED = re.compile(
    r"name|modules|training\.(seed|repeat|gc_every)|cluster\..*"  # layout and hardware stand for cluster
    r"|metrics\.(?!valid).*"
    r"|checkpoint\.(?!mode|every|minutes).*"
    r"|dataset\.(.*\.)?(cache|prefetch|workers)"
)
"""Settings that distinguish no variants."""
PATHS = re.compile(r"dataset\.(.*\.)?path")
"""They distinguish variants only where the data differ."""
RATE = "optimizer.lr"
TAKEN = ("training.seed", "training.repeat")
CONTINUED = "training.continued_from"
"""The planned steps of earlier attempts, where they differ."""
DERIVED = ("devices", "data", "parent")
"""Facts that usually follow from others, and are shown only where they don't."""


@dataclass(frozen=True)
class Facts:
    """The settings of a run.

    Attributes:
        choices: the option of each axis.
        values: resolved settings by dotted name, and what follows from them: layout, devices, hardware, data.
        typed: names of the settings on the command line.
    """

    choices: Mapping[str, str]
    values: Mapping[str, Any]
    typed: frozenset[str]


@dataclass(frozen=True)
class Group:
    """Runs that differ in seed and repeat only.

    Attributes:
        runs: the runs.
        facts: the facts that they share.
        settings: those that distinguish the group, by full name, as typed.
    """

    runs: tuple[Raw, ...]
    facts: Facts
    settings: Mapping[str, str]

    @cached_property
    def label(self) -> str:
        """Return the settings in short; model and layout of a single group."""
        if not self.settings:
            choices = self.facts.choices
            return " ".join(f"{axis}={choices[axis]}" for axis in ("model", "parallelism") if axis in choices) or "runs"
        return " ".join(f"{short(name, self.facts.values)}={value}" for name, value in self.settings.items())

    @cached_property
    def rest(self) -> str:
        """Return all settings but the learning rate as one text."""
        values = {name: format_value(value) for name, value in self.facts.values.items() if name != RATE}
        return repr(sorted(values.items()))

    @property
    def group_id(self) -> str:
        """Return the group_id; of continued runs with their former steps, as their schedule was another one."""
        first = self.runs[0]
        return " ".join([str(first.last["ids"]["group"]), *map(str, first.continued)])


def grouped(runs: Sequence[Raw]) -> list[Group]:
    """Return the runs in groups, in the order in which they were found."""
    groups: dict[Any, list[Raw]] = {}
    for raw in runs:
        groups.setdefault(_key(raw), []).append(raw)
    facts = [facts_of(members[0]) for members in groups.values()]
    settings = telling(facts)
    return [Group(tuple(m), f, s) for m, f, s in zip(groups.values(), facts, settings, strict=True)]


def facts_of(raw: Raw) -> Facts:
    """Return the facts of a run."""
    last, science = raw.last, raw.last["science"]
    values = {name: value for name, value in flat(_completed(raw)).items() if not IGNORED.fullmatch(name)}
    values |= {f"{axis}.class": kind for axis in Recipe.axes() if (kind := kinds.find_kind_in_ids(axis, science))}
    values |= {f"parallelism.{name}": degree for name, degree in (last.get("layout") or {}).items()}
    values |= {"parallelism.microbatches": last.get("microbatches"), "devices": raw.devices, "hardware": raw.hardware}
    values |= {"data": str(science.get("data"))[:8], "parent": science.get("parent")}
    values |= {CONTINUED: " ".join(map(str, raw.continued)) or "no"}
    typed = frozenset(override.partition("=")[0].lstrip("+~") for override in raw.overrides)
    hooks = {
        "hooks": format_value(list(raw.config.get("hooks") or {}))
    }  # as on the command line; no axis, so no choice yet
    return Facts({**(last.get("choices") or {}), **hooks}, values, typed)


def _completed(raw: Raw) -> dict[str, Any]:
    """Return a run's configuration, with defaults for settings that its version of titan lacked."""
    return {axis: {**_defaults(axis), **v} if isinstance(v, Mapping) else v for axis, v in raw.config.items()}


@cache
def _defaults(axis: str) -> Mapping[str, Any]:
    """Return the defaults of the execution settings of an axis; science axes have several schemas and none."""
    schema = typing.get_type_hints(Recipe).get(axis)
    if axis in SCIENCE or not is_dataclass(schema):
        return {}
    return {f.name: to_plain(f.default) for f in fields(schema) if f.default is not MISSING}


def _key(raw: Raw) -> Any:
    values = facts_of(raw).values
    same = sorted((name, neat(value)) for name, value in values.items() if not PATHS.fullmatch(name))
    return raw.last["ids"]["group"], tuple(same)


def telling(facts: Sequence[Facts]) -> list[dict[str, str]]:
    """Return the settings that distinguish each variant, with their values as typed.

    An option that was chosen stands for the settings that follow from it; those that the command line gave are named
    beside it, others only where the variants would have equal labels without them.
    """
    columns = {name: [neat(f.values.get(name)) for f in facts] for name in _names(facts)}
    differ = {name: column for name, column in columns.items() if len(set(column)) > 1}
    if "data" not in differ:
        differ = {name: column for name, column in differ.items() if not PATHS.fullmatch(name)}
    chosen = _chosen(facts, differ)
    strong = [name for name in differ if _strong(name, chosen, facts)]
    shown = chosen | {name: differ[name] for name in strong}
    for name in sorted(differ.keys() - shown.keys(), key=lambda n: (n in DERIVED[1:], n != "devices", n)):
        if not _follows(differ[name], shown.values()):
            shown[name] = differ[name]
    return [{name: column[index] for name, column in shown.items()} for index in range(len(facts))]


def _names(facts: Sequence[Facts]) -> list[str]:
    return list(dict.fromkeys(name for each in facts for name in each.values))


def _chosen(facts: Sequence[Facts], differ: Iterable[str]) -> dict[str, list[str]]:
    """Return the axes, and hooks, whose options differ, and not only in name."""
    touched = {name.partition(".")[0] for name in differ}
    axes = (*Recipe.axes(), "hooks")
    columns = {axis: [f.choices.get(axis, "?") for f in facts] for axis in axes if axis in touched}
    return {axis: column for axis, column in columns.items() if len(set(column)) > 1}


def _strong(name: str, chosen: Mapping[str, Any], facts: Sequence[Facts]) -> bool:
    """Return whether a setting that differs is always named."""
    if name in DERIVED:
        return False
    by_itself = name.partition(".")[0] not in chosen and name.partition(".")[0] != "parallelism"
    return by_itself or any(name in each.typed for each in facts)


def _follows(column: Sequence[str], shown: Iterable[Sequence[str]]) -> bool:
    """Return whether the shown columns determine this one."""
    rows = list(zip(*shown, strict=True)) or [()] * len(column)
    return len(set(rows)) == len(set(zip(rows, column, strict=True)))


def short(name: str, names: Iterable[str]) -> str:
    """Return a setting's name without its axis, unless another setting (also one that never differs) ends alike."""
    last = name.rpartition(".")[2]
    return last if [n.rpartition(".")[2] for n in (*names, *TAKEN)].count(last) == 1 else name


def differs(groups: Sequence[Group]) -> dict[str, tuple[str, ...]]:
    """Return the settings that differ, with their values."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    return {name: tuple(dict.fromkeys(g.settings[name] for g in groups if name in g.settings)) for name in names}


def labels(group: Group, groups: Sequence[Group]) -> list[str]:
    """Return a label for each run of a group."""
    every = [raw for each in groups for raw in each.runs]
    parts = [group.label]
    seeds, repeats = len({raw.seed for raw in every}) > 1, len({raw.repeat for raw in every}) > 1
    found = []
    for raw in group.runs:
        more = [f"seed={raw.seed}"] * seeds + [f"repeat={raw.repeat}"] * repeats
        found.append(" ".join(parts + more))
    twice = {label for label in found if found.count(label) > 1}
    return [f"{x} ({raw.directory.name})" if x in twice else x for x, raw in zip(found, group.runs, strict=True)]


def baselines(groups: Sequence[Group], option: str | None, asked: Mapping[str, str]) -> list[int]:
    """Return the indices of the variants that may be the baseline, in the order in which they were found.

    Several differ in the learning rate only, where neither user nor sweep names one: the best of them is the baseline.

    Args:
        groups: all of them.
        option: what the user asks for: settings such as "parallelism=single,lr=0.001", or a run's directory.
        asked: the baseline of the sweep.

    Raises:
        ConfigError: when the option matches no variant, or several that differ in more.
    """
    if option is None:
        found = fitting(groups, asked) or [0]
        return found[:1] if _names_rate(asked) else _family(groups, found[0], found if asked else range(len(groups)))
    found, exact = _wanted(groups, option)
    if found and not exact and len(family := _family(groups, found[0], found)) == len(found):
        return family
    if len(found) != 1:
        names = "; ".join(group.label for group in groups[:8])
        raise ConfigError(
            f"baseline={option}: matches {len(found) or 'none'} of the variants ({names}); give the settings of one."
        )
    return found


def _wanted(groups: Sequence[Group], option: str) -> tuple[list[int], bool]:
    """Return the indices of the variants that the option matches, and whether it names one learning rate."""
    if Path(option).is_dir():
        at = Path(option).resolve()
        return [i for i, group in enumerate(groups) if at in [raw.directory for raw in group.runs]], True
    if labelled := [i for i, group in enumerate(groups) if option == group.label]:
        return labelled, True
    wanted = dict(re.findall(r"([^\s,=]+)=(\[[^\]]*\]|[^\s,]*)", option))
    return fitting(groups, wanted), _names_rate(wanted)


def _names_rate(wanted: Mapping[str, str]) -> bool:
    return any(name in (RATE, "lr") for name in wanted)


def _family(groups: Sequence[Group], one: int, among: Iterable[int]) -> list[int]:
    """Return the variants among some that differ from one of them in the learning rate only."""
    return [i for i in among if groups[i].rest == groups[one].rest]


def fitting(groups: Sequence[Group], wanted: Mapping[str, str]) -> list[int]:
    """Return the indices of the groups with all wanted settings; none where nothing is wanted."""
    return [i for i, group in enumerate(groups) if wanted and fits(group, wanted)]


def fits(group: Group, wanted: Mapping[str, str]) -> bool:
    """Return whether a group has settings, by full or short names, with values as typed."""
    return all(any(_same(value, have) for have in _values(group, name)) for name, value in wanted.items())


def _values(group: Group, name: str) -> list[str]:
    """Return the values of a setting in a group, by its full or short name."""
    facts = group.facts
    if name in facts.choices:
        return [facts.choices[name]]
    full = [n for n in facts.values if short(n, facts.values) == name]
    typed = [o.partition("=")[2] for o in group.runs[0].overrides if o.partition("=")[0].lstrip("+~") == name]
    return [neat(facts.values[n]) for n in (full or [name]) if n in facts.values] + typed


def _same(a: str, b: str) -> bool:
    """Return whether two typed values are equal: 1e-3 is 0.001, True is true; blanks and quotes are ignored."""
    one, two = ("".join(text.split()).strip("'\"") for text in (a, b))
    try:
        return one == two or float(one) == float(two)
    except ValueError:
        return one.lower() == two.lower() and one.lower() in ("true", "false")
