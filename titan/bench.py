"""titan against the bare PyTorch loop: `python -m titan.bench [--suite NAME] [SETTING=VALUE ...]`.

Speed is a ratio: titan and the bare loop train the same model in one process, a few steps each in turn, and each
round gives one ratio; the table shows their median and spread. Ceilings, data loading, start-up and memory follow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan import capacity, compose, identity, lives, modes
from titan.checkpoint import measure
from titan.cluster.devices import peak_tflops
from titan.run import Run, billions
from titan.settings import Refusal
from titan.stop import Stop

if TYPE_CHECKING:
    from titan.baseline import BareLoop
    from titan.trainer import Trainer

QUIET = ["checkpoint=off", "metrics.plot=false", "metrics.sample_tokens=0", "metrics.validation_tokens=0"]
LONG = ["training.steps=1000000", *QUIET]
PRECISIONS, COMPILES = ("fp32", "bf16"), ("off", "block")


@dataclass(frozen=True)
class Case:
    """One row of the table of speeds."""

    title: str
    overrides: tuple[str, ...]
    autocast: bool = False


@dataclass(frozen=True)
class Speed:
    """What a case gave: tokens/s (medians) and titan's share of the bare loop's speed, round by round."""

    title: str
    bare: float
    titan: float
    ratios: tuple[float, ...]
    mfu: float | None

    def row(self) -> str:
        """As a line of the table."""
        low, middle, high = min(self.ratios), statistics.median(self.ratios), max(self.ratios)
        mfu = f"{self.mfu:7.1%}" if self.mfu else "      -"
        speeds = f"{self.bare:>10,.0f} {self.titan:>10,.0f} {middle:>7.3f} ({low:.3f} to {high:.3f})"
        return f"{self.title:<34} {speeds} {mfu}"


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
    parser.add_argument("--bare", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args(argv)
    try:
        return _bare(args.bare, overrides) if args.bare else _suite(args, overrides)
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
    found["ceilings"] = _ceilings(run)
    cases = _gpu_cases(run, base) if args.suite == "gpu" else _cpu_cases()
    print(f"\n{'tokens/s':<34} {'bare':>10} {'titan':>10} {'ratio':>7} {'(lowest to highest)':<18} {'MFU':>7}")
    found["speed"] = []
    for case in (c for c in cases if args.case in c.title):
        result = _measure(case, [*LONG, *base], args.rounds, args.steps)
        print(result.row(), flush=True)
        found["speed"].append(asdict(result))
    print()
    found["loading"] = _loading(run, found["speed"])
    found["start"] = _start(base, repeats=1 if args.suite == "tiny" else 3)
    found["memory"] = _memory(base)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


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
        found = measure.suite(run, [*base, *QUIET[1:]], args.rounds, Path(folder), _train)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _generate(run: Run, args: argparse.Namespace) -> int:
    """How fast text is generated."""
    from titan.generation import measure

    found = measure.suite(run, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _train(overrides: list[str], folder: Path) -> int:
    command = [sys.executable, "-m", "titan.train", *overrides]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()).returncode


def _base(suite: str) -> list[str]:
    if suite == "tiny":  # the whole suite at a size that takes little, to see that it works
        shape = ["model.dim=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=128"]
        return [*shape, "dataset=synthetic", "training.seq_len=64", "training.global_batch=256"]
    long = ["dataset=synthetic", "training.seq_len=8192", "training.global_batch=8192"]
    if suite == "checkpoint":
        return [*measure.SHAPE]
    return [] if suite in ("cpu", "modes", "data", "generate") else [*long, "cluster.device=cuda"]


def _cpu_cases() -> list[Case]:
    cases = []
    for precision in PRECISIONS:
        for compile_ in COMPILES:
            cases.append(Case(f"{precision}, compile {compile_}", (f"precision={precision}", f"compile={compile_}")))
    return [*cases, Case("bf16, compile off, bare: autocast", ("precision=bf16", "compile=off"), autocast=True)]


def _gpu_cases(run: Run, base: list[str]) -> list[Case]:
    """llama1b, and as many of the 8B's layers as fit twice: titan and the bare loop are in memory together."""
    cases = []
    for model, full in (("llama1b", 16), ("llama8b", 32)):
        layers = _layers_that_fit(run, model, full, base)
        title = f"{model}, {layers} of {full} layers"
        for compile_ in COMPILES:
            shape = (f"model={model}", f"model.layers={layers}", "precision=bf16", f"compile={compile_}")
            cases.append(Case(f"{title}, compile {compile_}", shape))
    return cases


def _layers_that_fit(run: Run, model: str, full: int, base: list[str]) -> int:
    recipe = compose.composed([*base, f"model={model}", "precision=bf16", "cluster.memory_gib=1000000"])
    room = capacity.available(run, recipe.layout, run.machine) / 2
    for layers in range(full, 0, -1):
        part = replace(recipe, model=replace(recipe.model, layers=layers))
        if capacity.demand(part, recipe.layout, 1).gib <= room:
            return layers
    raise Refusal(f"--suite gpu: not even one layer of {model} fits twice into this device; use --suite cpu.")


def _measure(case: Case, overrides: list[str], rounds: int, steps: int) -> Speed:
    import torch

    from titan.baseline import seconds

    run = compose.composed([*overrides, *case.overrides])
    with _trainer(run) as (trainer, bare_loop):
        device, pairs = trainer.world.device, []
        bare = bare_loop(case.autocast)
        for work in (trainer.loop, bare.steps):
            work(3)  # allocations, compilation
        for number in range(rounds):
            first, second = (trainer.loop, bare.steps) if number % 2 else (bare.steps, trainer.loop)
            times = {w: seconds(lambda w=w: w(steps), device) for w in (first, second)}  # type: ignore[misc]
            pairs.append((times[bare.steps], times[trainer.loop]))
    torch._dynamo.reset()
    tokens = steps * run.training.global_batch
    bare_rate, titan_rate = (tokens / statistics.median(column) for column in zip(*pairs, strict=True))
    peak = run.cluster.peak_tflops or peak_tflops(run.machine.name, run.precision.compute)  # type: ignore[arg-type]
    tflops = titan_rate * run.model.flops_per_token(run.training.seq_len) / 1e12
    ratios = tuple(bare_time / titan_time for bare_time, titan_time in pairs)
    return Speed(case.title, bare_rate, titan_rate, ratios, tflops / peak if peak else None)


@contextmanager
def _trainer(run: Run) -> Iterator[tuple[Trainer, Callable[[bool], BareLoop]]]:
    """titan's own trainer for one device, recording as always, and what makes the bare loop on the same data."""
    from launchers.place import Place
    from titan.assemble import assemble
    from titan.baseline import BareLoop
    from titan.metrics.recorder import Recorder
    from titan.parallelism import mesh
    from titan.trainer import Trainer

    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        run = replace(run, directory=folder)
        life = lives.begin(run)
        if isinstance(life, lives.Finished):
            raise Refusal(f"{folder} holds a finished run; empty it.")
        world = mesh.connect(Place(), run.layout, run.machine.device, run.cluster.timeout)
        trainer = Trainer(run, life, world, assemble(run, world), Stop())
        with Recorder(run, life, print) as recorder, trainer.loader:
            trainer.recorder = recorder
            yield trainer, lambda autocast: BareLoop(run, trainer.mix, world.device, autocast=autocast)


def _ceilings(run: Run) -> dict[str, float]:
    import torch

    from titan.baseline import copy_gb_per_second, matmul_tflops

    device = torch.device(run.machine.device)
    size, mebibytes = (8192, 1024) if device.type == "cuda" else (1024, 64)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found = {f"matmul_{name}_tflops": matmul_tflops(device, dtype, size) for name, dtype in types.items()}
    found["copy_gb_per_second"] = copy_gb_per_second(device, mebibytes)
    products = ", ".join(f"{name} {found[f'matmul_{name}_tflops']:.3g} TFLOP/s" for name in types)
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
    fastest = max(row["titan"] for row in speeds)
    print(f"data loading: {billions(rate)} tokens/s, {rate / fastest:,.0f} times the fastest training above")
    return {"tokens_per_second": rate, "times_training": rate / fastest}


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
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=_environment()) as process:
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
    sizes = {"titan": titan, "bare": float(_output(["-m", "titan.bench", "--bare", str(steps), *overrides]))}
    ratio = sizes["titan"] / sizes["bare"]
    print(f"peak memory of the process: titan {sizes['titan']:.3f} GiB, bare {sizes['bare']:.3f}, ratio {ratio:.3f}")
    return {**sizes, "ratio": ratio}


def _output(command: list[str]) -> str:
    """The last line that a Python command prints."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=_environment())
    if done.returncode:
        raise Refusal(f"{' '.join(command)}: ended with exit code {done.returncode}; see its message above.")
    return done.stdout.strip().splitlines()[-1]


def _bare(steps: int, overrides: list[str]) -> int:
    """The bare loop alone, in a process of its own."""
    import torch

    from titan.baseline import BareLoop
    from titan.dataset.corpora import mixed, opened, ready
    from titan.metrics.recorder import peak_resident_gib

    run = compose.composed([*LONG, *overrides])
    loop = BareLoop(run, mixed(run.dataset, run.training, opened(ready(run.dataset))), torch.device(run.machine.device))
    loop.steps(steps)
    print(peak_resident_gib())
    return 0


def _environment() -> dict[str, str]:
    """This process's environment, with its own titan in reach."""
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    sys.exit(main())
