"""titan against the bare PyTorch loop: `python -m titan.bench [--suite NAME] [SETTING=VALUE ...]`.

Speed is a ratio: titan and the bare loop train the same model, on a CPU in one process, a few steps each in turn, and
each round gives one ratio; the table shows their median and spread, and the share of what `titan.limit` says could be.
Ceilings, data loading, start-up and memory follow.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan import compose, identity, measure, modes
from titan.checkpoint import measure as saving
from titan.measure import SIDES, Speed, environment
from titan.precision import CAPABILITY
from titan.run import Run, billions
from titan.settings import Refusal
from titan.suites import Case, cpu_cases, gpu_cases

QUIET = ["checkpoint=off", "metrics.plot=false", "metrics.sample_tokens=0", "metrics.validation_tokens=0"]
LONG = ["training.steps=1000000", *QUIET]


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m titan.bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--suite",
        choices=("cpu", "gpu", "tiny", "modes", "data", "generate", "checkpoint"),
        default="cpu",
        help="what to measure",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds a case (default 9)")
    parser.add_argument("--steps", type=int, default=5, help="steps a round (default 5)")
    parser.add_argument("--case", default="", help="only the cases whose title holds this text")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--profile", action="store_true", help="show where the steps of each case spend their time")
    parser.add_argument("--alone", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--autocast", action="store_true", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args(argv)
    try:
        if args.alone:
            return measure.alone(args.alone, overrides, args.rounds, args.steps, args.autocast)
        return _suite(args, overrides)
    except Refusal as refusal:
        print(f"titan: {refusal}", file=sys.stderr)
        return 2


def _suite(args: argparse.Namespace, overrides: list[str]) -> int:
    base = [*_base(args.suite), *overrides]
    run = compose.composed([*LONG, *base])
    found: dict[str, Any] = {"machine": asdict(run.machine), "code": identity.code(), "date": time.strftime("%Y-%m-%d")}
    print(f"{run.machine.describe()}; torch {found['code']['torch']}; {found['date']}")
    if args.suite == "modes":
        return _modes(run, args, overrides)
    if args.suite == "data":
        return _data(args)
    if args.suite == "checkpoint":
        return _checkpoint(run, args, base)
    if args.suite == "generate":
        return _generate(run, args)
    cases = [c for c in (gpu_cases() if args.suite == "gpu" else cpu_cases()) if args.case in c.title]
    if args.profile:
        return _profile(cases, [*LONG, *base], args.steps)
    found["ceilings"] = _ceilings(run)
    found["speed"] = _speeds(cases, [*LONG, *base], found["ceilings"], args)
    if args.suite == "gpu":
        found["waits"] = _waits(cases, [*LONG, *base])
    print()
    found["loading"] = _loading(run, found["speed"])
    found["start"] = _start(base, repeats=1 if args.suite == "tiny" else 3)
    found["memory"] = _memory(base)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _speeds(
    cases: Sequence[Case], base: Sequence[str], ceilings: Mapping[str, float], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The table of speeds; a case that can't be composed here is told and left out."""
    print(f"\n{measure.HEADER}")
    found: list[Speed] = []
    for case in cases:
        try:
            found.append(measure.speed(case, base, ceilings, args.rounds, args.steps))
            print(found[-1].rows(), flush=True)
        except Refusal as refusal:
            print(f"{case.title:<34} left out: {refusal}", flush=True)
    if found and found[0].bare and found[0].title == cases[0].title:
        fastest = max(found, key=lambda each: each.titan)
        share = fastest.titan / found[0].bare
        print(f"fastest titan ({fastest.title}) / bare ({found[0].title}): {share:.2f}")
    return [asdict(each) for each in found]


def _profile(cases: Sequence[Case], base: Sequence[str], steps: int) -> int:
    for case in cases:
        print(f"\n{case.title}: {steps} steps\n{measure.profile(case, base, steps)}", flush=True)
    return 0


def _waits(cases: Sequence[Case], base: Sequence[str]) -> dict[str, str | None]:
    """Whether the host waits for the device within a step, for the first case of each model."""
    found = {}
    for case in {case.overrides[0]: case for case in reversed(cases)}.values():
        try:
            found[case.title] = measure.waits(compose.composed([*base, *case.overrides]))
            print(f"{case.title}: the host waits for {found[case.title] or 'nothing within a step'}")
        except Refusal as refusal:
            print(f"{case.title}: not looked at: {refusal}")
    return found


def _modes(run: Run, args: argparse.Namespace, overrides: list[str]) -> int:
    """Peak memory and time of each way to keep activations, compiled and not."""
    print(f"\n{modes.HEADER}")
    found = []
    for mode in (m for m in modes.modes(run) if args.case in m.title):
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
            taken = modes.measure(mode, [*QUIET, *overrides], Path(folder) / "run", _train)
            print(taken.row() if taken else f"{mode.title:<36} failed", flush=True)
            found += [asdict(taken)] if taken else []
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _data(args: argparse.Namespace) -> int:
    """How well data are prepared."""
    from titan.dataset import measure as data

    found = data.suite(args.rounds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _checkpoint(run: Run, args: argparse.Namespace, base: list[str]) -> int:
    """What saving takes."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        found = saving.suite(run, [*base, *QUIET[1:]], args.rounds, Path(folder), _train)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _generate(run: Run, args: argparse.Namespace) -> int:
    """How fast text is generated."""
    from titan.generation import measure as generating

    found = generating.suite(run, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _train(overrides: list[str], folder: Path) -> int:
    command = [sys.executable, "-m", "titan.train", *overrides]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()).returncode


def _base(suite: str) -> list[str]:
    if suite == "tiny":  # the whole suite at a size that takes little, to see that it works
        shape = ["model.dim=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=128"]
        return [*shape, "dataset=synthetic", "training.seq_len=64", "training.global_batch=256"]
    long = ["dataset=synthetic", "training.seq_len=8192", "training.global_batch=8192"]
    if suite == "checkpoint":
        return [*saving.SHAPE]
    return [] if suite in ("cpu", "modes", "data", "generate") else [*long, "cluster.device=cuda"]


def _ceilings(run: Run) -> dict[str, float]:
    import torch

    from titan.baseline import copy_gb_per_second, float8_tflops, matmul_tflops

    device = torch.device(run.machine.device)
    size, mebibytes = (8192, 1024) if device.type == "cuda" else (1024, 64)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found = {f"matmul_{name}_tflops": matmul_tflops(device, dtype, size) for name, dtype in types.items()}
    if (run.machine.capability or 0) >= CAPABILITY["float8"]:
        found["matmul_float8_tflops"] = float8_tflops(device, size)
    products = ", ".join(f"{name.split('_')[1]} {value:.3g} TFLOP/s" for name, value in found.items())
    found["copy_gb_per_second"] = copy_gb_per_second(device, mebibytes)
    torch.cuda.empty_cache()  # for the processes that follow; without a GPU it does nothing
    print(f"ceilings: matrix product of {size}: {products}; copy {found['copy_gb_per_second']:.0f} GB/s")
    return found


def _loading(run: Run, speeds: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens/s through the loader, against the fastest training above."""
    from titan.dataset.corpora import mixed, opened, ready
    from titan.dataset.loader import Loader, Shape, Share

    mix = mixed(run.dataset, run.training, opened(ready(run.dataset)))
    steps = max(20, 2_000_000 // run.training.global_batch)
    shape = Shape(run.microbatches, run.microbatch_rows, run.training.seq_len)
    with Loader(mix, run.training, Share(0, 1), shape) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(loader)
        rate = steps * run.training.global_batch / (time.perf_counter() - start)
    times = rate / max((row["titan"] for row in speeds if row["titan"]), default=math.inf)
    print(f"data loading: {billions(rate)} tokens/s, {times:,.0f} times the fastest training above")
    return {"tokens_per_second": rate, "times_training": times}


def _start(overrides: list[str], repeats: int = 3) -> dict[str, float]:
    """Seconds from the command to the end of the first step, and how many of them Python spends on imports."""
    first, imports = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
            command = ["-m", "titan.train", "training.steps=2", *QUIET, f"hydra.run.dir={folder}/run", *overrides]
            first.append(_seconds_until("step      1/", command))
        imports.append(_seconds_until("", ["-c", "import titan.train, titan.worker"]))
    found = {"first_step_seconds": min(first), "import_seconds": min(imports)}
    print(f"command to first step: {min(first):.2f} s, of which imports {min(imports):.2f} s (best of {repeats})")
    return found


def _seconds_until(text: str, command: list[str]) -> float:
    """Seconds until a Python command prints a line that begins with `text`; until it ends, without a text."""
    start, found = time.perf_counter(), 0.0
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment()) as process:
        for line in process.stdout or ():
            if text and not found and line.startswith(text):
                found = time.perf_counter() - start
    if process.returncode:
        raise Refusal(f"{' '.join(command)}: ended with exit code {process.returncode}; see its message above.")
    return found or time.perf_counter() - start


def _memory(overrides: list[str], steps: int = 20) -> dict[str, float]:
    """Largest resident size of a process that trains with titan, and of one with the bare loop."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        train = ["-m", "titan.train", f"training.steps={steps}", *QUIET, f"hydra.run.dir={folder}/run", *overrides]
        _output(train)
        titan = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[-1])["memory_gib"]
    rounds = ["--rounds", "1", "--steps", str(steps - measure.WARM)]
    bare = ["-m", "titan.bench", "--alone", "bare", *rounds, f"training.steps={steps}", *QUIET, *overrides]
    sizes = {"titan": titan, "bare": float(json.loads(_output(bare))["memory_gib"])}
    ratio = sizes["titan"] / sizes["bare"]
    print(f"peak memory of the process: titan {sizes['titan']:.3f} GiB, bare {sizes['bare']:.3f}, ratio {ratio:.3f}")
    return {**sizes, "ratio": ratio}


def _output(command: list[str]) -> str:
    """The last line that a Python command prints."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment())
    if done.returncode:
        raise Refusal(f"{' '.join(command)}: ended with exit code {done.returncode}; see its message above.")
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
