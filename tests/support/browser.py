"""Measure pages in a headless Chromium, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FRAME = """<!doctype html><iframe style="width:{width}px;height:2000px;border:0" srcdoc="{page}"></iframe>
<script>document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, width = event.target.clientWidth;
  const wide = [...page.querySelectorAll("body *")].filter(
    e => Math.max(e.getBoundingClientRect().right, e.scrollWidth) > width + 1
      && !e.closest(".scroll, .many, .bars, svg"));
  const names = wide.slice(0, 5).map(e => `${{e.tagName}}: ${{e.textContent.slice(0, 60)}}`);
  document.title = `width ${{page.documentElement.scrollWidth}} of ${{width}}; ${{names}}`;
}}</script>"""
"""A window can't be as narrow as a telephone; a frame in it can."""


def find_browser() -> str | None:
    """The program; None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def measure_page(text: str, width: int, folder: Path) -> tuple[int, str]:
    """The width that a page takes in a frame of some width, in pixels, and the elements that are too wide."""
    program = find_browser()
    assert program is not None, "no Chromium here"
    file = folder / "frame.html"
    file.write_text(FRAME.format(width=width, page=escape(text)))
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1000,2000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(rf"<title>width (\d+) of {width}; ([^<]*)</title>", done.stdout)
    assert match, done.stderr[-2000:]
    return int(match[1]), match[2]
