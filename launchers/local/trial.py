"""One trial of a local sweep as its own process: `python -m launchers.local.trial FILE PARENT`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from launchers import run_file, start
from titan.console import output
from titan.errors import exit_code
from titan.files.platform import die_with_parent


def main(file: str, parent: str) -> int:
    """Run the trial that `launchers.run_file` wrote into FILE; the process PARENT started this one and ends it."""
    die_with_parent(int(parent))
    report = partial(run_file.write_reason, Path(file))
    return exit_code(lambda: start.run_local(run_file.read(Path(file)), report=report), report)


if __name__ == "__main__":
    output.run(partial(main, *sys.argv[1:]))
