"""titan against the bare PyTorch loop: `python -m titan.bench [--suite NAME] [SETTING=VALUE ...]`.

Speed is a ratio: titan and the bare loop train the same model in alternating rounds of a few steps, and each round
gives one ratio. The table shows their median and range, and titan's fraction of the roofline
(`titan.estimate.roofline`). MFU is relative to the device's peak in the compute type, which is bf16 for float8 matmuls
too. Ceilings, data loading, start-up and memory follow.

Modules that import torch are imported inside functions, so that `--help` and errors take a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from titan.bench import activation_modes, experts, features, speed
from titan.bench import checkpoint as saving
from titan.bench.speed import SIDES, HostSync, Speed, environment
from titan.bench.suites import Case, cpu_cases, gpu_cases
from titan.cluster.environment import prepare_environment
from titan.config.arguments import describe_version
from titan.console.numbers import billions
from titan.errors import ConfigError, exit_code
from titan.precision.schema import CAPABILITY
from titan.run import compose, identity
from titan.run.hydra_session import CONF
from titan.run.run import Run

SUITES = (
    "cpu", "gpu", "tiny", "modes", "data", "generate", "checkpoint", "features", "experts", "acceptance", "scale",
)  # fmt: skip
QUIET = ["checkpoint=off", "metrics.plot=false", "metrics.sample_tokens=0", "evaluation.tokens=0"]
LONG = ["training.steps=1000000", *QUIET]
CEILINGS = {"cpu": (1024, 64), "cuda": (8192, 1024)}
"""The size of a square matmul, and the MiB of a copy, that show what a device can do."""
TURNS = {"features": features, "experts": experts}
"""Suites whose cases are ratios of the times of two sides that take turns."""
Titled = TypeVar("Titled", Case, activation_modes.Mode)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    prepare_environment(os.environ)
    return exit_code(lambda: _main(*_parser().parse_known_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m titan.bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--suite",
        choices=SUITES,
        default="cpu",
        help="what to measure",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds per case (default 9)")
    parser.add_argument("--steps", type=int, default=5, help="steps per round (default 5)")
    parser.add_argument("--case", default="", help="only cases whose title contains this text")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--report", type=Path, default=Path("acceptance"), help="the folder of --suite acceptance")
    parser.add_argument("--profile", action="store_true", help="print the slowest operators of each case")
    parser.add_argument("--only", choices=(*SIDES, "sync"), help=argparse.SUPPRESS)
    parser.add_argument("--autocast", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=describe_version())
    parser.error = _reject  # type: ignore[method-assign]
    return parser


def _main(args: argparse.Namespace, overrides: list[str]) -> int:
    if min(args.rounds, args.steps) < 1:
        raise ConfigError(f"--rounds {args.rounds} --steps {args.steps}: must be at least 1.")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: directory {args.json.parent} does not exist; give another file.")
    if args.only == "sync":
        return speed.print_host_sync(overrides)
    if args.only:
        return speed.measure_side(args.only, overrides, args.rounds, args.steps, args.autocast)
    return _suite(args, overrides)


def _reject(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help.")


def _suite(args: argparse.Namespace, overrides: list[str]) -> int:
    base = [*_base(args.suite), *overrides]
    run = compose.compose_run([*LONG, *base])
    found: dict[str, Any] = {
        "machine": asdict(run.machine),
        "code": identity.describe_code(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{run.machine.describe()}; torch {found['code']['torch']}; {found['date']}")
    if args.suite == "acceptance":
        return _acceptance(run, args, overrides, found)
    if args.suite == "modes":
        return _modes(run, args, overrides)
    if args.suite == "data":
        return _data(args)
    if args.suite == "checkpoint":
        return _checkpoint(run, args, base)
    if args.suite == "generate":
        return _generate(run, args)
    if args.suite == "scale":
        return _scale(args)
    if args.suite in TURNS:
        return _turns(args, [*LONG, *base])
    cases = _select(args.case, gpu_cases() if args.suite == "gpu" else cpu_cases())
    if args.profile:
        return _profile(cases, [*LONG, *base], args.steps)
    _measure_cases(found, cases, base, run, args)
    failed = sum(bool(row["failure"]) for row in found["speed"])
    print(f"{len(cases)} cases: {len(cases) - len(found['speed'])} skipped, {failed} with a failed side")
    return 0


def _measure_cases(
    found: dict[str, Any], cases: Sequence[Case], base: list[str], run: Run, args: argparse.Namespace
) -> None:
    """Measure all parts of the suite and write the figures found so far after each."""
    found["ceilings"], found["speed"] = _ceilings(run), []
    print(f"\n{speed.HEADER}")
    for measured in _speeds(cases, [*LONG, *base], found["ceilings"], args):
        found["speed"].append(asdict(measured))
        _write_json(args.json, found)
    if args.suite == "gpu":
        found["host_sync"] = _host_syncs(cases, [*LONG, *base])
    elif found["speed"] and found["speed"][0]["title"] == cases[0].title:
        _print_fastest(found["speed"])
    _write_json(args.json, found)
    print()
    found["loading"] = _loading(run, found["speed"])
    found["start"] = _start(base, repeats=1 if args.suite == "tiny" else 3)
    found["memory"] = _memory(base)
    _write_json(args.json, found)


def _write_json(path: Path | None, found: Any) -> None:
    """Write the figures found so far to the file of `--json`, atomically."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(found, indent=1))
        part.replace(path)


def _select(text: str, cases: Iterable[Titled]) -> list[Titled]:
    """Return the cases whose title contains a text."""
    known = list(cases)
    found = [case for case in known if text in case.title]
    if not found:
        titles = "; ".join(case.title for case in known)
        raise ConfigError(f"--case {text}: no case has a title that contains this; give a part of one of: {titles}.")
    return found


def _speeds(
    cases: Sequence[Case], base: Sequence[str], ceilings: Mapping[str, float], args: argparse.Namespace
) -> Iterator[Speed]:
    """Measure the cases and print their rows; a case that can't be composed here is skipped with its error."""
    for case in cases:
        try:
            found = speed.measure(case, base, ceilings, args.rounds, args.steps)
        except ConfigError as error:
            print(f"{case.title:<34} skipped: {error}", flush=True)
        else:
            print(found.rows(), flush=True)
            yield found


def _print_fastest(speeds: Sequence[Mapping[str, Any]]) -> None:
    """Print titan's fastest case, as all compute the same on a CPU, relative to the bare loop in the first case."""
    fastest, first = max(speeds, key=lambda each: each["titan"]), speeds[0]
    print(f"fastest titan ({fastest['title']}) / bare ({first['title']}): {fastest['titan'] / first['bare']:.2f}")


def _profile(cases: Sequence[Case], base: Sequence[str], steps: int) -> int:
    for case in cases:
        print(f"\n{case.title}: {steps} steps\n{speed.profile(case, base, steps)}", flush=True)
    return 0


def _host_syncs(cases: Sequence[Case], base: Sequence[str]) -> dict[str, Any]:
    """Search the steps of one case per model and kind for host synchronisations."""
    found = {}
    for case in {(case.overrides[0], _kind(case)): case for case in reversed(cases)}.values():
        try:
            sync = speed.host_sync([*base, *case.overrides])
        except ConfigError as error:
            sync = HostSync(failure=str(error))
        found[case.title] = asdict(sync)
        print(f"{case.title}: {sync.describe()}", flush=True)
    return found


def _kind(case: Case) -> tuple[bool, bool]:
    """Return whether a case compiles, and whether it has float8 matmuls."""
    return "compile=off" not in case.overrides, any(o.startswith("precision=float8") for o in case.overrides)


def _modes(run: Run, args: argparse.Namespace, overrides: list[str]) -> int:
    """Measure peak memory and step time of each kind of activation checkpointing, compiled and not."""
    print(f"\n{activation_modes.HEADER}")
    found = []
    for mode in _select(args.case, activation_modes.modes(run)):
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
            measured = activation_modes.measure(mode, [*QUIET, *overrides], Path(folder) / "run", _train)
            print(measured.row() if measured else f"{mode.title:<36} failed", flush=True)
            found += [asdict(measured)] if measured else []
            _write_json(args.json, found)
    return 0


def _acceptance(run: Run, args: argparse.Namespace, overrides: list[str], about: dict[str, Any]) -> int:
    """Ask a device everything that a run relies on."""
    from titan.bench.acceptance import parts, report
    from titan.bench.acceptance.lab import Lab

    device, others = run.machine.device, [one for one in overrides if not one.startswith("cluster.device=")]
    count = run.machine.count if device == "cuda" else 2
    lab = Lab(args.report.resolve(), device, count, tuple(others), _describing_cluster(run.machine.name))
    known = {name: value for name, value in about.items() if name != "date"}
    return report.run(lab, parts.select(args.case), known)


def _describing_cluster(device_name: str) -> str | None:
    """Return the choice of `cluster` that describes devices of this name."""
    for file in sorted((CONF / "cluster").glob("*.yaml")):
        if yaml.safe_load(file.read_text()).get("device_name") == device_name:
            return file.stem
    return None


def _data(args: argparse.Namespace) -> int:
    """Measure the preparing and loading of data."""
    from titan.bench import preparing

    found = preparing.suite(args.rounds)
    _write_json(args.json, found)
    return 0


def _checkpoint(run: Run, args: argparse.Namespace, base: list[str]) -> int:
    """Measure saving checkpoints."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        found = saving.suite(run, [*base, *QUIET[1:]], args.rounds, Path(folder), _train)
    _write_json(args.json, found)
    return 0


def _generate(run: Run, args: argparse.Namespace) -> int:
    """Measure the speed of generation."""
    from titan.bench import generation

    found = generation.suite(run, args.rounds)
    _write_json(args.json, found)
    return 0


def _scale(args: argparse.Namespace) -> int:
    """Measure what grows with the number of ranks."""
    from titan.bench import scale

    print(f"\n{scale.HEADER}")
    found = []
    for row in scale.suite(args.case):
        print(row.row(), flush=True)
        found.append(asdict(row))
        _write_json(args.json, found)
    return 0


def _turns(args: argparse.Namespace, base: list[str]) -> int:
    """Measure the ratios of times of a suite in `TURNS`."""
    measured = TURNS[args.suite]
    print(f"\n{measured.HEADER}")
    found = []
    for overhead in measured.suite(args.case, base, args.rounds, args.steps):
        print(overhead.row(), flush=True)
        found.append(asdict(overhead))
        _write_json(args.json, found)
    return 0


def _train(overrides: list[str], folder: Path) -> int:
    command = [sys.executable, "-m", "titan.train", *overrides]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()).returncode


def _base(suite: str) -> list[str]:
    if suite == "tiny":  # the whole suite at a small size, as a smoke test
        shape = ["model.dim=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=128"]
        return [*shape, "dataset=synthetic", "training.seq_len=64", "training.global_batch=256"]
    long = ["dataset=synthetic", "training.seq_len=8192", "training.global_batch=8192"]
    if suite == "checkpoint":
        return [*saving.SHAPE]
    return [*long, "cluster.device=cuda"] if suite == "gpu" else []


def _ceilings(run: Run) -> dict[str, float]:
    """Measure the speeds of large matmuls in each type, and of a copy in the device's memory."""
    import torch

    from titan.bench.bare_loop import copy_gb_per_second, float8_tflops, matmul_tflops

    device = torch.device(run.machine.device)
    size, mebibytes = CEILINGS[device.type]
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found = {f"matmul_{name}_tflops": matmul_tflops(device, dtype, size) for name, dtype in types.items()}
    if (run.machine.capability or 0) >= CAPABILITY["float8"]:
        found["matmul_float8_tflops"] = float8_tflops(device, size)
    matmuls = ", ".join(f"{name.split('_')[1]} {value:.3g} TFLOP/s" for name, value in found.items())
    found["copy_gb_per_second"] = copy_gb_per_second(device, mebibytes)
    torch.cuda.empty_cache()  # for the processes that follow; no effect without a GPU
    print(f"ceilings: square matmul of {size}: {matmuls}; copy {found['copy_gb_per_second']:.0f} GB/s")
    return found


def _loading(run: Run, speeds: list[dict[str, Any]]) -> dict[str, float]:
    """Measure tokens/s of the loader, relative to the fastest training above."""
    from titan.dataset.corpora import build_mixture, open_corpora, prepare_corpora
    from titan.dataset.loader import BatchShape, Loader
    from titan.parallelism.data_shard import DataShard

    mix = build_mixture(run.dataset, run.training, open_corpora(prepare_corpora(run.dataset)))
    steps = max(20, 2_000_000 // run.training.global_batch)
    shape = BatchShape(run.microbatches, run.microbatch_rows, run.training.seq_len)
    with Loader(mix, run.training, DataShard(0, 1), shape) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(loader)
        rate = steps * run.training.global_batch / (time.perf_counter() - start)
    times = rate / max((row["titan"] for row in speeds if row["titan"]), default=math.inf)
    print(f"data loading: {billions(rate)} tokens/s, {times:,.0f} x the fastest training above")
    return {"tokens_per_second": rate, "times_training": times}


def _start(overrides: list[str], repeats: int = 3) -> dict[str, float]:
    """Measure seconds from the command to the end of the first step, and the seconds of imports among them."""
    first, imports = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
            command = ["-m", "titan.train", "training.steps=2", *QUIET, f"hydra.run.dir={folder}/run", *overrides]
            first.append(_seconds_until("step      1/", command))
        imports.append(_seconds_until("", ["-c", "import titan.train, titan.training.worker"]))
    found = {"first_step_seconds": min(first), "import_seconds": min(imports)}
    print(f"command to first step: {min(first):.2f} s, of which imports {min(imports):.2f} s (best of {repeats})")
    return found


def _seconds_until(text: str, command: list[str]) -> float:
    """Return seconds until a Python command prints a line that starts with `text`; until it ends if that is empty."""
    start, found = time.perf_counter(), 0.0
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment()) as process:
        for line in process.stdout or ():
            if text and not found and line.startswith(text):
                found = time.perf_counter() - start
    if process.returncode:
        raise ConfigError(f"{' '.join(command)}: ended with exit code {process.returncode}; see its message above.")
    return found or time.perf_counter() - start


def _memory(overrides: list[str], steps: int = 20) -> dict[str, float]:
    """Measure the peak memory of a process that trains with titan and of one that runs the bare loop."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        train = ["-m", "titan.train", f"training.steps={steps}", *QUIET, f"hydra.run.dir={folder}/run", *overrides]
        _output(train)
        titan = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[-1])["memory_gib"]
    rounds = ["--rounds", "1", "--steps", str(steps - speed.WARM)]
    bare = ["-m", "titan.bench", "--only", "bare", *rounds, f"training.steps={steps}", *QUIET, *overrides]
    sizes = {"titan": titan, "bare": float(json.loads(_output(bare))["memory_gib"])}
    ratio = sizes["titan"] / sizes["bare"]
    print(f"peak memory of the process: titan {sizes['titan']:.3f} GiB, bare {sizes['bare']:.3f}, ratio {ratio:.3f}")
    return {**sizes, "ratio": ratio}


def _output(command: list[str]) -> str:
    """Return the last line that a Python command prints."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment())
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: ended with exit code {done.returncode}; see its message above.")
    return done.stdout.strip().splitlines()[-1]
