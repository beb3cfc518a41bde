"""Tables of settings for the documentation, generated from the schemas.

`python -m tests.support.settings_table` rewrites every table in `docs/*.md` between

    <!-- settings: PREFIX = MODULE.CLASS -->
    <!-- end of settings -->

with one row for each setting of the dataclass: its name behind PREFIX, its type, its default and its help text. A
class after `beyond` (`PREFIX = MODULE.CLASS beyond MODULE.OTHER`) leaves out what that class declares in the same way.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import re
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from titan.config.settings import MISSING, format_value
from titan.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"
END = "<!-- end of settings -->"
BLOCK = re.compile(rf"(<!-- settings: (.*?) -->\n).*?({re.escape(END)})", re.DOTALL)
HEAD = "| setting | type | default | help |\n| --- | --- | --- | --- |\n"
LIMITS = {"at_least": ">=", "at_most": "<=", "above": ">", "below": "<"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the tables of the pages in a folder (default: `docs/` of this clone), and return the exit code."""
    folders = list(sys.argv[1:] if arguments is None else arguments)
    for page in sorted(Path(folders[0] if folders else DOCS).glob("*.md")):
        old = page.read_text(encoding="utf-8")
        if (new := update_tables(old)) != old:
            page.write_text(new, encoding="utf-8")
            print(f"{page}: updated")
    return 0


def update_tables(text: str) -> str:
    """Return a page's text with every table between markers generated anew."""
    return BLOCK.sub(lambda match: match[1] + build_table(match[2]) + match[3], text)


def build_table(declaration: str) -> str:
    """Return the table that a marker declares, such as `memory = titan.memory.schema.Memory`."""
    match = re.fullmatch(r"(\S+) = (\S+)(?: beyond (\S+))?", declaration)
    if match is None:
        raise ConfigError(f"settings: {declaration}: not understood; write PREFIX = MODULE.CLASS.")
    prefix, schema = match[1], _import_schema(match[2])
    declared = _format_rows(prefix, _import_schema(match[3])) if match[3] else []
    return HEAD + "".join(row for row in _format_rows(prefix, schema) if row not in declared)


def _import_schema(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    try:
        schema = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"settings: {name}: no such class ({error}); correct the name.") from error
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        raise ConfigError(f"settings: {name}: must be a dataclass; name another class.")
    return schema


def _format_rows(prefix: str, schema: type) -> list[str]:
    hints = typing.get_type_hints(schema)
    rows: list[str] = []
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if field.init and dataclasses.is_dataclass(kind) and field.default_factory is not dataclasses.MISSING:
            rows += _format_rows(_join_names(prefix, field.name), typing.cast(type, kind))
        elif field.init:
            rows.append(_format_row(prefix, field, kind))
    return rows


def _format_row(prefix: str, field: dataclasses.Field[Any], kind: Any) -> str:
    name = field.metadata.get("operand") or _join_names(prefix, field.name.rstrip("_"))
    words = [f"`{word}`" for word in field.metadata.get("words", ())]
    names = [name for name in _name_types(kind) if not (words and name == "str")] + words
    limits = [f"{LIMITS[limit]} {bound:g}" for limit, bound in field.metadata.get("limits", {}).items()]
    is_required = field.default in (MISSING, dataclasses.MISSING)
    default = "required" if is_required else f"`{format_value(field.default)}`"
    # else Markdown would read emphasis or HTML
    help_text = re.sub(r"([*<])", r"\\\1", str(field.metadata.get("help", "")))
    cells = (f"`{name}`", ", ".join([" or ".join(names), *limits]), default, help_text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _join_names(prefix: str, name: str) -> str:
    return ".".join(filter(None, [prefix.strip("-"), name]))


def _name_types(kind: Any) -> list[str]:
    """Return the alternatives of a type, each as a word of a table."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return [name for argument in arguments for name in _name_types(argument)]
    if origin is Literal:
        return [f"`{argument}`" for argument in arguments]
    names = [" or ".join(_name_types(argument)) for argument in arguments if argument is not Ellipsis]
    if origin is tuple:
        return [f"list of {names[0]}" if Ellipsis in arguments else f"[{','.join(names)}]"]
    if origin is collections.abc.Mapping:
        return [f"mapping of {names[0]} to {names[1]}"]
    return ["null" if kind is type(None) else kind.__name__]


if __name__ == "__main__":
    sys.exit(main())
