"""Inductor's code for a GPU, written without one: `python -m tests.measure.inductor PYTHON` (make cuda-names).

PYTHON is an interpreter with a CUDA wheel of torch, of which Triton is used. A model of each family trains on the
rehearsal's device with compiled blocks: Inductor lowers forward and backward, and writes the Triton code of an H100;
the graphs that it was given are then executed instead. Exit code 1 where a family fails, or has no Triton kernel.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.rehearsal import build, rehearse
from tests.rehearsal.table import Rehearsed
from tests.rehearsal.triton_code import FOLDER

FAMILIES = ("debug", "qwen3_debug", "qwen3_moe_debug", "deepseek_v3_debug", "llama4_debug")


def build_command(family: str, code: Path) -> Rehearsed:
    """Return a run of a family with compiled blocks."""
    arguments = (f"model={family}", "precision=bf16", "compile=block", "training.steps=2", "model.layers=2")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(code.parent / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return Rehearsed(f"compiled {family}", arguments, environment={FOLDER: str(code), **caches})


def main(pythons: Sequence[str]) -> int:
    """Train each family, and print how many kernels Inductor wrote."""
    if not pythons:
        raise SystemExit(__doc__)
    if obstacle := build.find_obstacle():
        print(f"skipped: {obstacle}")
        return 0
    build.build_extension()
    result = subprocess.run(
        [pythons[0], "-c", "import triton; print(triton.__path__[0])"], capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(f"{pythons[0]}: has no Triton")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        (folder / "path").mkdir()
        for part in Path(result.stdout.strip()).parent.glob("triton*"):  # the package, and what names its backends
            (folder / "path" / part.name).symlink_to(part)
        with rehearse.Rehearsal(folder, references={}, paths=[str(folder / "path")]) as rehearsal:
            print("| family | graphs | Triton kernels | lines | s | exit code |\n| --- |" + " --- |" * 5)
            for family in FAMILIES:
                failed += _train_family(family, folder / family, rehearsal)
    return 1 if failed else 0


def _train_family(family: str, code: Path, rehearsal: rehearse.Rehearsal) -> bool:
    """Train a family, print its line, and return whether it failed."""
    code.mkdir()
    result = rehearsal.run(build_command(family, code))
    texts = [file.read_text() for file in code.iterdir()]
    kernels = sum(len(re.findall(r"^def triton_", text, flags=re.MULTILINE)) for text in texts)
    cells = [family, len(texts), kernels, sum(text.count("\n") for text in texts), f"{result.seconds:.0f}", result.code]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for problem in result.problems:
        print(problem)
    return bool(result.problems) or not kernels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
