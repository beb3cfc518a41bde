"""Commands of the pages, run in order in one folder, find in `runs/` what they need and no other page's runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import composing
from tests.test_docs import PAGES, ROOT, DocumentedCommand, commands

README, TUTORIAL = (commands(page) for page in (ROOT / "README.md", ROOT / "docs" / "tutorial.md"))


def read_name(words: Sequence[str]) -> str | None:
    """The value of `name=` in a command."""
    return next((word.partition("=")[2] for word in words if word.startswith("name=")), None)


def list_trainings(page: Sequence[DocumentedCommand]) -> list[tuple[str, ...]]:
    """The words of the commands that train a run with a name."""
    return [command.words for command in page if "titan.train" in command.words and read_name(command.words)]


def list_fixed(words: Sequence[str]) -> frozenset[str]:
    """What the trials of a grid have in common: seeds, other values of an axis and launchers keep its trials."""
    overrides = words[words.index("-m", words.index("titan.train")) + 1 :]
    axes = frozenset(word.partition("=")[0] for word in overrides if "," in word and "[" not in word)
    fixed = frozenset(word for word in overrides if word.partition("=")[0] not in axes)
    return frozenset(word for word in fixed | axes if not word.startswith(("training.seed", "hydra")))


def collect_grids(pages: Sequence[Path]) -> dict[str, set[frozenset[str]]]:
    """What is fixed in the grids of the pages, by their names."""
    grids = defaultdict[str, set[frozenset[str]]](set)
    for words in (words for page in pages for words in list_trainings(commands(page))):
        if words.count("-m") == 2:
            grids[str(read_name(words))].add(list_fixed(words))
    return grids


def test_grids_of_one_name_are_one_grid() -> None:
    grids = collect_grids(PAGES)
    assert len(grids) > 10 and {name for name, fixed in grids.items() if len(fixed) > 1} == set()


def test_the_tutorial_continues_no_run_of_readme() -> None:
    readme, tutorial = ({read_name(words) for words in list_trainings(page)} for page in (README, TUTORIAL))
    assert readme and tutorial and readme.isdisjoint(tutorial)


@pytest.mark.parametrize("program", ["profile", "replay", "generate", "status", "compare"])
def test_readme_trains_what_it_looks_at(program: str) -> None:
    (last,) = [i for i, command in enumerate(README) if f"titan.{program}" in command.words]
    words = README[last].words
    (run,) = [word.removeprefix("runs/") for word in words if word.startswith("runs/")]
    (trained, *_) = [words for words in list_trainings(README[:last]) if read_name(words) == run]
    if program == "profile":
        assert "profile=once" in trained
    if program == "replay":
        (step,) = [int(step) for word in words for step in re.findall(r"^step=(\d+)$", word)]
        made = composing.compose_test_run(list(trained[trained.index("titan.train") + 1 :]))
        every, keep = made.checkpoint.every, made.checkpoint.keep
        assert made.training.steps - (keep - 1) * every < step <= made.training.steps
