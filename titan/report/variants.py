"""Which runs belong together, what tells the variants apart, and which variant the others are held against."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from titan.config.settings import plain, show
from titan.errors import ConfigError
from titan.report.collect import Raw, neat
from titan.run.attempts import flat
from titan.run.identity import SCIENCE
from titan.run.schema import Recipe

IGNORED = re.compile(
    r"name|modules|training\.(seed|repeat|gc_every)|cluster\..*"  # what cluster comes to: layout and hardware
    r"|metrics\.(?!valid).*"
    r"|checkpoint\.(?!mode|every|minutes).*"
    r"|dataset\.(.*\.)?(cache|prefetch|workers)"
)
"""Settings that tell no variant from another."""
PATHS = re.compile(r"dataset\.(.*\.)?path")
"""They tell variants apart only where other data lie there."""
RATE = "optimizer.lr"
TAKEN = ("training.seed", "training.repeat")
CONTINUED = "training.continued_from"
"""The fact of how many steps earlier attempts were to do, where these were others."""
DERIVED = ("devices", "data", "parent")
"""Facts that follow from other ones as a rule, and are shown only where they do not."""


@dataclass(frozen=True)
class Facts:
    """What there is to say of a run's settings.

    Attributes:
        choices: the option of each axis.
        values: resolved settings by dotted name, and what follows from them: layout, devices, hardware, data.
        typed: names of the settings that the command line gave.
    """

    choices: Mapping[str, str]
    values: Mapping[str, Any]
    typed: frozenset[str]


@dataclass(frozen=True)
class Group:
    """Runs that differ in seed and repeat only.

    Attributes:
        runs: they.
        facts: that they share.
        settings: those that tell the group from the others, by full name, as typed.
    """

    runs: tuple[Raw, ...]
    facts: Facts
    settings: Mapping[str, str]

    @cached_property
    def label(self) -> str:
        """The settings in short; of a lone group its model and layout."""
        if not self.settings:
            choices = self.facts.choices
            return " ".join(f"{axis}={choices[axis]}" for axis in ("model", "parallelism") if axis in choices) or "runs"
        return " ".join(f"{short(name, self.facts.values)}={value}" for name, value in self.settings.items())

    @cached_property
    def rest(self) -> str:
        """All settings but the learning rate, as one text."""
        values = {name: show(value) for name, value in self.facts.values.items() if name != RATE}
        return repr(sorted(values.items()))

    @property
    def group_id(self) -> str:
        """Of its science, whatever the seed; of continued runs one of their own, as their schedule was another one."""
        first = self.runs[0]
        return " ".join([str(first.last["ids"]["group"]), *map(str, first.continued)])


def grouped(runs: Sequence[Raw]) -> list[Group]:
    """The runs in groups, in the order in which they were found."""
    groups: dict[Any, list[Raw]] = {}
    for raw in runs:
        groups.setdefault(_key(raw), []).append(raw)
    facts = [facts_of(members[0]) for members in groups.values()]
    settings = telling(facts)
    return [Group(tuple(m), f, s) for m, f, s in zip(groups.values(), facts, settings, strict=True)]


def facts_of(raw: Raw) -> Facts:
    """The facts of a run."""
    last, science = raw.last, raw.last["science"]
    values = {name: value for name, value in flat(_completed(raw)).items() if not IGNORED.fullmatch(name)}
    values |= {f"{axis}.class": science[axis] for axis in Recipe.axes() if axis in science}
    values |= {f"parallelism.{name}": degree for name, degree in (last.get("layout") or {}).items()}
    values |= {"parallelism.microbatches": last.get("microbatches"), "devices": raw.devices, "hardware": raw.hardware}
    values |= {"data": str(science.get("data"))[:8], "parent": science.get("parent")}
    values |= {CONTINUED: " ".join(map(str, raw.continued)) or "no"}
    typed = frozenset(override.partition("=")[0].lstrip("+~") for override in raw.overrides)
    return Facts(dict(last.get("choices") or {}), values, typed)


def _completed(raw: Raw) -> dict[str, Any]:
    """A run's configuration, with the defaults of settings that its titan did not have yet."""
    return {axis: {**_defaults(axis), **v} if isinstance(v, Mapping) else v for axis, v in raw.config.items()}


@cache
def _defaults(axis: str) -> Mapping[str, Any]:
    """The defaults of the execution settings of an axis: those of science, of which there are many kinds, are left."""
    schema = typing.get_type_hints(Recipe).get(axis)
    if axis in SCIENCE or not is_dataclass(schema):
        return {}
    return {f.name: plain(f.default) for f in fields(schema) if f.default is not MISSING}


def _key(raw: Raw) -> Any:
    values = facts_of(raw).values
    same = sorted((name, neat(value)) for name, value in values.items() if not PATHS.fullmatch(name))
    return raw.last["ids"]["group"], tuple(same)


def telling(facts: Sequence[Facts]) -> list[dict[str, str]]:
    """Of each variant the settings, with their values as typed, that tell it from the others.

    An option that was chosen stands for the settings that follow from it; those that the command line gave are named
    beside it, others only where the variants could not be told apart without them.
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
    """The axes whose options differ, and not in name alone."""
    touched = {name.partition(".")[0] for name in differ}
    columns = {axis: [f.choices.get(axis, "?") for f in facts] for axis in Recipe.axes() if axis in touched}
    return {axis: column for axis, column in columns.items() if len(set(column)) > 1}


def _strong(name: str, chosen: Mapping[str, Any], facts: Sequence[Facts]) -> bool:
    """Whether a setting that differs is named in any case."""
    if name in DERIVED:
        return False
    by_itself = name.partition(".")[0] not in chosen and name.partition(".")[0] != "parallelism"
    return by_itself or any(name in each.typed for each in facts)


def _follows(column: Sequence[str], shown: Iterable[Sequence[str]]) -> bool:
    """Whether the columns that are shown decide this one."""
    rows = list(zip(*shown, strict=True)) or [()] * len(column)
    return len(set(rows)) == len(set(zip(rows, column, strict=True)))


def short(name: str, names: Iterable[str]) -> str:
    """Return a setting's name without its axis, unless another setting (also one that never differs) ends alike."""
    last = name.rpartition(".")[2]
    return last if [n.rpartition(".")[2] for n in (*names, *TAKEN)].count(last) == 1 else name


def differs(groups: Sequence[Group]) -> dict[str, tuple[str, ...]]:
    """The settings that differ, with the values that there are."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    return {name: tuple(dict.fromkeys(g.settings[name] for g in groups if name in g.settings)) for name in names}


def labels(group: Group, groups: Sequence[Group]) -> list[str]:
    """A label for each run of a group."""
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
    """The places of the variants that may be the baseline, in the order in which they were found.

    Several differ in the learning rate alone: no word of the user's or the sweep's says which one, and the best is.

    Args:
        groups: all of them.
        option: what the user says: settings such as "parallelism=single,lr=0.001", or a run's directory.
        asked: what the sweep says.

    Raises:
        ConfigError: when the user's words fit no variant, or several that differ in more.
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
    """The places of the variants that the user's words fit, and whether they name one learning rate."""
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
    """Those of some variants that differ from one of them in the learning rate alone."""
    return [i for i in among if groups[i].rest == groups[one].rest]


def fitting(groups: Sequence[Group], wanted: Mapping[str, str]) -> list[int]:
    """The places of the groups that have all of some settings; none where nothing is wanted."""
    return [i for i, group in enumerate(groups) if wanted and fits(group, wanted)]


def fits(group: Group, wanted: Mapping[str, str]) -> bool:
    """Whether a group has settings, by full or short names, with values as typed."""
    return all(any(_same(value, have) for have in _values(group, name)) for name, value in wanted.items())


def _values(group: Group, name: str) -> list[str]:
    """What a setting, by its full name or in short, is in a group."""
    facts = group.facts
    if name in facts.choices:
        return [facts.choices[name]]
    full = [n for n in facts.values if short(n, facts.values) == name]
    typed = [o.partition("=")[2] for o in group.runs[0].overrides if o.partition("=")[0].lstrip("+~") == name]
    return [neat(facts.values[n]) for n in (full or [name]) if n in facts.values] + typed


def _same(a: str, b: str) -> bool:
    """Whether two values as typed are the same: 1e-3 is 0.001, True is true, and blanks and quotes do not count."""
    one, two = ("".join(text.split()).strip("'\"") for text in (a, b))
    try:
        return one == two or float(one) == float(two)
    except ValueError:
        return one.lower() == two.lower() and one.lower() in ("true", "false")
