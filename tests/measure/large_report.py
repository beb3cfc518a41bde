"""Seconds and memory of a comparison of 64 runs of 10,000 steps: `python -m tests.measure.large_report [RUNS
STEPS]`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from titan.report.comparison import compare

LAYOUTS = ("single", "ddp", "fsdp", "cp")


def main(runs: int = 64, steps: int = 10_000) -> None:
    """Make the runs in a folder of its own, compare them in a fresh process, and say what that took."""
    from tests.support.made_runs import Story, make_run  # brings torch, which the comparison itself does without

    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "grid"
        for index in range(runs):
            layout = LAYOUTS[index % len(LAYOUTS)]
            story = Story(seed=index // 16, steps=steps, every=50, luck=index, off=1e-4 * index, spread=0.01)
            rate = f"optimizer.lr={1e-3 * (1 + index // 4 % 4):g}"
            make_run(template / str(index), story, f"parallelism={layout}", rate)
        subprocess.run([sys.executable, "-m", "tests.measure.large_report", str(template)], check=True)


def measure_comparison(directory: str) -> None:
    """Compare what is in a directory and print what it took."""
    size = sum(file.stat().st_size for file in Path(directory).rglob("metrics.jsonl")) / 2**20
    initial_mib, start, worked = read_peak_mib(), time.monotonic(), time.process_time()
    comparison = compare([directory])
    seconds, worked = time.monotonic() - start, time.process_time() - worked
    runs = sum(len(variant.runs) for variant in comparison.variants)
    print(
        f"{runs} runs in {len(comparison.variants)} variants, {size:.0f} MiB of metrics.jsonl: {seconds:.1f} s, "
        f"{worked:.1f} s of a core, peak {read_peak_mib():.0f} MiB, of which {initial_mib:.0f} MiB before"
    )


def read_peak_mib() -> float:
    """The largest resident size that this process has had (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) == 1:
        measure_comparison(arguments[0])
    else:
        main(*map(int, arguments))
