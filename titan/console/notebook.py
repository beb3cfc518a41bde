"""Objects in notebooks: a short line for `repr`, a table for `_repr_html_`.

Styles stand in the elements, so that they change nothing else in the notebook; colours are the notebook's, whose theme
is light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

TABLE = "margin: 0; border-collapse: collapse"
NAME = "text-align: left; vertical-align: top; white-space: normal; padding: 0.25em 0.75em"
VALUE = f"{NAME}; overflow-wrap: anywhere"
"""Notebooks centre tables and align cells right, which is hard to read in sentences."""


class Shown:
    """An object of which notebooks show some facts."""

    def list_facts(self) -> dict[str, str]:
        """Return what a reader wants to know first, by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return format_fields(type(self).__name__, self.list_facts())

    def _repr_html_(self) -> str:
        return build_table(self.list_facts().items())


def format_fields(kind: str, fields: Mapping[str, str]) -> str:
    """Return one line, such as Run(name=first, steps=100)."""
    return f"{kind}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def build_table(fields: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values as HTML, empty without any; all text is escaped."""
    rows = "".join(
        f'<tr><th scope="row" style="{NAME}">{escape(name)}</th><td style="{VALUE}">{escape(value)}</td></tr>'
        for name, value in fields
    )
    return f'<table style="{TABLE}">{rows}</table>' if rows else ""
