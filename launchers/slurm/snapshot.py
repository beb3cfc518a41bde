"""Copy the code beside the sweep, so that jobs in the queue run what was submitted. Free of torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from titan.run import identity

ROOT = Path(__file__).resolve().parents[2]
"""The folder that titan is imported from: a checkout, or site-packages."""
PARTS = ("titan", "launchers", "conf", "experiments")


def take(folder: Path) -> Path:
    """Copy titan's code to a folder in `folder`, named by a digest of its content, unless it is there already.

    Returns:
        The folder to import from.
    """
    code, files = identity.code(), _files()
    copy = folder / "code" / _digest(files)
    if copy.is_dir():
        return copy
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
    for file in files:
        target = temporary / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (temporary / identity.FROZEN).write_text(json.dumps({"code": code, "diff": identity.git_diff()}))
    try:
        temporary.rename(copy)
    except OSError:  # another launcher was faster
        shutil.rmtree(temporary)
    return copy


def _files() -> list[Path]:
    """Return all files of titan's code; of site-packages only titan's own."""
    parts = [part for part in PARTS if (ROOT / part).is_dir() and (part != "experiments" or (ROOT / "conf").is_dir())]
    found = (file for part in parts for file in (ROOT / part).rglob("*") if file.is_file())
    return sorted(file for file in found if "__pycache__" not in file.parts and file.suffix != ".pyc")


def _digest(files: list[Path]) -> str:
    """Return 12 hex digits of a hash of names and contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
