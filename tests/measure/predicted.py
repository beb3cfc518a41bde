"""Predictions of the planner beside measurements of this machine: `python -m tests.measure.predicted cluster=FILE`.

A matrix of small models in many layouts is predicted first, from the figures that `titan.calibrate` measured. Then each
case is trained for some steps, its ranks as new processes. The table has the step time (median of the later steps), the
peak resident set of the fullest rank, and the most bytes of tensors that were alive at once on it; the summary has the
median errors, and how often the faster of two layouts of the same model was predicted.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file, write_output_file
from titan.config.settings import MISSING, setting
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.estimate import memory
from titan.estimate import plan as planning
from titan.metrics.reader import METRICS, read_steps
from titan.run import attempts, compose
from titan.run.run import Run

BASE = (
    "dataset=synthetic", "checkpoint=off", "compile=off", "model=debug", "metrics.plot=false",
    "metrics.sample_tokens=0", "evaluation.tokens=0", "training.steps=1000000", "cluster=cpu",
)  # fmt: skip
"""Overrides of all cases."""
TOKENS = 2048
"""The global batch of all cases."""
MODELS = {
    "narrow": ("model.dim=128", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.ffn=384"),
    "wide": ("model.dim=384", "model.layers=6", "model.heads=6", "model.kv_heads=2", "model.ffn=1024"),
    "experts": ("model=qwen3_moe_debug",),
    "latent": ("model=deepseek_v3_debug",),
}
DENSE = ("narrow", "wide")
WITH_EXPERTS = (
    ("experts", "single"), ("experts", "fsdp"), ("experts", "fsdp parallelism.expert=2"), ("latent", "single"),
)  # fmt: skip
"""Models with experts, and their layouts."""
LENGTHS = (128, 256, 512)
TWO_RANK_LAYOUTS = ("single", "ddp", "fsdp", "tp", "pp", "cp")
FOUR_RANK_LAYOUTS = ("hsdp", "fsdp_tp", "fsdp_pp", "fsdp_cp")
MODES = ("full", "selective")
WARM = 3
"""Steps before those that count."""
MIN_DIFFERENCE = 0.15
"""Layouts whose times differ by at least this fraction are a pair, whose faster one is to be predicted."""
RANK_SECONDS = 180.0
"""Time that the ranks of a case have."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m tests.measure.predicted`."""

    cluster: str = setting(MISSING, "the file that titan.calibrate wrote on this machine")
    to: str | None = setting(None, "also write all figures to this JSON file")
    steps: int = setting(9, f"steps of a case, of which the first {WARM} do not count", at_least=WARM + 1, cap=1000)
    only: str = setting("", "only cases whose title contains this text")


COMMAND = Command(
    "tests.measure.predicted",
    "Compare predictions with measurements on this CPU.",
    {"cluster=here.yaml": "the file of python -m titan.calibrate to=here.yaml"},
    Settings,
    notes="Let nothing else run meanwhile; it takes about ten minutes on two cores.",
    uses_torch=True,
)


@dataclass(frozen=True)
class PredictionCase:
    """One row: a model, the length of its rows, a layout and a memory mode."""

    model: str
    length: int
    layout: str
    mode: str

    @property
    def title(self) -> str:
        """The choices."""
        return f"{self.model} {self.length} {self.layout} {self.mode}"

    def overrides(self, cluster: Sequence[str]) -> list[str]:
        """Return the command line."""
        length = (f"training.seq_len={self.length}", f"training.global_batch={TOKENS}")
        return [
            *BASE,
            *MODELS[self.model],
            *length,
            *f"parallelism={self.layout}".split(),
            f"memory={self.mode}",
            *cluster,
        ]


@dataclass(frozen=True)
class Figures:
    """Seconds of a step, GiB of the fullest rank, and bytes of its live tensors: predicted or measured."""

    seconds: float
    gib: float
    live: float


@dataclass(frozen=True)
class PredictionRow:
    """A case with both, and the seconds of each step that counts."""

    case: PredictionCase
    predicted: Figures
    measured: Figures
    steps: tuple[float, ...] = ()

    def compute_error(self, name: str) -> float:
        """Return the relative error of a prediction."""
        return float(getattr(self.predicted, name) / getattr(self.measured, name) - 1)

    def row(self) -> str:
        """Return the line of the table."""
        p, m = self.predicted, self.measured
        pairs = (
            (f"{p.seconds:8.3f} {m.seconds:8.3f}", "seconds"), (f"{p.gib:7.3f} {m.gib:7.3f}", "gib"),
            (f"{p.live / 2**20:7.1f} {m.live / 2**20:7.1f}", "live"),
        )  # fmt: skip
        return f"{self.case.title:<32}" + " ".join(f"{text} {self.compute_error(name):+7.1%}" for text, name in pairs)


HEADER = f"{'case':<32}{'step seconds':>17} {'error':>7} {'peak GiB':>15} {'error':>7} {'live MiB':>15} {'error':>7}"


def list_cases() -> Iterator[PredictionCase]:
    """Yield the cases.

    Every layout has every dense model and length; each memory mode comes once per layout and model; models with
    experts come last.
    """
    layouts = (*TWO_RANK_LAYOUTS, *FOUR_RANK_LAYOUTS)
    for model, length, layout in itertools.product(DENSE, LENGTHS, layouts):
        yield PredictionCase(model, length, layout, "none")
    for number, (layout, mode) in enumerate(itertools.product(layouts, MODES)):
        model = DENSE[number // 2 % 2]
        yield PredictionCase(model, LENGTHS[number // 4 % 3], layout, mode)
    for model, layout in WITH_EXPERTS:
        yield PredictionCase(model, 256, layout, "none")


def _run_command(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    file = None if settings.to is None else check_output_file(settings.to, (".json",))
    cases = [case for case in list_cases() if settings.only in case.title]
    if not cases:
        raise ConfigError(f"only={settings.only}: no case has such a title; leave it out.")
    runs = {case: compose.compose_run(case.overrides(read_hardware(settings.cluster)), remote=True) for case in cases}
    predictions = {case: predict_run(run) for case, run in runs.items()}  # all of them before the first measurement
    print(f"{format_plural(len(cases), 'case')}; {time.strftime('%Y-%m-%d %H:%M')}, load {os.getloadavg()[0]:.1f}")
    print(HEADER)
    rows = []
    for case, run in runs.items():
        rows.append(PredictionRow(case, predictions[case], *measure_run(run, settings.steps)))
        print(rows[-1].row(), flush=True)
        if file is not None:
            write_output_file(file, [asdict(row) for row in rows])
    print("\n".join(summarise_rows(rows)))
    return 0


def read_hardware(file: str) -> list[str]:
    """Return the overrides with the figures of a cluster's file.

    Raises:
        ConfigError: when the file can't be read or has no figures.
    """
    import yaml

    path = Path(file).expanduser()
    if not path.exists():
        raise ConfigError(f"cluster={file}: there is no such file; write it with python -m titan.calibrate.")
    try:
        figures: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["hardware"]
    except (OSError, TypeError, KeyError, yaml.YAMLError) as error:
        raise ConfigError(f"cluster={file}: holds no hardware; write it with python -m titan.calibrate.") from error
    return [f"cluster.hardware.{name}={value}" for name, value in figures.items()]


def predict_run(run: Run) -> Figures:
    """Return the prediction for a run."""
    plan = planning.build_plan(run, run.layout, run.microbatches, run.machine)
    live = memory.estimate_peak(run, run.layout, run.microbatches, run.machine.device)
    return Figures(plan.step.seconds, plan.fullest.gib, live.bytes)


# ---- measurements ----


def measure_run(run: Run, steps: int) -> tuple[Figures, tuple[float, ...]]:
    """Train a run for some steps in new processes; return what it took, and the seconds of the steps that count."""
    from titan.calibration.trials import prepare_trial, run_together

    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        run = replace(run, directory=folder)
        run, attempt = prepare_trial(run)
        peaks = run_together(partial(_train_rank, run, attempt, steps), run.layout.devices, RANK_SECONDS)
        seconds = _read_step_seconds(Path(folder))
    return Figures(statistics.median(seconds), **peaks), seconds


def _train_rank(
    run: Run, attempt: attempts.Attempt, steps: int, rank: int, ranks: int, init_method: str
) -> dict[str, float]:
    """Train as one of the ranks and return the memory of the fullest one."""
    from titan.calibration import trials
    from titan.metrics.recorder import peak_resident_gib
    from titan.training import reporter

    world = trials.connect_rank(run, rank, ranks, init_method)
    trainer = trials.build_trainer((run, attempt), world)
    with trainer.loader, reporter.build_recorder(run, attempt, print) as recorder:
        trainer.reporter.recorder = recorder if rank == 0 else None
        trainer.run_steps(steps)
        gib = peak_resident_gib()
        live = _measure_live_bytes(trainer)
    fullest = [max(values) for values in zip(*world.all_gather_object((gib, live)), strict=True)]
    world.close()
    return {"gib": fullest[0], "live": fullest[1]}


def _read_step_seconds(folder: Path) -> tuple[float, ...]:
    records = read_steps(folder / METRICS)
    return tuple(record["step_seconds"] for record in records[WARM:-1])  # the last one was profiled


def _measure_live_bytes(trainer: Any) -> float:
    """Return the most bytes of tensors that are alive at once in a step: those before it, and what it allocates.

    Weights, optimizer state and DDP's buckets of gradients are there before; a profiler sees each allocation within.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    step = trainer.train_step
    live_tensors = [
        *step.parameters(),
        *itertools.chain.from_iterable(s.values() for s in step.optimizer.state.values()),
    ]
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in live_tensors if isinstance(tensor, torch.Tensor))
    wrapped = getattr(step.runner, "wrapped", None)
    buckets = sum(p.nbytes for p in step.parameters()) if isinstance(wrapped, DistributedDataParallel) else 0
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in local}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.run_steps(1)
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return buckets + sum(storages.values()) + max(itertools.accumulate(changes), default=0)


# ---- summary ----


def summarise_rows(rows: Sequence[PredictionRow]) -> list[str]:
    """Return the median errors, the largest, and the fraction of pairs whose faster layout was predicted."""
    lines = []
    for name, title in (("seconds", "step time"), ("gib", "peak memory"), ("live", "live tensors")):
        errors = [abs(row.compute_error(name)) for row in rows]
        lines.append(f"{title}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    distinct_pairs = find_distinct_pairs(rows)
    correct = sum(faster.predicted.seconds < slower.predicted.seconds for faster, slower in distinct_pairs)
    lines.append(
        f"faster of two layouts: {correct} of {len(distinct_pairs)} pairs that differ by more than {MIN_DIFFERENCE:.0%}"
    )
    return lines


def find_distinct_pairs(rows: Sequence[PredictionRow]) -> list[tuple[PredictionRow, PredictionRow]]:
    """Return all pairs of layouts of one model, length and memory mode that differ enough, the faster one first."""
    distinct_pairs = []
    for first, second in itertools.permutations(rows, 2):
        is_same_case = replace(first.case, layout="") == replace(second.case, layout="")
        if is_same_case and first.measured.seconds * (1 + MIN_DIFFERENCE) < second.measured.seconds:
            distinct_pairs.append((first, second))
    return distinct_pairs


main, cli = COMMAND.bind(_run_command)

if __name__ == "__main__":
    cli()
