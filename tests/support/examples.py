"""The examples of docs/extending.md and of the pages it leads to: a package and a configuration folder outside of
titan, and commands."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECTIONS = {
    "Your own model": "models",
    "Your own attention": "models",
    "Your own optimizer": "optimizers",
    "Your own dataset": "data",
    "Your own schedule": "training",
    "Your own terms of the loss": "training",
    "Your own sharding strategy": "parallelism",
    "Your own evaluation task": "evaluation",
    "Your own tracker": "metrics",
}
"""The pages of sections with examples, beside extending.md."""


def read_section(name: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    page = (DOCS / f"{SECTIONS.get(name, 'extending')}.md").read_text()
    return page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


PAGE = "\n".join([(DOCS / "extending.md").read_text(), *map(read_section, SECTIONS)])


def read_files(text: str = PAGE) -> dict[str, str]:
    """The contents of files that a text shows, by their names."""
    return dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", text, flags=re.DOTALL))


def read_commands(text: str = PAGE) -> list[str]:
    """The lines of its blocks of commands."""
    return [line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]


def read_trainings(text: str = PAGE) -> list[str]:
    """What follows `titan.train` in its commands."""
    return [line.partition("titan.train ")[2] for line in read_commands(text) if "titan.train " in line]


@contextmanager
def write_examples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Go into a folder with all files of the page, and with the environment that its first block sets."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    for name, text in {**read_files(), "mine/__init__.py": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (exports,) = [line for line in read_commands() if line.startswith("export ")]
    for setting in shlex.split(os.path.expandvars(exports))[1:]:
        monkeypatch.setenv(*setting.split("=", 1))
    monkeypatch.syspath_prepend(os.environ["PYTHONPATH"])
    yield folder
    for module in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[module]
