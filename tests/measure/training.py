"""titan against the bare PyTorch loop: `python -m tests.measure suite=cpu`, `gpu` and `tiny`.

Speed is a ratio: titan and the bare loop train the same model in alternating rounds of a few steps, and each round
gives one ratio. The table shows their median and range, and titan's fraction of the roofline
(`tests.measure.roofline`). MFU is relative to the device's peak in the compute type, which is bf16 for float8 matmuls
too. Ceilings, data loading, start-up and memory follow.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.measure import speed
from tests.measure.common import LONG, QUIET, build_environment, read_last_line, select_cases
from tests.measure.speed import CaseSpeed, HostSync, SpeedCase
from titan.console.numbers import format_count, format_plural
from titan.errors import ConfigError
from titan.metrics.reader import METRICS, read_last_steps
from titan.precision.schema import CAPABILITY
from titan.run.run import Run

if TYPE_CHECKING:
    from tests.measure.command import Settings


def measure_training(settings: Settings, overrides: Sequence[str], run: Run, provenance: Mapping[str, Any]) -> None:
    """Measure all parts of the suite, or print the slowest operators of each case instead."""
    cases = select_cases(settings.case, speed.list_gpu_cases() if settings.suite == "gpu" else speed.list_cpu_cases())
    if settings.operators:
        for case in cases:
            table = speed.profile_case(case, [*LONG, *overrides], settings.steps)
            print(f"\n{case.title}: {settings.steps} steps\n{table}", flush=True)
        return
    results = _measure_cases(dict(provenance), cases, overrides, run, settings)
    failed = sum(bool(row["failure"]) for row in results["speed"])
    skipped, total = len(cases) - len(results["speed"]), format_plural(len(cases), "case")
    print(f"{total}: {skipped} skipped, {failed} with a failed side")


def _measure_cases(
    results: dict[str, Any], cases: Sequence[SpeedCase], base: Sequence[str], run: Run, settings: Settings
) -> dict[str, Any]:
    """Return all figures, and write those found so far after each part."""
    results["ceilings"], results["speed"] = _measure_ceilings(run), []
    print(f"\n{speed.HEADER}")
    for measured in _measure_speeds(cases, [*LONG, *base], results["ceilings"], settings):
        results["speed"].append(asdict(measured))
        settings.write(results)
    if settings.suite == "gpu":
        results["host_sync"] = _find_host_syncs(cases, [*LONG, *base])
    elif results["speed"] and (first := results["speed"][0])["title"] == cases[0].title:
        # all compute the same on a CPU
        fastest = max(results["speed"], key=lambda row: row["titan"])
        ratio = fastest["titan"] / first["bare"]
        print(f"fastest titan ({fastest['title']}) / bare ({first['title']}): {ratio:.2f}")
    settings.write(results)
    print()
    results["loading"] = _measure_loading(run, results["speed"])
    results["start"] = _measure_start(base, repeats=1 if settings.suite == "tiny" else 3)
    results["memory"] = _measure_memory(base)
    settings.write(results)
    return results


def _measure_speeds(
    cases: Sequence[SpeedCase], base: Sequence[str], ceilings: Mapping[str, float], settings: Settings
) -> Iterator[CaseSpeed]:
    """Measure the cases and print their rows; a case that can't be composed here is skipped with its error."""
    for case in cases:
        try:
            case_speed = speed.measure_case(case, base, ceilings, settings.rounds, settings.steps)
        except ConfigError as error:
            print(f"{case.title:<34} skipped: {error}", flush=True)
        else:
            print(case_speed.format_rows(), flush=True)
            yield case_speed


def _find_host_syncs(cases: Sequence[SpeedCase], base: Sequence[str]) -> dict[str, Any]:
    """Search the steps of one case per model and kind for host synchronisations."""
    syncs = {}
    kinds = {
        (case.overrides[0], "compile=off" in case.overrides, "float8" in " ".join(case.overrides)): case
        for case in reversed(cases)
    }
    for case in kinds.values():
        try:
            sync = speed.find_host_sync([*base, *case.overrides])
        except ConfigError as error:
            sync = HostSync(failure=str(error))
        syncs[case.title] = asdict(sync)
        print(f"{case.title}: {sync.describe()}", flush=True)
    return syncs


def _measure_ceilings(run: Run) -> dict[str, float]:
    """Measure the speeds of large matmuls in each type, and of a copy in the device's memory."""
    import torch

    from tests.measure.bare_loop import measure_float8_tflops, measure_matmul_tflops
    from titan.calibration.measurements import measure_copy_speed

    device = torch.device(run.machine.device)
    size, mebibytes = speed.CEILINGS[device.type]
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    ceilings = {f"matmul_{name}_tflops": measure_matmul_tflops(device, dtype, size) for name, dtype in types.items()}
    if (run.machine.capability or 0) >= CAPABILITY["float8"]:
        ceilings["matmul_float8_tflops"] = measure_float8_tflops(device, size)
    matmuls = ", ".join(f"{name.split('_')[1]} {value:.3g} TFLOP/s" for name, value in ceilings.items())
    ceilings["copy_gb_per_second"] = measure_copy_speed(device, mebibytes)
    torch.cuda.empty_cache()  # for the processes that follow; no effect without a GPU
    print(f"ceilings: square matmul of {size}: {matmuls}; copy {ceilings['copy_gb_per_second']:.0f} GB/s")
    return ceilings


def _measure_loading(run: Run, speeds: list[dict[str, Any]]) -> dict[str, float]:
    """Measure tokens/s of the loader, relative to the fastest training above."""
    from tests.measure.bare_loop import open_loader, open_mixture

    steps = max(20, 2_000_000 // run.training.global_batch)
    with open_loader(run, open_mixture(run)) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(loader)
        rate = steps * run.training.global_batch / (time.perf_counter() - start)
    ratio = rate / max((row["titan"] for row in speeds if row["titan"]), default=math.inf)
    print(f"data loading: {format_count(rate)} tokens/s, {ratio:,.0f} x the fastest training above")
    return {"tokens_per_second": rate, "times_training": ratio}


def _measure_start(overrides: Sequence[str], repeats: int = 3) -> dict[str, float]:
    """Measure seconds from the command to the end of the first step, and the seconds of imports among them."""
    first, imports = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
            command = ["-m", "titan.train", "training.steps=2", *QUIET, f"hydra.run.dir={folder}/run", *overrides]
            first.append(_time_until("step      1/", command))
        imports.append(_time_until("", ["-c", "import titan.train, titan.training.worker"]))
    timings = {"first_step_seconds": min(first), "import_seconds": min(imports)}
    print(f"command to first step: {min(first):.2f} s, of which imports {min(imports):.2f} s (best of {repeats})")
    return timings


def _time_until(text: str, command: list[str]) -> float:
    """Return seconds until a Python command prints a line that starts with `text`; until it ends if that is empty."""
    start, elapsed = time.perf_counter(), 0.0
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env=build_environment()
    ) as process:
        for line in process.stdout or ():
            if text and not elapsed and line.startswith(text):
                elapsed = time.perf_counter() - start
    if process.returncode:
        raise ConfigError(f"{' '.join(command)}: ended with exit code {process.returncode}; see its message above.")
    return elapsed or time.perf_counter() - start


def _measure_memory(overrides: Sequence[str], steps: int = 20) -> dict[str, float]:
    """Measure the peak memory of a process that trains with titan and of one that runs the bare loop."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        train = ["-m", "titan.train", f"training.steps={steps}", *QUIET, f"hydra.run.dir={folder}/run", *overrides]
        read_last_line(train)
        titan = next(read_last_steps(Path(folder) / "run" / METRICS))["memory_gib"]
    rounds = ["rounds=1", f"steps={steps - speed.WARM}"]
    bare = ["-m", "tests.measure", "only=bare", *rounds, f"training.steps={steps}", *QUIET, *overrides]
    sizes = {"titan": titan, "bare": float(json.loads(read_last_line(bare))["memory_gib"])}
    ratio = sizes["titan"] / sizes["bare"]
    print(f"peak memory of the process: titan {sizes['titan']:.3f} GiB, bare {sizes['bare']:.3f}, ratio {ratio:.3f}")
    return {**sizes, "ratio": ratio}
