"""A report as one HTML file that loads nothing. Needs jinja2 (the extra `compare`); free of torch.

`page.html.jinja` lays the parts of a report out; it escapes all text. The charts are SVG that escapes its own.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

from titan.report.render.document import Commands, Report

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""A page may load nothing, and run no script but its own, whose digest is added."""
MANY = 12
"""More items than these scroll in a box."""
NARROW_STYLES = ("page.css", "plan.css")
"""Of pages without wide tables."""


def format_page(report: Report, footer: str = "", styles: tuple[str, ...] = NARROW_STYLES, script: str = "") -> str:
    """Return the page of a report.

    Args:
        footer: date and command, for the last line.
        styles: files of this package.
        script: a file of this package; empty: none.
    """
    code = read_file(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    environment = Environment(
        loader=FunctionLoader(read_file),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    return environment.get_template("page.html.jinja").render(
        report=report,
        sections=[s for s in report.sections if any(part and not isinstance(part, Commands) for part in s.parts)],
        policy=f"{POLICY}; script-src 'sha256-{digest}'" if code else POLICY,
        css="".join(map(read_file, styles)),
        script=code,
        footer=footer,
        many=MANY,
    )


def read_file(name: str) -> str:
    """Return a file of this package."""
    return importlib.resources.files("titan.report.render").joinpath(name).read_text(encoding="utf-8")
