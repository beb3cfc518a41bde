"""titan's optional packages: how to install them is one sentence everywhere, and a page lists them."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.test_doc_names import PAGES, ROOT, list_files
from titan.config.optional import advise_extra, import_optional
from titan.errors import ConfigError

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FILES = [*PAGES, *list_files("titan", "launchers", "experiments"), ROOT / "Makefile"]
ASKED = re.compile(r"-e '?\.\[([\w,]+)\]|advise_extra\([\"'](\w+)[\"']\)")


def test_extras_are_installed_from_the_clone() -> None:
    assert advise_extra("slurm") == "pip install -e '.[slurm]' in titan's clone"
    by_name = [str(file) for file in FILES if re.search(r"pip install[^`\n]*titan\[", file.read_text())]
    assert by_name == [], "titan is installed from its clone"


def test_extras_that_are_asked_for_exist() -> None:
    asked = {
        name
        for file in FILES
        for match in ASKED.finditer(file.read_text())
        for name in (match[1] or match[2]).split(",")
    }
    assert {"slurm", "sweep", "compare", "float8", "track"} <= asked <= {*EXTRAS, "EXTRA", "EXTRAS"}


def test_a_page_lists_all_extras() -> None:
    table = (ROOT / "docs" / "running.md").read_text().partition("## Installation")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", table, flags=re.MULTILINE))
    assert listed.keys() == EXTRAS.keys()
    for name, cell in listed.items():
        packages = set(re.findall(r"`([\w-]+)`", cell))
        required = {re.split(r"[\[<>=]", requirement)[0] for requirement in EXTRAS[name]}
        assert packages <= required and (packages == required or name in ("test", "lint")), name


def test_a_missing_package_is_named_as_pip_knows_it() -> None:
    with pytest.raises(ConfigError, match=r"^page: drawing needs the package pillow: pip install pillow$"):
        import_optional("no_such_package.part", "page", "drawing", project="pillow")
    with pytest.raises(ConfigError, match=r"^page: needs the package no_such_package: pip install no_such_package$"):
        import_optional("no_such_package.part", "page")
