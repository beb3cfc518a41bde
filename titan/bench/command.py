"""titan against the bare PyTorch loop: `python -m titan.bench [suite=NAME] [KEY=VALUE ...] [OVERRIDE ...]`.

Speed is a ratio: titan and the bare loop train the same model in alternating rounds of a few steps, and each round
gives one ratio. The table shows their median and range, and titan's fraction of the roofline
(`titan.estimate.roofline`). MFU is relative to the device's peak in the compute type, which is bf16 for float8 matmuls
too. Ceilings, data loading, start-up and memory follow.

Modules that import torch are imported inside functions, so that `--help` and errors take a fraction of a second.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from titan.bench import activation_modes, speed
from titan.bench import checkpoint as saving
from titan.bench.speed import CaseSpeed, HostSync, build_environment
from titan.bench.suites import SpeedCase, list_cpu_cases, list_gpu_cases
from titan.cluster.environment import prepare_environment
from titan.config.command import Command, CommandLine
from titan.config.settings import setting
from titan.console.numbers import format_count, format_plural
from titan.errors import ConfigError
from titan.files.output_files import check_output_file, write_output_file
from titan.metrics.reader import METRICS, read_last_steps
from titan.precision.schema import CAPABILITY
from titan.run import compose, identity
from titan.run.hydra_session import CONF
from titan.run.run import Run

SUITES = ("cpu", "gpu", "tiny", "modes", "checkpoint", "acceptance")
QUIET = ["checkpoint=off", "metrics.plot=false", "metrics.sample_tokens=0", "evaluation.tokens=0"]
LONG = ["training.steps=1000000", *QUIET]
CEILINGS = {"cpu": (1024, 64), "cuda": (8192, 1024)}
"""The size of a square matmul, and the MiB of a copy, that show what a device can do."""
Titled = TypeVar("Titled", SpeedCase, activation_modes.ActivationMode)


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.bench`."""

    suite: str = setting("cpu", f"what to measure: {', '.join(SUITES)}")
    rounds: int = setting(9, "rounds per case", at_least=1, cap=10**6)
    steps: int = setting(5, "steps per round", at_least=1, cap=10**6)
    case: str = setting(
        "", "only cases whose title contains this text, or one of several with ; between them", any_text=True
    )
    to: str | None = setting(
        None, "a JSON file to write, with all figures; of suite=acceptance the folder of the report; null: acceptance"
    )
    operators: bool = setting(False, "print the slowest operators of each case instead")
    only: Literal["titan", "bare", "sync"] | None = setting(
        None, "measure one side in this process, as suites do in others"
    )
    autocast: bool = setting(False, "with only=bare: under torch.autocast")

    @property
    def file(self) -> Path | None:
        """The JSON file to write."""
        return None if self.to is None else Path(self.to).expanduser()


COMMAND = Command(
    "titan.bench",
    "Measure the speed of titan, as a ratio to the bare PyTorch loop, and other suites.",
    {
        "": "training on this CPU",
        "case='bf16, compile block' operators=true": "the operators that a step spends its time in",
        "suite=acceptance cluster.device=cuda to=acceptance": "is a GPU right, and how fast",
    },
    Settings,
    overrides="Other arguments are those of titan.train, for all cases.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    prepare_environment(os.environ)
    return COMMAND.run(_run_command, argv)


def _run_command(command_line: CommandLine[Settings]) -> int:
    settings, overrides = command_line.settings, command_line.overrides
    if settings.suite not in SUITES:
        raise ConfigError(f"suite={settings.suite}: choose one of {', '.join(SUITES)}.")
    if settings.to is not None and settings.suite != "acceptance":
        check_output_file(settings.to, (".json",))
    if settings.only == "sync":
        return speed.print_host_sync(overrides)
    if settings.only is not None:
        return speed.measure_side(settings.only, overrides, settings.rounds, settings.steps, settings.autocast)
    return _run_suite(settings, overrides)


def _run_suite(settings: Settings, overrides: list[str]) -> int:
    base = [*_choose_overrides(settings.suite), *overrides]
    run = compose.compose_run([*LONG, *base])
    results: dict[str, Any] = {
        "machine": asdict(run.machine),
        "code": identity.describe_code(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{run.machine.describe()}; torch {results['code']['torch']}; {results['date']}")
    if settings.suite == "acceptance":
        return _run_acceptance(run, settings, overrides, results)
    if settings.suite == "modes":
        return _measure_modes(run, settings, overrides)
    if settings.suite == "checkpoint":
        return _measure_saving(run, settings, base)
    cases = _select_cases(settings.case, list_gpu_cases() if settings.suite == "gpu" else list_cpu_cases())
    if settings.operators:
        return _profile_cases(cases, [*LONG, *base], settings.steps)
    _measure_cases(results, cases, base, run, settings)
    failed = sum(bool(row["failure"]) for row in results["speed"])
    skipped, total = len(cases) - len(results["speed"]), format_plural(len(cases), "case")
    print(f"{total}: {skipped} skipped, {failed} with a failed side")
    return 0


def _measure_cases(
    results: dict[str, Any], cases: Sequence[SpeedCase], base: list[str], run: Run, settings: Settings
) -> None:
    """Measure all parts of the suite and write the figures found so far after each."""
    results["ceilings"], results["speed"] = _measure_ceilings(run), []
    print(f"\n{speed.HEADER}")
    for measured in _measure_speeds(cases, [*LONG, *base], results["ceilings"], settings):
        results["speed"].append(asdict(measured))
        _write_json(settings.file, results)
    if settings.suite == "gpu":
        results["host_sync"] = _find_host_syncs(cases, [*LONG, *base])
    elif results["speed"] and results["speed"][0]["title"] == cases[0].title:
        _print_fastest(results["speed"])
    _write_json(settings.file, results)
    print()
    results["loading"] = _measure_loading(run, results["speed"])
    results["start"] = _measure_start(base, repeats=1 if settings.suite == "tiny" else 3)
    results["memory"] = _measure_memory(base)
    _write_json(settings.file, results)


def _write_json(file: Path | None, figures: Any) -> None:
    """Write the figures found so far to the file of `to=`."""
    if file is not None:
        write_output_file(file, figures)


def _select_cases(text: str, cases: Iterable[Titled]) -> list[Titled]:
    """Return the cases whose title contains a text, or one of several with semicolons between them."""
    all_cases = list(cases)
    matches = [case for case in all_cases if any(part.strip() in case.title for part in text.split(";"))]
    if not matches:
        titles = "; ".join(case.title for case in all_cases)
        raise ConfigError(f"case={text}: no case has a title that contains this; give a part of one of: {titles}.")
    return matches


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


def _print_fastest(speeds: Sequence[Mapping[str, Any]]) -> None:
    """Print titan's fastest case, as all compute the same on a CPU, relative to the bare loop in the first case."""
    fastest, first = max(speeds, key=lambda row: row["titan"]), speeds[0]
    print(f"fastest titan ({fastest['title']}) / bare ({first['title']}): {fastest['titan'] / first['bare']:.2f}")


def _profile_cases(cases: Sequence[SpeedCase], base: Sequence[str], steps: int) -> int:
    for case in cases:
        print(f"\n{case.title}: {steps} steps\n{speed.profile_case(case, base, steps)}", flush=True)
    return 0


def _find_host_syncs(cases: Sequence[SpeedCase], base: Sequence[str]) -> dict[str, Any]:
    """Search the steps of one case per model and kind for host synchronisations."""
    syncs = {}
    for case in {(case.overrides[0], _classify_case(case)): case for case in reversed(cases)}.values():
        try:
            sync = speed.find_host_sync([*base, *case.overrides])
        except ConfigError as error:
            sync = HostSync(failure=str(error))
        syncs[case.title] = asdict(sync)
        print(f"{case.title}: {sync.describe()}", flush=True)
    return syncs


def _classify_case(case: SpeedCase) -> tuple[bool, bool]:
    """Return whether a case compiles, and whether it has float8 matmuls."""
    return "compile=off" not in case.overrides, any(o.startswith("precision=float8") for o in case.overrides)


def _measure_modes(run: Run, settings: Settings, overrides: list[str]) -> int:
    """Measure peak memory and step time of each kind of activation checkpointing, compiled and not."""
    print(f"\n{activation_modes.HEADER}")
    results = []
    for mode in _select_cases(settings.case, activation_modes.list_modes(run)):
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
            measured = activation_modes.measure_mode(mode, [*QUIET, *overrides], Path(folder) / "run", _run_training)
            print(measured.row() if measured else f"{mode.title:<36} failed", flush=True)
            results += [asdict(measured)] if measured else []
            _write_json(settings.file, results)
    return 0


def _run_acceptance(run: Run, settings: Settings, overrides: list[str], provenance: dict[str, Any]) -> int:
    """Ask a device everything that a run relies on."""
    from titan.bench.acceptance import parts, report
    from titan.bench.acceptance.lab import Lab

    device = run.machine.device
    other_overrides = [override for override in overrides if not override.startswith("cluster.device=")]
    count = run.machine.count if device == "cuda" else 2
    lab = Lab(
        Path(settings.to or "acceptance").resolve(),
        device,
        count,
        tuple(other_overrides),
        _find_cluster(run.machine.name),
    )
    stable_provenance = {name: value for name, value in provenance.items() if name != "date"}
    return report.run_parts(lab, parts.select_parts(settings.case), stable_provenance)


def _find_cluster(device_name: str) -> str | None:
    """Return the choice of `cluster` that describes devices of this name."""
    for file in sorted((CONF / "cluster").glob("*.yaml")):
        if yaml.safe_load(file.read_text()).get("device_name") == device_name:
            return file.stem
    return None


def _measure_saving(run: Run, settings: Settings, base: list[str]) -> int:
    """Measure saving checkpoints."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        figures = saving.suite(run, [*base, *QUIET[1:]], settings.rounds, Path(folder), _run_training)
    _write_json(settings.file, figures)
    return 0


def _run_training(overrides: list[str], folder: Path) -> int:
    command = [sys.executable, "-m", "titan.train", *overrides]
    return subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=build_environment()
    ).returncode


def _choose_overrides(suite: str) -> list[str]:
    if suite == "tiny":  # the whole suite at a small size, as a smoke test
        shape = ["model.dim=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=128"]
        return [*shape, "dataset=synthetic", "training.seq_len=64", "training.global_batch=256"]
    long = ["dataset=synthetic", "training.seq_len=8192", "training.global_batch=8192"]
    if suite == "checkpoint":
        return [*saving.SHAPE]
    return [*long, "cluster.device=cuda"] if suite == "gpu" else []


def _measure_ceilings(run: Run) -> dict[str, float]:
    """Measure the speeds of large matmuls in each type, and of a copy in the device's memory."""
    import torch

    from titan.bench.bare_loop import measure_copy_speed, measure_float8_tflops, measure_matmul_tflops

    device = torch.device(run.machine.device)
    size, mebibytes = CEILINGS[device.type]
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
    from titan.dataset.corpora import build_mixture, open_corpora, prepare_corpora
    from titan.dataset.loader import BatchShape, Loader
    from titan.parallelism.schema import DataShard

    mix = build_mixture(run.dataset, run.training, open_corpora(prepare_corpora(run.dataset)))
    steps = max(20, 2_000_000 // run.training.global_batch)
    shape = BatchShape(run.microbatches, run.microbatch_rows, run.training.seq_len)
    with Loader(mix, run.training, DataShard(0, 1), shape) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(loader)
        rate = steps * run.training.global_batch / (time.perf_counter() - start)
    ratio = rate / max((row["titan"] for row in speeds if row["titan"]), default=math.inf)
    print(f"data loading: {format_count(rate)} tokens/s, {ratio:,.0f} x the fastest training above")
    return {"tokens_per_second": rate, "times_training": ratio}


def _measure_start(overrides: list[str], repeats: int = 3) -> dict[str, float]:
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


def _measure_memory(overrides: list[str], steps: int = 20) -> dict[str, float]:
    """Measure the peak memory of a process that trains with titan and of one that runs the bare loop."""
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        train = ["-m", "titan.train", f"training.steps={steps}", *QUIET, f"hydra.run.dir={folder}/run", *overrides]
        _read_last_line(train)
        titan = next(read_last_steps(Path(folder) / "run" / METRICS))["memory_gib"]
    rounds = ["rounds=1", f"steps={steps - speed.WARM}"]
    bare = ["-m", "titan.bench", "only=bare", *rounds, f"training.steps={steps}", *QUIET, *overrides]
    sizes = {"titan": titan, "bare": float(json.loads(_read_last_line(bare))["memory_gib"])}
    ratio = sizes["titan"] / sizes["bare"]
    print(f"peak memory of the process: titan {sizes['titan']:.3f} GiB, bare {sizes['bare']:.3f}, ratio {ratio:.3f}")
    return {**sizes, "ratio": ratio}


def _read_last_line(command: list[str]) -> str:
    """Return the last line that a Python command prints."""
    completed = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=build_environment())
    if completed.returncode:
        raise ConfigError(f"{' '.join(command)}: ended with exit code {completed.returncode}; see its message above.")
    return completed.stdout.strip().splitlines()[-1]
