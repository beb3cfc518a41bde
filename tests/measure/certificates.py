"""Certificates of all recipes, and of models and layouts: `python -m tests.measure.certificates [NAME ...]`.

It prints a row for each; exit code 1 where a layout is not proven.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.measure.cpu_time import measure_cpu_seconds
from titan import prove

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("debug", "qwen3_debug", "qwen3_moe_debug", "deepseek_v3_debug", "llama4_debug")
LAYOUTS = ("ddp", "hsdp", "fsdp", "fsdp_tp", "fsdp_cp", "fsdp_pp", "3d", "4d", "ep")
SMALL = ("dataset=synthetic", "cluster=cpu", "compile=off", "training.global_batch=8192")
HEAD = (
    "recipe, or model and layout",
    "layout",
    "shrunk",
    "gradients, fp32",
    "weights after 3 steps",
    "checks",
    "CPU seconds",
)


def list_cases() -> dict[str, tuple[str, ...]]:
    """Return the overrides of each case, by name."""
    recipes = sorted(file.stem for file in (ROOT / "conf" / "recipe").glob("*.yaml"))
    cases: dict[str, tuple[str, ...]] = {name: (f"recipe={name}",) for name in recipes}
    for model in MODELS:
        for layout in LAYOUTS:
            if layout != "ep" or model not in ("debug", "qwen3_debug"):
                cases[f"{model} {layout}"] = (f"model={model}", f"parallelism={layout}", *SMALL)
    return cases


def prove_case(name: str, overrides: tuple[str, ...]) -> tuple[str, bool]:
    """Return a case's row, and whether it was proven."""
    start, output = measure_cpu_seconds(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "certificate.json"
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = prove.main([*overrides, f"to={file}"])
        if not file.exists():
            return f"| {name} | {output.getvalue().strip().splitlines()[-1]} |", False
        content = json.loads(file.read_text())
    worst = {check["name"]: f"{check['worst']:.0e}" for check in content["checks"]}
    passed = sum(check["passed"] for check in content["checks"])
    cells = (
        name, content["layout"], content["shrunk"]["layout"], worst["gradients of step 1, fp32"],
        worst["weights after step 3"], f"{passed} of {len(worst)}", f"{measure_cpu_seconds() - start:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |", code == 0


def main(names: list[str]) -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
        failed = []
        for name, overrides in list_cases().items():
            if not names or name in names:
                row, proven = prove_case(name, overrides)
                print(row, flush=True)
                failed += [] if proven else [name]
    print(f"{len(failed)} not proven{': ' if failed else ''}{', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
