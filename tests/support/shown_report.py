"""Made comparisons to be shown; `python -m tests.support.shown_report FOLDER` writes their pages, to be looked at."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from titan.report.findings import (
    Comparison,
    Curves,
    FailedRun,
    Interval,
    Learning,
    MeasuredSpeed,
    Quality,
    RunCost,
    RunResult,
    StepPercentiles,
    TimeToTarget,
    Variant,
)
from titan.report.render.comparison_report import build_report
from titan.report.render.document import format_markdown, format_text

NASTY = '<script>alert("x")</script> & |pipe|'
TOKENS = 4096


def make_curves(steps: int, seed: int, gain: float = 0.0, rounding: float = 0.0) -> Curves:
    """A falling loss with noise; `gain` lower in the end, and `rounding` away from others of the seed."""
    numbers = np.arange(1, steps + 1)
    random = np.random.default_rng(seed)
    shared = 2.2 + 6 * (numbers + 3.0) ** -0.45 - gain * numbers / steps + 0.05 * random.standard_normal(steps)
    away = rounding * np.sqrt(numbers) * np.random.default_rng(seed + 1).standard_normal(steps)
    at = numbers[max(1, steps // 10) - 1 :: max(1, steps // 10)]
    validation = (shared + away)[at - 1] + 0.02
    return Curves(
        steps=numbers,
        tokens=numbers.astype(float) * TOKENS,
        losses=shared + away,
        device_hours=numbers / 3600,
        validation_steps=at,
        validation_tokens=at.astype(float) * TOKENS,
        validation=validation,
        bits_per_byte=validation / 3.1,
    )


def make_speed(tokens: float, memory: float | None = 1.5, mfu: float | None = 0.412) -> MeasuredSpeed:
    step = TOKENS / tokens
    return MeasuredSpeed(
        step_seconds=StepPercentiles(step, 0.96 * step, 1.09 * step),
        tokens_per_second_per_device=tokens,
        tflops_per_device=12.5,
        mfu=mfu,
        mfu_causal=None if mfu is None else 0.9 * mfu,
        memory_gib=memory,
        steps=380,
    )


def make_run_result(
    label: str, seed: int = 0, tokens: float | None = 30_000, gain: float = 0.0, **changes: Any
) -> RunResult:
    steps = changes.pop("steps_done", 400)
    drawn = make_curves(steps, seed, gain, changes.pop("rounding", 0.0)) if steps else make_curves(1, seed)
    timed = None if tokens is None else make_speed(tokens, changes.pop("memory", 1.5), changes.pop("mfu", 0.412))
    result = RunResult(
        label=f"{label} seed={seed}",
        directory=f"/data/runs/grid/{label.replace(' ', ',')}-{seed}",
        science_id="5c1e9ce5",
        group_id="9209",
        execution_id="e8ec",
        code_id="c0de",
        seed=seed,
        state="finished",
        reason=None,
        step=steps,
        steps=400,
        tokens=steps * TOKENS,
        devices=2,
        hardware="NVIDIA H200",
        decayed=steps >= 400,
        loss=float(drawn.losses[-10:].mean()),
        validation=float(drawn.validation[-1]),
        bits=float(drawn.bits_per_byte[-1]),
        bits_by_source={"code": 0.9, "books": 1.1},
        speed=timed,
        speed_by_attempt=() if timed is None else (timed, timed),
        cost=RunCost(0.75, 0.93, 2, 0.74, 12.5, 3.25, 0.5, 20),
        curves=drawn,
    )
    return replace(result, **changes)


def make_interval(estimate: float, half: float | None = None) -> Interval:
    return Interval(estimate, None, None) if half is None else Interval(estimate, estimate - half, estimate + half)


def make_variant(label: str, seeds: Sequence[int] = (0, 1), **changes: Any) -> Variant:
    """A variant of runs; `changes` are the variant's where it has such a field, else those of `make_run_result`."""
    of_variant = {name: changes.pop(name) for name in list(changes) if name in Variant.__dataclass_fields__}
    runs = tuple(make_run_result(label, seed, **changes) for seed in seeds)
    tokens = runs[0].speed.tokens_per_second_per_device if runs and runs[0].speed else None
    final = [result.validation for result in runs if result.validation is not None]
    bits = [result.bits for result in runs if result.bits is not None]
    half = 0.01 if len(seeds) > 1 else None
    base = Variant(
        label=label,
        settings=dict(cast(tuple[str, str], part.split("=", 1)) for part in label.split() if "=" in part),
        baseline=False,
        same_science=True,
        runs=runs,
        speed=None if tokens is None else make_interval(tokens, tokens / 50),
        speed_ratio=None if tokens is None else make_interval(tokens / 30_000, half and 0.02),
        validation=make_interval(sum(final) / len(final), half) if final else None,
        bits=make_interval(sum(bits) / len(bits), half) if bits else None,
    )
    return replace(base, **of_variant)


def make_learning(answer: str = "yes", text: str = "Learns the same: 0.0003 nats apart, within 0.02.") -> Learning:
    return Learning(cast(Any, answer), text, True, 1e-7, 1e-6, make_interval(0.0003, 0.002), 0.02, 2, None)


def make_quality(answer: str = "yes", difference: float = -0.05, at: str = "the end", **changes: Any) -> Quality:
    text = f"At {at} the loss differs by {difference:+.3f} nats."
    base = Quality(
        cast(Any, answer), text, "validation loss", at, make_interval(difference, 0.02), 0.003, 0.006, {}, 2, None
    )
    return replace(base, **changes)


def make_comparison(*variants: Variant, failed: Sequence[FailedRun] = (), **changes: Any) -> Comparison:
    base = Comparison(
        title="layouts",
        question="Which layout of two devices is fastest, and do all learn the same?",
        common={"model": "debug", "dataset": "stdlib", "tokens": "1.64M", "devices": "2"},
        differs={"parallelism": ("single", "fsdp", "tp")},
        variants=variants,
        failed=tuple(failed),
        target=None,
        margin=0.02,
        notes=("Runs were made by two versions of the code: c0de and 10ad.",),
    )
    return replace(base, **changes)


def make_two_variants() -> Comparison:
    """A baseline and a variant of its science."""
    return make_comparison(
        make_variant("parallelism=single", baseline=True),
        make_variant("parallelism=fsdp", tokens=39_600, memory=0.9, rounding=1e-6, learning=make_learning()),
    )


def make_mixed() -> Comparison:
    """Answers of every kind, an unfinished run, a target, sources, failures, and labels that try to break out."""
    running: dict[str, Any] = {"steps_done": 180, "state": "running", "validation": None, "bits": None}
    long = "parallelism=fsdp memory=full compile=block precision=bf16 optimizer.lr=0.003"
    undecided = make_learning("undecided", "Undecided: 3 pairs more would decide.")
    return make_comparison(
        make_variant("parallelism=single", (0, 1, 2), baseline=True, reached=TimeToTarget(3, 3, 1.1e6, 0.4)),
        make_variant("parallelism=fsdp", tokens=39_600, memory=0.9, rounding=1e-6, learning=make_learning()),
        make_variant(long, tokens=24_000, memory=0.45, rounding=1e-3, learning=undecided),
        make_variant(
            "parallelism=tp", tokens=33_000, memory=1.1, rounding=0.02, learning=make_learning("no", "Not the same.")
        ),
        make_variant(
            "optimizer=muon",
            same_science=False,
            tokens=28_500,
            gain=0.3,
            memory=1.4,
            quality=(
                make_quality(by_source={"code": make_interval(-0.02, 0.01), "books": make_interval(-0.01)}),
                make_quality(at="equal tokens"),
            ),
            reached=TimeToTarget(2, 2, 0.8e6, 0.3),
            notes=("The learning rate was not tuned for this variant.",),
        ),
        make_variant(f"model={NASTY}", (0,), same_science=False, notes=(NASTY,), **running),
        failed=[
            FailedRun("parallelism=pp", "/data/runs/grid/pp", "failed", "out of memory on rank 3: 150 GiB were wanted"),
            FailedRun(NASTY, "/data/runs/grid/nasty", "failed", NASTY),
        ],
        target=2.6,
    )


def make_many_variants(variants: int = 64, steps: int = 10_000) -> Comparison:
    """As many variants as one may ever look at."""
    members = [make_variant("lr=0.001 layout=0", (0,), baseline=True, steps_done=steps)]
    for i in range(1, variants):
        label = f"optimizer.lr={0.0005 * i:.4g} parallelism={('fsdp', 'tp', 'hsdp')[i % 3]} schedule.warmup={i % 7}"
        figures: dict[str, Any] = {"tokens": 30_000 + 300 * ((i * 37) % 64 - 20), "memory": 0.5 + (i * 29 % 64) / 30}
        same = {"learning": make_learning(), "rounding": 1e-6 * i} if i % 2 else {}
        quality_changes = (
            {} if i % 2 else {"same_science": False, "quality": (make_quality(difference=-0.01 * i),), "gain": 0.01 * i}
        )
        members.append(make_variant(label, (0,), steps_done=steps, **figures, **same, **quality_changes))
    return make_comparison(*members, title="64 variants")


def make_single_run() -> Comparison:
    """A single run."""
    return make_comparison(
        make_variant("runs/first", (0,), baseline=True), question=None, differs={}, title="runs/first", notes=()
    )


def make_failures() -> Comparison:
    """Nothing but failures."""
    failed = [FailedRun(f"lr={i}", f"/data/runs/bad/{i}", "failed", "the loss was not finite") for i in range(3)]
    return make_comparison(failed=failed, title="bad", notes=())


ALL = {
    "two": make_two_variants,
    "mixed": make_mixed,
    "many": make_many_variants,
    "one": make_single_run,
    "failures": make_failures,
}


def show_text(comparison: Comparison, width: int, colour: bool = False) -> str:
    return format_text(build_report(comparison), width, colour)


def show_markdown(comparison: Comparison) -> str:
    return format_markdown(build_report(comparison))


def main(folder: Path) -> None:
    """Write a page of each."""
    from titan.report.render.comparison_report import render_page

    folder.mkdir(parents=True, exist_ok=True)
    for name, make in ALL.items():
        (folder / f"{name}.html").write_text(render_page(make()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
