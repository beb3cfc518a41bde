"""Align runs: group them into variants, and find what distinguishes these, what they share, and what compares them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
        values = _collect_facts(raw).values.items()
        key = sorted((name, format_value(value)) for name, value in values if not PATHS.fullmatch(name))
        groups.setdefault((raw.last_document["ids"]["group"], tuple(key)), []).append(raw)
    facts = [_collect_facts(members[0]) for members in groups.values()]
    settings = _find_distinguishing_settings(facts)
    return [
        RunGroup(tuple(members), group_facts, group_settings, _find_missing_trials(members, failed))
        for members, group_facts, group_settings in zip(groups.values(), facts, settings, strict=True)
    ]


def _collect_facts(raw: RawRun) -> Facts:
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
    hooks = format_value(list(raw.config.get("hooks") or {}))  # as on the command line; no axis, so no choice yet
    choices = {**(last.get("choices") or {}), "hooks": hooks}
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


def _find_missing_trials(runs: Sequence[RawRun], failed: Sequence[FailedRun]) -> tuple[FailedRun, ...]:
    """Return the trials without metrics that differ from runs in their seed only."""

    def select_recipe(overrides: Sequence[str]) -> frozenset[str]:
        return frozenset(override for override in overrides if not SEED_OVERRIDE.fullmatch(override))

    recipes = {select_recipe(raw.overrides) for raw in runs}
    return tuple(trial for trial in failed if trial.overrides and select_recipe(trial.overrides) in recipes)


def _find_distinguishing_settings(facts: Sequence[Facts]) -> list[dict[str, str]]:
    """Return the settings that distinguish each variant, with their values as typed.

    An option that was chosen stands for the settings that follow from it; those that the command line gave are named
    beside it, others only where the variants would have equal labels without them.
    """
    names = dict.fromkeys(name for run_facts in facts for name in run_facts.values)
    columns = {name: _format_column([f.values.get(name) for f in facts]) for name in names}
    differ = {name: column for name, column in columns.items() if len(set(column)) > 1}
    if "data" not in differ:
        differ = {name: column for name, column in differ.items() if not PATHS.fullmatch(name)}
    touched = {name.partition(".")[0] for name in differ}
    options = {axis: [f.choices.get(axis, "?") for f in facts] for axis in (*Recipe.axes(), "hooks") if axis in touched}
    choices = {axis: column for axis, column in options.items() if len(set(column)) > 1}
    settings = choices | {name: column for name, column in differ.items() if _is_always_named(name, choices, facts)}
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
    seeds, repeats = len({raw.seed for raw in all_runs}) > 1, len({raw.repeat for raw in all_runs}) > 1
    labels = [
        " ".join([group.label, *[f"seed={raw.seed}"] * seeds, *[f"repeat={raw.repeat}"] * repeats])
        for raw in group.runs
    ]
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
    if raw.model:  # its class can be loaded
        size = format_count(raw.model.parameters())
        main_settings["model"] = f"{main_settings.get('model', '?')}, {size} parameters"
    batch = "" if training.get("grow") else f" of {format_tokens(training['global_batch'])} tokens"
    return main_settings | {
        "precision": str(raw.config.get("precision", {}).get("compute", "?")),
        "training": f"{format_plural(training['steps'], 'step')}{batch}, rows of {training['seq_len']:,}",
        "optimizer.lr": f"{raw.config['optimizer'].get('lr', 0):g}",
        "devices": f"{raw.devices} x {hardware}" if hardware else str(raw.devices),
    }


def find_shared_runs(runs: Sequence[RawRun]) -> set[Path]:
    """Return the directories of runs with an attempt during another run's attempt on the same machine.

    Hosts are those of the first ranks, and of each run's last attempt: env.json has no others.
    """
    spans = []  # attempts on a machine: host, start, end (seconds since 1970) and directory
    for raw in (raw for raw in runs if raw.host):
        for document in raw.documents:
            start, end = parse_start_time(document), raw.metrics.last_times.get(int(document["attempt"]))
            spans += [(raw.host, start, end, raw.directory)] if start is not None and end is not None else []
    directories: set[Path] = set()
    for _, host_spans in groupby(sorted(spans), key=lambda span: span[0]):
        longest, *later_spans = host_spans
        for span in later_spans:  # in order of start: each is compared with the longest one
            if span[1] + ALLOWED_OVERLAP < min(longest[2], span[2]):
                directories |= {span[3], longest[3]}
            longest = max(longest, span, key=lambda candidate: candidate[2])
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
    return (run.last_document["science"].get("data"), config.get("evaluation", {}).get("tokens"), *rows)


def _has_same_text(variant: RawRun, baseline: RawRun) -> bool:
    """Return whether two runs have the same text as evaluation set, whatever their tokens and rows are."""
    runs = (variant, baseline)
    counts = [run.config.get("evaluation", {}).get("tokens") for run in runs]
    digests, kinds = ([run.last_document["science"].get(key) for run in runs] for key in ("data", "dataset"))
    if counts[0] != counts[1] or digests[0] == digests[1]:
        return bool(counts[0] == counts[1])
    text, reading = zip(*map(_split_dataset_settings, runs), strict=True)
    return bool(kinds[0] == kinds[1] and text[0] == text[1] and reading[0] != reading[1])


def _split_dataset_settings(run: RawRun) -> tuple[Any, Any]:
    """Return the settings that decide the text of the evaluation set, and those that change the same text's digest."""
    dataset = run.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    ignored = (*READING_SETTINGS, *HOUSEKEEPING)
    return (
        {name: {k: format_value(v) for k, v in part.items() if k not in ignored} for name, part in parts.items()},
        {name: [format_value(part.get(k)) for k in ("tokenizer", "block", "window")] for name, part in parts.items()},
    )
