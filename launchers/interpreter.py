"""Run a module by the Python interpreter of another environment, with another titan or torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from titan.console.text import sanitize_line
from titan.errors import ConfigError

SHOWN_LINES = 5
"""Of what a failed command printed last."""
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would have the other interpreter import this environment's packages."""


def check_interpreter(python: str) -> str:
    """Return the path of an interpreter."""
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(f"python={python}: is no program here; give the interpreter of an environment with titan.")
    return found


def run_module(python: str, module: str, words: Sequence[str]) -> int:
    """Run a module, and return its exit code; after a failure the last lines that it printed are shown.

    The interpreter imports nothing of the working directory (`PYTHONSAFEPATH`), which may be a checkout of this titan.
    """
    env = {key: value for key, value in os.environ.items() if key not in OWN_VARIABLES} | {"PYTHONSAFEPATH": "1"}
    command = [check_interpreter(python), "-m", module, *words]
    result = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    for line in (result.stderr.splitlines() or ["(it printed nothing)"])[-SHOWN_LINES:] if result.returncode else ():
        print(f"titan: python={sanitize_line(python)}: {sanitize_line(line)}", file=sys.stderr)
    return result.returncode
