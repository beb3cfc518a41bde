"""The tables of settings in the documentation are those of the schemas."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from tests.support import settings_table
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.run.schema import Recipe

PAGES = sorted(settings_table.DOCS.glob("*.md"))
MARKED = "# Page\n<!-- settings: {} -->\nold\n<!-- end of settings -->\ntext\n"


@dataclass(frozen=True)
class Small:
    size: int | str = setting("auto", "how large", words=("auto",), at_least=1)
    kind: Literal["a", "b"] | None = setting(None, "a | b, such as *.x")
    from_: tuple[tuple[int, int], ...] = setting(help="pairs")


@dataclass(frozen=True)
class Larger(Small):
    rate: float = setting(0.5, "how fast", above=0, below=1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert settings_table.update_tables(text) == text, "run python -m tests.support.settings_table"


def test_every_axis_has_a_table() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for axis in Recipe.axes():
        assert f"<!-- settings: {axis} = " in text


def test_every_setting_of_fixed_axes_is_listed() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for axis in ("training", "parallelism", "memory", "checkpoint", "cluster"):
        schema = next(field.type for field in fields(Recipe) if field.name == axis)
        module = f"titan.{axis}.schema"
        for field in fields(getattr(__import__(module, fromlist=[str(schema)]), str(schema))):
            assert f"| `{axis}.{field.name}` |" in text


def test_a_table_names_types_limits_and_defaults() -> None:
    lines = settings_table.build_table(f"x = {__name__}.Small").splitlines()[2:]
    assert lines == [
        "| `x.size` | int or `auto`, >= 1 | `auto` | how large |",
        "| `x.kind` | `a` or `b` or null | `null` | a \\| b, such as \\*.x |",
        "| `x.from` | list of [int,int] | required | pairs |",
    ]


def test_beyond_leaves_out_what_another_class_has() -> None:
    lines = settings_table.build_table(f"x = {__name__}.Larger beyond {__name__}.Small").splitlines()[2:]
    assert lines == ["| `x.rate` | float, > 0, < 1 | `0.5` | how fast |"]


def test_the_command_rewrites_pages(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(MARKED.format("memory = titan.memory.schema.Memory"))
    assert settings_table.main([str(tmp_path)]) == 0
    text = page.read_text()
    assert "| `memory.offload` | bool | `false` |" in text and "\nold\n" not in text
    assert text.startswith("# Page\n") and text.endswith("-->\ntext\n") and settings_table.update_tables(text) == text


@pytest.mark.parametrize("declaration", ["memory", "memory = titan.memory.schema.Nothing", "memory = titan.errors.os"])
def test_a_marker_that_names_no_schema_is_rejected(declaration: str) -> None:
    with pytest.raises(ConfigError, match="settings: "):
        settings_table.update_tables(MARKED.format(declaration))
