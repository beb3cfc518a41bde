"""The text of `titan.train --help`: every axis, and every choice with the first sentences of its file."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType

from titan.config.command import format_help

AXES = {
    "recipe": "named, complete recipes: recipe=NAME",
    "sweep": "named sweeps: -m sweep=NAME",
    "model": "architecture and size",
    "dataset": "training data",
    "optimizer": "optimizer",
    "schedule": "learning rate and weight decay over the steps",
    "training": "steps, global batch, sequence length",
    "evaluation": "validation sets, tasks, averaged weights",
    "precision": "dtypes of weights, activations and matmuls",
    "parallelism": "layout: how the model and the batch are split across devices",
    "memory": "activation checkpointing",
    "compile": "torch.compile",
    "checkpoint": "when and how to save",
    "metrics": "metrics and trackers",
    "debug": "debugging options",
    "profile": "which steps are profiled",
    "cluster": "devices and nodes",
    "hooks": "own code at named moments of a run: hooks=[NAME,...]",
    "hydra/launcher": "how the trials of a sweep are launched",
}

LAUNCHERS = {
    "basic": "As local; Hydra's name of its default.",
    "local": "On this machine, as many trials at once as hydra.launcher.at_once.",
    "slurm": "As Slurm jobs, in arrays.",
}

EXAMPLES = {
    "": "the default: a small Llama on real text, 2 minutes",
    "model=llama8b parallelism=fsdp": "choices of axes",
    "training.steps=500 name=longer": "settings; results go to runs/longer",
    "-m optimizer.lr=1e-3,3e-3": "a sweep: every combination, one after the other",
    "--cfg job": "print all settings and their values, without a run",
}
NOTES = """\
The same command resumes an unfinished run of the same name. Settings of an axis: --cfg job -p AXIS.
More choices: hydra.searchpath=[file:///folder], $TITAN_CONF, or packages with a titan.plugins entry point.
Tab completion in bash: eval "$(titan-train -sc install=bash)"."""


def build_help(loader: ConfigLoader, axes: Sequence[str]) -> str:
    """Return the help text with all choices that `loader` finds, also those of plugins."""
    return format_help(
        "titan.train",
        ["[AXIS=CHOICE ...]", "[AXIS.SETTING=VALUE ...]"],
        "Pre-train a language model.",
        EXAMPLES,
        "\n".join(_list_choices(loader, axes)),
        NOTES,
    )


def _list_choices(loader: ConfigLoader, axes: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for axis in (*axes, "hooks", "hydra/launcher", "recipe", "sweep"):
        options = loader.get_group_options(axis, ObjectType.CONFIG)
        if options:
            width = max(14, *map(len, options))
            lines.append(f"  {axis}: {AXES.get(axis, '')}")
            lines += [f"    {option:<{width}} {_describe_choice(loader, axis, option)}" for option in sorted(options)]
    return lines


def _describe_choice(loader: Any, axis: str, option: str) -> str:
    for source in loader.repository.get_sources():
        file = _find_file(source, f"{axis}/{option}.yaml")
        if file is not None:
            with file.open(encoding="utf-8") as lines:
                return cut_sentences(
                    [line[2:].strip() for line in lines if line.startswith("# ") and "@package" not in line]
                )
    return LAUNCHERS.get(option, "") if axis == "hydra/launcher" else ""


def cut_sentences(lines: Sequence[str]) -> str:
    """Return the first line of a comment up to its last sentence's end, or with those that complete it."""
    first = lines[0] if lines else ""
    if first.endswith((".", "?")) or len(lines) < 2:
        return first
    if whole_sentences := re.match(r".*[.?](?= [A-Z])", first):
        return whole_sentences[0]
    text = " ".join(lines)
    end = re.search(r"[.?](?= |$)", text)
    return text[: end.end()] if end else first


def _find_file(source: Any, name: str) -> Any:
    file: Any
    if source.scheme() == "file":
        file = Path(source.path) / name
    elif source.scheme() == "pkg":
        file = importlib.resources.files(source.path.split("/")[0]).joinpath(*source.path.split("/")[1:], name)
    else:
        return None
    return file if file.is_file() else None
