"""Run one step of two compositions, and ask why they differ. Free of torch.

For other commands: `compare_plans` takes two `ReplayPlan`s (of runs by `titan.training.replay.request.plan_replay`),
each with what starts its ranks, and returns the findings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan.numerics.differences import compare_operations, measure_spread
from titan.precision.schema import Precision
from titan.run.run import Run
from titan.training.replay import questions
from titan.training.replay.observation import ReplayedStep, merge_ranks, read_rank_replays
from titan.training.replay.questions import Answers, ReplayPair
from titan.training.replay.request import (
    EXACT,
    NATIVE,
    OPERATIONS,
    ROUNDED,
    ExactType,
    ReplayJob,
    ReplayPlan,
    Settings,
    align_start,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReplayComparison:
    """Two replays, why they differ, and sentences on the operations of the module that a finding names."""

    a: ReplayedStep
    b: ReplayedStep
    answers: Answers
    operations: tuple[str, ...] = ()


def compare_plans(a: ReplayPlan, b: ReplayPlan, settings: Settings, *, shares_start: bool = True) -> ReplayComparison:
    """Run the step of two plans, and ask why they differ.

    Args:
        shares_start: whether B begins the step with A's state.

    Raises:
        ConfigError: when a plan can't be run.
        ReplayEndedError: when ranks failed; their error has been printed.
    """
    exact = any(_needs_exact(plan, settings.exact) for plan in (a, b))
    run_passes(a, settings, exact)
    if shares_start:
        b = align_start(b, a, settings.step)
    run_passes(b, replace(settings, tokens=0), exact, None if settings.pin is None else a.run.directory)
    names = [plan.run.precision.describe() for plan in (a, b)]
    native = ReplayPair(
        _read(a, NATIVE, settings),
        _read(b, NATIVE, settings),
        names[0] if names[0] == names[1] else f"{names[0]} against {names[1]}",
        is_mixed=a.run.precision.drop_unused_settings() != b.run.precision.drop_unused_settings(),
    )
    decider = native
    if exact:
        passes = [EXACT if _needs_exact(plan, settings.exact) else NATIVE for plan in (a, b)]
        decider = ReplayPair(_read(a, passes[0], settings), _read(b, passes[1], settings), settings.exact)
    runs = [replace(plan.run, directory="", overrides=(), choices={}, hydra={}, options=()) for plan in (a, b)]
    same_code = shares_start and runs[0] == runs[1] and not (a.is_foreign or b.is_foreign)
    bound = settings.tolerance
    answers = questions.ask_questions(native, decider, same_code=same_code, bound=bound)
    if exact and settings.repeats > 1 and _needs_spread(native, answers):
        begun = align_start(a, a, settings.step)
        begun.run_ranks(ReplayJob(((NATIVE, a.run),), begun.attempt, settings.step, repeats=settings.repeats))
        repetitions = [_read(a, f"{ROUNDED}{number}", settings) for number in range(settings.repeats)]
        spread = measure_spread([step.samples for step in repetitions], [step.record for step in repetitions])
        answers = questions.ask_questions(native, decider, same_code=same_code, bound=bound, spread=spread)
    starts = (align_start(a, a, settings.step), align_start(b, a if shares_start else b, settings.step))
    operations = _compare_operations(starts, settings, answers) if settings.depth == "operation" else ()
    return ReplayComparison(native.a, native.b, answers, operations)


def _compare_operations(plans: tuple[ReplayPlan, ReplayPlan], settings: Settings, answers: Answers) -> tuple[str, ...]:
    """Return sentences on the operations in the module that the first finding names."""
    module = next((f.name for f in answers.findings if f.kind in ("forward", "backward")), None)
    if module is None:
        return ("no forward or backward pass of a module was named, so no operations are compared",)
    for plan in plans:
        run = _make_exact(plan.run, settings.exact) if _needs_exact(plan, settings.exact) else plan.run
        plan.run_ranks(ReplayJob(((OPERATIONS, run),), plan.attempt, settings.step, operations=module))
    a, b = (_read(plan, OPERATIONS, settings).operations for plan in plans)
    return tuple(compare_operations(module, a, b, settings.tolerance))


def _needs_spread(native: ReplayPair, answers: Answers) -> bool:
    """Whether only precision is left to explain a difference."""
    if answers.findings or not answers.comparable:
        return False
    figures = [native.read_figures(key) for key in ("loss", "grad_norm")]
    return any(x != y for x, y in figures) or any(d.relative for d in native.activations)


def run_passes(plan: ReplayPlan, settings: Settings, exact: bool, pin: str | None = None) -> None:
    """Run the step of a plan, and where `exact` and its precision is lower in that type; ranks leave what they saw.

    Raises:
        ReplayEndedError: when ranks failed.
    """
    passes = [(NATIVE, plan.run)]
    if exact and _needs_exact(plan, settings.exact):
        passes.append((EXACT, _make_exact(plan.run, settings.exact)))
    save = settings.step > 1 and plan.attempt.step < settings.step - 1
    plan.run_ranks(ReplayJob(tuple(passes), plan.attempt, settings.step, settings.tokens, save, pin=pin))


def run_single(plan: ReplayPlan, settings: Settings) -> ReplayedStep:
    """Run the step of one plan in its precision, and return what was seen.

    Raises:
        ReplayEndedError: when ranks failed; their error has been printed.
    """
    plan.run_ranks(ReplayJob(((NATIVE, plan.run),), plan.attempt, settings.step, settings.tokens, layers=True))
    return _read(plan, NATIVE, settings)


def _read(plan: ReplayPlan, name: str, settings: Settings) -> ReplayedStep:
    directory, training = Path(plan.run.directory), plan.run.training
    parts = read_rank_replays(directory, name)
    first = training.count_rows_before(settings.step)
    return merge_ranks(parts, None if plan.is_foreign else plan.mix, first, settings.tokens, training.seq_len)


@dataclass(frozen=True)
class DoublePrecision(Precision):
    """Matmuls and activations in fp64. No run trains so: its settings are those of fp32."""

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of matmuls and activations."""
        import torch

        return torch.float64

    def describe(self) -> str:
        """Return one phrase for the console."""
        return "fp64"


def _needs_exact(plan: ReplayPlan, exact: ExactType) -> bool:
    """Whether a plan's run computes in less than the type."""
    precision = plan.run.precision
    return exact == "fp64" or precision.eight_bit or "bf16" in (precision.compute, precision.weights)


def _make_exact(run: Run, exact: ExactType) -> Run:
    """Return the run in the type; a kernel that does not take it is replaced by one that torch chooses."""
    precision = replace(run.precision, compute="fp32", weights="fp32", matmuls="compute").drop_unused_settings()
    training, on_gpu = run.training, run.machine.device == "cuda"
    if exact == "fp64":
        precision = DoublePrecision(**{field.name: getattr(precision, field.name) for field in fields(Precision)})
        training = replace(training, attention="math") if on_gpu or training.attention == "flex" else training
    elif training.attention in ("flash", "cudnn") and on_gpu:
        training = replace(training, attention="auto")
    return replace(run, precision=precision, training=training)
