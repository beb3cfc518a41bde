"""The names of torch._C and torch.cuda in CUDA wheels, as `tests.measure.cuda_names` recorded them."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parent / "cuda_names.txt"


def read_names() -> dict[str, set[str]]:
    """Return the recorded names of each release, each with its module: torch.cuda.Event."""
    releases: list[str] = []
    names_by_release: dict[str, set[str]] = {}
    module = ""
    for line in FILE.read_text().splitlines():
        if line.startswith("releases:"):
            releases = line.split()[1:]
            names_by_release = {release: set() for release in releases}
        elif line.startswith("module:"):
            module = line.split()[1]
        elif line and not line.startswith("#"):
            name, *only = line.split()
            for release in only or releases:
                names_by_release[release].add(f"{module}.{name}")
    return names_by_release
