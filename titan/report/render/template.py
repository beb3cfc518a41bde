"""Templates of pages, and the files that a page includes. Needs jinja2 (the extra `compare`)."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from functools import cache

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""A page may load nothing, and run no script."""


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


def allow_script(script: str) -> str:
    """Return the policy of a page that may run one script, whose element has exactly this text."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'"


def content(name: str) -> str:
    """Return a file of this package."""
    return importlib.resources.files("titan.report.render").joinpath(name).read_text(encoding="utf-8")
