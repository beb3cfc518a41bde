"""Read runs as a table for a scaling law: parameters, tokens and final losses, with variants and corpora."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.console.numbers import format_count, format_plural
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.report.align import group_runs, identify_evaluation_set
from titan.report.collect import RawRun, collect_runs
from titan.report.estimate import build_member
from titan.report.findings import RunResult
from titan.scaling.findings import LawFindings
from titan.scaling.schema import Settings
from titan.scaling.study import Question, Target, study_table
from titan.scaling.table import LEAST_COUNT, Table, parse_number, read_csv

EXECUTION = re.compile(
    r"(parallelism|memory|compile|checkpoint|metrics|cluster|debug|profile|evaluation)(\..*)?"
    r"|model\.(dim|layers|heads|kv_heads|head_dim|ffn|vocab)|devices|hardware|parent|data|continued|name|training\.(steps|tokens|global_batch|seed|repeat)"
)
"""Settings that distinguish no variants of a law: sizes, lengths, data, and how runs were executed."""

NAMED = 2
"""Trunks that are named, where there are more."""
MODEL = re.compile(r"model\b")
NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?")


@dataclass(frozen=True)
class _Rung:
    """A run with what a law needs of it."""

    raw: RawRun
    result: RunResult
    settings: Mapping[str, str]
    counts: tuple[float, float]

    @property
    def place(self) -> tuple[float, int]:
        """Return its size and length."""
        return self.counts[0], self.result.tokens

    @property
    def shape(self) -> tuple[int, int]:
        """Return the width and depth of its model, which variants share whose parameters differ a little."""
        return (self.raw.model.dim, self.raw.model.layers) if self.raw.model else (0, 0)


def study_sources(settings: Settings) -> LawFindings:
    """Return what some runs show, for each corpus.

    Raises:
        ConfigError: where a source or a target is no such thing, and where the runs can't determine a law.
    """
    for name in settings.sources:
        if not os.path.exists(name):
            kind = "file" if name.endswith(".csv") else "directory"
            raise ConfigError(f"{name}: there is no such {kind}; correct the path.")
        if not os.path.isdir(name) and len(settings.sources) > 1:
            raise ConfigError(f"{name}: is a file; give one CSV file alone, or directories of runs.")
    target = holdout = None
    if settings.target is not None:
        parts = settings.target.split(",")
        if len(parts) != 2:
            raise ConfigError(f"target={settings.target}: give parameters and tokens, as in target=1.4B,28B.")
        target = Target(*(_parse_count(f"target={settings.target}", part) for part in parts))
    if settings.holdout is not None:
        holdout = _parse_count(f"holdout={settings.holdout}", settings.holdout)
    is_folder = os.path.isdir(settings.sources[0])
    embeddings = settings.embeddings
    table = read_runs(settings.sources, embeddings) if is_folder else read_csv(settings.sources[0], embeddings)
    question = Question(target, holdout, settings.baseline, settings.extrapolate, settings.replicates, settings.seed)
    return study_table(table, question)


def _parse_count(typed: str, text: str) -> float:
    """Return a count, as 1.4B or 1.4e9; `typed` is the whole word, for messages."""
    value = parse_number(text.strip())
    if value is None or not value >= LEAST_COUNT:
        raise ConfigError(f"{typed}: is no number of parameters or tokens; write it as 1.4B or 1.4e9.")
    return value


def read_runs(directories: Sequence[str], count_all: bool = False) -> Table:
    """Return finished runs as a table; N counts the parameters that compute a token.

    Args:
        directories: of runs or sweeps.
        count_all: whether N counts embeddings and head.

    Raises:
        ConfigError: where there is no finished run with a loss.
    """
    collected = collect_runs([Path(name) for name in directories])
    left_out = [f"{run.label}: {run.reason}" for run in collected.failed]
    rungs, trunks = list[_Rung](), list[_Rung]()
    for group in group_runs(collected.list_started_runs(), collected.failed):
        for raw in group.runs:
            result, counts = build_member(raw, raw.directory.name).run, _count_parameters(raw)
            if reason := _find_reason(result, counts):
                left_out.append(f"{raw.directory.name}: {reason}")
            elif counts is not None:
                # a run of the schedule wsd that never decays, as those from which decayed branches begin
                is_trunk = (raw.config.get("schedule") or {}).get("decay") == 0
                (trunks if is_trunk else rungs).append(_Rung(raw, result, group.settings, counts))
    if not rungs and not trunks:
        raise ConfigError(f"{directories[0]}: has no finished run with a loss; a law needs final losses.")
    names = [trunk.raw.directory.name for trunk in trunks] if rungs else []
    if len(names) > NAMED:
        shown, rate = ", ".join(names[:NAMED]), "their learning rate stays constant, and that of the other runs decays"
        left_out.append(f"{len(names)} runs, {shown} and others: {rate}")
    else:
        left_out += [f"{name}: its learning rate stays constant, and others decay" for name in names]
    return _build_table(*_choose_losses(rungs or trunks), left_out, count_all)


def _find_reason(result: RunResult, counts: tuple[float, float] | None) -> str:
    """Return why a run is left out; empty where it is not."""
    if result.diverged:
        return "diverged"
    if result.state != "finished":
        return f"{result.state}; its learning rate has not decayed to its end"
    return "" if counts is not None else "its model's class can't be loaded, so its size is not known"


def _count_parameters(raw: RawRun) -> tuple[float, float] | None:
    """Return the parameters that compute a token, without embedding and head, and with both."""
    model = raw.model
    if model is None:
        return None
    total = model.active_parameters()
    return float(total - (1 if model.tied else 2) * model.embedding_parameters()), float(total)


def _choose_losses(rungs: Sequence[_Rung]) -> tuple[list[_Rung], list[float], list[str]]:
    """Return the runs, their losses, and notes on which losses these are."""
    evaluated = [rung for rung in rungs if _is_number(rung.result.validation)]
    if evaluated:
        missing = [rung.raw.directory.name for rung in rungs if rung not in evaluated]
        notes = ["losses: final evaluation, in nats per token"]
        notes += [f"left out: {name}: it has no final evaluation, and others have" for name in missing]
        return evaluated, [float(rung.result.validation or 0) for rung in evaluated], notes
    trained = [rung for rung in rungs if _is_number(rung.result.loss)]
    note = "losses: of training, the mean of the last steps: no run has a final evaluation"
    return trained, [float(rung.result.loss or 0) for rung in trained], [note]


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _build_table(
    rungs: Sequence[_Rung], losses: Sequence[float], notes: list[str], left_out: Sequence[str], count_all: bool
) -> Table:
    body, total = (np.array([rung.counts[k] for rung in rungs]) for k in (0, 1))
    variants, dropped = _name_variants(rungs)
    notes += [f"left out: {reason}" for reason in left_out]
    if dropped:
        notes.append(f"{', '.join(dropped)}: a function of size and length in these runs, so part of the ladder's rule")
    tokens = np.array([float(rung.result.tokens) for rung in rungs])
    models = [(rung.raw.model, int(rung.raw.config["training"]["seq_len"])) for rung in rungs]
    flops = [float(model.flops_per_token(length)) if model else math.nan for model, length in models]
    return Table(
        n=total if count_all else body,
        d=tokens,
        loss=np.array(losses),
        seed=tuple(str(rung.raw.seed) for rung in rungs),
        variant=variants,
        corpus=_name_corpora(rungs),
        name=tuple(rung.raw.directory.name for rung in rungs),
        other_n=body if count_all else total,
        counted="with embeddings" if count_all else "without embeddings",
        notes=tuple(notes),
        flops=tokens * np.array(flops),
        hours=np.array([rung.result.cost.training_hours for rung in rungs]),
    )


def _name_variants(rungs: Sequence[_Rung]) -> tuple[tuple[str, ...], list[str]]:
    """Return the variant of each run, and the settings that size and length determine, as a ladder's learning rate."""
    names = [name for name in dict.fromkeys(key for r in rungs for key in r.settings) if not EXECUTION.fullmatch(name)]
    values = {name: [rung.settings.get(name, "") for rung in rungs] for name in names}
    names = [name for name in names if len(set(values[name])) > 1]
    shapes = [rung.shape for rung in rungs]
    pairs = {name: {*zip(shapes, values[name], strict=True)} for name in names}
    # each shape of a model has one value, as where models of a family differ in it
    dropped = [name for name in names if MODEL.match(name) and len(pairs[name]) == len(set(shapes))]
    numbers = [name for name in names if name not in dropped and all(map(NUMBER.fullmatch, values[name]))]
    texts = [name for name in names if name not in (*dropped, *numbers)]
    words = [tuple(values[name][k] for name in texts) for k in range(len(rungs))]
    dropped += [name for name in numbers if _is_determined(values[name], words, [rung.place for rung in rungs])]
    kept = [name for name in names if name not in dropped]
    labels = tuple(
        sanitize_line(" ".join(f"{name.rpartition('.')[2]}={values[name][k]}" for name in kept))
        for k in range(len(rungs))
    )
    return labels, [name for name in dropped if name != "model"]


def _is_determined(
    values: Sequence[str], words: Sequence[tuple[str, ...]], places: Sequence[tuple[float, int]]
) -> bool:
    """Return whether a number has one value at each size and length, and not one at all of them.

    Args:
        values: of the number; [runs].
        words: the settings that are no numbers: runs with the same ones are compared; [runs].
        places: sizes and lengths; [runs].
    """
    by_place: dict[tuple[tuple[str, ...], tuple[float, int]], set[str]] = {}
    by_words: dict[tuple[str, ...], set[str]] = {}
    for value, own, place in zip(values, words, places, strict=True):
        by_place.setdefault((own, place), set()).add(value)
        by_words.setdefault(own, set()).add(value)
    varies = any(len(found) > 1 for found in by_words.values())
    return varies and len(by_place) > 1 and all(len(found) == 1 for found in by_place.values())


def _name_corpora(rungs: Sequence[_Rung]) -> tuple[str, ...]:
    """Return a name for each evaluation set and its data; runs of different ones are never fitted together."""
    keys = [repr(identify_evaluation_set(rung.raw)) for rung in rungs]
    if len(set(keys)) == 1:
        return ("",) * len(rungs)
    numbers = {key: k + 1 for k, key in enumerate(dict.fromkeys(keys))}
    names = []
    for rung, key in zip(rungs, keys, strict=True):
        document, length = rung.raw.last_document, rung.raw.config["training"]["seq_len"]
        choice = sanitize_line(str((document.get("choices") or {}).get("dataset", "data")))
        names.append(f"{choice} {str(document['science'].get('data'))[:8]}, rows of {length} ({numbers[key]})")
    return tuple(names)


def describe_table(table: Table) -> str:
    """Return in one sentence what a table has."""
    rungs = len({*zip(table.variant, table.n, table.d, strict=True)})
    sizes = f"N {format_count(table.n.min())} to {format_count(table.n.max())}"
    if table.counted != "as given":
        sizes += f" {table.counted}"
        known = table.other_n[np.isfinite(table.other_n)]
        label = "with" if table.counted == "without embeddings" else "without"
        sizes += f" ({format_count(known.min())} to {format_count(known.max())} {label})" if len(known) else ""
    tokens = f"D {format_count(table.d.min())} to {format_count(table.d.max())}"
    return f"{format_plural(len(table), 'run')} on {format_plural(rungs, 'rung')}: {sizes}, {tokens}"
