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
from typing import NoReturn

VERSION = "0.1.0"
"""titan's own."""
REQUIREMENTS = {
    "torch": "torch", "numpy": "numpy", "hydra": "hydra-core", "omegaconf": "omegaconf", "yaml": "pyyaml",
    "tiktoken": "tiktoken",
}  # fmt: skip
"""The packages to import, and the names to install them by."""
OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent.parent
"""The repository, or the folder that titan is installed in."""


def check_requirements(program: Sequence[str]) -> None:
    """End a command of titan with exit code 2 and one sentence when packages are missing; a library raises by itself.

    Args:
        program: the first word of the process: "-m" while Python looks for the module of `python -m titan.COMMAND`.
    """
    script = find_script(sys.modules.get("__main__"))
    if not (script or program == ["-m"] or any(Path(word).name.startswith("titan-") for word in program)):
        return
    missing = [package for package in REQUIREMENTS if find_spec(package) is None]
    if sys.version_info < OLDEST_PYTHON:
        _reject(describe_python(sys.version_info[:2]))
    if missing:
        _reject(describe_missing(missing, ROOT, sys.prefix))
    if script:
        _reject(describe_script(script))


def find_script(main_module: object) -> Path | None:
    """Return the file of titan that was started as a script; None for `python -m` and multiprocessing."""
    file = getattr(main_module, "__file__", None)
    script = Path(file or "").resolve()
    is_script = file is not None and getattr(main_module, "__spec__", None) is None
    return script if is_script and ROOT / "titan" in script.parents else None


def describe_script(script: Path) -> str:
    """Return the sentence on a file of titan that is no script: Python imports its neighbours in place of libraries."""
    parts = [part for part in script.relative_to(ROOT).with_suffix("").parts if part not in ("__main__", "command")]
    return f"{os.path.relpath(script)}: is a module of a package; write -m {'.'.join(parts)}"


def _reject(sentence: str) -> NoReturn:
    print(f"titan: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def describe_python(version: Sequence[int]) -> str:
    """Return the sentence on a Python that is too old."""
    oldest, running = (".".join(map(str, numbers)) for numbers in (OLDEST_PYTHON, version))
    return f"{sys.executable} is Python {running}, and titan needs {oldest} or newer; install it, and titan with it"


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
