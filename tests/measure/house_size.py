"""The size of the house: lines of titan/ and launchers/ that are not blank, at most as many as pyproject.toml allows.

`python -m tests.measure.house_size`, which `make lint` runs. What moves in makes room: the number is lowered with the
code, and raised only by a separate commit that says for what.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("titan", "launchers")


def count_lines(root: Path) -> int:
    """Return the number of lines of Python files that are not blank."""
    files = [file for package in PACKAGES for file in (root / package).rglob("*.py")]
    return sum(bool(line.strip()) for file in files for line in file.read_text(encoding="utf-8").splitlines())


def main() -> int:
    """Print the size; return 1 where it is too large."""
    most = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["titan"]["max_lines"]
    lines = count_lines(ROOT)
    print(f"{lines:,} lines of {' and '.join(PACKAGES)} are not blank; pyproject.toml allows {most:,}")
    return int(lines > most)


if __name__ == "__main__":
    sys.exit(main())
