"""Print constraints for pip: the lowest version that pyproject.toml allows of each dependency, and torch at its pin.

What only tests need is not constrained, and neither is what a dependency needs.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LOWER = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[\w,-]+\])?>=([\w.]+)")


def list_constraints() -> list[str]:
    """Return the constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras if name not in ("lint", "test"))]
    matches = (_LOWER.match(requirement) for group in groups for requirement in group)
    bounds = dict(match.groups() for match in matches if match)
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    return [f"{name}=={version}" for name, version in sorted((bounds | {"torch": pins["torch"]}).items())]


if __name__ == "__main__":
    print("\n".join(list_constraints()))
