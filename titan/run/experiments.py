"""Choices in the folders below experiments/, which a command line finds by `hydra.searchpath`. Free of torch."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
"""Where they are in a checkout; a wheel has none."""
SHOWN_GROUPS = ("recipe", "optimizer", "hooks")
"""Config groups whose choices stand for the experiment."""


def describe_experiment_choice(group: str, choice: str) -> str | None:
    """Return which experiment has a choice of a config group, and how to find it; None where none has it."""
    if not re.fullmatch(r"[\w-]+", choice):
        return None
    for file in sorted(FOLDER.glob(f"*/conf/{group}/{choice}.yaml")):
        name = file.relative_to(FOLDER).parts[0]
        return f"experiments/{name} has it: add {_format_search_path(name)}"
    return None


def advise_on_experiment(name: str) -> str:
    """Return what to write in place of `experiment=NAME`: an experiment's choices where it is one, else a recipe."""
    if re.fullmatch(r"\w+", name) and (FOLDER / name / "conf").is_dir():
        choices = " or ".join(_list_choices(name))
        return f"write {_format_search_path(name)} {choices} (experiments/{name}/README.md)"
    return "named settings are a recipe: write recipe=NAME, and see docs/grids.md"


def _list_choices(name: str) -> list[str]:
    """Return the choices of an experiment as they are typed."""
    files = [file for group in SHOWN_GROUPS for file in sorted((FOLDER / name / "conf" / group).glob("*.yaml"))]
    return [
        f"{file.parent.name}=[{file.stem}]" if file.parent.name == "hooks" else f"{file.parent.name}={file.stem}"
        for file in files
    ]


def _format_search_path(name: str) -> str:
    return f'"hydra.searchpath=[file://{FOLDER / name / "conf"}]"'
