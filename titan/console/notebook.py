"""Objects in notebooks: a short line for `repr`, a table for `_repr_html_`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def format_fields(kind: str, fields: Mapping[str, str]) -> str:
    """Return one line, such as Run(name=first, steps=100)."""
    return f"{kind}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def build_table(fields: Mapping[str, str]) -> str:
    """Return a table of names and values as HTML; all text is escaped."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in fields.items())
    return f"<table>{''.join(rows)}</table>"
