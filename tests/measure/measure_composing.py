"""What it takes to compose and check a grid: `python -m tests.measure.measure_composing [TRIALS]`.

A dry run of a grid of 200 trials, or as many as are given, of an 8B model on nodes of eight GPUs: five layouts with
open degrees, a learning rate and a seed. Wall-clock and CPU seconds and peak memory are those of the whole command.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from tests.support.processes import ROOT

LAYOUTS = ("fsdp", "hsdp", "fsdp_tp", "fsdp_pp", "fsdp_cp")
SHARED = (
    "name=composed", "model=llama8b", "cluster=h100", "cluster.nodes=4", "cluster.time=60", "training.seq_len=8192",
    "training.global_batch=1048576", "training.seed=0,1", "hydra/launcher=slurm", "hydra.launcher.dry_run=true",
)  # fmt: skip


def build_grid(trials: int) -> list[str]:
    """The arguments of a grid of at least so many trials."""
    rates = -(-trials // (2 * len(LAYOUTS)))
    return [
        *SHARED,
        f"parallelism={','.join(LAYOUTS)}",
        f"optimizer.lr={','.join(f'{n}e-5' for n in range(1, rates + 1))}",
    ]


def main(trials: int = 200) -> int:
    """Print the figures; gives the command's exit code."""
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "titan.train", "-m", *build_grid(trials)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    wall, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(result.stdout.strip().splitlines()[-1] if result.stdout else "nothing was said")
    cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    print(f"{trials} trials: {wall:.1f} s, {wall / trials:.3f} s a trial; {cpu:.1f} CPU-seconds; peak {memory:.0f} MiB")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
