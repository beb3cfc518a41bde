"""`plan.trace` on a CPU's tensors and on the rehearsal's: `python -m tests.measure.rehearsed_traces [NAME...]`.

Prints a table of memory: live tensors and what the allocator reserves for them, in both ways, beside published peaks.
On the rehearsal's device attention is flash attention with what that saves, and titan takes its CUDA branches. The runs
are `bench_8b_8` and those of `titan/estimate/published.csv` and `unseen.csv` that state the peak of PyTorch.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from tests.rehearsal import build, cuda, imports, watch

ON_DEVICE = "--on-device"


def list_runs() -> Iterator[tuple[str, list[str], float | None]]:
    """Yield name, command line and published peak in GiB of each run."""
    from tests.measure import fit_costs

    yield "bench_8b_8, not compiled", ["recipe=bench_8b_8", "compile=off"], None
    rows = [*fit_costs.read_runs(fit_costs.PUBLISHED), *fit_costs.read_runs(fit_costs.UNSEEN)]
    for row in rows:
        if row["mem_GiB"] and fit_costs.choose_kernel(row) == "flash":
            layout = " ".join(f"{name} {row[name]}" for name in ("tp", "pp", "cp") if (row[name] or "1") != "1")
            compiled = "" if row["compile"] == "0" else ", compiled"
            name = f"{row['model']}, {row['precision']}, {row['n_gpus']} x {int(row['seq']):,} {layout}".strip()
            yield name + compiled, fit_costs.build_overrides(row), float(row["mem_GiB"])


def measure_trace(overrides: Sequence[str]) -> dict[str, float]:
    """Return GiB of live tensors and what is reserved, of the rank that needs most."""
    from tests.measure.fit_costs import _compose_run
    from titan.estimate.operations import derive_speeds
    from titan.estimate.plan import resolve_hardware
    from titan.estimate.rank_sizes import GIB
    from titan.training.trace.rank import trace_run

    run = _compose_run(tuple(overrides))
    fullest = trace_run(
        run, derive_speeds(resolve_hardware(run.cluster, run.machine), 8, dtype="bf16", kernel="flash")
    ).fullest
    return {"live": fullest.live.bytes / GIB, "reserved": fullest.gib, "events": fullest.events}


def print_traces(names: Sequence[str]) -> None:
    """Print the figures of each run as JSON, one per line."""
    import torch

    from titan.training.trace import rank

    device = torch.device("cuda", 0) if cuda.count_devices() else rank.DEVICE
    with mock.patch.object(rank, "DEVICE", device):
        for name, overrides, peak in list_runs():
            if not names or any(part in name for part in names):
                print(json.dumps({"name": name, "peak": peak, **measure_trace(overrides)}), flush=True)


def _run_traces(names: Sequence[str], devices: int) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(watch.ROOT), cuda.DEVICES: str(devices), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.measure.rehearsed_traces", ON_DEVICE, *names]
    result = subprocess.run(command, cwd=watch.ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def main(names: Sequence[str]) -> int:
    """Trace in both ways, and print the table."""
    if obstacle := build.find_obstacle():
        print(f"skipped: {obstacle}")
        return 0
    build.build_extension()
    pairs = list(zip(_run_traces(names, 0), _run_traces(names, 8), strict=True))
    print(
        "| run | live, CPU | live, device | reserved, CPU | reserved, device | published peak |\n| --- |" + " --- |" * 5
    )
    for host, device in pairs:
        peak = "-" if host["peak"] is None else f"{host['peak']:.1f} GiB"
        figures = [f"{side[key]:.1f} GiB" for key in ("live", "reserved") for side in (host, device)]
        print(f"| {host['name']} | {' | '.join(figures)} | {peak} |")
    for index, side in enumerate(("CPU", "device")):
        errors = [abs(math.log(pair[index]["reserved"] / pair[index]["peak"])) for pair in pairs if pair[index]["peak"]]
        if errors:
            print(f"{side}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%} of {len(errors)}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [ON_DEVICE]:
        if cuda.count_devices():
            imports.install_finder()
        print_traces(sys.argv[2:])
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
