"""Records the names of torch._C and torch.cuda in CUDA wheels: `python -m tests.measure.cuda_names PYTHON...`.

A CPU build lacks most of them, so that no test here would see a misspelt one. Each PYTHON is an interpreter with a CUDA
wheel of torch, for which no GPU or driver is needed; the file gets all names of the releases given.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from tests.rehearsal.names import FILE, read_names

MODULES = (
    "torch._C", "torch._C._distributed_c10d", "torch._C._cudart", "torch.cuda", "torch.cuda.memory",
    "torch.cuda.streams", "torch.cuda.Stream", "torch.cuda.Event",
)  # fmt: skip
LISTING = """
import json, sys
import torch, torch.distributed

def names(path):
    found = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return [name for name in dir(found) if not (name.startswith("__") and name.endswith("__"))]

found = {path: names(path) for path in sys.argv[1:]}
json.dump({"release": torch.__version__, "cuda": torch.version.cuda, "names": found}, sys.stdout)
"""


def format_names(recorded: dict[str, dict[str, list[str]]]) -> str:
    """Return the file of names: one per line, with the releases that have it where not all do.

    Args:
        recorded: names by module, by release.
    """
    releases = sorted(recorded)
    lines = [
        "# Names in CUDA wheels of torch, written by tests/measure/cuda_names.py.",
        f"releases: {' '.join(releases)}",
    ]
    for module in MODULES:
        lines.append(f"module: {module}")
        for name in sorted({name for names in recorded.values() for name in names[module]}):
            having = [release for release in releases if name in recorded[release][module]]
            lines.append(name if having == releases else " ".join([name, *having]))
    return "\n".join(lines) + "\n"


def list_names(python: str) -> tuple[str, dict[str, list[str]]]:
    """Return the release of an interpreter's torch, and its names by module.

    Raises:
        SystemExit: where it is no CUDA build.
    """
    result = subprocess.run([python, "-c", LISTING, *MODULES], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{python}: {result.stderr.strip().splitlines()[-1]}")
    listing = json.loads(result.stdout)
    if listing["cuda"] is None:
        raise SystemExit(f"{python}: has torch {listing['release']}, which is no CUDA build")
    return ".".join(listing["release"].split("+")[0].split(".")[:2]), listing["names"]


def main(pythons: Sequence[str]) -> int:
    """Record the names."""
    if not pythons:
        raise SystemExit(__doc__)
    recorded = dict(list_names(python) for python in pythons)
    FILE.write_text(format_names(recorded))
    print(f"{FILE}: {', '.join(f'{release}: {len(names)}' for release, names in read_names().items())} names")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
