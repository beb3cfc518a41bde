"""The training loop, and what it does between steps.

A step never waits for the host: its metrics (loss, norm, hash, requests to stop or save) are summed over the ranks in
one small vector on the device (`titan.training.step_metrics`) and read while the next step runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.state import init_optimizer_state
from titan.cluster.heap import HeapTrimmer
from titan.compile.backend import GraphWatch
from titan.dataset import corpora
from titan.dataset.loader import Batch, BatchShape, Loader
from titan.dataset.mixture import RowMixture
from titan.debug.activity import COMPUTING, EVALUATING, FINISHING, SAVING, UPDATING
from titan.hooks.calls import Hooks
from titan.parallelism import norms
from titan.parallelism.mesh import RunContext
from titan.parallelism.microbatches import Microbatches
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.schedule.optimizer_schedule import OptimizerSchedule
from titan.training import checkpointing, layer_metrics, step_metrics
from titan.training.audit import Audit
from titan.training.bad_steps import BadSteps
from titan.training.checkpointing import CheckpointPolicy
from titan.training.evaluation.averages import MovingAverage
from titan.training.evaluation.evaluator import Evaluator
from titan.training.layer_metrics import LayerMetrics
from titan.training.profiling import RunProfiler
from titan.training.rank_times import RankTimes
from titan.training.reporter import RunReporter
from titan.training.result_json import RunEnd, find_ended_by, sample_text
from titan.training.signals import StopSignals
from titan.training.step_metrics import (
    LOSS,
    PROFILE,
    SQUARES,
    VALID,
    VOID,
    InFlightStep,
    Requests,
    StepResult,
    StepTimer,
)
from titan.training.train_step import StepWatch, TrainStep


class Trainer:
    """Trains one attempt of a run on one rank.

    Attributes:
        step: the number of updates that have started.
        rows: the number of rows that they have read.
        requests: what ranks have asked for in steps whose metrics were read.
        evaluator: measures the weights; None before the run starts.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        world: RunContext,
        train_step: TrainStep,
        stop: StopSignals,
        reader: CheckpointReader | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        """Take everything that a step needs; nothing is written yet.

        Args:
            train_step: the model and the optimizer, as `titan.training.build` makes them.
            watch: looks at the steps, and may make their gradients; None: nothing does.
        """
        self.run, self.attempt, self.world, self.train_step, self.stop = run, attempt, world, train_step, stop
        self.step, self.rows, self.reader, self.watch = attempt.step, attempt.rows, reader, watch or StepWatch()
        init_optimizer_state(train_step.optimizer)
        decay, factors = run.evaluation.ema, run.schedule.build(run.training.steps)
        self.average = None if decay is None else MovingAverage(train_step, decay)
        self.optimizer_schedule = OptimizerSchedule(train_step.optimizer, run.optimizer.peak_lr, factors)
        self.mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(attempt.corpora, run.dataset))
        self.masks_targets = run.dataset.mask_documents or any(rows.corpus.masked for rows in self.mix.sources)
        self.hooks = Hooks(run, world, lambda: layer_metrics.iterate_parameters(train_step))
        self.layer_metrics = LayerMetrics(run, train_step, run.metrics.layers_every)
        self.rank_times = RankTimes(run.profile, world, train_step, run.compile.scope != "off")
        self.requests, self.timeouts = Requests(), Timeouts(run, attempt, world)
        self.heap = HeapTrimmer(world.device.type == "cpu")
        self.audit = Audit(run, train_step)
        measures = self.layer_metrics, self.rank_times, self.audit
        self.reporter = RunReporter(run, attempt, train_step, self.hooks, *measures, factors)
        show, warn = self.reporter.show, self.reporter.warn
        self.bad_steps = BadSteps(run, train_step, self.mix, self.timeouts.allow_task, self.to_device, warn)
        self.saving = CheckpointPolicy(run, attempt, train_step, self.mix, warn)
        self.evaluator: Evaluator | None = None
        predicted = attempt.prediction.step_parts if attempt.prediction else {}
        tasks: dict[str, tuple[Any, str]] = {"checkpoint": (self, "save"), "evaluation": (self, "validate")}
        self.profiler = RunProfiler(run, world, train_step, predicted, show, tasks)
        self.loader = build_loader(run, self.mix, world, attempt.step, show, self._is_stopped)

    def train(self) -> int:
        """Train to the end, or until a signal; then save, evaluate, sample and report.

        Returns:
            0 when all steps are done, 130 when a signal ended them, 75 when they are to be started again.

        Raises:
            StopRequestedError: when a signal came while it waited for the evaluation set.
        """
        start_time = time.monotonic()
        self.restore_state()
        self.reporter.start_run(self.mix, self.notes)
        with self.reporter.show_progress(self.step, self.run.training.steps):
            self.evaluator = Evaluator(self.run, self.train_step, self.mix, self.reporter.show, self._is_stopped)
            self.reporter.report_moment("on_run_start", self.step, {})
            with _no_automatic_gc():
                self.run_steps()
        self._finish_run(start_time)
        return self.requests.choose_exit_code()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was applied to the model, and where its weights came from."""
        return (*self.train_step.notes, *checkpointing.describe_source(self.attempt))

    def close(self) -> None:
        """End what runs beside training: the loader, a save once it is done, the recorder."""
        self.loader.close()
        self.rank_times.close()
        self.saving.close()
        self.reporter.close()

    def _is_stopped(self) -> bool:
        return self.stop.requested

    def restore_state(self) -> None:
        """Load a checkpoint's state or initial weights, and finish what a kill left of that checkpoint's save."""
        reader, self.reader = self.reader, None  # frees its metadata
        checkpointing.restore_state(self.run, self.attempt, self.train_step, self.average, reader)
        if self.attempt.checkpoint:
            self.saving.resume_post_save()

    # --- the loop

    def run_steps(self, steps: int | None = None) -> None:
        """Train `steps` steps, or all that are left."""
        last = self.run.training.steps if steps is None else self.step + steps
        previous: InFlightStep | None = None
        self.heap.begin_steps()
        graphs = GraphWatch(self.train_step.graph_labels)
        while self.step < last and not self.requests.stop:
            self.timeouts.allow_step(self.step + 1)
            ended = self.profiler.begin_step(self.step + 1)
            current = self._step(previous.timer if previous and not ended else None)
            self.heap.end_step()
            if self.step == self.attempt.step + 1:
                self.reporter.report_graphs(graphs)
            if previous and self._finalize_step(previous):
                current = self._step(batch=current.batch)  # the device left the weights as they were
            previous = self._run_periodic_tasks(current, last)
        if previous:
            self._finalize_step(previous)
        self.profiler.close()

    def _step(self, previous_timer: StepTimer | None = None, batch: Batch | None = None) -> InFlightStep:
        """Start one optimizer update on the device, and return the step, whose metrics `_finalize_step` reads.

        Args:
            previous_timer: times the step that this one follows without a break.
            batch: of a step that is repeated; None: the next one.
        """
        timer = StepTimer(self.world.device, previous_timer)
        self.rank_times.begin_step(follows=previous_timer is not None)
        batch = self.read_batch() if batch is None else batch
        self.world.activity.enter_phase(COMPUTING)
        lr, tokens = self.optimizer_schedule.set_rates(self.step), self.run.training.count_step_tokens(self.step)
        rows = self.to_device(batch)
        self.layer_metrics.measure_forward(self.step, rows)
        with self.audit.record(self.step, rows):
            loss = self.watch.compute_gradients(self.train_step, rows, 1 / tokens)
        if warning := self.audit.check(self.step, rows):
            self.reporter.warn(warning)
        self.rank_times.end_backward()
        metrics = self.world.all_reduce(self._pack_metrics(loss, batch))
        gradients, norm = self.train_step.list_gradients(), metrics[SQUARES].sqrt()
        if self.masks_targets:  # how many targets count is known only now
            scale = tokens / metrics[VALID].clamp(min=1)
            norms.scale_gradients(gradients, scale.float())
            norm = norm * scale
        norm = norm.float()
        if self.hooks.has_method("before_optimizer"):  # it may change gradients
            self.hooks.before_optimizer(self.step)
            norm = self.train_step.compute_norm()
        self.layer_metrics.measure_gradients(self.step)
        self.watch.see_gradients()
        if self.run.training.clip_norm is not None:
            norms.clip_gradients(gradients, norm, self.run.training.clip_norm)
        self.saving.wait_for_staging()
        bad = ~torch.isfinite(metrics[LOSS] + norm)
        self.world.activity.enter_phase(UPDATING)
        # After a bad step the weights wait until the host has found its cause, and this step is repeated.
        skipped = bad | self.bad_steps.latest | (metrics[VOID] > 0)
        self._update(skipped)
        if (load := self.train_step.expert_load) is not None:
            load.update(metrics[-load.num_counts :], skipped)
        self.layer_metrics.measure_updates(self.step)
        self.bad_steps.latest, self.rows = bad, batch.rows_read
        return self._copy_metrics_to_host(batch, lr, loss, torch.cat([metrics, norm.double()[None]]), timer)

    def read_batch(self) -> Batch:
        """Begin the next step: wait for its rows."""
        self.world.activity.begin_step(self.step + 1)
        batch, self.step = next(self.loader), self.step + 1
        return batch

    def to_device(self, batch: Batch) -> Microbatches:
        """Copy a batch to this rank's device; ranks that share rows get those of the rank that reads them."""
        fields = torch.from_numpy(batch.fields)
        if self.world.device.type == "cuda":
            fields = fields.pin_memory().to(self.world.device, non_blocking=True)
        return Microbatches.from_fields(self.world.broadcast_rows(fields).long())

    def _pack_metrics(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return this rank's part of the step's vector."""
        stop, squares = self.stop, self.train_step.sum_gradient_squares()
        ends = self.hooks.stop_request is not None
        requests = stop.requested, stop.requeue, self.saving.should_save(), self.profiler.take_request(), ends
        return step_metrics.pack_metrics(loss, batch, squares, requests, self.rank_times.build_slots(self.step))

    def _update(self, skipped: Tensor) -> None:
        """Update the weights, unless the step is `skipped`.

        Fused optimizers skip the update on the device; for others the host waits and decides.
        """
        optimizer: Any = self.train_step.optimizer
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # a blocking copy where weights are on the host: torch's own would not wait for the device
            optimizer.found_inf = skipped.float().cpu() if self.run.memory.offload else skipped.float()
            optimizer.step()
        elif not skipped.item():
            optimizer.step()
        if self.train_step.scales is not None:
            self.train_step.scales.update()
        if self.average is not None:
            self.average.update(skipped)
        optimizer.zero_grad(set_to_none=True)

    def _copy_metrics_to_host(
        self, batch: Batch, lr: float, loss: Tensor, metrics: Tensor, timer: StepTimer
    ) -> InFlightStep:
        """Start the copy of a step's metrics to the host, and stop its timer."""
        if self.world.device.type == "cuda":
            host = torch.empty(metrics.shape, dtype=metrics.dtype, pin_memory=True)
            metrics = host.copy_(metrics, non_blocking=True)
        timer.stop()
        self.rank_times.end_step(self.step)
        return InFlightStep(self.step, batch, lr, loss, metrics, timer)

    def take_step(self, batch: Batch) -> StepResult:
        """Take the update of a batch by itself, and return what all ranks measured; nothing is reported of it."""
        result = self._read(self._step(batch=batch))
        self.bad_steps.latest = torch.zeros_like(self.bad_steps.latest)
        return result

    def _read(self, step: InFlightStep) -> StepResult:
        return step.read(self.rank_times.num_slots, self.train_step.num_expert_counts)

    def _finalize_step(self, step: InFlightStep) -> bool:
        """Read a step's metrics, act on them, report them; return whether a step that has started must be repeated."""
        result = self._read(step)
        self.rank_times.finish_step(result.step, result.seconds, result.batch.wait_seconds)
        self.requests.add(result.metrics, is_last=self.step >= self.run.training.steps)
        if result.is_void:  # no step came after it
            self.step = min(self.step, result.step - 1)
            self.rows = self.run.training.count_rows_before(self.step + 1)
            return False
        self.profiler.is_requested = self.profiler.is_requested or result.metrics[PROFILE] > 0
        cause = self._check_finite(result)
        self.reporter.report_step(result, cause, self.saving.poll_finished)
        return bool(cause)

    def _check_finite(self, result: StepResult) -> str:
        """Report a step whose loss or gradients are not finite; return where that began, empty for a finite step."""
        bad_step = self.bad_steps.examine(result)
        if bad_step is None:
            return ""
        symptom, cause = bad_step
        if self.bad_steps.count >= self.run.training.bad_steps:
            self.reporter.report_saves(self.step, self.saving.wait_for_saves())
            raise self.bad_steps.build_error(result.step, symptom, cause, self.saving.saved_step)
        figures = {"loss": result.loss, "grad_norm": result.grad_norm, "not_finite": cause}
        self.reporter.report_moment("on_not_finite", result.step, figures)
        return cause

    # --- between steps

    def _run_periodic_tasks(self, step: InFlightStep, last: int) -> InFlightStep | None:
        """Evaluate, save and collect garbage when it is time.

        Returns:
            The step; None where it had to be finalized for one of these tasks.
        """
        settings, every = self.run.checkpoint, self.run.evaluation.every
        is_regular = self.step in settings.at or (settings.every > 0 and self.step % settings.every == 0)
        saves = settings.mode != "off" and (self.requests.save or is_regular) and self.step < last
        is_due = every > 0 and self.step % every == 0 and self.step < self.run.training.steps
        validates = is_due and bool(self.evaluator)
        if not (validates or saves):
            if self.step % self.run.training.gc_every == 0:
                gc.collect(1)
            return step
        self._finalize_step(step)
        self.timeouts.allow_task()
        if validates:
            self.validate()
        if saves:
            self.save()
        return None

    def validate(self) -> None:
        """Measure what the evaluation axis asks for; all ranks call it together."""
        if not self.evaluator:
            return
        self.world.activity.enter_phase(EVALUATING)
        self.heap.release()
        self.reporter.report_evaluation(self.step, self.rows, self.evaluator.measure(self.average))

    def save(self) -> None:
        """Start a checkpoint; all ranks call it together."""
        self.world.activity.enter_phase(SAVING)
        self.heap.release()
        self.requests.save = False
        self.saving.save(self.step, self.rows)
        self.reporter.report_saves(self.step, self.saving.poll_finished())

    # --- the end

    def _finish_run(self, start_time: float) -> None:
        """After the last step: save, evaluate, sample, and report the result."""
        self.world.activity.enter_phase(FINISHING)
        self.heap.release()
        self.timeouts.allow_task()
        self.world.activity.enter_phase(SAVING)
        saves_end = not self.requests.is_interrupted or self.run.checkpoint.on_stop
        saves = self.saving.finish_saving(self.step, self.rows) if saves_end else self.saving.wait_for_saves()
        self.reporter.report_saves(self.step, saves)
        if not self.requests.is_interrupted:
            self.validate()
            self.world.activity.enter_phase(FINISHING)
        finished, stalled_seconds = not self.requests.stop, self.saving.stalled_seconds
        sample = sample_text(self.run, self.train_step, self.mix) if finished else None
        ended_by = find_ended_by(self.hooks, self.world) if self.requests.ended_by_hook else {}
        end = RunEnd(finished, self.step, self.rows, start_time, stalled_seconds, sample, ended_by)
        self.reporter.report_end(end)


@contextmanager
def _no_automatic_gc() -> Iterator[None]:
    """Turn Python's automatic garbage collection off: each rank would pause at another step, and all wait each time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def count_hook_seconds(run: Run) -> float:
    """Return how much longer collectives may take because of hooks; the watcher knows whether one is waited for."""
    return run.cluster.hook_timeout if run.hooks else 0.0


class Timeouts:
    """Sets the timeout of all groups of this rank; all ranks call its methods together."""

    def __init__(self, run: Run, attempt: Attempt, world: RunContext) -> None:
        """Take the settings, the first step of the attempt, and the ranks."""
        self.run, self.attempt, self.world, self.seconds = run, attempt, world, run.cluster.timeout

    def allow_step(self, step: int) -> None:
        """Set the timeout for a step.

        The first step, and the first of each batch size, may compile; and with `dataset.stream` a rank may have to wait
        for data that is still being prepared.
        """
        is_first = step == self.attempt.step + 1 or step == self.run.training.find_phase(step).step
        if is_first or self.run.dataset.stream:
            self.allow_task()
        else:
            self._set_seconds(self.run.cluster.step_seconds)

    def allow_task(self) -> None:
        """Set the timeout for what is no step, such as a save or an evaluation."""
        self._set_seconds(self.run.cluster.timeout)

    def _set_seconds(self, seconds: float) -> None:
        if seconds != self.seconds:
            self.world.set_timeout(seconds + count_hook_seconds(self.run), barrier=seconds < self.seconds)
            self.seconds = self.world.activity.timeout = seconds


def build_loader(
    run: Run, mix: RowMixture, world: RunContext, step: int, show: Callable[[str], None], stopped: Callable[[], bool]
) -> Loader:
    """Return what yields the batches of the steps after `step`; see `Loader` for the arguments."""
    return Loader(
        mix,
        run.training,
        world.data_shard,
        BatchShape(run.microbatches, run.microbatch_rows, run.training.seq_len),
        step=step + 1,
        prefetch=run.dataset.prefetch,
        mask_documents=run.dataset.mask_documents,
        has_keys=run.model.uses_keys,
        is_reader=world.reads_data,
        patience=run.cluster.timeout,
        log=show,
        is_stopped=stopped,
    )
