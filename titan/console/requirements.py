"""The packages that titan needs: without them a command ends with one sentence, before anything imports them.

Python imports `titan` before it runs a command of it, so this is the first of titan's code. It uses nothing but the
standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

REQUIREMENTS = {
    "torch": "torch", "numpy": "numpy", "hydra": "hydra-core", "omegaconf": "omegaconf", "yaml": "pyyaml",
    "tiktoken": "tiktoken",
}  # fmt: skip
"""The packages to import, and the names to install them by."""
ROOT = Path(__file__).resolve().parent.parent.parent
"""The repository, or the folder that titan is installed in."""


def check_requirements(program: Sequence[str]) -> None:
    """End a command of titan with exit code 2 and one sentence when packages are missing; a library raises by itself.

    Args:
        program: the first word of the process: "-m" while Python looks for the module of `python -m titan.COMMAND`.
    """
    if not (program == ["-m"] or any(Path(word).name.startswith("titan-") for word in program)):
        return
    missing = [package for package in REQUIREMENTS if find_spec(package) is None]
    if missing:
        print(f"titan: {describe_missing(missing, ROOT, sys.prefix)}", file=sys.stderr)
        raise SystemExit(2)


def describe_missing(missing: Sequence[str], root: Path, prefix: str) -> str:
    """Return the sentence on missing packages.

    Args:
        missing: names of `REQUIREMENTS`.
        root: the repository.
        prefix: the environment of this Python.
    """
    environment = root / ".venv"
    problem = f"{sys.executable} has no {', '.join(missing)}"
    if (environment / "bin" / "activate").is_file() and Path(prefix).resolve() != environment.resolve():
        return f"{problem}; activate titan's environment: source {os.path.relpath(environment)}/bin/activate"
    if (root / "pyproject.toml").is_file():
        return f"{problem}; install titan's packages: {sys.executable} -m pip install -e {os.path.relpath(root)}"
    return f"{problem}; install: {sys.executable} -m pip install {' '.join(REQUIREMENTS[name] for name in missing)}"
