"""Where the results of an attempt go: metrics.jsonl and the trackers, the terminal, hooks, and result.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from titan.cluster.known_devices import look_up_peak_tflops
from titan.compile.backend import GraphWatch
from titan.config.kinds import get_kind
from titan.console.progress import Progress
from titan.console.text import sanitize_line
from titan.dataset import corpora
from titan.dataset.mixture import RowMixture
from titan.debug.activity import FINISHING
from titan.debug.diagnosis import format_ranks
from titan.files.atomic import write_atomic
from titan.hooks.calls import Hooks
from titan.metrics.reader import METRICS, read_last_steps
from titan.metrics.recorder import Recorder, StepSpeed, peak_memory_gib
from titan.metrics.spikes import SpikeDetector
from titan.metrics.tracker_run import RunDescription, hide_secrets
from titan.metrics.trackers import open_trackers
from titan.run import evaluated, identity, summary
from titan.run.attempts import Attempt
from titan.run.axes import PLUGGABLE
from titan.run.directory import find_parent_sweep, read_attempts
from titan.run.run import Run, as_config
from titan.schedule.schema import Factors
from titan.training import step_metrics
from titan.training.audit import Audit
from titan.training.layer_metrics import LayerMetrics
from titan.training.rank_times import RankTimes
from titan.training.result_json import RunEnd, build_result
from titan.training.step_metrics import PAIRS, VALID, StepResult, StepTimes
from titan.training.train_step import TrainStep

log = logging.getLogger("titan")


class RunReporter:
    """Receives the results of an attempt on one rank. All ranks call the methods; rank 0 records and shows them.

    Attributes:
        recorder: writes records; None before the run starts, and on ranks other than 0.
        progress: writes to the terminal, on the same terms.
        has_started: whether rank 0 has shown the run; a benchmark, which does not, shows no lines.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        train_step: TrainStep,
        hooks: Hooks,
        layer_metrics: LayerMetrics,
        rank_times: RankTimes,
        audit: Audit,
        factors: Callable[[int], Factors],
    ) -> None:
        """Take what the records of a step consist of; nothing is written yet."""
        self.run, self.attempt, self.train_step, self.world = run, attempt, train_step, train_step.world
        self.hooks, self.layer_metrics, self.rank_times = hooks, layer_metrics, rank_times
        self.audit, self.factors = audit, factors
        self.speed = build_step_speed(run)
        self.spikes = build_spike_detector(run, attempt, self.world.is_rank0)
        self.recorder: Recorder | None = None
        self.progress: Progress | None = None
        self.has_started = False
        self.step_times = StepTimes()
        self.evaluation: dict[str, float] = {}

    # --- the terminal

    def show(self, line: str) -> None:
        """Write a line to the terminal, on rank 0, from the start of the run on."""
        if self.progress:
            self.progress.print_line(line)
        elif self.has_started:
            print(sanitize_line(line), flush=True)

    def warn(self, line: str) -> None:
        """Write a line to this rank's log, and to the terminal on rank 0."""
        log.warning(line)
        self.show(line)

    @contextmanager
    def show_progress(self, step: int, last: int) -> Iterator[None]:
        """Show the progress from `step` to `last` while the block runs."""
        with Progress(step, last, self.run.metrics.console_every) as progress:
            self.progress = progress if self.world.is_rank0 else None
            yield

    # --- results, in the order of a run

    def start_run(self, mix: RowMixture, notes: Sequence[str]) -> None:
        """Show the run, and start to record; `notes` are what was applied to the model."""
        if self.world.is_rank0:
            self.has_started = True
            summary.show_run(self.run, self.attempt, mix, notes)
            self.recorder = build_recorder(self.run, self.attempt, self.warn, mix)

    def report_graphs(self, graphs: GraphWatch) -> None:
        """Report which compiled graphs ran in the first step; rank 0 also warns of what the other ranks lack."""
        if self.run.compile.scope == "off":
            return
        if graphs.labels:
            self.show(f"compiled graphs: {graphs.describe()}")
        missing_by_rank = self.world.all_gather_object(graphs.list_missing())
        for label in dict.fromkeys(chain.from_iterable(missing_by_rank)):
            ranks = [rank for rank, missing in enumerate(missing_by_rank) if label in missing]
            if self.world.is_rank0 or self.world.rank_info.rank in ranks:
                self.warn(
                    f"compile={self.run.compile.scope}: no graph of {label} ran in the first step on "
                    f"{format_ranks(ranks)}: torch could not compile it; TORCH_LOGS=graph_breaks shows why."
                )

    def report_step(
        self, result: StepResult, cause: str, poll_saves: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Report a step that all ranks have finished.

        Args:
            cause: where its first value that is not finite came from; empty for a finite step.
            poll_saves: returns the saves that have finished: they are reported between what hooks do and the step's
                record, at the step that is reported, though the next one may have begun.
        """
        self.step_times.add(result.seconds, result.metrics[PAIRS], result.batch.wait_seconds)
        ranks, warnings = self.rank_times.read_slots(result.step, result.rank_slots)
        for line in warnings:
            self.warn(line)
        hook_metrics = self.hooks.end_step(result.step, lambda: self._build_hook_figures(result))
        if self.recorder:
            self.report_saves(result.step, poll_saves())
            record = self.build_record(result) | self._record_expert_load(result) | ranks
            not_finite = {"not_finite": cause} if cause else {}
            self.recorder.log(record | not_finite | self._mark_spike(result) | hook_metrics)
        if self.progress:
            tokens_per_second = self.run.training.count_step_tokens(result.step) / result.seconds
            self.progress.step(result.step, result.loss, tokens_per_second)

    def report_evaluation(self, step: int, rows: int, figures: dict[str, float]) -> None:
        """Report an evaluation after `step` updates and `rows` rows."""
        self.evaluation = figures
        hook_metrics = self.hooks.call_moment("on_validation", step, figures)
        if self.recorder:
            tokens = rows * self.run.training.seq_len
            self.recorder.log({"step": step, "tokens": tokens, **figures, **hook_metrics})
        self.show(f"step {step:,}: {summary.describe_evaluation(figures)}")

    def report_saves(self, step: int, saves: Sequence[Mapping[str, Any]]) -> None:
        """Report finished saves at `step`, that of the last record or later: trackers need ascending steps."""
        if self.recorder:
            for save in saves:
                hook_metrics = self.hooks.call_moment("on_checkpoint", save["checkpoint_step"], save)
                self.recorder.log({"step": step, **save, **hook_metrics})

    def report_moment(self, moment: str, step: int, figures: Mapping[str, Any]) -> None:
        """Call the hooks at a moment that has no record: what they log gets one."""
        hook_metrics = self.hooks.call_moment(moment, step, figures)
        if self.recorder and hook_metrics:
            self.recorder.log({"step": step, **hook_metrics})

    def report_end(self, end: RunEnd) -> None:
        """Call the hooks, write result.json, show it, and end the trackers."""
        figures = {"finished": end.finished, **end.ended_by, **self.evaluation}
        self.report_moment("on_run_end", end.step, figures)
        if self.recorder:
            latest_metrics = {**self.evaluation, **self.hooks.latest_metrics}
            speed: dict[str, float | None] = {"data_wait": self.step_times.compute_data_wait()}
            if median := self.step_times.find_median():  # whose batch is taken to be the last step's
                speed = self.speed.compute(median[0], self.run.training.count_step_tokens(end.step), median[1]) | speed
            result = build_result(self.run, self.attempt, self.world, end, latest_metrics, speed)
            write_atomic(Path(self.run.directory) / "result.json", json.dumps(result, indent=1))
            summary.show_result(self.run, result)
            self.world.activity.enter_phase(FINISHING)
            self.recorder.finish(result)

    def close(self) -> None:
        """Write what is buffered, and let the trackers flush."""
        if self.recorder:
            self.recorder.close()

    # --- what results consist of

    def build_record(self, result: StepResult) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl, without what concerns ranks, experts, spikes and hooks."""
        batch, metrics, tokens = result.batch, result.metrics, self.run.training.count_step_tokens(result.step)
        return {
            "step": result.step,
            "tokens": batch.rows_read * self.run.training.seq_len,
            "loss": result.loss,
            **step_metrics.compute_term_means(self.train_step.terms, metrics),
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            **build_weight_decay_record(self.run, self.factors, result.step),
            "step_seconds": result.seconds,
            "data_seconds": batch.wait_seconds,
            **self.speed.compute(result.seconds, tokens, metrics[PAIRS]),
            "valid_tokens": int(metrics[VALID]),
            "memory_gib": peak_memory_gib(self.world.device),
            "rows": [batch.first, batch.last],
            "batch_hash": step_metrics.format_batch_hash(metrics),
            **self.layer_metrics.build_record(result.step),
            **self.audit.build_record(result.step),
        }

    def _build_hook_figures(self, result: StepResult) -> dict[str, Any]:
        """Return the figures of a step for hooks."""
        return {
            "tokens": result.batch.rows_read * self.run.training.seq_len,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "step_seconds": result.seconds,
        }

    def _record_expert_load(self, result: StepResult) -> dict[str, Any]:
        """Report routers that have collapsed; return what the record of a step says of the experts' load."""
        expert_load, counts = self.train_step.expert_load, result.expert_counts
        if expert_load is None:
            return {}
        for line in expert_load.check_collapse(counts):
            self.warn(f"step {result.step}: {line}")
        return expert_load.build_record(counts, per_expert=self.layer_metrics.is_due(result.step))

    def _mark_spike(self, result: StepResult) -> dict[str, float]:
        """Report a step whose loss is a spike; return what its record says of that."""
        spike = self.spikes.add(result.loss)
        if spike is None:
            return {}
        self.warn(spike.format_message(result.step, result.loss, result.batch.first, result.batch.last))
        return spike.build_record()


def build_recorder(run: Run, attempt: Attempt, warn: Callable[[str], None], mix: RowMixture | None = None) -> Recorder:
    """Return what writes this attempt's records to metrics.jsonl and to the trackers; they name the data of `mix`."""
    directory = Path(run.directory)
    description = RunDescription(run_id="", group_id="", name=run.name, config={})
    if run.metrics.tensorboard or run.metrics.wandb or run.metrics.trackers:
        description = describe_run(run, attempt, mix)
    trackers = open_trackers(run.metrics, directory=directory, description=description, warn=warn)
    changed = evaluated.find_changed(attempt.evaluated, read_attempts(directory))
    return Recorder(directory, attempt.number, trackers, warn, partial(evaluated.rename_figures, changed=changed))


def describe_run(run: Run, attempt: Attempt, mix: RowMixture | None) -> RunDescription:
    """Return what trackers show of a run beside its records."""
    code, sweep = identity.describe_code(), find_parent_sweep(run)
    facts = {
        "choices": dict(run.choices),
        "kinds": {axis: get_kind(type(getattr(run, axis))) for axis in PLUGGABLE},
        "ids": asdict(attempt.ids),
        "attempt": attempt.number,
        "commit": code["commit"],
        "diff": code["diff"],
        "data": corpora.compute_data_digest(mix) if mix else None,
        "parameters": run.model.parameters(),
        "layout": run.layout.degrees(),
        "sweep": sweep.name if sweep else None,
        "variant": sweep.variant if sweep else None,
    }
    return RunDescription(
        run_id=attempt.run_id,
        group_id=next(iter(read_attempts(Path(run.directory))), {"ids": asdict(attempt.ids)})["ids"]["group"],
        name=hide_secrets(run.name),
        config=as_config(run),
        facts=facts,
        sweep=hide_secrets(sweep.name) if sweep else None,
        labels=(*(o for o in run.overrides if o.startswith("recipe=")), str(run.layout)),
    )


def build_weight_decay_record(run: Run, factors: Callable[[int], Factors], step: int) -> dict[str, float]:
    """Return what the record of a step says of the weight decay: that of `optimizer`, where the schedule changes it."""
    if not run.schedule.sets_weight_decay or not run.optimizer.weight_decay:
        return {}
    return {"weight_decay": run.optimizer.weight_decay * factors(step).weight_decay}


def build_spike_detector(run: Run, attempt: Attempt, records: bool) -> SpikeDetector:
    """Return what marks loss spikes; on the rank that records, its window begins with the losses before the attempt."""
    last_steps = read_last_steps(Path(run.directory) / METRICS) if records else ()
    previous_losses = (line["loss"] for line in last_steps if line["step"] <= attempt.step)
    window_losses = list(islice(previous_losses, run.metrics.spike_window))
    return SpikeDetector(run.metrics.spike_window, run.metrics.spike_deviations, reversed(window_losses))


def build_step_speed(run: Run) -> StepSpeed:
    """Return what turns the seconds of a step into throughput and MFU."""
    device_peak = look_up_peak_tflops(run.machine.name, run.precision.compute) if run.machine.device == "cuda" else None  # type: ignore[arg-type]
    return StepSpeed(run.model.flops_per_token, run.layout.devices, run.cluster.peak_tflops or device_peak)
