"""The loop that trains, and what it does between steps.

A step never waits for the host: what the host wants to know of it (loss, norm, hash, whether to stop) is summed over
the ranks into one small vector on the device and read while the next step runs. All ranks read the same numbers at the
same step, so they agree on stopping, saving and giving up without another word.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.checkpoint import manifest, retention
from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.restore import restore
from titan.checkpoint.state import init_optimizer_state
from titan.console.progress import Progress
from titan.dataset import corpora
from titan.dataset.loader import Batch, Loader, Shape
from titan.errors import RunError
from titan.metrics.plot import plot_losses
from titan.metrics.recorder import Recorder, finite, first_and_last_loss, peak_memory_gib
from titan.metrics.schema import WARM
from titan.parallelism import grad_norm
from titan.parallelism.mesh import World, release
from titan.parallelism.microbatches import Microbatches
from titan.run import summary
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training import recording
from titan.training.checkpointing import CheckpointPolicy
from titan.training.evaluation import EvalSet, eval_sets, evaluate
from titan.training.lr_schedule import lr_factor
from titan.training.sample import sample_continuation
from titan.training.signals import exit_code_of_stop
from titan.training.train_step import TrainStep
from titan.weights.start import start_from_weights

log = logging.getLogger("titan")

LOSS, STOP, AGAIN, SAVE, VOID, VALID, PAIRS, HASH = range(8)
"""Places in a step's vector: summed loss, requests to stop, to be started again after that, and to save, ranks that had
nothing to read, targets that count, pairs of tokens that attend to each other, four pieces of the hash."""
PIECES, PIECE = 4, 1 << 16
"""A 64-bit hash travels as four 16-bit pieces: in float64 their sums are exact for any number of ranks."""


class StopSource(Protocol):
    """What tells the trainer that a signal came."""

    asked: bool
    again: bool


class StepTimer:
    """Times a step on its device: from the end of the step before, where nothing came between, to its own end."""

    def __init__(self, device: torch.device, before: StepTimer | None) -> None:
        self.on_gpu = device.type == "cuda"
        self.start: Any = before.end if before else self._now()
        self.end: Any = None

    def stop(self) -> None:
        """Mark the step's end, in the order of the device's work."""
        self.end = self._now()

    def wait(self) -> None:
        """Wait until the device has come to the step's end."""
        if self.on_gpu:
            self.end.synchronize()

    def seconds(self) -> float:
        """How long the step took; call it after `wait`."""
        if self.on_gpu:
            return float(self.start.elapsed_time(self.end)) / 1000
        return float(self.end - self.start)

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class InFlightStep:
    """A step that was started and whose figures are still on their way."""

    step: int
    batch: Batch
    lr: float
    local_loss: Tensor
    figures: Tensor
    clock: StepTimer

    def read(self) -> list[float]:
        """The step's vector and its norm, once the device has them."""
        self.clock.wait()
        values: list[float] = self.figures.tolist()
        return values


class Trainer:
    """Trains one attempt of a run on one rank."""

    def __init__(self, run: Run, attempt: Attempt, world: World, train_step: TrainStep, stop: StopSource) -> None:
        """Take everything that a step needs; nothing is written yet.

        Args:
            run: the experiment.
            attempt: where it begins and what it is called.
            world: the ranks.
            train_step: the assembled model and optimizer.
            stop: asked at every step whether a signal came.
        """
        self.run, self.attempt, self.world, self.train_step, self.stop = run, attempt, world, train_step, stop
        self.step, self.rows = attempt.step, attempt.rows
        init_optimizer_state(train_step.optimizer)
        self.speed = recording.speed(run)
        self.mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(attempt.corpora, run.dataset))
        self.partial = run.dataset.mask_documents or any(rows.corpus.masked for rows in self.mix.sources)
        self.saving = CheckpointPolicy(run, attempt, train_step, self.mix, self._warn)
        self.stopping = self.again = self.due = False
        self.bad = 0
        self.seconds: deque[float] = deque(maxlen=1000)
        self.pairs: deque[float] = deque(maxlen=1000)
        self.waited = 0.0
        self.validation: dict[str, float] = {}
        self.recorder: Recorder | None = None
        self.progress: Progress | None = None
        self.held: dict[str, EvalSet] = {}
        self.allowed = world.timeout
        self.loader = self._loader()

    def train(self) -> int:
        """Train to the end, or until a signal; then save, sample and report.

        Returns:
            0 when all steps are done, 130 when a signal ended them, 75 when they are to be started again.

        Raises:
            Interrupted: when a signal came while it waited for validation rows.
        """
        began = time.monotonic()
        self._begin()
        if self.world.is_rank0:
            summary.show_run(self.run, self.attempt, self.mix, self.train_step.notes)
            self.recorder = recording.recorder(self.run, self.attempt, self._warn)
        with Progress(self.step, self.run.training.steps, self.run.metrics.console_every) as progress:
            self.progress = progress if self.world.is_rank0 else None
            self.held = eval_sets(self.run, self.world, self.mix, self._show, lambda: self.stop.asked)
            with _collected_at_steps():
                self.loop()
        self._finish(began)
        return exit_code_of_stop(self.again) if self.stopping else 0

    def close(self) -> None:
        """End what runs beside training, a save once it is done."""
        self.loader.close()
        self.saving.close()
        if self.recorder:
            self.recorder.close()

    def _begin(self) -> None:
        """Clear away what a killed attempt may have left, and take up the state of a checkpoint, or given weights."""
        if self.world.is_rank0:
            retention.sweep(Path(self.run.directory), self.run.checkpoint.grace)
        rank_info = self.world.rank_info
        coordinator = Coordinator(rank_info.rank, rank_info.world_size, self.world.aside)
        if self.attempt.checkpoint:
            restore(self.train_step, Path(self.attempt.checkpoint), coordinator)
            self.saving.resume_post_save()
        elif self.attempt.weights:
            start_from_weights(self.train_step, self.attempt.weights, coordinator)

    def loop(self, steps: int | None = None) -> None:
        """Train `steps` steps, or all that are left."""
        last = self.run.training.steps if steps is None else self.step + steps
        sent: InFlightStep | None = None
        while self.step < last and not self.stopping:
            self._set_timeout(self._step_timeout())
            new = self._step(sent.clock if sent else None)
            if self.step == self.attempt.step + 1:  # its freed memory lies between the optimizer's state, made after it
                release(self.world.device)
            if sent:
                self._finalize_step(sent)
            sent = self._run_periodic_tasks(new, last)
        if sent:
            self._finalize_step(sent)

    def _step_timeout(self) -> float:
        """Seconds that ranks may wait for each other in the next step.

        The first step, and the first of each batch size, may compile; and a rank that reads data while they are
        prepared may have to wait for them.
        """
        new = self.step == self.attempt.step or self.run.training.phase(self.step + 1).step == self.step + 1
        cluster = self.run.cluster
        return cluster.timeout if new or self.run.dataset.stream else cluster.step_seconds

    def _set_timeout(self, seconds: float) -> None:
        """Set how long ranks wait for each other; all ranks call it together."""
        if seconds != self.allowed:
            self.world.set_timeout(seconds, meet=seconds < self.allowed)
            self.allowed = seconds

    def _step(self, before: StepTimer | None = None) -> InFlightStep:
        """Start one update on the device; `before` is the clock of the step that it follows without a break."""
        clock, self.step = StepTimer(self.world.device, before), self.step + 1
        batch = next(self.loader)
        lr = self.run.optimizer.lr * lr_factor(self.run.training, self.step)
        for group in self.train_step.optimizer.param_groups:
            group["lr"] = lr * group.get("factor", 1.0)
        tokens = self.run.training.phase(self.step).rows * self.run.training.seq_len
        loss = self.train_step.backward(self._rows(batch), 1 / tokens)
        figures = self.world.sum(self._pack_metrics(loss, batch))
        gradients = self.train_step.gradients()
        if self.partial:  # how many targets count is known only now
            grad_norm.scale(gradients, (tokens / figures[VALID].clamp(min=1)).float())
        size = self.train_step.norm()
        if self.run.training.clip_norm is not None:
            grad_norm.clip(gradients, size, self.run.training.clip_norm)
        self.saving.wait_for_staging()
        self._update(~torch.isfinite(figures[LOSS] + size) | (figures[VOID] > 0))
        self.rows = batch.read
        return self._copy_metrics_to_host(batch, lr, loss, torch.cat([figures, size.double()[None]]), clock)

    def _pack_metrics(self, loss: Tensor, batch: Batch) -> Tensor:
        """This rank's share of the step's vector."""
        due = self.saving.due()
        pieces = [float(batch.hash >> (16 * i) & (PIECE - 1)) for i in range(PIECES)]
        asked = self.stop.asked or batch.void
        told = [
            float(asked),
            float(self.stop.again),
            float(due),
            float(batch.void),
            float(batch.valid),
            float(batch.pairs),
            *pieces,
        ]
        host = torch.tensor(told, dtype=torch.float64)
        if self.world.device.type == "cuda":
            host = host.pin_memory()
        return torch.cat([loss.double()[None], host.to(self.world.device, non_blocking=True)])

    def _update(self, bad: Tensor) -> None:
        """Change the weights, unless `bad`: fused optimizers decide that on the device, others are asked here."""
        optimizer: Any = self.train_step.optimizer
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # a blocking copy where weights are on the host: torch's own would not wait for the device
            optimizer.found_inf = bad.float().cpu() if self.run.memory.offload else bad.float()
            optimizer.step()
        elif not bad.item():
            optimizer.step()
        if self.train_step.scales is not None:
            self.train_step.scales.update()
        optimizer.zero_grad(set_to_none=True)

    def _copy_metrics_to_host(
        self, batch: Batch, lr: float, loss: Tensor, figures: Tensor, clock: StepTimer
    ) -> InFlightStep:
        """Start the copy of a step's figures to the host."""
        if self.world.device.type == "cuda":
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            figures = host.copy_(figures, non_blocking=True)
        clock.stop()
        return InFlightStep(self.step, batch, lr, loss, figures, clock)

    def _finalize_step(self, sent: InFlightStep) -> None:
        """Read a step's figures, act on them and write them down."""
        *figures, size = sent.read()
        seconds = sent.clock.seconds()
        self.stopping = self.stopping or figures[STOP] > 0
        self.again = self.again or figures[AGAIN] > 0
        if figures[VOID]:  # a signal came while a rank waited for data: this was no step, and none came after it
            self.step = min(self.step, sent.step - 1)
            self.rows = self.run.training.rows_before(self.step + 1)
            return
        self.due = self.due or figures[SAVE] > 0
        loss = figures[LOSS] / max(1, figures[VALID])
        self._check_finite(sent, loss, size)
        self.seconds.append(seconds)
        self.pairs.append(figures[PAIRS])
        self.waited += sent.batch.wait_seconds
        if self.recorder:
            self._log_records(self.saving.poll_finished())
            self.recorder.log(self._record(sent, loss, size, seconds, figures))
        if self.progress:
            self.progress.step(sent.step, loss, self._tokens(sent) / seconds)

    def _record(
        self, sent: InFlightStep, loss: float, size: float, seconds: float, figures: list[float]
    ) -> dict[str, Any]:
        batch_hash = sum(int(piece) << (16 * i) for i, piece in enumerate(figures[HASH:])) % 2**64
        return {
            "step": sent.step,
            "tokens": sent.batch.read * self.run.training.seq_len,
            "loss": loss,
            "grad_norm": size,
            "lr": sent.lr,
            "step_seconds": seconds,
            "data_seconds": sent.batch.wait_seconds,
            **self.speed.of(seconds, self._tokens(sent), figures[PAIRS]),
            "valid_tokens": int(figures[VALID]),
            "memory_gib": peak_memory_gib(self.world.device),
            "rows": [sent.batch.first, sent.batch.last],
            "batch_hash": f"{batch_hash:016x}",
        }

    def _tokens(self, sent: InFlightStep) -> int:
        """Tokens of a step."""
        return self.run.training.phase(sent.step).rows * self.run.training.seq_len

    def _check_finite(self, sent: InFlightStep, loss: float, size: float) -> None:
        """Report a step whose loss or gradients were not finite; give up after some in a row.

        Raises:
            RunError: on `training.bad_steps` such steps in a row.
        """
        if math.isfinite(loss + size):
            self.bad = 0
            return
        self.bad += 1
        losses = self.world.gather(float(sent.local_loss))
        ranks = [r for r, value in enumerate(losses) if not math.isfinite(value)]
        where = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "gradients, of a finite loss"
        line = (
            f"step {sent.step}: {where} not finite (rows {sent.batch.first} to {sent.batch.last}); "
            "the weights were left as they were"
        )
        self._warn(line)
        if self.bad >= self.run.training.bad_steps:
            self._log_records(self.saving.wait())
            raise RunError(
                f"{self.bad} steps in a row were not finite, the last one step {sent.step}: {where}, rows "
                f"{sent.batch.first} to {sent.batch.last}; lower optimizer.lr={self.run.optimizer.lr:g}, or raise "
                f"training.bad_steps={self.run.training.bad_steps}. The last checkpoint is from step "
                f"{self.saving.saved_step}."
            )

    def _warn(self, line: str) -> None:
        """Put a line into this rank's log, and on the terminal where this rank speaks."""
        log.warning(line)
        self._show(line)

    def _show(self, line: str) -> None:
        """Put a line on the terminal, where this rank speaks."""
        if self.progress:
            self.progress.say(line)

    def _run_periodic_tasks(self, sent: InFlightStep, last: int) -> InFlightStep | None:
        """What is due after a step: validation, a checkpoint, garbage. What is settled for it, is None."""
        step, run = self.step, self.run
        every = run.metrics.validate_every
        validate = bool(self.held) and every > 0 and step % every == 0 and step < run.training.steps
        save = self.due or (run.checkpoint.every > 0 and step % run.checkpoint.every == 0)
        save = save and run.checkpoint.mode != "off" and step < last
        if not (validate or save):
            if step % run.training.gc_every == 0:
                gc.collect(1)
            return sent
        self._finalize_step(sent)
        self._set_timeout(run.cluster.timeout)
        if validate:
            self.validate()
        if save:
            self.save()
        return None

    def validate(self) -> None:
        """Measure the loss on the fixed validation rows; all ranks together."""
        if not self.held:
            return
        release(self.world.device)
        self.validation = evaluate(self.train_step, self.world, self.held)
        if self.recorder:
            tokens_read = self.rows * self.run.training.seq_len
            self.recorder.log({"step": self.step, "tokens": tokens_read, **self.validation})
        if self.progress:
            self.progress.say(f"step {self.step:,}: validation loss {self.validation['validation_loss']:.4f}")

    def save(self) -> None:
        """Begin a checkpoint; all ranks together."""
        release(self.world.device)
        self.due = False
        self.saving.save(self.step, self.rows)
        self._log_records(self.saving.poll_finished())

    def _log_records(self, records: list[dict[str, Any]]) -> None:
        """Write down how saves went, in the order of steps, as trackers want it."""
        if self.recorder:
            for record in records:
                self.recorder.log({"step": self.step, **record})

    def _finish(self, began: float) -> None:
        """After the last step: save, validate, sample, and say what came out."""
        release(self.world.device)
        self._set_timeout(self.run.cluster.timeout)
        if not self.stopping or self.run.checkpoint.on_stop:
            self._log_records(self.saving.finish(self.step, self.rows))
        else:
            self._log_records(self.saving.wait())
        sample = None
        if not self.stopping:
            self.validate()
            sample = self._sample()
        if self.recorder:
            result = self._result(began, sample)
            self._write(result)
            self.recorder.finish(result)
            summary.show_result(self.run, result)

    def _result(self, began: float, sample: dict[str, str] | None) -> dict[str, Any]:
        timed = list(zip(self.seconds, self.pairs, strict=True))
        figures = self._median(timed[WARM:] or timed)
        saved = manifest.complete(Path(self.run.directory))
        metrics = Path(self.run.directory) / "metrics.jsonl"
        first, last = first_and_last_loss(metrics)
        drawn = plot_losses(metrics, Path(self.run.directory) / "loss.png") if self.run.metrics.plot else None
        return {
            "finished": not self.stopping,
            "step": self.step,
            "tokens": self.rows * self.run.training.seq_len,
            "attempt": self.attempt.number,
            "science_id": self.attempt.ids.science,
            "first_loss": first,
            "last_loss": last,
            **{k: finite(v) for k, v in self.validation.items()},
            **figures,
            "data_wait": self.waited / total if (total := sum(self.seconds)) else None,
            "checkpoint_stall_seconds": self.saving.stalled,
            "memory_gib": peak_memory_gib(self.world.device),
            "seconds": time.monotonic() - began,
            "pipeline_idle": self.run.staging.idle,
            "checkpoint": str(saved[-1]) if saved else None,
            "plot": str(drawn) if drawn else None,
            "sample": sample,
        }

    def _median(self, timed: list[tuple[float, float]]) -> dict[str, Any]:
        """The speed of the step whose time is the median, of steps with the last one's batch."""
        if not timed:
            return {}
        seconds, pairs = sorted(timed)[len(timed) // 2]
        tokens = self.run.training.phase(self.step).rows * self.run.training.seq_len
        return dict(self.speed.of(seconds, tokens, pairs))

    def _write(self, result: dict[str, Any]) -> None:
        file = Path(self.run.directory) / "result.json"
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1))
        temporary.rename(file)

    def _sample(self) -> dict[str, str] | None:
        """A continuation of the first validation row, as text; every rank computes it together."""
        from titan.dataset.tokenizers.base import load_tokenizer

        count, seq_len = self.run.metrics.sample_tokens, self.run.training.seq_len
        corpus = self.mix.sources[0].corpus
        if not count or corpus.tokenizer["fingerprint"] == "none":
            return None
        split = corpus.validation if corpus.validation.rows(seq_len) else corpus.train
        tokenizer = load_tokenizer(corpus.tokenizer_path)
        start = [int(t) for t in split.read(0, min(16, seq_len // 2))]
        tokens = sample_continuation(
            self.train_step.logits,
            start,
            count,
            window=seq_len,
            vocab=min(tokenizer.vocab_size, self.run.model.vocab),
            seed=self.run.training.seed,
        )
        return {"start": tokenizer.decode(start), "text": tokenizer.decode(tokens)}

    def _loader(self) -> Loader:
        run = self.run
        return Loader(
            self.mix,
            run.training,
            self.world.share,
            Shape(run.microbatches, run.microbatch_rows, run.training.seq_len),
            step=self.attempt.step + 1,
            prefetch=run.dataset.prefetch,
            documents=run.dataset.mask_documents,
            read=self.world.reads,
            patience=run.cluster.timeout,
            tell=self._show,
            stopped=lambda: self.stop.asked,
        )

    def _rows(self, batch: Batch) -> Microbatches:
        """A batch on this rank's device: what it read, or what the rank that reads hands out."""
        return Microbatches(*self.world.hand_out(self._on_device(batch.fields)).long())

    def _on_device(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.world.device.type == "cuda":
            return tensor.pin_memory().to(self.world.device, non_blocking=True)
        return tensor


@contextmanager
def _collected_at_steps() -> Iterator[None]:
    """Without Python's own garbage collection: each rank would pause at another step, and all would wait each time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
