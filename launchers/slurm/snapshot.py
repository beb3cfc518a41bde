"""Copy the code beside the sweep, so that jobs in the queue run what was submitted. Free of torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from titan.run import identity

ROOT = Path(__file__).resolve().parents[2]
"""The folder that titan is imported from: a checkout, or site-packages."""
PARTS = ("titan", "launchers", "conf", "experiments")


def copy_code(folder: Path, packages: Iterable[str] = ()) -> Path:
    """Copy titan's code to a folder in `folder`, named by a digest of its content, unless it is there already.

    Args:
        packages: the user's own packages, which are copied too unless they are installed.

    Returns:
        The folder to import from.
    """
    code = identity.describe_code()
    # of site-packages only titan's own
    parts = [part for part in PARTS if (ROOT / part).is_dir() and (part != "experiments" or (ROOT / "conf").is_dir())]
    files = {str(file.relative_to(ROOT)): file for part in parts for file in identity.walk_files(ROOT / part)}
    for package in packages:
        if package not in PARTS and not identity.is_installed(package):
            files |= identity.find_files(package)
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    copy = folder / "code" / digest.hexdigest()[:12]
    if copy.is_dir():
        return copy
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
    for name, file in files.items():
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (temporary / identity.FROZEN).write_text(json.dumps({"code": code, "diff": identity.read_git_diff()}))
    try:
        temporary.rename(copy)
    except OSError:  # another launcher was faster
        shutil.rmtree(temporary)
    return copy
