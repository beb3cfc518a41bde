"""A copy of the code beside the sweep, so that jobs which wait in the queue run what was submitted. Free of torch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from titan import identity

ROOT = Path(__file__).resolve().parent.parent
"""Where titan is imported from: a checkout, or site-packages."""
PARTS = ("titan", "launchers", "conf", "experiments")


def take(folder: Path) -> Path:
    """Copy titan's code to a folder of its own in `folder`, named by what it holds; one that is there already serves.

    Returns:
        The folder to import from.
    """
    code = identity.code()
    copy = folder / "code" / identity.digest(code)
    if copy.is_dir():
        return copy
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
    for part in PARTS:
        if (ROOT / part).is_dir() and (part != "experiments" or (ROOT / "conf").is_dir()):
            shutil.copytree(ROOT / part, temporary / part, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (temporary / identity.FROZEN).write_text(json.dumps({"code": code, "diff": identity.git_diff()}))
    try:
        temporary.rename(copy)
    except OSError:  # another launcher was faster
        shutil.rmtree(temporary)
    return copy
