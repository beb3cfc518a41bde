"""Align runs: group them into variants, and find what distinguishes these, what they share, and what compares them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from titan.config.settings import format_value
from titan.console.numbers import format_count, format_plural, format_tokens, shorten_exponent
from titan.optimizer.schema import Muon
from titan.report.collect import RawRun
from titan.report.findings import FailedRun
from titan.report.run_end import parse_start_time
from titan.run.axes import complete_config, read_degrees
from titan.run.run import flatten_config
from titan.run.schema import Recipe
from titan.schedule.schema import Schedule
from titan.sweep.labels import format_numbers
from titan.sweep.trial_settings import NO_VARIANT

PATHS = re.compile(r"dataset\.(.*\.)?path")
"""They distinguish variants only where the data differ."""
AUTO = "auto"
LENGTHS = ("training.steps", "schedule.decay", "schedule.warmup", "parent", "training.continued_from")
"""Facts in which a shorter run of a recipe may differ from it; a branch has another parent and decay."""
LEARNING_RATE = "optimizer.lr"
RESERVED_NAMES = ("training.seed", "training.repeat")
CONTINUED = "training.continued_from"
"""The planned steps of earlier attempts, where they differ."""
DERIVED = ("devices", "data", "parent")
"""Facts that usually follow from others, and are shown only where they don't."""
LossMeasure = Literal["validation loss", "bits per byte"]
"""Nats on the same tokens, or bits per byte on the same text."""
READING_SETTINGS = ("tokenizer", "weights", "stages", "mask_documents", "skip", "block", "window", "epochs", "sources")
"""Dataset settings that decide how text is read, not which text is the evaluation set."""
HOUSEKEEPING = ("cache", "prefetch", "workers", "stream", "keep_gib")
"""Dataset settings that change no token."""
ALLOWED_OVERLAP = 2.0
"""Seconds that two attempts may overlap: a start is recorded in whole seconds."""
SEED_OVERRIDE = re.compile(r"[+~]*training\.(seed|repeat)=.*")


@dataclass(frozen=True)
class Facts:
    """The settings of a run.

    Attributes:
        choices: the option of each axis.
        values: resolved settings by dotted name, and what follows from them: layout, devices, hardware, data.
        typed: names of the settings on the command line.
        resolved: what the option `auto` of an axis, or a setting that is `auto`, meant for the run, by its name.
    """

    choices: Mapping[str, str]
    values: Mapping[str, Any]
    typed: frozenset[str]
    resolved: Mapping[str, str]


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in seed and repeat only.

    Attributes:
        runs: the runs.
        facts: the facts that they share.
        settings: those that distinguish the group, by full name, as typed.
        missing: its trials without metrics: those that differ from the runs in their seed only.
    """

    runs: tuple[RawRun, ...]
    facts: Facts
    settings: Mapping[str, str]
    missing: tuple[FailedRun, ...] = ()

    @cached_property
    def label(self) -> str:
        """Return the settings in short; model and layout of a single group."""
        if not self.settings:
            choices = self.facts.choices
            return " ".join(f"{axis}={choices[axis]}" for axis in ("model", "parallelism") if axis in choices) or "runs"
        names = {name: shorten_name(name, self.facts.values) for name in self.settings}
        return " ".join(f"{names[name]}={value}" for name, value in self.settings.items())

    @cached_property
    def other_settings(self) -> str:
        """Return all settings but the learning rate as one text."""
        values = {name: format_value(value) for name, value in self.facts.values.items() if name != LEARNING_RATE}
        return repr(sorted(values.items()))

    @cached_property
    def settings_but_length(self) -> str:
        """Return all settings but those of the length as one text."""
        values = {name: format_value(value) for name, value in self.facts.values.items() if name not in LENGTHS}
        return repr(sorted(values.items()))

    @property
    def group_id(self) -> str:
        """Return the group_id; of continued runs with their former steps, as their schedule was another one."""
        first = self.runs[0]
        return " ".join([str(first.last_document["ids"]["group"]), *map(str, first.earlier_planned_steps)])


def group_runs(runs: Sequence[RawRun], failed: Sequence[FailedRun] = ()) -> list[RunGroup]:
    """Return the runs in groups, in the order in which they were found."""
    groups: dict[Any, list[RawRun]] = {}
    for raw in runs:
        groups.setdefault(_build_group_key(raw), []).append(raw)
    facts = [collect_facts(members[0]) for members in groups.values()]
    settings = find_distinguishing_settings(facts)
    return [
        RunGroup(tuple(members), group_facts, group_settings, _find_missing_trials(members, failed))
        for members, group_facts, group_settings in zip(groups.values(), facts, settings, strict=True)
    ]


def collect_facts(raw: RawRun) -> Facts:
    """Return the facts of a run."""
    last, science = raw.last_document, raw.last_document["science"]
    degrees = read_degrees(last)
    config = complete_config(raw.config, degrees)
    values = {name: value for name, value in flatten_config(config).items() if not NO_VARIANT.fullmatch(name)}
    values |= {f"{axis}.class": science[axis] for axis in Recipe.axes() if axis in science}
    values |= {f"parallelism.{name}": degree for name, degree in degrees.items()}
    values |= {"parallelism.microbatches": last.get("microbatches"), "devices": raw.devices, "hardware": raw.hardware}
    values |= {"data": str(science.get("data"))[:8], "parent": science.get("parent")}
    values |= {CONTINUED: " ".join(map(str, raw.earlier_planned_steps)) or "no"}
    typed = frozenset(override.partition("=")[0].lstrip("+~") for override in raw.overrides)
    hooks = {
        "hooks": format_value(list(raw.config.get("hooks") or {}))
    }  # as on the command line; no axis, so no choice yet
    choices = {**(last.get("choices") or {}), **hooks}
    return Facts(choices, values, typed, _resolve_auto(choices, values, raw))


def _resolve_auto(choices: Mapping[str, str], values: Mapping[str, Any], raw: RawRun) -> dict[str, str]:
    """Return `Facts.resolved`: of options and settings whose meaning follows from what run.yaml records."""
    meanings = {"precision": values.get("precision.compute"), "compile": values.get("compile.scope")}
    if str(values.get("schedule.class", "titan")).startswith("titan"):
        meanings["schedule.warmup"] = Schedule().warmup_steps(raw.planned_steps)
    if device := raw.device.get("device"):
        meanings["optimizer.newton_schulz"] = Muon().choose_newton_schulz(device)
    current = {**values, **choices}
    return {
        name: str(meaning) for name, meaning in meanings.items() if meaning is not None and current.get(name) == AUTO
    }


def _build_group_key(raw: RawRun) -> Any:
    values = collect_facts(raw).values
    key_settings = sorted((name, format_value(value)) for name, value in values.items() if not PATHS.fullmatch(name))
    return raw.last_document["ids"]["group"], tuple(key_settings)


def _find_missing_trials(runs: Sequence[RawRun], failed: Sequence[FailedRun]) -> tuple[FailedRun, ...]:
    """Return the trials without metrics that differ from runs in their seed only."""
    recipes = {_select_recipe(raw.overrides) for raw in runs}
    return tuple(trial for trial in failed if trial.overrides and _select_recipe(trial.overrides) in recipes)


def _select_recipe(overrides: Sequence[str]) -> frozenset[str]:
    """Return the overrides of a trial that all seeds of its variant share."""
    return frozenset(override for override in overrides if not SEED_OVERRIDE.fullmatch(override))


def find_distinguishing_settings(facts: Sequence[Facts]) -> list[dict[str, str]]:
    """Return the settings that distinguish each variant, with their values as typed.

    An option that was chosen stands for the settings that follow from it; those that the command line gave are named
    beside it, others only where the variants would have equal labels without them.
    """
    columns = {name: _format_column([f.values.get(name) for f in facts]) for name in _list_names(facts)}
    differ = {name: column for name, column in columns.items() if len(set(column)) > 1}
    if "data" not in differ:
        differ = {name: column for name, column in differ.items() if not PATHS.fullmatch(name)}
    choices = _find_differing_choices(facts, differ)
    strong_names = [name for name in differ if _is_always_named(name, choices, facts)]
    settings = choices | {name: differ[name] for name in strong_names}
    for name in sorted(differ.keys() - settings.keys(), key=lambda n: (n in DERIVED[1:], n != "devices", n)):
        if not _is_determined(differ[name], settings.values()):
            settings[name] = differ[name]
    settings = {name: _name_resolved(name, column, facts) for name, column in settings.items()}
    return [{name: column[index] for name, column in settings.items()} for index in range(len(facts))]


def _format_column(values: Sequence[Any]) -> list[str]:
    """Return a setting's values as text; sampled numbers have as few digits as distinguish them."""
    texts = [format_value(value) for value in values]
    is_number = [isinstance(value, float) and math.isfinite(value) for value in values]
    numbers = [repr(value) for value, is_float in zip(values, is_number, strict=True) if is_float]
    exact_texts = [text for text, is_float in zip(texts, is_number, strict=True) if is_float]
    has_rounding = len(set(exact_texts)) < len(set(numbers))
    shown = iter(map(shorten_exponent, numbers) if has_rounding else format_numbers(exact_texts))
    return [next(shown) if is_float else text for text, is_float in zip(texts, is_number, strict=True)]


def _name_resolved(name: str, column: Sequence[str], facts: Sequence[Facts]) -> list[str]:
    """Return the column with what `auto` meant in its place, unless another variant was given the same by name."""
    resolved = [f.resolved.get(name, value) if value == AUTO else value for value, f in zip(column, facts, strict=True)]
    named = set(column)
    return [value if meaning in named else meaning for value, meaning in zip(column, resolved, strict=True)]


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
    """Return the settings that differ, with their values as labels have them."""
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
        "training": f"{format_plural(training['steps'], 'step')}{batch}, rows of {training['seq_len']:,}",
        "optimizer.lr": f"{raw.config['optimizer'].get('lr', 0):g}",
        "devices": f"{raw.devices} x {hardware}" if hardware else str(raw.devices),
    }


def _count_parameters(group: RunGroup) -> int | None:
    """Return the model's parameter count; None where its class can't be loaded."""
    model = group.runs[0].model
    return model.parameters() if model else None


@dataclass(frozen=True, order=True)
class _HostSpan:
    """An attempt on a machine, in seconds since 1970."""

    host: str
    start: float
    end: float
    directory: Path


def find_shared_runs(runs: Sequence[RawRun]) -> set[Path]:
    """Return the directories of runs with an attempt during another run's attempt on the same machine.

    Hosts are those of the first ranks, and of each run's last attempt: env.json has no others.
    """
    spans = sorted(span for raw in runs for span in _list_spans(raw))
    directories: set[Path] = set()
    for _, host_spans in groupby(spans, key=lambda span: span.host):
        directories |= _find_overlaps(list(host_spans))
    return directories


def _list_spans(raw: RawRun) -> Iterator[_HostSpan]:
    for document in raw.documents if raw.host else ():
        start, end = parse_start_time(document), raw.metrics.last_times.get(int(document["attempt"]))
        if start is not None and end is not None:
            yield _HostSpan(raw.host, start, end, raw.directory)


def _find_overlaps(spans: Sequence[_HostSpan]) -> set[Path]:
    """Return the overlapping attempts of one host, in order of start: each is compared with the longest one."""
    directories: set[Path] = set()
    longest = spans[0]
    for span in spans[1:]:
        if span.start + ALLOWED_OVERLAP < min(longest.end, span.end):
            directories |= {span.directory, longest.directory}
        longest = max(longest, span, key=lambda candidate: candidate.end)
    return directories


def find_common_measure(variant: RawRun, baseline: RawRun) -> LossMeasure | None:
    """Return the loss that two runs are comparable by; None for validation sets of different texts."""
    if identify_evaluation_set(variant) == identify_evaluation_set(baseline):
        return "validation loss"
    return "bits per byte" if _has_same_text(variant, baseline) else None


def identify_evaluation_set(run: RawRun) -> tuple[Any, ...]:
    """Return the settings that decide the evaluation set and its rows."""
    config = run.config
    rows = config["training"]["seq_len"], config["dataset"].get("mask_documents")
    return (_read_digest(run), config.get("evaluation", {}).get("tokens"), *rows)


def _read_digest(run: RawRun) -> Any:
    return run.last_document["science"].get("data")


def _has_same_text(variant: RawRun, baseline: RawRun) -> bool:
    """Return whether two runs have the same text as evaluation set, whatever their tokens and rows are."""
    count = [run.config.get("evaluation", {}).get("tokens") for run in (variant, baseline)]
    if count[0] != count[1]:
        return False
    if _read_digest(variant) == _read_digest(baseline):
        return True
    return bool(
        _identify_text(variant) == _identify_text(baseline)
        and _list_reading_settings(variant) != _list_reading_settings(baseline)
    )


def _identify_text(run: RawRun) -> Any:
    """Return the settings that decide the text of the evaluation set."""
    dataset = run.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    dataset_kinds = run.last_document["science"].get("dataset")
    return dataset_kinds, {
        name: {k: format_value(v) for k, v in part.items() if k not in (*READING_SETTINGS, *HOUSEKEEPING)}
        for name, part in parts.items()
    }


def _list_reading_settings(run: RawRun) -> Any:
    """Return the settings that change the digest of the same text."""
    dataset = run.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    return {name: [format_value(part.get(k)) for k in ("tokenizer", "block", "window")] for name, part in parts.items()}
