"""The training loop, and what it does between steps.

A step never waits for the host: its metrics (loss, norm, hash, requests to stop or save) are summed over the ranks in
one small vector on the device (`titan.training.step_metrics`) and read while the next step runs.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from titan.checkpoint import retention
from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import restore_train_state
from titan.checkpoint.state import init_optimizer_state
from titan.console.progress import Progress
from titan.dataset import corpora
from titan.dataset.loader import Batch
from titan.debug.activity import COMPUTING, EVALUATING, FINISHING, SAVING, UPDATING
from titan.errors import RunError
from titan.files.atomic import write_atomic
from titan.hooks.calls import Hooks
from titan.metrics.recorder import Recorder, peak_memory_gib
from titan.parallelism import grad_norm
from titan.parallelism.mesh import World, release_freed_memory
from titan.parallelism.microbatches import Microbatches
from titan.run import summary
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.schedule.optimizer_schedule import OptimizerSchedule
from titan.training import layer_norms, loader_setup, metrics_setup, not_finite, result_json, step_metrics
from titan.training.checkpointing import CheckpointPolicy
from titan.training.evaluation.averages import MovingAverage, use_evaluation_weights
from titan.training.evaluation.evaluator import Evaluator
from titan.training.layer_metrics import LayerMetrics
from titan.training.profiling import RunProfiler
from titan.training.rank_times import RankTimes
from titan.training.sample_text import sample_text
from titan.training.signals import choose_stop_exit_code
from titan.training.step_metrics import (
    END,
    LOSS,
    PAIRS,
    PROFILE,
    REQUEUE,
    SAVE,
    SQUARES,
    STOP,
    VALID,
    VOID,
    InFlightStep,
    StepTimer,
    StepTimes,
)
from titan.training.train_step import TrainStep
from titan.weights.start import load_initial_weights

log = logging.getLogger("titan")


class StopSource(Protocol):
    """Tells the trainer that a signal came.

    Attributes:
        requested: whether to stop at the end of the step.
        requeue: whether to end with the exit code that asks to be started again.
    """

    requested: bool
    requeue: bool


class Trainer:
    """Trains one attempt of a run on one rank."""

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        world: World,
        train_step: TrainStep,
        stop: StopSource,
        reader: CheckpointReader | None = None,
    ) -> None:
        """Take everything that a step needs; nothing is written yet.

        Args:
            run: the experiment.
            attempt: where it begins and what it is called.
            world: the ranks.
            train_step: the model and the optimizer, as `titan.training.build` makes them.
            stop: asked at every step whether a signal came.
            reader: the attempt's checkpoint, where it has been opened already.
        """
        self.activity = world.activity
        self.run, self.attempt, self.world, self.train_step, self.stop = run, attempt, world, train_step, stop
        self.step, self.rows, self.reader = attempt.step, attempt.rows, reader
        init_optimizer_state(train_step.optimizer)
        decay = run.evaluation.ema
        self.average = None if decay is None else MovingAverage(train_step, decay)
        self.speed = metrics_setup.build_step_speed(run)
        self.mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(attempt.corpora, run.dataset))
        self.masks_targets = run.dataset.mask_documents or any(rows.corpus.masked for rows in self.mix.sources)
        self.saving = CheckpointPolicy(run, attempt, train_step, self.mix, self._warn)
        self.activity.get_running_save = self.saving.find_running_save
        self.stopping = self.requeue = self.save_requested = False
        self.hooks, self.ended_by_hook = Hooks(run, world, lambda: layer_norms.iterate_parameters(train_step)), False
        self.bad_steps, self.bad = 0, torch.zeros((), dtype=torch.bool, device=world.device)
        self.optimizer_schedule = OptimizerSchedule(
            train_step.optimizer, run.optimizer.lr, run.schedule.build(run.training.steps)
        )
        self.step_times = StepTimes()
        self.layer_metrics = LayerMetrics(run, train_step, run.metrics.layers_every)
        self.spikes = metrics_setup.build_spike_detector(run, attempt, world.is_rank0)
        self.validation: dict[str, float] = {}
        self.recorder: Recorder | None = None
        self.progress: Progress | None = None
        self.evaluator: Evaluator | None = None
        self.timeout = world.timeout
        self.profiler = self._build_profiler()
        self.rank_times = RankTimes(run.profile, world, train_step, run.compile.scope != "off")
        self.loader = loader_setup.build_loader(
            run, self.mix, world, attempt.step, self._show, lambda: self.stop.requested
        )
        self.expert_load = train_step.expert_load
        self.notes = train_step.notes

    def train(self) -> int:
        """Train to the end, or until a signal; then save, evaluate, sample and report.

        Returns:
            0 when all steps are done, 130 when a signal ended them, 75 when they are to be started again.

        Raises:
            StopRequestedError: when a signal came while it waited for the evaluation set.
        """
        start = time.monotonic()
        self._restore_state()
        if self.world.is_rank0:
            summary.show_run(self.run, self.attempt, self.mix, self.notes)
            self.recorder = metrics_setup.build_recorder(self.run, self.attempt, self._warn, self.mix)
        with Progress(self.step, self.run.training.steps, self.run.metrics.console_every) as progress:
            self.progress = progress if self.world.is_rank0 else None
            self.evaluator = Evaluator(self.run, self.train_step, self.mix, self._show, lambda: self.stop.requested)
            self._call_hooks("on_run_start", {})
            with _no_automatic_gc():
                self.run_steps()
        self._finish_run(start)
        return choose_stop_exit_code(self.requeue) if self.is_interrupted else 0

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the run before its last step."""
        return self.stopping and not self.ended_by_hook

    def close(self) -> None:
        """End what runs beside training: the loader, a save once it is done, the recorder."""
        self.loader.close()
        self.rank_times.close()
        self.saving.close()
        if self.recorder:
            self.recorder.close()

    def _restore_state(self) -> None:
        """Remove what a killed attempt may have left, and load a checkpoint's state or initial weights."""
        if self.world.is_rank0:
            retention.remove_leftovers(Path(self.run.directory), self.run.checkpoint.grace)
        coordinator, complete = Coordinator.from_world(self.world), False
        if self.attempt.checkpoint:
            reader = self.reader or CheckpointReader(self.attempt.checkpoint)
            self.reader = None  # frees its metadata
            complete = restore_train_state(self.train_step, reader, coordinator)
            self._add_note(
                f"weights, optimizer state and data position: from {summary.shorten_path(self.attempt.checkpoint)}"
            )
            self.saving.resume_post_save()
        elif self.attempt.weights:
            load_initial_weights(self.train_step, self.attempt.weights, coordinator)
            self._add_note(f"weights: from {summary.shorten_path(self.attempt.weights)}")
        if self.average is not None and not complete:
            self.average.copy_weights()

    def _add_note(self, line: str) -> None:
        """Add a line to what was applied to the model."""
        log.info(line)
        self.notes = (*self.notes, line)

    # --- the loop

    def run_steps(self, steps: int | None = None) -> None:
        """Train `steps` steps, or all that are left."""
        last = self.run.training.steps if steps is None else self.step + steps
        previous: InFlightStep | None = None
        while self.step < last and not self.stopping:
            self._set_timeout(self._choose_step_timeout())
            ended = self.profiler.begin_step(self.step + 1)
            current = self._step(previous.timer if previous and not ended else None)
            if self.step == self.attempt.step + 1:  # its freed memory lies between the optimizer's state, made after it
                release_freed_memory(self.world.device)
            if previous and self._finalize_step(previous):
                current = self._step(batch=current.batch)  # the device left the weights as they were
            previous = self._run_periodic_tasks(current, last)
        if previous:
            self._finalize_step(previous)
        self.profiler.close()

    def _step(self, previous_timer: StepTimer | None = None, batch: Batch | None = None) -> InFlightStep:
        """Start one optimizer update on the device.

        Args:
            previous_timer: times the step that this one follows without a break.
            batch: of a step that is repeated; None: the next one.

        Returns:
            The step, whose metrics `_finalize_step` reads.
        """
        timer = StepTimer(self.world.device, previous_timer)
        self.rank_times.begin_step(follows=previous_timer is not None)
        if batch is None:
            self.activity.begin_step(self.step + 1)
            batch, self.step = next(self.loader), self.step + 1
        self.activity.enter_phase(COMPUTING)
        layers = self.layer_metrics if self.layer_metrics.is_due(self.step) else None
        lr = self.optimizer_schedule.set_rates(self.step)
        tokens, rows = self.run.training.find_phase(self.step).rows * self.run.training.seq_len, self._to_device(batch)
        if layers:
            layers.measure_forward(self.step, rows)
        loss = self.train_step.backward(rows, 1 / tokens)
        self.rank_times.end_backward()
        metrics = self.world.all_reduce(self._pack_metrics(loss, batch))
        gradients, norm = self.train_step.list_gradients(), metrics[SQUARES].sqrt()
        if self.masks_targets:  # how many targets count is known only now
            scale = tokens / metrics[VALID].clamp(min=1)
            grad_norm.scale_gradients(gradients, scale.float())
            norm = norm * scale
        norm = norm.float()
        if self.hooks.has_method("before_optimizer"):  # it may change gradients
            self.hooks.before_optimizer(self.step)
            norm = self.train_step.compute_norm()
        if layers:
            layers.measure_gradients()
        if self.run.training.clip_norm is not None:
            grad_norm.clip_gradients(gradients, norm, self.run.training.clip_norm)
        self.saving.wait_for_staging()
        bad = ~torch.isfinite(metrics[LOSS] + norm)
        self.activity.enter_phase(UPDATING)
        # After a bad step the weights wait until the host has found its cause, and this step is repeated.
        skipped = bad | self.bad | (metrics[VOID] > 0)
        self._update(skipped)
        if self.expert_load is not None:
            self.expert_load.update(metrics[-self.expert_load.num_counts :], skipped)
        self.bad = bad
        if layers:
            layers.measure_updates(self.step)
        self.rows = batch.rows_read
        return self._copy_metrics_to_host(batch, lr, loss, torch.cat([metrics, norm.double()[None]]), timer)

    def _to_device(self, batch: Batch) -> Microbatches:
        """Copy a batch to this rank's device; ranks that share rows get those of the rank that reads them."""
        fields = torch.from_numpy(batch.fields)
        if self.world.device.type == "cuda":
            fields = fields.pin_memory().to(self.world.device, non_blocking=True)
        return Microbatches(*self.world.broadcast_rows(fields).long())

    def _pack_metrics(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return this rank's part of the step's vector."""
        return step_metrics.pack_metrics(
            loss,
            batch,
            squares=self.train_step.sum_gradient_squares(),
            stop=self.stop.requested,
            requeue=self.stop.requeue,
            save=self.saving.should_save(),
            profile=self.profiler.take_request(),
            end=self.hooks.stop_request is not None,
            slots=self.rank_times.build_slots(self.step),
        )

    def _update(self, bad: Tensor) -> None:
        """Update the weights, unless `bad`: fused optimizers decide that on the device, others are asked here."""
        optimizer: Any = self.train_step.optimizer
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # a blocking copy where weights are on the host: torch's own would not wait for the device
            optimizer.found_inf = bad.float().cpu() if self.run.memory.offload else bad.float()
            optimizer.step()
        elif not bad.item():
            optimizer.step()
        if self.train_step.scales is not None:
            self.train_step.scales.update()
        if self.average is not None:
            self.average.update(bad)
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

    def _finalize_step(self, step: InFlightStep) -> bool:
        """Read a step's metrics, act on them and log them; return whether a step that has started must be repeated."""
        values, norm = step.read()
        metrics, slots, counts = step_metrics.split_metrics(
            values, self.rank_times.num_slots, self.expert_load.num_counts if self.expert_load else 0
        )
        seconds = step.timer.compute_seconds()
        self.rank_times.finish_step(step.step, seconds, step.batch.wait_seconds)
        self.stopping = self.stopping or metrics[STOP] > 0
        self.requeue = self.requeue or metrics[REQUEUE] > 0
        if metrics[VOID] > 0:  # a signal came while a rank waited for data: this was no step, and none came after it
            self.step = min(self.step, step.step - 1)
            self.rows = self.run.training.count_rows_before(self.step + 1)
            return False
        self.ended_by_hook = self.ended_by_hook or (metrics[END] > 0 and self.step < self.run.training.steps)
        self.stopping = self.stopping or self.ended_by_hook
        self.save_requested = self.save_requested or metrics[SAVE] > 0
        self.profiler.is_requested = self.profiler.is_requested or metrics[PROFILE] > 0
        loss = metrics[LOSS] / max(1, metrics[VALID])
        cause = self._check_finite(step, loss, norm)
        self.step_times.add(seconds, metrics[PAIRS], step.batch.wait_seconds)
        ranks, warnings = self.rank_times.read_slots(step.step, slots)
        for line in warnings:
            self._warn(line)
        hook_metrics = self.hooks.end_step(step.step, lambda: self._build_figures(step, loss, norm, seconds))
        if self.recorder:
            self._log_records(self.saving.poll_finished())
            record = self._build_record(step, loss, norm, seconds, metrics) | self._record_expert_load(
                step.step, counts
            )
            self.recorder.log(record | ranks | cause | self._mark_spike(step, loss) | hook_metrics)
        if self.progress:
            self.progress.step(step.step, loss, self._count_tokens(step) / seconds)
        return bool(cause)

    def _check_finite(self, step: InFlightStep, loss: float, norm: float) -> dict[str, str]:
        """Report a step whose loss or gradients were not finite; return what its record says of that.

        Raises:
            RunError: on `training.bad_steps` such steps in a row.
        """
        if math.isfinite(loss + norm):
            self.bad_steps = 0
            return {}
        self.bad_steps += 1
        losses = self.world.all_gather_object(float(step.local_loss.flatten()[0]))
        ranks = [r for r, value in enumerate(losses) if not math.isfinite(value)]
        origin = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradients (the loss is finite)"
        rows = f"rows {step.batch.first} to {step.batch.last}"
        cause = self._find_cause(step)
        self._warn(f"step {step.step}: not finite: {origin}, {rows}: {cause}; the weights are unchanged")
        if self.bad_steps >= self.run.training.bad_steps:
            self._log_records(self.saving.wait_for_saves())
            raise RunError(
                f"{self.bad_steps} steps in a row were not finite, the last one step {step.step}: {origin}, {rows}: "
                f"{cause}; "
                f"lower optimizer.lr={self.run.optimizer.lr:g}, or raise training.bad_steps="
                f"{self.run.training.bad_steps}. The last checkpoint is from step {self.saving.saved_step}."
            )
        self._call_hooks("on_not_finite", {"loss": loss, "grad_norm": norm, "not_finite": cause}, step.step)
        return {"not_finite": cause}

    def _find_cause(self, step: InFlightStep) -> str:
        """Repeat a step that was not finite, and return where that began; details are in `debug/`."""
        self._set_timeout(self.run.cluster.timeout)
        run, self.bad = self.run, torch.zeros_like(self.bad)
        report = not_finite.investigate_step(
            run,
            self.train_step,
            self._to_device(step.batch),
            1 / self._count_tokens(step),
            self._build_row_numbering(step.step),
        )
        if self.world.is_rank0:
            report.write(Path(run.directory), step.step)
        return report.sentence

    def _build_row_numbering(self, step: int) -> Callable[[int], int | None]:
        """Return the function that gives the number in the data of this rank's rows of a step, None for padding."""
        training = self.run.training
        rank_rows = self.world.data_shard.slice_rows(training.find_phase(step).rows)
        numbers = self.mix.compute_row_numbers(
            np.arange(rank_rows.start, rank_rows.stop) + training.count_rows_before(step)
        ).tolist()
        return lambda index: numbers[index] if index < len(numbers) else None

    def _mark_spike(self, step: InFlightStep, loss: float) -> dict[str, float]:
        """Report a step whose loss is a spike; return what its record says of that."""
        if spike := self.spikes.add(loss):
            self._warn(spike.format_message(step.step, loss, step.batch.first, step.batch.last))
        return spike.build_record() if spike else {}

    def _build_record(
        self, step: InFlightStep, loss: float, norm: float, seconds: float, metrics: list[float]
    ) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl."""
        return {
            "step": step.step,
            "tokens": step.batch.rows_read * self.run.training.seq_len,
            "loss": loss,
            **step_metrics.compute_term_means(self.train_step.terms, metrics),
            "grad_norm": norm,
            "lr": step.lr,
            **metrics_setup.build_weight_decay_record(self.run, self.optimizer_schedule.factors, step.step),
            "step_seconds": seconds,
            "data_seconds": step.batch.wait_seconds,
            **self.speed.compute(seconds, self._count_tokens(step), metrics[PAIRS]),
            "valid_tokens": int(metrics[VALID]),
            "memory_gib": peak_memory_gib(self.world.device),
            "rows": [step.batch.first, step.batch.last],
            "batch_hash": step_metrics.format_batch_hash(metrics),
            **self.layer_metrics.build_record(step.step),
        }

    def _record_expert_load(self, step: int, counts: list[float]) -> dict[str, Any]:
        """Report routers that have collapsed; return what the record of a step says of the experts' load."""
        if self.expert_load is None:
            return {}
        for line in self.expert_load.check_collapse(counts):
            self._warn(f"step {step}: {line}")
        return self.expert_load.build_record(counts, per_expert=self.layer_metrics.is_due(step))

    def _build_figures(self, step: InFlightStep, loss: float, norm: float, seconds: float) -> dict[str, Any]:
        """Return the figures of a step for hooks."""
        tokens = step.batch.rows_read * self.run.training.seq_len
        return {"tokens": tokens, "loss": loss, "grad_norm": norm, "lr": step.lr, "step_seconds": seconds}

    def _count_tokens(self, step: InFlightStep) -> int:
        """Return the number of tokens of a step."""
        return self.run.training.find_phase(step.step).rows * self.run.training.seq_len

    # --- between steps

    def _run_periodic_tasks(self, step: InFlightStep, last: int) -> InFlightStep | None:
        """Evaluate, save and collect garbage when it is time.

        Returns:
            The step; None where it had to be finalized for one of these tasks.
        """
        number, run = self.step, self.run
        every = run.evaluation.every
        validate = bool(self.evaluator) and every > 0 and number % every == 0 and number < run.training.steps
        save = self.save_requested or (run.checkpoint.every > 0 and number % run.checkpoint.every == 0)
        save = save and run.checkpoint.mode != "off" and number < last
        if not (validate or save):
            if number % run.training.gc_every == 0:
                gc.collect(1)
            return step
        self._finalize_step(step)
        self._set_timeout(run.cluster.timeout)
        if validate:
            self.validate()
        if save:
            self.save()
        return None

    def validate(self) -> None:
        """Measure what the evaluation axis asks for; all ranks call it together."""
        if not self.evaluator:
            return
        self.activity.enter_phase(EVALUATING)
        release_freed_memory(self.world.device)
        self.validation = self.evaluator.measure(self.average)
        hook_metrics = self.hooks.call_moment("on_validation", self.step, self.validation)
        if self.recorder:
            tokens_read = self.rows * self.run.training.seq_len
            self.recorder.log({"step": self.step, "tokens": tokens_read, **self.validation, **hook_metrics})
        if self.progress:
            self.progress.print_line(f"step {self.step:,}: {summary.describe_evaluation(self.validation)}")

    def save(self) -> None:
        """Start a checkpoint; all ranks call it together."""
        self.activity.enter_phase(SAVING)
        release_freed_memory(self.world.device)
        self.save_requested = False
        self.saving.save(self.step, self.rows)
        self._log_records(self.saving.poll_finished())

    def _choose_step_timeout(self) -> float:
        """Return the seconds that ranks may wait for each other in the next step.

        The first step, and the first of each batch size, may compile; and with `dataset.stream` a rank may have to wait
        for data that is still being prepared.
        """
        may_compile = (
            self.step == self.attempt.step or self.run.training.find_phase(self.step + 1).step == self.step + 1
        )
        cluster = self.run.cluster
        return cluster.timeout if may_compile or self.run.dataset.stream else cluster.step_seconds

    def _set_timeout(self, seconds: float) -> None:
        """Set how long ranks wait for each other; all ranks call it together."""
        if seconds != self.timeout:
            self.world.set_timeout(seconds, barrier=seconds < self.timeout)
            self.timeout = self.activity.timeout = seconds

    def _log_records(self, records: list[dict[str, Any]]) -> None:
        """Log finished saves at the present step: trackers need steps in ascending order."""
        if self.recorder:
            for record in records:
                hook_metrics = self.hooks.call_moment("on_checkpoint", record["checkpoint_step"], record)
                self.recorder.log({"step": self.step, **record, **hook_metrics})

    def _call_hooks(self, moment: str, figures: Mapping[str, Any], step: int | None = None) -> None:
        """Call the hooks at a moment that has no record: what they log gets one; `step`: None for the present one."""
        step = self.step if step is None else step
        hook_metrics = self.hooks.call_moment(moment, step, figures)
        if self.recorder and hook_metrics:
            self.recorder.log({"step": step, **hook_metrics})

    def _warn(self, line: str) -> None:
        """Write a line to this rank's log, and to the terminal on rank 0."""
        log.warning(line)
        self._show(line)

    def _show(self, line: str) -> None:
        """Write a line to the terminal, on rank 0."""
        if self.progress:
            self.progress.print_line(line)

    # --- the end

    def _finish_run(self, start: float) -> None:
        """After the last step: save, evaluate, sample, and report the result."""
        self.activity.enter_phase(FINISHING)
        release_freed_memory(self.world.device)
        self._set_timeout(self.run.cluster.timeout)
        self.activity.enter_phase(SAVING)
        if not self.is_interrupted or self.run.checkpoint.on_stop:
            self._log_records(self.saving.finish_saving(self.step, self.rows))
        else:
            self._log_records(self.saving.wait_for_saves())
        sample = None
        if not self.is_interrupted:
            self.validate()
            self.activity.enter_phase(FINISHING)
        if not self.stopping:
            with use_evaluation_weights(self.train_step):
                sample = sample_text(self.run, self.train_step, self.mix)
        ended_by = result_json.find_ended_by(self)
        self._call_hooks("on_run_end", {"finished": not self.stopping, **ended_by, **self.validation})
        if self.recorder:
            result = result_json.build_result(self, time.monotonic() - start, sample, ended_by)
            write_atomic(Path(self.run.directory) / "result.json", json.dumps(result, indent=1))
            summary.show_result(self.run, result)
            self.activity.enter_phase(FINISHING)
            self.recorder.finish(result)

    def _build_profiler(self) -> RunProfiler:
        predicted = self.attempt.prediction.step_parts if self.attempt.prediction else {}
        tasks: dict[str, tuple[Any, str]] = {"checkpoint": (self, "save"), "evaluation": (self, "validate")}
        return RunProfiler(self.run, self.world, self.train_step, predicted, self._show, tasks)


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
