"""Results of a comparison as frozen data: `comparison` makes them, `render` shows them.

A comparison has variants. The runs of a variant differ in seed and repeat only. Every variant is compared with the
baseline. Variants with the same hyperparameters (one `science_id`) must learn the same: they are tested for equivalence
and compared by speed. Variants with other hyperparameters are compared by their validation loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from titan.sweep.ledger import State

Answer = Literal["yes", "no", "undecided"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; low and high are None where there are too few repeats for one."""

    estimate: float
    low: float | None
    high: float | None
    level: float = 0.95


@dataclass(frozen=True)
class StepPercentiles:
    """Median, 10th and 90th percentile of the steps."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class MeasuredSpeed:
    """Speed of an attempt, or of all attempts of a run, without the warm-up steps of each attempt.

    Attributes:
        step_seconds: of a step.
        tokens_per_second_per_device: at the median step.
        tflops_per_device: model FLOPs at the median step, attention in full.
        mfu: their share of the device's peak; None where the peak is unknown.
        mfu_causal: the same with half of attention's FLOPs, since half of it is masked.
        memory_gib: peak memory of rank 0.
        steps: how many steps were timed.
    """

    step_seconds: StepPercentiles
    tokens_per_second_per_device: float
    tflops_per_device: float | None
    mfu: float | None
    mfu_causal: float | None
    memory_gib: float | None
    steps: int


@dataclass(frozen=True)
class RunCost:
    """Cost of a run over all its attempts.

    Attributes:
        device_hours: devices times the hours of its attempts.
        goodput: share of the attempts' time spent in steps that count.
        attempts: how many there were.
        training_hours: likewise without start-up, which ends where a first step of usual length would begin.
        start_seconds: from the beginning of an attempt to its first step, of all attempts.
        checkpoint_seconds: training waited for checkpoints.
        data_seconds: steps waited for data.
        steps_again: steps that were done more than once.
    """

    device_hours: float
    goodput: float | None
    attempts: int
    training_hours: float
    start_seconds: float
    checkpoint_seconds: float
    data_seconds: float
    steps_again: int


@dataclass(frozen=True)
class Curves:
    """A run over time: for each step the values of its last attempt, in rising order of steps; [steps] each.

    Attributes:
        steps: of training.
        tokens: read up to the end of each step.
        losses: of training; NaN where a loss was not finite.
        device_hours: spent up to the end of each step, stalls and lost steps included, start-up not.
        validation_steps: the steps after which the validation set was evaluated; [evaluations], as the next ones.
        validation_tokens: read up to then.
        validation: loss on the validation set, nats per token.
        bits_per_byte: likewise, NaN where unknown.
    """

    steps: NDArray[np.int64]
    tokens: Numbers
    losses: Numbers
    device_hours: Numbers
    validation_steps: NDArray[np.int64]
    validation_tokens: Numbers
    validation: Numbers
    bits_per_byte: Numbers


@dataclass(frozen=True)
class RunPrediction:
    """What the last attempt of a run was predicted to take, beside what was measured.

    Attributes:
        step_seconds: of a step; nine in ten published runs lie within the interval.
        memory_gib: of rank 0, as metrics.jsonl measures it.
        step_parts: predicted seconds of a step by cause.
        memory_parts: predicted GiB of the fullest rank by category.
        constants: version of the cost model's constants.
        step_error: predicted over measured step time, minus 1; None where it was not measured.
        memory_error: predicted over measured memory, minus 1; None where it was not measured.
        work_seconds: measured step time without waiting for data, of the median step.
        data_seconds: measured time that a step waited for data, on average.
        evaluation_seconds: measured time of evaluations between steps, per step; None where there was none.
        checkpoint_seconds: measured time of saves between steps, per step; None where there was none.
    """

    step_seconds: Interval
    memory_gib: Interval
    step_parts: Mapping[str, float]
    memory_parts: Mapping[str, float]
    constants: str
    step_error: float | None = None
    memory_error: float | None = None
    work_seconds: float | None = None
    data_seconds: float | None = None
    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None


@dataclass(frozen=True)
class Spike:
    """A loss spike: the step of its maximum, the loss there, the usual loss before it, and the step's rows if known."""

    step: int
    loss: float
    usual: float
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class RunResult:
    """One run.

    Attributes:
        label: what distinguishes it from the others, such as "parallelism=fsdp seed=1".
        directory: where it is.
        science_id: of its last attempt.
        group_id: of its last attempt.
        execution_id: of its last attempt.
        code_id: of its last attempt.
        seed: training.seed.
        state: its state.
        reason: why it failed or stopped; None where it did not.
        step: optimizer updates done.
        steps: optimizer updates that its settings ask for.
        tokens: read.
        devices: number of devices.
        hardware: their name, such as "NVIDIA H200".
        decayed: whether its learning rate schedule is finished.
        loss: of training, mean of the last steps.
        validation: the final validation loss, in nats per token.
        bits: the final validation loss in bits per byte.
        bits_by_source: likewise of each source of a mixture.
        speed: over all attempts; None where no step was timed.
        speed_by_attempt: of each attempt that timed any.
        cost: over all attempts.
        curves: over time.
        repeat: training.repeat: which repeat of the same seed it is.
        diverged: whether it has no finite result because of its recipe, and not because its machine failed.
        outlier: whether its final validation loss is finite and far from those of its variant's other seeds.
        spikes: of the training loss, in the order of steps.
        shared: whether another run of the comparison used the same machine while its steps were timed.
        predicted: what it was predicted to take; None where its hardware was not described.
        own: the last value of each metric that hooks have logged, by its key hooks/NAME/METRIC.
        figures: what it measured at its end of files, tasks and averaged weights, by the keys of metrics.jsonl.
        experts: the load of its experts, mean of the last steps, by the keys of metrics.jsonl; empty without experts.
    """

    label: str
    directory: str
    science_id: str
    group_id: str
    execution_id: str
    code_id: str
    seed: int
    state: State
    reason: str | None
    step: int
    steps: int
    tokens: int
    devices: int
    hardware: str
    decayed: bool
    loss: float | None
    validation: float | None
    bits: float | None
    bits_by_source: Mapping[str, float]
    speed: MeasuredSpeed | None
    speed_by_attempt: tuple[MeasuredSpeed, ...]
    cost: RunCost
    curves: Curves = field(repr=False)
    repeat: int = 0
    diverged: bool = False
    outlier: bool = False
    spikes: tuple[Spike, ...] = ()
    shared: bool = False
    predicted: RunPrediction | None = None
    own: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RepeatsNeeded:
    """Repeats needed for an answer, by an estimated spread.

    Attributes:
        count: by the spread as estimated; None: more than can be counted.
        low: by the lower bound of the spread's 95% confidence interval; None: more than can be counted.
        high: by its upper bound; None: more than can be counted.
        seen: repeats that the spread is estimated from.
    """

    count: int | None
    low: int | None
    high: int | None
    seen: int


@dataclass(frozen=True)
class Learning:
    """Whether a variant with the baseline's hyperparameters learns the same as the baseline.

    Attributes:
        answer: yes, no or undecided.
        text: the answer as a sentence, with the values that decided.
        batches_equal: of the steps compared, all had the same batch hash; None where no step is in both.
        first_loss_gap: the largest difference of losses over the first steps, relative.
        first_norm_gap: likewise of gradient norms.
        difference: variant minus baseline in final validation loss, nats, over the pairs of equal seeds.
        margin: the equivalence margin.
        pairs: how many pairs there were.
        needed: pairs that would decide, where undecided and known.
        needed_range: the same, with its uncertainty.
        command: repeats the first step at which a pair differs; empty where the answer is not "no", or no step differs.
    """

    answer: Answer
    text: str
    batches_equal: bool | None
    first_loss_gap: float | None
    first_norm_gap: float | None
    difference: Interval | None
    margin: float
    pairs: int
    needed: int | None
    needed_range: RepeatsNeeded | None = None
    command: str = ""


@dataclass(frozen=True)
class Quality:
    """Whether a variant with other hyperparameters learned more or less than the baseline.

    Attributes:
        answer: whether there is a difference: yes, no (only where equivalence is shown) or undecided.
        text: the answer as a sentence.
        measure: what was compared: "validation loss", "bits per byte" or "tokens to the target".
        at: "the end", "equal tokens", "the target" or "equal device-hours".
        difference: variant minus baseline over pairs of equal seeds; for "tokens to the target" their ratio. Where runs
            diverged it is of the pairs in which none did, and has no interval.
        p: of the paired t-test, where runs diverged of the sign test.
        p_holm: after Holm's correction over the variants.
        by_source: the same difference for each source of a mixture.
        pairs: how many pairs there were.
        needed: how many pairs would decide; None where that is not known.
        needed_range: the same with its uncertainty.
        better: pairs in which the variant did better than the baseline; counted where runs diverged.
        worse: pairs in which it did worse; counted where runs diverged.
        diverged: diverged seeds of the variant; at the target: seeds that never reached it.
        baseline_diverged: the same of the baseline.
    """

    answer: Answer
    text: str
    measure: str
    at: str
    difference: Interval | None
    p: float | None
    p_holm: float | None
    by_source: Mapping[str, Interval]
    pairs: int
    needed: int | None
    needed_range: RepeatsNeeded | None = None
    better: int = 0
    worse: int = 0
    diverged: int = 0
    baseline_diverged: int = 0


@dataclass(frozen=True)
class Effort:
    """What share of the baseline's compute a variant needs for the baseline's loss; below 1 is better.

    Attributes:
        text: as a sentence, which says what would determine it where it is not known.
        tokens: of its tokens; None where it is not known. Without bounds where there is one pair of seeds.
        flops: of its FLOPs.
        hours: of its device-hours, without start-up.
    """

    text: str
    tokens: Interval | None = None
    flops: Interval | None = None
    hours: Interval | None = None


@dataclass(frozen=True)
class Outcomes:
    """How many of a variant's seeds have which outcome.

    Attributes:
        ended: a finite result.
        diverged: none, because of the recipe; a seed of which any repeat diverged counts here.
        failed: none, for another reason: its machine failed, or someone stopped it.
        waiting: none yet: still running, or not started.
    """

    ended: int = 0
    diverged: int = 0
    failed: int = 0
    waiting: int = 0

    @property
    def known(self) -> int:
        """Return the number of seeds with an outcome of the recipe."""
        return self.ended + self.diverged


@dataclass(frozen=True)
class TimeToTarget:
    """When a variant reached the target loss: `reached` of `runs` runs did; the others are censored.

    Attributes:
        runs: how many runs there are.
        reached: how many of them reached the target.
        median_tokens: the Kaplan-Meier median of tokens; None where less than half reached it.
        median_device_hours: the Kaplan-Meier median of device-hours; None where less than half reached it.
        at_first: runs that had reached it at their first validation, at an unknown time.
    """

    runs: int
    reached: int
    median_tokens: float | None
    median_device_hours: float | None
    at_first: int = 0


@dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed, or are repeats.

    Attributes:
        label: the settings that distinguish it from the other variants, such as "parallelism=fsdp memory=full".
        settings: the same by name.
        baseline: whether it is the baseline.
        same_science: whether it has the baseline's hyperparameters and must learn the same.
        runs: its runs.
        speed: tokens/s per device; None where no step was timed.
        speed_ratio: its ratio to the baseline's, with an interval; None where none was timed.
        validation: mean loss over its finished runs, with an interval where there are several.
        bits: the same in bits per byte.
        learning: for a variant with the hyperparameters of the baseline, or of another of its learning rates.
        quality: for variants with other hyperparameters; the first one decides the answer.
        reached: where there is a target loss.
        notes: on unfinished schedules, learning rates that are not tuned, other hardware, other code.
        few: whether a side has fewer than three runs, so speed is not ranked.
        speed_doubt: why speed is not ranked; empty where it is.
        outcomes: of its seeds.
        tried: number of learning rates that it is the best of; 0 or 1: only this one.
        untuned: whether another of its learning rates is better.
        against_best: how it compares with that one where runs diverged, such as "better on 4 of 6 seeds, 2 diverged".
        effort: for variants with other hyperparameters: their share of the baseline's compute.
    """

    label: str
    settings: Mapping[str, str]
    baseline: bool
    same_science: bool
    runs: tuple[RunResult, ...]
    speed: Interval | None
    speed_ratio: Interval | None
    validation: Interval | None
    bits: Interval | None
    learning: Learning | None = None
    quality: tuple[Quality, ...] = ()
    reached: TimeToTarget | None = None
    notes: tuple[str, ...] = ()
    few: bool = False
    speed_doubt: str = ""
    outcomes: Outcomes = Outcomes()
    tried: int = 0
    untuned: bool = False
    against_best: str = ""
    effort: Effort | None = None


@dataclass(frozen=True)
class FailedRun:
    """A trial without metrics, perhaps not yet started, or a run that failed or stopped, with the reason.

    Attributes:
        label: its name in the report.
        directory: its run's.
        state: see `State`.
        reason: why it failed or stopped.
        overrides: of its trial.
        is_hook_end: whether a hook ended it before its last step, as intended: it did not fail.
    """

    label: str
    directory: str
    state: State
    reason: str
    overrides: tuple[str, ...] = ()
    is_hook_end: bool = False


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        title: the sweep's name, or the directories.
        question: the question of the sweep; None without one.
        common: the main settings that all share: model, data, tokens, devices.
        differs: the settings that differ, with the values that there are.
        variants: the baseline first.
        failed: what failed, with reasons.
        target: the loss of `Variant.reached`.
        margin: of `Learning`, in nats.
        budget: what the variants had as much of as the baseline: "steps", "tokens", "flops" or "time".
        margin_share: what share of the baseline's compute the margin is worth; None where that is not known.
        notes: on the whole: several code ids, different hardware, different validation sets.
    """

    title: str
    question: str | None
    common: Mapping[str, str]
    differs: Mapping[str, tuple[str, ...]]
    variants: tuple[Variant, ...]
    failed: tuple[FailedRun, ...]
    target: float | None
    margin: float
    budget: str = "steps"
    margin_share: float | None = None
    notes: tuple[str, ...] = field(default=())
