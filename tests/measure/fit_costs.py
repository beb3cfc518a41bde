"""Fit the cost model's constants on published runs: `python -m tests.measure.fit_costs [to=FILE]`.

The runs are in `titan/estimate/published.csv` with their sources. A run becomes a recipe, whose predicted step time is
compared with the published one; the constants minimise the sum of squared logarithms of the ratios. Each source is left
out once, to see how well the others predict it. `titan/estimate/unseen.csv` has further runs, which the fit never uses;
runs that recompute in a way that titan does not have are not among them. `titan/estimate/experts.csv` has runs of
models with experts: the mean of their measured over predicted times is a constant too. Runs that hide the exchange of
rows between experts behind other computation than shared experts' are not among them.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from titan.config.command import Command, CommandLine
from titan.config.optional import import_optional
from titan.config.output_files import check_output_file, write_output_file
from titan.config.settings import setting
from titan.estimate import constants, memory, operations
from titan.estimate.constants import Constants
from titan.estimate.overhead import CONTEXT_GIB
from titan.estimate.plan import resolve_hardware
from titan.estimate.step_time import estimate_step
from titan.model.activations import HeadActivations, RankBatch
from titan.run.compose import compose_run
from titan.run.run import Run

PUBLISHED = Path(constants.__file__).with_name("published.csv")
UNSEEN = PUBLISHED.with_name("unseen.csv")
EXPERTS = PUBLISHED.with_name("experts.csv")
TOLERANCE = 0.2
"""Relative error, of which the fraction of unseen runs within it is stated."""
FITTED = {
    "matmul": (0.72, 0.1), "matmul_8bit": (0.65, 0.05), "casts": (1.0, 0.7), "memory": (0.75, 0.2), "eager": (2.6, 0.3),
    "overlapped": (0.3, 0.5), "per_doubling": (0.002, 0.5), "power": (0.33, 0.3),
}  # fmt: skip
"""The constants that are fitted: what is expected of each before, and the relative deviation from it that would not be
surprising."""
NOISE = 0.02
"""Relative deviation of a published run that would not be surprising: one configuration differs by as much."""
FUSED_KERNELS = "TE"
"""In the column `compile`: Transformer Engine's kernels, with cuDNN's attention."""
PRECISIONS = {
    "bf16": ["precision=bf16"], "fp8": ["precision=float8"], "fp8_tensorwise": ["precision=float8"],
    "fp8_rowwise": ["precision=float8_rowwise"], "mxfp8": ["precision=mxfp8"],
}  # fmt: skip
LLAMAS = {"llama3.1-8b": "llama8b", "llama3-8b": "llama8b", "llama3.1-70b": "llama70b", "llama3-70b": "llama70b",
          "llama3.1-405b": "llama405b", "llama3-405b": "llama405b"}  # fmt: skip
QWENS = {"qwen3-30b-a3b": "qwen3_30b_a3b", "qwen3-235b-a22b": "qwen3_235b_a22b"}
MODELS = {name: [f"model={choice}", "dataset.vocab=128256"] for name, choice in LLAMAS.items()} | {
    name: [f"model={choice}", "dataset.vocab=151936"] for name, choice in QWENS.items()
}
DEVICES = {
    "H100-96GB-HBM2e-500W": [
        "cluster=h100", "cluster.hardware.watts=500", "cluster.hardware.memory_gb_per_second=2400",
    ],
    "H100-80GB-700W": ["cluster=h100"], "H200": ["cluster=h200"], "B200": ["cluster=b200"], "A100": ["cluster=a100"],
}  # fmt: skip
RESULTS = {"tok_s_gpu", "step_s", "mem_GiB", "rep_tflops", "rep_mfu_pct", "notes", "url", "date"}
"""Columns that say nothing about the configuration."""
DEVICES_ONLY, TECHNIQUES = {"n_gpus", "gbs", "dp_shard", "dp_repl"}, {"precision", "compile", "asynctp", "ac", "vp"}
"""Columns of the number of devices, and of techniques."""
MEMORY = {"": "none", "none": "none", "selective-op": "selective", "selective": "selective", "full": "full"}


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m tests.measure.fit_costs`."""

    to: str | None = setting(None, "a JSON file to write, with the constants; null: only print them")


COMMAND = Command(
    "tests.measure.fit_costs",
    "Fit the cost model's constants on published runs, and print its errors.",
    {
        "": "the errors on the published runs, and on those that the fit does not use",
        "to=titan/estimate/constants.json": "in a clone: replace the constants that titan.plan uses",
    },
    Settings,
    notes="Needs scipy. It takes half a minute on one core.",
)


def _run_fit(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    file = None if settings.to is None else check_output_file(settings.to, (".json",))
    fitted = fit_and_print()
    if file is not None:
        write_output_file(file, {"constants": dataclasses.asdict(fitted)})
    return 0


def read_runs(file: Path = PUBLISHED) -> list[dict[str, str]]:
    """Return the published runs."""
    with file.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def build_overrides(row: Mapping[str, str]) -> list[str]:
    """Return the command line of a published run.

    Megatron's distributed optimizer keeps whole weights and gradients during a step: here FSDP that reshards never and
    accumulates whole gradients.
    """
    tensor, pipeline, context = (int(row[name] or 1) for name in ("tp", "pp", "cp"))
    devices, seq_len = int(row["n_gpus"]), int(row["seq"])
    data = devices // (tensor * pipeline * context)
    local, micro = int(row["local_bs"] or 0), int(row["mbs"] or 1)
    batch = local * data if local else int(row["gbs"])
    megatron = not local
    stages = pipeline * int(row["vp"] or 1)
    count = max(1, batch // data // micro) if megatron else stages if pipeline > 1 else 1
    overrides = [
        *MODELS[row["model"]], *PRECISIONS[row["precision"]], *DEVICES[row["gpu"]],
        f"cluster.devices={devices}", f"cluster.nodes={max(1, devices // 8)}", 
        "dataset=synthetic", "checkpoint=off", "cluster.memory_gib=1e6",
        f"parallelism={'fsdp' if data > 1 else 'single'}", f"training.seq_len={seq_len}",
        f"training.global_batch={batch * seq_len}", f"parallelism.tensor={tensor}", f"parallelism.context={context}",
        f"parallelism.pipeline={pipeline}", f"parallelism.microbatches={count}",
        f"memory={MEMORY[row['ac']]}", f"compile={'off' if row['compile'] == '0' else 'block'}",
    ]  # fmt: skip
    if pipeline > 1:
        schedule = "Interleaved1F1B" if stages > pipeline else "1F1B"
        overrides += [f"parallelism.schedule={schedule}", f"parallelism.stages={stages}", "parallelism.idle=0.9"]
        overrides += ["parallelism.split=layers"] if megatron else []
    if megatron:
        overrides += ["parallelism.reshard=never", "parallelism.accumulate=whole", "parallelism.context_method=ring"]
    if row.get("ep"):
        overrides.append(f"parallelism.expert={row['ep']}")
    if tensor > 1:
        overrides.append(f"parallelism.async_tensor={str(row['asynctp'] == '1' or megatron).lower()}")
    return overrides


@cache
def _compose_run(overrides: tuple[str, ...]) -> Run:
    return compose_run(list(overrides), remote=True)


def choose_kernel(row: Mapping[str, str]) -> str:
    """Return the attention kernel of a published run."""
    return "cudnn" if row["compile"] in (FUSED_KERNELS, "") else "flash"


def compute_measured_seconds(row: Mapping[str, str]) -> float:
    """Return the published step time in seconds."""
    if row["step_s"]:
        return float(row["step_s"])
    run = _compose_run(tuple(build_overrides(row)))
    return run.training.global_batch / float(row["tok_s_gpu"]) / int(row["n_gpus"])


def predict_step(row: Mapping[str, str], fitted: Constants) -> Any:
    """Return the predicted step time of a published run."""
    run = _compose_run(tuple(build_overrides(row)))
    dtype: Literal["bf16", "fp32"] = "bf16" if run.precision.compute == "bf16" else "fp32"
    hardware = resolve_hardware(run.cluster, run.machine)
    speeds = operations.derive_speeds(hardware, 8, dtype=dtype, kernel=choose_kernel(row), constants=fitted)
    return estimate_step(run, run.layout, run.microbatches, speeds, merged=choose_kernel(row) == "cudnn")


def compute_errors(published: Sequence[Mapping[str, str]], fitted: Constants) -> list[float]:
    """Return the logarithm of predicted over published step time of each run."""
    return [math.log(predict_step(row, fitted).seconds / compute_measured_seconds(row)) for row in published]


def fit_constants(published: Sequence[Mapping[str, str]], initial: Constants | None = None) -> Constants:
    """Return the constants with the least squared errors."""
    least_squares = import_optional("scipy.optimize", "tests.measure.fit_costs").least_squares
    start = initial or Constants()
    published = _select_extremes(published)
    weights = _compute_weights(published)

    def residuals(values: Sequence[float]) -> list[float]:
        candidate = dataclasses.replace(start, **dict(zip(FITTED, map(float, values), strict=True)))
        prior = [math.log(v / expected) / spread for v, (expected, spread) in zip(values, FITTED.values(), strict=True)]
        return [w * e / NOISE for w, e in zip(weights, compute_errors(published, candidate), strict=True)] + prior

    solution = least_squares(
        residuals, [expected for expected, _ in FITTED.values()], bounds=(1e-5, [1, 1, 9, 1, 9, 1, 0.1, 1]),
        x_scale=[expected for expected, _ in FITTED.values()], diff_step=1e-3, xtol=1e-4, ftol=1e-4,
    )  # fmt: skip
    return dataclasses.replace(start, **dict(zip(FITTED, map(float, solution.x), strict=True)))


def _make_group_key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("source", "model", "precision", "seq", "tp", "pp", "compile", "ac", "asynctp"))


def _select_extremes(published: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return, of runs that differ in the number of devices only, those on fewest and on most devices."""
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in published:
        groups.setdefault(_make_group_key(row), []).append(row)
    return [row for group in groups.values() for row in (group[:1] if len(group) == 1 else [group[0], group[-1]])]


def _compute_weights(published: Sequence[Mapping[str, str]]) -> list[float]:
    """Return weights with which runs that differ in the number of devices only count like one."""
    groups = [_make_group_key(row) for row in published]
    return [1 / math.sqrt(groups.count(group)) for group in groups]


def cross_validate_sources(published: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[float]]]:
    """Yield each source, with the errors of its runs when the other sources alone determine the constants."""
    for source in dict.fromkeys(row["source"] for row in published):
        other_rows = [row for row in published if row["source"] != source]
        yield source, compute_errors([row for row in published if row["source"] == source], fit_constants(other_rows))


def fit_experts(published: Sequence[Mapping[str, str]], fitted: Constants) -> Constants:
    """Return the constants with those of models with experts, and print the errors of their runs.

    Each run is predicted with the mean ratio of the runs of other models and devices.
    """
    logs = [-error for error in compute_errors(published, fitted)]
    configurations = [(row["model"], row["gpu"]) for row in published]
    errors = [
        log - statistics.fmean(other for other, key in zip(logs, configurations, strict=True) if key != configuration)
        for log, configuration in zip(logs, configurations, strict=True)
    ]
    for row, log in zip(published, logs, strict=True):
        print(f"{math.exp(log):7.2f} {row['model']:14} {row['precision']:15} {row['n_gpus']:>5} {row['gpu']}")
    print(_format_summary("experts, left out", [math.expm1(abs(error)) for error in errors]))
    mean, least, most = (math.exp(value) for value in (statistics.fmean(logs), min(logs), max(logs)))
    return dataclasses.replace(
        fitted, experts=mean, experts_least=least, experts_most=most, experts_error=_compute_error_bound(errors)
    )


def fit_and_print() -> Constants:
    """Fit the constants, print the errors, and return the constants with their intervals."""
    published = read_runs()
    fitted = fit_constants(published)
    for row, error in zip(published, compute_errors(published, fitted), strict=True):
        print(f"{error:+7.1%} {row['model']:14} {row['precision']:15} {row['n_gpus']:>5} {row['source'][:40]}")
    print(_format_summary("all", compute_errors(published, fitted)))
    errors_by_source = dict(cross_validate_sources(published))
    for source, source_errors in errors_by_source.items():
        print(_format_summary(f"left out: {source}", source_errors))
    fitted = fit_experts(read_runs(EXPERTS), fitted)
    peaks = collect_memory_pairs(published)
    unfitted = compute_memory_errors(peaks, Constants())
    fitted = dataclasses.replace(fitted, fragments=fit_fragments(peaks))
    print(_format_summary("memory", compute_memory_errors(peaks, fitted)))
    print(_format_summary("memory, left out", unfitted))
    worst = max(map(_compute_error_bound, [*errors_by_source.values(), compute_errors(read_runs(UNSEEN), fitted)]))
    fitted = dataclasses.replace(fitted, error=worst, memory_error=_compute_error_bound(unfitted))
    print(fitted)
    print_unseen(fitted)
    return fitted


def print_unseen(fitted: Constants) -> None:
    """Print the errors of the runs that the fit has not seen, by source and of all."""
    unseen = read_runs(UNSEEN)
    errors = compute_errors(unseen, fitted)
    for source in dict.fromkeys(row["source"] for row in unseen):
        print(
            _format_summary(
                f"unseen: {source}", [e for row, e in zip(unseen, errors, strict=True) if row["source"] == source]
            )
        )
    share_within, coverage = compute_share_within(errors), compute_coverage(errors, fitted)
    print(
        f"{_format_summary(f'unseen: all {len(errors)}', errors)}, {share_within:.0%} within {TOLERANCE:.0%}, "
        f"{coverage:.0%} in the interval"
    )
    for name, differences in compute_ratio_errors(unseen, errors).items():
        print(
            f"unseen: ratios of two runs that differ in {name}: {_format_summary(str(len(differences)), differences)}"
        )
    peaks = compute_memory_errors(collect_memory_pairs(unseen), fitted)
    print(f"{_format_summary(f'unseen: memory of {len(peaks)}', peaks)}, lowest {min(peaks):+.1%}")


def compute_ratio_errors(published: Sequence[Mapping[str, str]], errors: Sequence[float]) -> dict[str, list[float]]:
    """Return the errors of ratios between runs of a source that differ in devices only, or in one technique only.

    Args:
        published: the runs.
        errors: the error of each.
    """
    ratios: dict[str, list[float]] = {"devices": [], "one technique": []}
    for (first_row, first_error), (second_row, second_error) in itertools.combinations(
        zip(published, errors, strict=True), 2
    ):
        differing = {name for name in first_row if name not in RESULTS and first_row[name] != second_row[name]}
        if differing and differing <= DEVICES_ONLY:
            ratios["devices"].append(first_error - second_error)
        elif len(differing) == 1 and differing <= TECHNIQUES:
            ratios["one technique"].append(first_error - second_error)
    return ratios


def compute_share_within(errors: Sequence[float]) -> float:
    """Return the fraction of runs whose predicted time differs from the published one by at most `TOLERANCE` of it."""
    return statistics.mean(abs(math.expm1(error)) <= TOLERANCE for error in errors)


def compute_coverage(errors: Sequence[float], fitted: Constants) -> float:
    """Return the fraction of runs whose published time is in the interval of the predicted one."""
    return statistics.mean(abs(error) <= math.log1p(fitted.error) for error in errors)


def compute_median_error(errors: Sequence[float]) -> float:
    """Return the median of the errors without their sign."""
    return statistics.median(map(abs, errors))


class _SeparateLoss:
    """A model whose loss is as TorchTitan's when these runs were published: in float32, from logits in no graph."""

    def head_activations(self, batch: RankBatch, **choices: Any) -> HeadActivations:
        """See `titan.model.schema.Decoder`; a loss from split logits keeps them and their exponentials."""
        head: HeadActivations = super().head_activations(dataclasses.replace(batch, compiled=False), **choices)  # type: ignore[misc]
        logits = 4 * batch.tokens * self.vocab / batch.tensor if batch.tensor > 1 and choices["parts"] else 0.0  # type: ignore[attr-defined]
        return head._replace(
            saved=head.saved + logits, forward=head.forward + logits, backward=head.backward + 2 * logits
        )


def _separate_loss(model: Any) -> Any:
    """Return a model as the published runs computed its loss."""
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return type(f"Published{type(model).__name__}", (_SeparateLoss, type(model)), {})(**fields)


def collect_memory_pairs(published: Sequence[Mapping[str, str]]) -> list[tuple[float, float]]:
    """Return live tensors and published peak in GiB of the runs of PyTorch that state it."""
    memory_pairs = []
    for row in published:
        if row["mem_GiB"] and choose_kernel(row) == "flash":
            run = _compose_run(tuple(build_overrides(row)))
            run = dataclasses.replace(run, model=_separate_loss(run.model))
            memory_pairs.append((memory.estimate_peak(run, run.layout, run.microbatches).gib, float(row["mem_GiB"])))
    return memory_pairs


def fit_fragments(memory_pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median of what runs reserve beside live tensors and the context, as a fraction of live tensors."""
    return statistics.median((peak - CONTEXT_GIB) / live - 1 for live, peak in memory_pairs)


def compute_memory_errors(memory_pairs: Sequence[tuple[float, float]], fitted: Constants) -> list[float]:
    """Return the logarithm of predicted over published peak memory."""
    return [math.log((live * (1 + fitted.fragments) + CONTEXT_GIB) / peak) for live, peak in memory_pairs]


def _compute_error_bound(errors: Sequence[float]) -> float:
    """Return the relative error that nine in ten stay below, rounded up to a percent."""
    ordered = sorted(map(abs, errors))
    return math.ceil(100 * (math.exp(ordered[math.ceil(0.9 * len(ordered)) - 1]) - 1)) / 100


def _format_summary(name: str, errors: Sequence[float]) -> str:
    return f"{name}: median {compute_median_error(errors):.1%}, largest {max(map(abs, errors)):.1%}"


main, cli = COMMAND.bind(_run_fit)

if __name__ == "__main__":
    cli()
