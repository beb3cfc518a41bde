"""Templates of pages, and the files that a page includes. Needs jinja2 (the extra `compare`)."""

from __future__ import annotations

import importlib.resources
from functools import cache

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""A page may load nothing."""


@cache
def load_template(name: str) -> Template:
    """Return a template of this package; it escapes all text."""
    environment = Environment(
        loader=FunctionLoader(content),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def content(name: str) -> str:
    """Return a file of this package."""
    return importlib.resources.files("titan.report.render").joinpath(name).read_text(encoding="utf-8")
