"""Measure the training speed of one case: titan against the bare loop; also profiles and host-device synchronisations.

On a CPU both sides run in one process in alternating rounds, so that other work on the machine slows both. On a GPU
they run one after the other in separate processes, because the two may not fit into its memory together: first the bare
loop, titan twice, then the bare loop, so that a device that becomes warmer, and slower, slows both.

Modules that import torch are imported inside functions: `--help` and the parent of GPU measurements do without it.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.measure.common import run_python, time_in_turn
from tests.measure.roofline import Roofline, compute_roofline, select_rates
from titan.cluster.known_devices import look_up_peak_tflops
from titan.run import compose
from titan.run.run import Run

if TYPE_CHECKING:
    from tests.measure.bare_loop import BareLoop
    from titan.training.trainer import Trainer

Side = Literal["titan", "bare"]
SIDES: tuple[Side, ...] = ("bare", "titan")
WARM = 3
"""Warm-up steps before a measurement: allocations, compilation."""
CEILINGS = {"cpu": (1024, 64), "cuda": (8192, 1024)}
"""The size of a square matmul, and the MiB of a copy, that show what a device can do."""
SYNCHRONIZING = "called a synchronizing CUDA operation"
"""How torch's error message begins when an operation synchronises under `set_sync_debug_mode("error")`."""
ERROR = re.compile(r"(\[rank\d+\]: )?(titan: |[\w.]*(Error|Exception|Exit|Interrupt)\b|[\w.]+\.exc\.\w+)")
"""How the line with the error of a failed process begins; warnings and advice may follow it."""
HEADER = (
    f"{'tokens/s':<34} {'bare':>10} {'titan':>10} {'ratio':>7} {'(lowest to highest)':<18} {'MFU':>7} {'roofline':>8}"
)

PRECISIONS, COMPILES = ("fp32", "bf16"), ("off", "block", "model")
FLOAT8 = ("float8", "float8_rowwise")
EXPERTS = ("model=qwen3_30b_a3b", "model.layers=8", "model.experts=32")
"""2.0B parameters, of which 1.1B compute a token."""
UNBALANCED = ("model.aux_loss=0",)
"""The bare loop has no loss that balances experts."""


@dataclass(frozen=True)
class SpeedCase:
    """One row of the table of speeds: titan's overrides under a title that names the choices.

    The bare loop may run under torch.autocast, and with another scope of compilation than titan's.
    """

    title: str
    overrides: tuple[str, ...]
    autocast: bool = False
    bare: Literal["", "off", "block", "model"] = ""


@dataclass(frozen=True)
class SideResult:
    """The measurement of one side: seconds of each round and peak memory, or the error message if it failed."""

    seconds: tuple[float, ...] = ()
    memory_gib: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class CaseSpeed:
    """The measurement of a case.

    Attributes:
        title: the case's title.
        bare: the bare loop's median tokens/s; 0 if it failed.
        titan: titan's median tokens/s; 0 if it failed.
        ratios: titan's speed as a fraction of the bare loop's, one per round; empty if a side failed.
        mfu: model FLOPs utilisation of titan, relative to the device's peak in the compute type (bf16 for float8
            matmuls too); None where the peak is unknown.
        roofline: tokens/s of the roofline, see `tests.measure.roofline`.
        parts: seconds of the roofline's step by kind of operation.
        memory_gib: peak memory of each side, where they ran in separate processes.
        failure: the error messages of sides that failed.
    """

    title: str
    bare: float
    titan: float
    ratios: tuple[float, ...]
    mfu: float | None
    roofline: float
    parts: Mapping[str, float]
    memory_gib: Mapping[str, float | None]
    failure: str = ""

    def format_rows(self) -> str:
        """Return the lines of the table: speeds, the roofline's parts, and memory where it is known."""
        ratios = f"{'-':>7} {'':<18}"
        if self.ratios:
            low, middle, high = min(self.ratios), statistics.median(self.ratios), max(self.ratios)
            ratios = f"{middle:>7.3f} ({low:.3f} to {high:.3f})"
        mfu = f"{self.mfu:7.1%}" if self.mfu else "      -"
        speeds = f"{self.bare:>10,.0f} {self.titan:>10,.0f} {ratios} {mfu} {self.titan / self.roofline:>8.1%}"
        parts = Roofline(self.parts, 0).describe()
        lines = [f"{self.title:<34} {speeds}", f"  roofline {self.roofline:,.0f} tokens/s: {parts}"]
        if memories := [f"{side} {gib:.1f} GiB" for side, gib in self.memory_gib.items() if gib]:
            lines.append(f"  peak memory: {', '.join(memories)}")
        return "\n".join([*lines, *([f"  {self.failure}"] if self.failure else [])])


def measure_case(
    case: SpeedCase, overrides: Sequence[str], ceilings: Mapping[str, float], rounds: int, steps: int
) -> CaseSpeed:
    """Measure the training speed of titan and of the bare loop in one case."""
    run = compose.compose_run([*overrides, *case.overrides])
    if run.machine.device == "cuda":
        sides = measure_separately(case, overrides, rounds, steps)
    else:
        sides = measure_alternating(run, case, rounds, steps)
    tokens = steps * run.training.global_batch
    rate = {side: tokens / statistics.median(r.seconds) if r.seconds else 0.0 for side, r in sides.items()}
    peak = run.cluster.peak_tflops or look_up_peak_tflops(run.machine.name, run.precision.compute)  # type: ignore[arg-type]
    tflops = rate["titan"] * run.model.flops_per_token(run.training.seq_len) / 1e12
    roofline = compute_roofline(run, run.microbatches, select_rates(ceilings, run, run.machine.device))
    return CaseSpeed(
        title=case.title,
        **rate,
        ratios=tuple(b / t for b, t in zip(sides["bare"].seconds, sides["titan"].seconds, strict=False)),
        mfu=tflops / peak if peak else None,
        roofline=roofline.tokens_per_second,
        parts=roofline.parts,
        memory_gib={side: result.memory_gib for side, result in sides.items()},
        failure="; ".join(f"{side}: {result.failure}" for side, result in sides.items() if result.failure),
    )


def measure_alternating(run: Run, case: SpeedCase, rounds: int, steps: int) -> dict[Side, SideResult]:
    """Measure both sides in this process in alternating rounds."""
    import torch

    with open_trainer(run) as trainer:
        sides = {"bare": build_bare_loop(case, trainer).train_steps, "titan": trainer.run_steps}
        for train in sides.values():
            train(WARM)
        work = {side: partial(train, steps) for side, train in sides.items()}
        side_times = time_in_turn(work, rounds, trainer.world.device)
    torch._dynamo.reset()
    return {side: SideResult(tuple(times)) for side, times in side_times.items()}


def build_bare_loop(case: SpeedCase, trainer: Trainer) -> BareLoop:
    """Return the bare loop of a case on the data of titan's trainer."""
    from tests.measure.bare_loop import BareLoop

    run = trainer.run
    bare_run = replace(run, compile=replace(run.compile, scope=case.bare or run.compile.scope))
    return BareLoop(bare_run, trainer.mix, trainer.world.device, autocast=case.autocast)


def measure_separately(case: SpeedCase, overrides: Sequence[str], rounds: int, steps: int) -> dict[Side, SideResult]:
    """Measure each side in two separate processes of half the rounds."""
    options = [f"rounds={-(-rounds // 2)}", f"steps={steps}", *(["autocast=true"] if case.autocast else [])]
    overrides, bare = [*overrides, *case.overrides], [f"compile={case.bare}"] if case.bare else []
    results: dict[Side, list[SideResult]] = {side: [] for side in SIDES}
    for side in (*SIDES, *reversed(SIDES)):
        results[side].append(SideResult(**_run_process(side, options, [*overrides, *(bare if side == "bare" else [])])))
    joined: dict[Side, SideResult] = {}
    for side, (first, second) in results.items():
        memory_gib = max(filter(None, (first.memory_gib, second.memory_gib)), default=None)
        joined[side] = SideResult((*first.seconds, *second.seconds), memory_gib, first.failure or second.failure)
    return joined


def _run_process(task: str, options: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that `tests.measure only=TASK` prints in its last line, or its error message as `failure`."""
    command = ["-m", "tests.measure", f"only={task}", *options, *overrides]
    completed = run_python(command, stderr=subprocess.PIPE)
    if completed.returncode:
        return {"failure": find_error_line(completed.stderr, completed.returncode)}
    result: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    return result


def find_error_line(text: str, code: int) -> str:
    """Return the last line of a failed process's messages that is an error, else its exit code."""
    lines = [line for line in text.splitlines() if ERROR.match(line)]
    return lines[-1][:200] if lines else f"exit code {code}"


def measure_side(side: Side, overrides: Sequence[str], rounds: int, steps: int, autocast: bool = False) -> int:
    """Measure one side in this process, print the `SideResult` as JSON in the last line, return the exit code."""
    run = compose.compose_run(overrides)
    import torch

    from tests.measure.bare_loop import BareLoop, open_mixture
    from titan.calibration.trials import time_work
    from titan.metrics.recorder import peak_memory_gib

    device = torch.device(run.machine.device)
    with ExitStack() as stack:
        if side == "titan":
            work: Callable[[int], None] = stack.enter_context(open_trainer(run)).run_steps
        else:
            work = BareLoop(run, open_mixture(run), device, autocast=autocast).train_steps
        work(WARM)
        times = [time_work(lambda: work(steps), device) for _ in range(rounds)]
    print(json.dumps(asdict(SideResult(tuple(times), peak_memory_gib(device)))))
    return 0


@contextmanager
def open_trainer(run: Run) -> Iterator[Trainer]:
    """Yield titan's trainer for one device, which records as usual."""
    from titan.calibration import trials
    from titan.training import reporter

    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        run, attempt = trial = trials.prepare_trial(replace(run, directory=folder))
        trainer = trials.build_trainer(trial, trials.connect_rank(run, 0, 1, ""))
        with reporter.build_recorder(run, attempt, print) as recorder, trainer.loader:
            trainer.reporter.recorder = recorder
            yield trainer


def profile_case(case: SpeedCase, overrides: Sequence[str], steps: int, rows: int = 25) -> str:
    """Return torch.profiler's table of the operators with the largest self time on the device in a case's steps."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run = compose.compose_run([*overrides, *case.overrides])
    cuda = run.machine.device == "cuda"
    with open_trainer(run) as trainer:
        trainer.run_steps(WARM)
        with profiler(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
            trainer.run_steps(steps)
    torch._dynamo.reset()
    sort_key = "self_device_time_total" if cuda else "self_cpu_time_total"
    return str(profiled.key_averages().table(sort_by=sort_key, row_limit=rows, max_name_column_width=60))


@dataclass(frozen=True)
class HostSync:
    """The first operation within titan's steps that makes the host wait for the GPU (empty: none), or the error."""

    location: str = ""
    failure: str = ""

    def describe(self) -> str:
        """Return one clause for the output."""
        if self.failure:
            return f"not checked: {self.failure}"
        return f"the host synchronises at {self.location}" if self.location else "no host synchronisation in a step"


def find_host_sync(overrides: Sequence[str]) -> HostSync:
    """Search a recipe's steps for a host synchronisation, in a separate process so that its GPU memory is freed."""
    compose.compose_run(overrides)
    return HostSync(**_run_process("sync", [], overrides))


def print_host_sync(overrides: Sequence[str]) -> int:
    """Search in this process, print the `HostSync` as JSON in the last line, return the exit code."""
    print(json.dumps(asdict(HostSync(locate_host_sync(compose.compose_run(overrides))))))
    return 0


def locate_host_sync(run: Run, steps: int = 3) -> str:
    """Return file, line and source of the first operation in a step that makes the host wait for the GPU; else "".

    torch raises at the first synchronising operation (`torch.cuda.set_sync_debug_mode`). Reading the metrics of the
    step before waits for an event, which does not count. Other errors pass through.
    """
    import torch

    with open_trainer(run) as trainer:
        trainer.run_steps(WARM)
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.run_steps(steps)
        except RuntimeError as error:
            if not str(error).startswith(SYNCHRONIZING):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}: {frame.line}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def list_cpu_cases() -> list[SpeedCase]:
    """Return each precision with each scope of compilation.

    Compiled blocks are also compared with a bare loop that is compiled as a whole, and bf16 with one under autocast.
    """
    cases = [_build_case(f"precision={p}", f"compile={c}") for p in PRECISIONS for c in COMPILES]
    block_cases = [case for case in cases if "compile=block" in case.overrides]
    bf16_cases = [
        case for case in cases if "precision=bf16" in case.overrides and "compile=model" not in case.overrides
    ]
    whole_cases = [SpeedCase(f"{case.title}, bare: model", case.overrides, bare="model") for case in block_cases]
    autocast_cases = [SpeedCase(f"{case.title}, bare: autocast", case.overrides, autocast=True) for case in bf16_cases]
    return [*cases, *whole_cases, *autocast_cases]


def list_gpu_cases() -> list[SpeedCase]:
    """Return the 1B model in each precision and scope, one with experts, and the 8B model as it fits in 141 GB.

    With weights and gradients in fp32 the 8B model fits only with activation checkpointing.
    """
    small = [
        *(("precision=bf16", f"compile={scope}") for scope in ("off", "block", "model")),
        ("precision=bf16", "compile=block", "training.loss_chunk=2048"),
        *((f"precision={p}", "compile=block") for p in FLOAT8),
    ]
    frugal = ("optimizer.moments=bf16", "training.loss_chunk=2048")
    large = [
        *(("precision=bf16", f"compile={scope}", "memory=full") for scope in ("off", "block", "model")),
        ("precision=bf16", "compile=block", "memory=selective"),
        *((f"precision={p}", "compile=block", f"memory={m}") for m in ("selective", "full") for p in FLOAT8),
        ("precision=bf16_pure", "compile=block", "memory=none"),
    ]
    cases = [_build_case("model=llama1b", *choices) for choices in small]
    cases += [
        _build_case(*EXPERTS, "precision=bf16", f"compile={scope}", hidden=UNBALANCED) for scope in ("off", "block")
    ]
    return [*cases, *(_build_case("model=llama8b", *choices, hidden=frugal) for choices in large)]


def _build_case(*overrides: str, hidden: tuple[str, ...] = ()) -> SpeedCase:
    """Return a case whose title names the choices except `hidden` ones."""
    return SpeedCase(", ".join(map(_shorten_override, overrides)), (*overrides, *hidden))


def _shorten_override(override: str) -> str:
    """Return a choice for a title: the value alone for models and precisions."""
    name, _, value = override.partition("=")
    return value if name in ("model", "precision") else f"{name.rpartition('.')[2]} {value}"
