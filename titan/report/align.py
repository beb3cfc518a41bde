"""Align runs: group them into variants, find the settings that distinguish or join these, and find the baseline."""

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
from titan.console.numbers import format_count, format_tokens
from titan.errors import ConfigError
from titan.report.collect import RawRun, format_setting, read_model_settings
from titan.report.findings import FailedRun
from titan.run.identity import SCIENCE
from titan.run.same_experiment import flatten_config
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
LEARNING_RATE = "optimizer.lr"
RESERVED_NAMES = ("training.seed", "training.repeat")
CONTINUED = "training.continued_from"
"""The planned steps of earlier attempts, where they differ."""
DERIVED = ("devices", "data", "parent")
"""Facts that usually follow from others, and are shown only where they don't."""
SEED_OVERRIDE = re.compile(r"[+~]*training\.(seed|repeat)=.*")


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
class RunGroup:
    """Runs that differ in seed and repeat only.

    Attributes:
        runs: the runs.
        facts: the facts that they share.
        settings: those that distinguish the group, by full name, as typed.
    """

    runs: tuple[RawRun, ...]
    facts: Facts
    settings: Mapping[str, str]

    @cached_property
    def label(self) -> str:
        """Return the settings in short; model and layout of a single group."""
        if not self.settings:
            choices = self.facts.choices
            return " ".join(f"{axis}={choices[axis]}" for axis in ("model", "parallelism") if axis in choices) or "runs"
        return " ".join(f"{shorten_name(name, self.facts.values)}={value}" for name, value in self.settings.items())

    @cached_property
    def other_settings(self) -> str:
        """Return all settings but the learning rate as one text."""
        values = {name: format_value(value) for name, value in self.facts.values.items() if name != LEARNING_RATE}
        return repr(sorted(values.items()))

    @property
    def group_id(self) -> str:
        """Return the group_id; of continued runs with their former steps, as their schedule was another one."""
        first = self.runs[0]
        return " ".join([str(first.last_document["ids"]["group"]), *map(str, first.earlier_planned_steps)])


def group_runs(runs: Sequence[RawRun]) -> list[RunGroup]:
    """Return the runs in groups, in the order in which they were found."""
    groups: dict[Any, list[RawRun]] = {}
    for raw in runs:
        groups.setdefault(_build_group_key(raw), []).append(raw)
    facts = [collect_facts(members[0]) for members in groups.values()]
    settings = find_distinguishing_settings(facts)
    return [RunGroup(tuple(m), f, s) for m, f, s in zip(groups.values(), facts, settings, strict=True)]


def collect_facts(raw: RawRun) -> Facts:
    """Return the facts of a run."""
    last, science = raw.last_document, raw.last_document["science"]
    values = {name: value for name, value in flatten_config(_fill_defaults(raw)).items() if not IGNORED.fullmatch(name)}
    values |= {f"{axis}.class": kind for axis in Recipe.axes() if (kind := kinds.find_kind_in_ids(axis, science))}
    values |= {f"parallelism.{name}": degree for name, degree in (last.get("layout") or {}).items()}
    values |= {"parallelism.microbatches": last.get("microbatches"), "devices": raw.devices, "hardware": raw.hardware}
    values |= {"data": str(science.get("data"))[:8], "parent": science.get("parent")}
    values |= {CONTINUED: " ".join(map(str, raw.earlier_planned_steps)) or "no"}
    typed = frozenset(override.partition("=")[0].lstrip("+~") for override in raw.overrides)
    hooks = {
        "hooks": format_value(list(raw.config.get("hooks") or {}))
    }  # as on the command line; no axis, so no choice yet
    return Facts({**(last.get("choices") or {}), **hooks}, values, typed)


def _fill_defaults(raw: RawRun) -> dict[str, Any]:
    """Return a run's configuration, with defaults for settings that its version of titan lacked."""
    return {axis: {**_read_defaults(axis), **v} if isinstance(v, Mapping) else v for axis, v in raw.config.items()}


@cache
def _read_defaults(axis: str) -> Mapping[str, Any]:
    """Return the defaults of the execution settings of an axis; science axes have several schemas and none."""
    schema = typing.get_type_hints(Recipe).get(axis)
    if axis in SCIENCE or not is_dataclass(schema):
        return {}
    return {f.name: to_plain(f.default) for f in fields(schema) if f.default is not MISSING}


def _build_group_key(raw: RawRun) -> Any:
    values = collect_facts(raw).values
    key_settings = sorted((name, format_setting(value)) for name, value in values.items() if not PATHS.fullmatch(name))
    return raw.last_document["ids"]["group"], tuple(key_settings)


def find_distinguishing_settings(facts: Sequence[Facts]) -> list[dict[str, str]]:
    """Return the settings that distinguish each variant, with their values as typed.

    An option that was chosen stands for the settings that follow from it; those that the command line gave are named
    beside it, others only where the variants would have equal labels without them.
    """
    columns = {name: [format_setting(f.values.get(name)) for f in facts] for name in _list_names(facts)}
    differ = {name: column for name, column in columns.items() if len(set(column)) > 1}
    if "data" not in differ:
        differ = {name: column for name, column in differ.items() if not PATHS.fullmatch(name)}
    choices = _find_differing_choices(facts, differ)
    strong_names = [name for name in differ if _is_always_named(name, choices, facts)]
    settings = choices | {name: differ[name] for name in strong_names}
    for name in sorted(differ.keys() - settings.keys(), key=lambda n: (n in DERIVED[1:], n != "devices", n)):
        if not _is_determined(differ[name], settings.values()):
            settings[name] = differ[name]
    return [{name: column[index] for name, column in settings.items()} for index in range(len(facts))]


def _list_names(facts: Sequence[Facts]) -> list[str]:
    return list(dict.fromkeys(name for run_facts in facts for name in run_facts.values))


def _find_differing_choices(facts: Sequence[Facts], differ: Iterable[str]) -> dict[str, list[str]]:
    """Return the axes, and hooks, whose options differ, and not only in name."""
    touched = {name.partition(".")[0] for name in differ}
    axes = (*Recipe.axes(), "hooks")
    columns = {axis: [f.choices.get(axis, "?") for f in facts] for axis in axes if axis in touched}
    return {axis: column for axis, column in columns.items() if len(set(column)) > 1}


def _is_always_named(name: str, choices: Mapping[str, Any], facts: Sequence[Facts]) -> bool:
    """Return whether a setting that differs is always named."""
    if name in DERIVED:
        return False
    by_itself = name.partition(".")[0] not in choices and name.partition(".")[0] != "parallelism"
    return by_itself or any(name in run_facts.typed for run_facts in facts)


def _is_determined(column: Sequence[str], columns: Iterable[Sequence[str]]) -> bool:
    """Return whether the shown columns determine this one."""
    rows = list(zip(*columns, strict=True)) or [()] * len(column)
    return len(set(rows)) == len(set(zip(rows, column, strict=True)))


def shorten_name(name: str, names: Iterable[str]) -> str:
    """Return a setting's name without its axis, unless another setting (also one that never differs) ends alike."""
    last = name.rpartition(".")[2]
    return last if [n.rpartition(".")[2] for n in (*names, *RESERVED_NAMES)].count(last) == 1 else name


def collect_differing_settings(groups: Sequence[RunGroup]) -> dict[str, tuple[str, ...]]:
    """Return the settings that differ, with their values."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    return {name: tuple(dict.fromkeys(g.settings[name] for g in groups if name in g.settings)) for name in names}


def label_runs(group: RunGroup, groups: Sequence[RunGroup]) -> list[str]:
    """Return a label for each run of a group."""
    all_runs = [raw for variant in groups for raw in variant.runs]
    parts = [group.label]
    seeds, repeats = len({raw.seed for raw in all_runs}) > 1, len({raw.repeat for raw in all_runs}) > 1
    labels = []
    for raw in group.runs:
        suffixes = [f"seed={raw.seed}"] * seeds + [f"repeat={raw.repeat}"] * repeats
        labels.append(" ".join(parts + suffixes))
    duplicates = {label for label in labels if labels.count(label) > 1}
    return [f"{x} ({raw.directory.name})" if x in duplicates else x for x, raw in zip(labels, group.runs, strict=True)]


def find_baselines(groups: Sequence[RunGroup], option: str | None, sweep_baseline: Mapping[str, str]) -> list[int]:
    """Return the indices of the variants that may be the baseline, in the order in which they were found.

    Several differ in the learning rate only, where neither user nor sweep names one: the best of them is the baseline.

    Args:
        groups: all of them.
        option: what the user asks for: settings such as "parallelism=single,lr=0.001", or a run's directory.
        sweep_baseline: the baseline of the sweep.

    Raises:
        ConfigError: when the option matches no variant, or several that differ in more.
    """
    if option is None:
        indices = find_fitting(groups, sweep_baseline) or [0]
        return (
            indices[:1]
            if _names_rate(sweep_baseline)
            else _select_family(groups, indices[0], indices if sweep_baseline else range(len(groups)))
        )
    indices, exact = _match_option(groups, option)
    if indices and not exact and len(family := _select_family(groups, indices[0], indices)) == len(indices):
        return family
    if len(indices) != 1:
        names = "; ".join(group.label for group in groups[:8])
        raise ConfigError(
            f"baseline={option}: matches {len(indices) or 'none'} of the variants ({names}); give the settings of one."
        )
    return indices


def _match_option(groups: Sequence[RunGroup], option: str) -> tuple[list[int], bool]:
    """Return the indices of the variants that the option matches, and whether it names one learning rate."""
    if Path(option).is_dir():
        directory = Path(option).resolve()
        return [i for i, group in enumerate(groups) if directory in [raw.directory for raw in group.runs]], True
    if labelled := [i for i, group in enumerate(groups) if option == group.label]:
        return labelled, True
    settings = dict(re.findall(r"([^\s,=]+)=(\[[^\]]*\]|[^\s,]*)", option))
    return find_fitting(groups, settings), _names_rate(settings)


def _names_rate(settings: Mapping[str, str]) -> bool:
    return any(name in (LEARNING_RATE, "lr") for name in settings)


def _select_family(groups: Sequence[RunGroup], index: int, indices: Iterable[int]) -> list[int]:
    """Return the variants among some that differ from one of them in the learning rate only."""
    return [i for i in indices if groups[i].other_settings == groups[index].other_settings]


def find_fitting(groups: Sequence[RunGroup], settings: Mapping[str, str]) -> list[int]:
    """Return the indices of the groups with all wanted settings; none where nothing is wanted."""
    return [i for i, group in enumerate(groups) if settings and has_settings(group, settings)]


def has_settings(group: RunGroup, settings: Mapping[str, str]) -> bool:
    """Return whether a group has settings, by full or short names, with values as typed."""
    return all(
        any(_is_same_value(value, existing) for existing in _list_values(group, name))
        for name, value in settings.items()
    )


def _list_values(group: RunGroup, name: str) -> list[str]:
    """Return the values of a setting in a group, by its full or short name."""
    facts = group.facts
    if name in facts.choices:
        return [facts.choices[name]]
    full = [n for n in facts.values if shorten_name(n, facts.values) == name]
    typed = [o.partition("=")[2] for o in group.runs[0].overrides if o.partition("=")[0].lstrip("+~") == name]
    return [format_setting(facts.values[n]) for n in (full or [name]) if n in facts.values] + typed


def _is_same_value(a: str, b: str) -> bool:
    """Return whether two typed values are equal: 1e-3 is 0.001, True is true; blanks and quotes are ignored."""
    text_a, text_b = ("".join(text.split()).strip("'\"") for text in (a, b))
    try:
        return text_a == text_b or float(text_a) == float(text_b)
    except ValueError:
        return text_a.lower() == text_b.lower() and text_a.lower() in ("true", "false")


def find_missing_trials(group: RunGroup, failed: Sequence[FailedRun]) -> tuple[FailedRun, ...]:
    """Return the trials without metrics that differ from a variant's runs in their seed only."""
    recipes = {_select_recipe(raw.overrides) for raw in group.runs}
    return tuple(trial for trial in failed if trial.overrides and _select_recipe(trial.overrides) in recipes)


def _select_recipe(overrides: Sequence[str]) -> frozenset[str]:
    """Return the overrides of a trial that all seeds of its variant share."""
    return frozenset(override for override in overrides if not SEED_OVERRIDE.fullmatch(override))


def find_common_settings(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Return the main settings that all variants share."""
    main_settings = [_collect_main_settings(group) for group in groups]
    return {
        key: value
        for key, value in (main_settings[0] if main_settings else {}).items()
        if all(t.get(key) == value for t in main_settings)
    }


def _collect_main_settings(group: RunGroup) -> dict[str, str]:
    raw, choices = group.runs[0], group.facts.choices
    training, hardware = raw.config["training"], raw.hardware
    main_settings = {
        axis: choices[axis] for axis in ("model", "dataset", "optimizer", "parallelism", "memory") if axis in choices
    }
    if size := _count_parameters(group):
        main_settings["model"] = f"{main_settings.get('model', '?')}, {format_count(size)} parameters"
    batch = "" if training.get("grow") else f" of {format_tokens(training['global_batch'])} tokens"
    return main_settings | {
        "precision": str(raw.config.get("precision", {}).get("compute", "?")),
        "training": f"{training['steps']:,} steps{batch}, rows of {training['seq_len']:,}",
        "optimizer.lr": f"{raw.config['optimizer'].get('lr', 0):g}",
        "devices": f"{raw.devices} x {hardware}" if hardware else str(raw.devices),
    }


def _count_parameters(group: RunGroup) -> int | None:
    """Return the model's parameter count; None where its class can't be loaded."""
    model = read_model_settings(group.runs[0])
    return model.parameters() if model else None
