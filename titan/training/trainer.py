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
from titan.checkpoint.restore import restore
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
from titan.schedule.rates import Rates
from titan.training import layer_norms, not_finite, reading, recording, results, step_metrics
from titan.training.checkpointing import CheckpointPolicy
from titan.training.evaluation.averages import MovingAverage, evaluated
from titan.training.evaluation.evaluator import Evaluator
from titan.training.layer_metrics import LayerMetrics
from titan.training.profiling import Profiling
from titan.training.rank_times import RankTimes
from titan.training.sample import sample_text
from titan.training.signals import exit_code_of_stop
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
from titan.weights.start import start_from_weights

log = logging.getLogger("titan")


class StopSource(Protocol):
    """Tells the trainer that a signal came.

    Attributes:
        asked: whether to stop at the end of the step.
        again: whether to end with the exit code that asks to be started again.
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
    ) -> None:
        """Take everything that a step needs; nothing is written yet.

        Args:
            run: the experiment.
            attempt: where it begins and what it is called.
            world: the ranks.
            train_step: the model and the optimizer, as `titan.training.build` makes them.
            stop: asked at every step whether a signal came.
        """
        self.activity = world.activity
        self.run, self.attempt, self.world, self.train_step, self.stop = run, attempt, world, train_step, stop
        self.step, self.rows = attempt.step, attempt.rows
        init_optimizer_state(train_step.optimizer)
        decay = run.evaluation.ema
        self.average = None if decay is None else MovingAverage(train_step, decay)
        self.speed = recording.speed(run)
        self.mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(attempt.corpora, run.dataset))
        self.masks_targets = run.dataset.mask_documents or any(rows.corpus.masked for rows in self.mix.sources)
        self.saving = CheckpointPolicy(run, attempt, train_step, self.mix, self._warn)
        self.activity.save = self.saving.running
        self.stopping = self.requeue = self.save_requested = False
        self.hooks, self.ended = Hooks(run, world, lambda: layer_norms.parameters(train_step)), False
        self.bad_steps, self.bad = 0, torch.zeros((), dtype=torch.bool, device=world.device)
        self.rates = Rates(train_step.optimizer, run.optimizer.lr, run.schedule.build(run.training.steps))
        self.times = StepTimes()
        self.layers = LayerMetrics(run, train_step, run.metrics.layers_every)
        self.spikes = recording.spikes(run, attempt, world.is_rank0)
        self.validation: dict[str, float] = {}
        self.recorder: Recorder | None = None
        self.progress: Progress | None = None
        self.evaluator: Evaluator | None = None
        self.timeout = world.timeout
        self.profiling = self._profiling()
        self.rank_times = RankTimes(run.profile, world, train_step, run.compile.scope != "off")
        self.loader = reading.loader(run, self.mix, world, attempt.step, self._show, lambda: self.stop.requested)
        self.load = train_step.load
        self.applied = train_step.notes

    def train(self) -> int:
        """Train to the end, or until a signal; then save, evaluate, sample and report.

        Returns:
            0 when all steps are done, 130 when a signal ended them, 75 when they are to be started again.

        Raises:
            StopRequested: when a signal came while it waited for the evaluation set.
        """
        began = time.monotonic()
        self._restore()
        if self.world.is_rank0:
            summary.show_run(self.run, self.attempt, self.mix, self.applied)
            self.recorder = recording.recorder(self.run, self.attempt, self._warn, self.mix)
        with Progress(self.step, self.run.training.steps, self.run.metrics.console_every) as progress:
            self.progress = progress if self.world.is_rank0 else None
            self.evaluator = Evaluator(self.run, self.train_step, self.mix, self._show, lambda: self.stop.requested)
            self._call_hooks("on_run_start", {})
            with _no_automatic_gc():
                self.loop()
        self._finish(began)
        return exit_code_of_stop(self.requeue) if self.interrupted else 0

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run before its last step."""
        return self.stopping and not self.ended

    def close(self) -> None:
        """End what runs beside training: the loader, a save once it is done, the recorder."""
        self.loader.close()
        self.rank_times.close()
        self.saving.close()
        if self.recorder:
            self.recorder.close()

    def _restore(self) -> None:
        """Remove what a killed attempt may have left, and load a checkpoint's state or initial weights."""
        if self.world.is_rank0:
            retention.sweep(Path(self.run.directory), self.run.checkpoint.grace)
        coordinator, complete = Coordinator.of(self.world), False
        if self.attempt.checkpoint:
            complete = restore(self.train_step, Path(self.attempt.checkpoint), coordinator)
            self._note(f"weights, optimizer state and data position: from {summary.short(self.attempt.checkpoint)}")
            self.saving.resume_post_save()
        elif self.attempt.weights:
            start_from_weights(self.train_step, self.attempt.weights, coordinator)
            self._note(f"weights: from {summary.short(self.attempt.weights)}")
        if self.average is not None and not complete:
            self.average.begin()

    def _note(self, line: str) -> None:
        """Add a line to what was applied to the model."""
        log.info(line)
        self.applied = (*self.applied, line)

    # --- the loop

    def loop(self, steps: int | None = None) -> None:
        """Train `steps` steps, or all that are left."""
        last = self.run.training.steps if steps is None else self.step + steps
        previous: InFlightStep | None = None
        while self.step < last and not self.stopping:
            self._set_timeout(self._step_timeout())
            ended = self.profiling.begin(self.step + 1)
            current = self._step(previous.timer if previous and not ended else None)
            if self.step == self.attempt.step + 1:  # its freed memory lies between the optimizer's state, made after it
                release_freed_memory(self.world.device)
            if previous and self._finalize_step(previous):
                current = self._step(batch=current.batch)  # the device left the weights as they were
            previous = self._run_periodic_tasks(current, last)
        if previous:
            self._finalize_step(previous)
        self.profiling.close()

    def _step(self, before: StepTimer | None = None, batch: Batch | None = None) -> InFlightStep:
        """Start one optimizer update on the device.

        Args:
            before: times the step that this one follows without a break.
            batch: of a step that is repeated; None: the next one.

        Returns:
            The step, whose metrics `_finalize_step` reads.
        """
        timer = StepTimer(self.world.device, before)
        self.rank_times.begin_step(follows=before is not None)
        if batch is None:
            self.activity.begin_step(self.step + 1)
            batch, self.step = next(self.loader), self.step + 1
        self.activity.enter(COMPUTING)
        layers = self.layers if self.layers.due(self.step) else None
        lr = self.rates.set(self.step)
        tokens, rows = self.run.training.phase(self.step).rows * self.run.training.seq_len, self._to_device(batch)
        if layers:
            layers.before_step(self.step, rows)
        loss = self.train_step.backward(rows, 1 / tokens)
        self.rank_times.end_backward()
        metrics = self.world.sum(self._pack_metrics(loss, batch))
        gradients, norm = self.train_step.gradients(), metrics[SQUARES].sqrt()
        if self.masks_targets:  # how many targets count is known only now
            scale = tokens / metrics[VALID].clamp(min=1)
            grad_norm.scale(gradients, scale.float())
            norm = norm * scale
        norm = norm.float()
        if self.hooks.wants("before_optimizer"):  # it may change gradients
            self.hooks.before_optimizer(self.step)
            norm = self.train_step.norm()
        if layers:
            layers.before_update()
        if self.run.training.clip_norm is not None:
            grad_norm.clip(gradients, norm, self.run.training.clip_norm)
        self.saving.wait_for_staging()
        bad = ~torch.isfinite(metrics[LOSS] + norm)
        self.activity.enter(UPDATING)
        # After a bad step the weights wait until the host has found its cause, and this step is repeated.
        skipped = bad | self.bad | (metrics[VOID] > 0)
        self._update(skipped)
        if self.load is not None:
            self.load.update(metrics[-self.load.size :], skipped)
        self.bad = bad
        if layers:
            layers.after_update(self.step)
        self.rows = batch.read
        return self._copy_metrics_to_host(batch, lr, loss, torch.cat([metrics, norm.double()[None]]), timer)

    def _to_device(self, batch: Batch) -> Microbatches:
        """Copy a batch to this rank's device; ranks that share rows get those of the rank that reads them."""
        fields = torch.from_numpy(batch.fields)
        if self.world.device.type == "cuda":
            fields = fields.pin_memory().to(self.world.device, non_blocking=True)
        return Microbatches(*self.world.broadcast_rows(fields).long())

    def _pack_metrics(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return this rank's part of the step's vector."""
        return step_metrics.pack(
            loss,
            batch,
            squares=self.train_step.gradient_squares(),
            stop=self.stop.requested,
            requeue=self.stop.requeue,
            save=self.saving.should_save(),
            profile=self.profiling.request(),
            end=self.hooks.stop is not None,
            slots=self.rank_times.slots(self.step),
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
        metrics, slots, counts = step_metrics.split(values, self.rank_times.count, self.load.size if self.load else 0)
        seconds = step.timer.seconds()
        self.rank_times.finished(step.step, seconds, step.batch.wait_seconds)
        self.stopping = self.stopping or metrics[STOP] > 0
        self.requeue = self.requeue or metrics[REQUEUE] > 0
        if metrics[VOID] > 0:  # a signal came while a rank waited for data: this was no step, and none came after it
            self.step = min(self.step, step.step - 1)
            self.rows = self.run.training.rows_before(self.step + 1)
            return False
        self.ended = self.ended or (metrics[END] > 0 and self.step < self.run.training.steps)
        self.stopping = self.stopping or self.ended
        self.save_requested = self.save_requested or metrics[SAVE] > 0
        self.profiling.asked = self.profiling.asked or metrics[PROFILE] > 0
        loss = metrics[LOSS] / max(1, metrics[VALID])
        cause = self._check_finite(step, loss, norm)
        self.times.add(seconds, metrics[PAIRS], step.batch.wait_seconds)
        ranks, warnings = self.rank_times.read(step.step, slots)
        for line in warnings:
            self._warn(line)
        own = self.hooks.end_step(step.step, lambda: self._figures(step, loss, norm, seconds))
        if self.recorder:
            self._log_records(self.saving.poll_finished())
            record = self._record(step, loss, norm, seconds, metrics) | self._expert_load(step.step, counts)
            self.recorder.log(record | ranks | cause | self._mark_spike(step, loss) | own)
        if self.progress:
            self.progress.step(step.step, loss, self._tokens(step) / seconds)
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
        losses = self.world.gather(float(step.local_loss.flatten()[0]))
        ranks = [r for r, value in enumerate(losses) if not math.isfinite(value)]
        where = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradients (the loss is finite)"
        rows = f"rows {step.batch.first} to {step.batch.last}"
        cause = self._find_cause(step)
        self._warn(f"step {step.step}: not finite: {where}, {rows}: {cause}; the weights are unchanged")
        if self.bad_steps >= self.run.training.bad_steps:
            self._log_records(self.saving.wait())
            raise RunError(
                f"{self.bad_steps} steps in a row were not finite, the last one step {step.step}: {where}, {rows}: "
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
        report = not_finite.investigate(
            run, self.train_step, self._to_device(step.batch), 1 / self._tokens(step), self._number_of(step.step)
        )
        if self.world.is_rank0:
            report.write(Path(run.directory), step.step)
        return report.sentence

    def _number_of(self, step: int) -> Callable[[int], int | None]:
        """Return the function that gives the number in the data of this rank's rows of a step, None for padding."""
        training = self.run.training
        own = self.world.data_shard.rows(training.phase(step).rows)
        numbers = self.mix.numbers(np.arange(own.start, own.stop) + training.rows_before(step)).tolist()
        return lambda place: numbers[place] if place < len(numbers) else None

    def _mark_spike(self, step: InFlightStep, loss: float) -> dict[str, float]:
        """Report a step whose loss is a spike; return what its record says of that."""
        if mark := self.spikes.add(loss):
            self._warn(mark.sentence(step.step, loss, step.batch.first, step.batch.last))
        return mark.record() if mark else {}

    def _record(
        self, step: InFlightStep, loss: float, norm: float, seconds: float, metrics: list[float]
    ) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl."""
        return {
            "step": step.step,
            "tokens": step.batch.read * self.run.training.seq_len,
            "loss": loss,
            **step_metrics.term_means(self.train_step.terms, metrics),
            "grad_norm": norm,
            "lr": step.lr,
            **recording.weight_decay(self.run, self.rates.factors, step.step),
            "step_seconds": seconds,
            "data_seconds": step.batch.wait_seconds,
            **self.speed.of(seconds, self._tokens(step), metrics[PAIRS]),
            "valid_tokens": int(metrics[VALID]),
            "memory_gib": peak_memory_gib(self.world.device),
            "rows": [step.batch.first, step.batch.last],
            "batch_hash": step_metrics.batch_hash(metrics),
            **self.layers.record(step.step),
        }

    def _expert_load(self, step: int, counts: list[float]) -> dict[str, Any]:
        """Report routers that have collapsed; return what the record of a step says of the experts' load."""
        if self.load is None:
            return {}
        for line in self.load.collapsed(counts):
            self._warn(f"step {step}: {line}")
        return self.load.record(counts, each=self.layers.due(step))

    def _figures(self, step: InFlightStep, loss: float, norm: float, seconds: float) -> dict[str, Any]:
        """Return the figures of a step for hooks."""
        tokens = step.batch.read * self.run.training.seq_len
        return {"tokens": tokens, "loss": loss, "grad_norm": norm, "lr": step.lr, "step_seconds": seconds}

    def _tokens(self, step: InFlightStep) -> int:
        """Return the number of tokens of a step."""
        return self.run.training.phase(step.step).rows * self.run.training.seq_len

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
        self.activity.enter(EVALUATING)
        release_freed_memory(self.world.device)
        self.validation = self.evaluator.measure(self.average)
        own = self.hooks.call("on_validation", self.step, self.validation)
        if self.recorder:
            tokens_read = self.rows * self.run.training.seq_len
            self.recorder.log({"step": self.step, "tokens": tokens_read, **self.validation, **own})
        if self.progress:
            self.progress.say(f"step {self.step:,}: {summary.validation(self.validation)}")

    def save(self) -> None:
        """Start a checkpoint; all ranks call it together."""
        self.activity.enter(SAVING)
        release_freed_memory(self.world.device)
        self.save_requested = False
        self.saving.save(self.step, self.rows)
        self._log_records(self.saving.poll_finished())

    def _step_timeout(self) -> float:
        """Return the seconds that ranks may wait for each other in the next step.

        The first step, and the first of each batch size, may compile; and with `dataset.stream` a rank may have to wait
        for data that is still being prepared.
        """
        new = self.step == self.attempt.step or self.run.training.phase(self.step + 1).step == self.step + 1
        cluster = self.run.cluster
        return cluster.timeout if new or self.run.dataset.stream else cluster.step_seconds

    def _set_timeout(self, seconds: float) -> None:
        """Set how long ranks wait for each other; all ranks call it together."""
        if seconds != self.timeout:
            self.world.set_timeout(seconds, barrier=seconds < self.timeout)
            self.timeout = self.activity.timeout = seconds

    def _log_records(self, records: list[dict[str, Any]]) -> None:
        """Log finished saves at the present step: trackers need steps in ascending order."""
        if self.recorder:
            for record in records:
                own = self.hooks.call("on_checkpoint", record["checkpoint_step"], record)
                self.recorder.log({"step": self.step, **record, **own})

    def _call_hooks(self, moment: str, figures: Mapping[str, Any], step: int | None = None) -> None:
        """Call the hooks at a moment that has no record: what they log gets one; `step`: None for the present one."""
        step = self.step if step is None else step
        own = self.hooks.call(moment, step, figures)
        if self.recorder and own:
            self.recorder.log({"step": step, **own})

    def _warn(self, line: str) -> None:
        """Write a line to this rank's log, and to the terminal on rank 0."""
        log.warning(line)
        self._show(line)

    def _show(self, line: str) -> None:
        """Write a line to the terminal, on rank 0."""
        if self.progress:
            self.progress.say(line)

    # --- the end

    def _finish(self, began: float) -> None:
        """After the last step: save, evaluate, sample, and report the result."""
        self.activity.enter(FINISHING)
        release_freed_memory(self.world.device)
        self._set_timeout(self.run.cluster.timeout)
        self.activity.enter(SAVING)
        if not self.interrupted or self.run.checkpoint.on_stop:
            self._log_records(self.saving.finish(self.step, self.rows))
        else:
            self._log_records(self.saving.wait())
        sample = None
        if not self.interrupted:
            self.validate()
            self.activity.enter(FINISHING)
        if not self.stopping:
            with evaluated(self.train_step):
                sample = sample_text(self.run, self.train_step, self.mix)
        ended_by = results.ended_by(self)
        self._call_hooks("on_run_end", {"finished": not self.stopping, **ended_by, **self.validation})
        if self.recorder:
            result = results.document(self, time.monotonic() - began, sample, ended_by)
            write_atomic(Path(self.run.directory) / "result.json", json.dumps(result, indent=1))
            summary.show_result(self.run, result)
            self.activity.enter(FINISHING)
            self.recorder.finish(result)

    def _profiling(self) -> Profiling:
        predicted = self.attempt.prediction.step_parts if self.attempt.prediction else {}
        tasks: dict[str, tuple[Any, str]] = {"checkpoint": (self, "save"), "evaluation": (self, "validate")}
        return Profiling(self.run, self.world, self.train_step, predicted, self._show, tasks)


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
