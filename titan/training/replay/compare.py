"""Run one step of two compositions, and ask why they differ. Free of torch.

For other commands: `compare_plans` takes two `ReplayPlan`s (of runs by `titan.training.replay.request.plan_replay`, of
compositions that have not run by `plan_first_step`) and what starts ranks, and returns the findings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from titan.numerics.differences import FP32_BOUND, compare_operations, measure_spread
from titan.precision.schema import Precision
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training.replay import questions
from titan.training.replay.observation import ReplayedStep, count_rank_files, merge_ranks, read_rank_replays
from titan.training.replay.questions import Answers, ReplayPair
from titan.training.replay.request import ReplayPlan, align_start

if TYPE_CHECKING:
    import torch

REPEATS = 2
"""Randomly rounded repetitions: with both sides in two precisions each it is six steps."""


NATIVE, EXACT, ROUNDED, OPERATIONS = "native", "exact", "rounded", "operations"
"""Passes: in the run's precision, in fp32, with randomly rounded weights (followed by the repetition's number), and
with the operations of one module."""


@dataclass(frozen=True)
class ReplayJob:
    """The input of the ranks.

    Attributes:
        passes: their names, and the run of each, with a temporary directory; they differ in precision only.
        tokens: how many tokens with the largest losses to collect.
        save: whether to save the state before that step, for another replay.
        repeats: how many randomly rounded repetitions of the step to compute, instead of the step.
        pin: the folder of another replay, whose experts the routers use; None: their own.
        operations: the module whose operations are recorded; None: of none.
        layers: whether the first pass has the metrics of all layers, which take another forward pass.
    """

    worker: ClassVar[str] = "titan.training.replay.worker"
    passes: tuple[tuple[str, Run], ...]
    attempt: Attempt
    step: int
    tokens: int = 10
    save: bool = False
    repeats: int = 0
    pin: str | None = None
    operations: str | None = None
    layers: bool = False

    @property
    def run(self) -> Run:
        """The run of the first pass."""
        return self.passes[0][1]


StartRanks = Callable[[ReplayPlan, ReplayJob], int]
"""Starts the ranks of a replay, waits for them, and returns the exit code; 0 when all have left what they saw."""


class ReplayEndedError(Exception):
    """The ranks of a replay failed, and have said why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the ranks ended with exit code {code}")
        self.code = code


@dataclass(frozen=True)
class CompareSettings:
    """How two replays are compared.

    Attributes:
        step: the step.
        tokens: with the largest losses, to show.
        bound: relative difference in fp32 that is a fault.
        repeats: randomly rounded repetitions where only precision is left; 0: none.
        pin: whether B's routers use A's experts.
        shares_start: whether B begins the step with A's state.
        exact: the type in which both are computed too, where theirs is lower.
        operations: whether the operations of the module that a finding names are compared.
    """

    step: int
    tokens: int = 10
    bound: float = FP32_BOUND
    repeats: int = REPEATS
    pin: bool = False
    shares_start: bool = True
    exact: ExactType = "fp32"
    operations: bool = False


@dataclass(frozen=True)
class ReplayComparison:
    """Two replays, and why they differ.

    Attributes:
        answers: of `titan.training.replay.questions`.
        operations: sentences on the operations in the module that a finding names.
    """

    a: ReplayedStep
    b: ReplayedStep
    answers: Answers
    operations: tuple[str, ...] = ()


def compare_plans(
    a: ReplayPlan, b: ReplayPlan, settings: CompareSettings, start: StartRanks, start_b: StartRanks | None = None
) -> ReplayComparison:
    """Run the step of two plans, and ask why they differ.

    Args:
        start_b: starts those of B; None: `start`.

    Raises:
        ConfigError: when a plan can't be run.
        ReplayEndedError: when ranks failed; their error has been printed.
    """
    exact = any(needs_exact(plan.run.precision, settings.exact) for plan in (a, b))
    run_passes(a, settings, start, exact)
    if settings.shares_start:
        b = align_start(b, a, settings.step)
    pin = a.run.directory if settings.pin else None
    run_passes(b, replace(settings, tokens=0), start_b or start, exact, pin)
    native = ReplayPair(
        _read(a, NATIVE, settings), _read(b, NATIVE, settings), _name_precisions(a, b), _differ_in_precision(a, b)
    )
    exact_pair = native
    if exact:
        exact_a, exact_b = (_read(plan, _pick(plan, settings), settings) for plan in (a, b))
        exact_pair = ReplayPair(exact_a, exact_b, settings.exact)
    same_code = settings.shares_start and _is_same(a, b)
    answers = questions.ask_questions(native, exact_pair, same_code=same_code, bound=settings.bound)
    if exact and needs_spread(native, answers) and settings.repeats > 1:
        repetitions = _repeat(a, settings, start)
        spread = measure_spread([step.samples for step in repetitions], [step.record for step in repetitions])
        answers = questions.ask_questions(native, exact_pair, same_code=same_code, bound=settings.bound, spread=spread)
    operations = _compare_operations(a, b, settings, start, start_b, answers) if settings.operations else ()
    return ReplayComparison(native.a, native.b, answers, operations)


def _compare_operations(
    a: ReplayPlan,
    b: ReplayPlan,
    settings: CompareSettings,
    start: StartRanks,
    start_b: StartRanks | None,
    answers: Answers,
) -> tuple[str, ...]:
    """Return sentences on the operations in the module that the first finding names."""
    module = find_module(answers)
    if module is None:
        return ("no forward or backward pass of a module was named, so no operations are compared",)
    seen = []
    for plan, run_ranks in ((a, start), (b, start_b or start)):
        begun = align_start(plan, plan if plan is a or not settings.shares_start else a, settings.step)
        is_lower = needs_exact(plan.run.precision, settings.exact)
        run = make_exact(plan.run, settings.exact) if is_lower else plan.run
        job = ReplayJob(((OPERATIONS, run),), begun.attempt, settings.step, operations=module)
        if code := run_ranks(begun, job):
            raise ReplayEndedError(code)
        seen.append(_read(plan, OPERATIONS, settings).operations)
    return tuple(compare_operations(module, seen[0], seen[1], settings.bound))


def find_module(answers: Answers) -> str | None:
    """Return the module whose pass the first finding names; None where it names none."""
    found = next((f for f in answers.findings if f.kind in ("forward", "backward")), None)
    return None if found is None else found.name


def _pick(plan: ReplayPlan, settings: CompareSettings) -> str:
    """Return the pass of a plan that decides."""
    return EXACT if needs_exact(plan.run.precision, settings.exact) else NATIVE


def _name_precisions(a: ReplayPlan, b: ReplayPlan) -> str:
    names = [plan.run.precision.describe() for plan in (a, b)]
    return names[0] if names[0] == names[1] else f"{names[0]} against {names[1]}"


def _differ_in_precision(a: ReplayPlan, b: ReplayPlan) -> bool:
    return a.run.precision.drop_unused_settings() != b.run.precision.drop_unused_settings()


def _is_same(a: ReplayPlan, b: ReplayPlan) -> bool:
    """Whether two plans are the same computation in the same order."""
    runs = [replace(plan.run, directory="", overrides=(), choices={}, hydra={}, options=()) for plan in (a, b)]
    return runs[0] == runs[1] and not (a.is_foreign or b.is_foreign)


def needs_spread(native: ReplayPair, answers: Answers) -> bool:
    """Whether only precision is left to explain a difference."""
    if answers.findings or not answers.comparable:
        return False
    figures = [(float(native.a.record[key]), float(native.b.record[key])) for key in ("loss", "grad_norm")]
    activations = native.compare_activations()
    return any(x != y for x, y in figures) or any(d.relative for d in activations)


def run_passes(
    plan: ReplayPlan, settings: CompareSettings, start: StartRanks, exact: bool, pin: str | None = None
) -> None:
    """Run the step of a plan, and where `exact` and its precision is lower in that type; ranks leave what they saw.

    Raises:
        ReplayEndedError: when ranks failed.
    """
    passes = [(NATIVE, plan.run)]
    if exact and needs_exact(plan.run.precision, settings.exact):
        passes.append((EXACT, make_exact(plan.run, settings.exact)))
    save = settings.step > 1 and plan.attempt.step < settings.step - 1
    job = ReplayJob(tuple(passes), plan.attempt, settings.step, settings.tokens, save, pin=pin)
    if code := start(plan, job):
        raise ReplayEndedError(code)


def run_single(plan: ReplayPlan, settings: CompareSettings, start: StartRanks) -> ReplayedStep:
    """Run the step of one plan in its precision, and return what was seen.

    Raises:
        ReplayEndedError: when ranks failed; their error has been printed.
    """
    job = ReplayJob(((NATIVE, plan.run),), plan.attempt, settings.step, settings.tokens, layers=True)
    if code := start(plan, job):
        raise ReplayEndedError(code)
    return _read(plan, NATIVE, settings)


def _repeat(plan: ReplayPlan, settings: CompareSettings, start: StartRanks) -> list[ReplayedStep]:
    """Return randomly rounded repetitions of a plan's step."""
    begun = align_start(plan, plan, settings.step)
    job = ReplayJob(((NATIVE, plan.run),), begun.attempt, settings.step, repeats=settings.repeats)
    if code := start(begun, job):
        raise ReplayEndedError(code)
    return [_read(plan, f"{ROUNDED}{number}", settings) for number in range(settings.repeats)]


def _read(plan: ReplayPlan, name: str, settings: CompareSettings) -> ReplayedStep:
    directory, training = Path(plan.run.directory), plan.run.training
    parts = read_rank_replays(directory, name, count_rank_files(directory, name) or 1)
    first = training.count_rows_before(settings.step)
    return merge_ranks(parts, None if plan.is_foreign else plan.mix, first, settings.tokens, training.seq_len)


ExactType = Literal["fp32", "fp64"]
"""The type: in fp64 matmuls, attention and FSDP's sums over ranks. Weights, their gradients and updates, norms, rotary
embedding, routers' scores and loss stay in fp32."""


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


def needs_exact(precision: Precision, exact: ExactType) -> bool:
    """Whether a run computes in less than the type."""
    return exact == "fp64" or precision.eight_bit or "bf16" in (precision.compute, precision.weights)


def make_exact(run: Run, exact: ExactType) -> Run:
    """Return the run in the type; a kernel that does not take it is replaced by one that torch chooses."""
    precision = replace(run.precision, compute="fp32", weights="fp32", matmuls="compute").drop_unused_settings()
    training, on_gpu = run.training, run.machine.device == "cuda"
    if exact == "fp64":
        precision = DoublePrecision(**{field.name: getattr(precision, field.name) for field in fields(Precision)})
        training = replace(training, attention="math") if on_gpu or training.attention == "flex" else training
    elif training.attention in ("flash", "cudnn") and on_gpu:
        training = replace(training, attention="auto")
    return replace(run, precision=precision, training=training)
