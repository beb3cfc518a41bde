"""The body of a rank that replays: train up to the step, look at it, and take it as the run did.

The step is computed once: hooks see the activations of its forward and backward passes, compiled where the run is
compiled. Gradients are looked at when they are reduced, before they are clipped. Then the state before the step is
restored, and the optimizer updates it with made gradients, which are bitwise the same on every layout: so that updates
differ only where the optimizer does, and not by the rounding of gradients that Adam amplifies.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from titan.checkpoint import manifest
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.state import train_state_dict
from titan.cluster.rank_info import RankInfo
from titan.dataset.loader import Batch
from titan.debug.module_hooks import force_eager
from titan.model.init_weights import Normal, init_parameter
from titan.parallelism import data, norms
from titan.parallelism.mesh import RunContext
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.norms import local_tensor
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.layer_metrics import LayerMetrics
from titan.training.observe import Observer, RunningTotals, StepRows, TokenSample
from titan.training.replay import observation, rounding
from titan.training.replay.fingerprints import describe_groups, fingerprint_tensors
from titan.training.replay.job import OPERATIONS, ROUNDED, ReplayJob
from titan.training.replay.observation import (
    GRADIENT,
    START,
    STATE,
    UPDATE,
    ActivationTotals,
    Fingerprint,
    Key,
    RankReplay,
    Samples,
)
from titan.training.replay.operations import OperationWatch
from titan.training.replay.routing import RouteWatch, read_routes
from titan.training.side_jobs.ranks import fetch_verified, join_ranks
from titan.training.signals import choose_stop_exit_code
from titan.training.trainer import Trainer
from titan.training.watched_runner import WatchedRunner

log = logging.getLogger("titan")

MADE_STD = 0.02
"""Standard deviation of made gradients: their norm is above a usual `clip_norm`, so that clipping is compared too."""
MADE_RATE = 0.01
"""The largest learning rate of an update from made gradients: an update that rounding of the weights does not hide."""


def work(job: ReplayJob, rank_info: RankInfo) -> int:
    """Replay as one of the job's ranks.

    Returns:
        0, or 130 when a signal ended it.

    Raises:
        ConfigError: when the checkpoint is corrupt.
        RunError: when the replay can't continue.
    """
    with join_ranks(job.run, rank_info) as (world, stop):
        reader, attempt = _open_start(job, world)
        for name, run in job.passes:
            replayer = Replayer(run, attempt, world, build_train_step(run, world, log.info), stop, reader)
            code = replayer.replay(job, name)
            if world.exchange is not None:
                world.exchange.drain()  # closing marks that this rank has left, unless all have read all messages
            replayer.close()
            if code:
                return code
            attempt, reader = _find_next_start(attempt, run, job.step), None
            del replayer  # before the next pass builds another model
            _free_memory(run.compile.scope != "off")
    return 0


def _open_start(job: ReplayJob, world: RunContext) -> tuple[CheckpointReader | None, Attempt]:
    path = job.attempt.checkpoint
    if path is None:
        return None, job.attempt
    reader = fetch_verified(job.run, path, job.attempt.step, world, "start")
    return reader, replace(job.attempt, checkpoint=str(reader.folder))


def _find_next_start(attempt: Attempt, run: Run, step: int) -> Attempt:
    """Return the attempt that begins with the state before the step, where a pass has saved it."""
    saved = manifest.folder_of(Path(run.directory), step - 1)
    if not saved.is_dir():
        return attempt
    rows = run.training.count_rows_before(step)
    return replace(attempt, checkpoint=str(saved), weights=None, step=step - 1, rows=rows)


def _free_memory(compiled: bool) -> None:
    if compiled:
        torch._dynamo.reset()
    gc.collect()


@dataclass
class _Watch(ExitStack):
    """What watches a step."""

    observer: Observer
    routes: RouteWatch

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> Self:
        self.enter_context(self.observer)
        self.enter_context(self.routes)
        return self


@dataclass
class _TakenStep:
    """A step that was taken: its record, what watched it, fingerprints of its reduced gradients, and its seconds."""

    record: dict[str, Any]
    watch: _Watch
    gradients: dict[Key, Fingerprint]
    seconds: float


class _WatchedLayers:
    """The metrics of layers, where a step's reduced gradients are looked at too."""

    def __init__(self, metrics: LayerMetrics, look: Any) -> None:
        self.metrics, self.look = metrics, look
        self.measure_forward, self.measure_updates = metrics.measure_forward, metrics.measure_updates

    def measure_gradients(self, step: int) -> None:
        """See `LayerMetrics`."""
        self.metrics.measure_gradients(step)
        self.look()


class Replayer(Trainer):
    """Trains to a step, and looks at it; what it saw is written to a file of this rank."""

    def replay(self, job: ReplayJob, name: str) -> int:
        """Replay the job's step as a pass; all ranks call it together."""
        self._restore_state()
        with self.reporter.show_progress(self.step, job.step):
            self.run_steps(job.step - 1 - self.step)
            if self.requests.stop:
                return choose_stop_exit_code(self.requests.requeue)
            if job.save and name == job.passes[0][0]:
                self._save_start()
            self.timeouts.allow_task()
            for pass_name, seen in self._look(job, name):
                seen.write(Path(self.run.directory), pass_name, self.world.rank_info.rank)
        self.reporter.progress = None
        return 0

    def _save_start(self) -> None:
        """Save the state before the step, unless the replay began with a checkpoint of it."""
        if self.step:
            self.saving.finish_saving(self.step, self.rows)
        else:
            self.saving.save_initial(self.rows)

    def _look(self, job: ReplayJob, name: str) -> Iterator[tuple[str, RankReplay]]:
        batch, self.step = next(self.loader), job.step
        if job.operations is not None:
            yield OPERATIONS, self._record_operations(job, batch, job.operations)
            return
        if not job.repeats:
            yield name, self._replay_step(job, name, batch)
            return
        for number in range(job.repeats):
            yield f"{ROUNDED}{number}", self._repeat_rounded(job, batch, number)

    # --- the step

    def _replay_step(self, job: ReplayJob, name: str, batch: Batch) -> RankReplay:
        """Take the step while it is watched, then compare the optimizer by made gradients."""
        rows, pinned = self._to_device(batch), read_routes(job.pin, name) if job.pin else {}
        is_first, is_last = (name == job.passes[i][0] for i in (0, -1))
        losses = self._find_losses(rows, job) if job.tokens and is_first and self.run.compile.scope != "off" else None
        fingerprints, kept = self._fingerprint_start(is_first), self._copy_state() if is_last else []
        tokens = job.tokens if is_first and losses is None else 0
        rows_of_step, layers = self._build_rows(rows, job), job.layers and is_first
        taken = self._take_step(batch, lambda: self._watch(rows_of_step, tokens, pinned, is_first), layers)
        self._restore_copy(kept)
        updates = self._fingerprint_update() if is_last else {}
        observer, routes = taken.watch.observer, taken.watch.routes
        return RankReplay(
            record=taken.record,
            totals=_convert_totals(observer),
            samples=self._convert_samples(observer),
            losses=tuple(observer.losses if losses is None else losses),
            notes=self.notes,
            fingerprints=fingerprints | taken.gradients | updates,
            groups=describe_groups(self.train_step.optimizer, self._name_parameters()),
            routes=routes.collect(self.world.rank_info.rank),
            unobserved=_list_unobserved(observer),
            figures={"step": taken.seconds} | routes.sum_choices(),
        )

    def _take_step(self, batch: Batch, watch: Callable[[], _Watch], layers: bool) -> _TakenStep:
        """Take the step; `layers`: with the metrics of all layers."""
        gradients: dict[Key, Fingerprint] = {}
        original, metrics = self.train_step, self.layer_metrics
        watches: list[_Watch] = []

        def begin_watch(_: Microbatches) -> _Watch:
            watches.append(watch())
            return watches[-1]

        runner = WatchedRunner(original.runner, begin_watch)
        watched: Any = _WatchedLayers(metrics, lambda: gradients.update(self._fingerprint_gradients()))
        metrics.set_interval(int(layers))
        self.train_step, self.layer_metrics = replace(original, runner=runner), watched
        start = time.perf_counter()
        try:
            result = self._step(batch=batch).read(self.rank_times.num_slots, original.num_expert_counts)
        finally:
            self.train_step, self.layer_metrics = original, metrics
        if not watches:
            raise RuntimeError("the step did not run its micro-batches")
        seconds = time.perf_counter() - start
        return _TakenStep(self.reporter.build_record(result), watches[0], gradients, seconds)

    def _watch(self, rows: StepRows, tokens: int, pinned: Mapping[str, Samples], totals: bool) -> _Watch:
        """Return what watches a step from now on; `tokens`: how many with the largest losses."""
        observer, routes = self._build_observer(rows, totals), RouteWatch(self.train_step, rows)
        if tokens:
            observer.watch_losses(tokens)
        routes.watch(pinned)
        return _Watch(observer, routes)

    def _build_rows(self, rows: Microbatches, job: ReplayJob) -> StepRows:
        count = self.run.training.find_phase(job.step).rows
        return StepRows(self.train_step, count, *rows.tokens.shape[1:])

    def _build_observer(self, rows: StepRows, totals: bool) -> Observer:
        observer = Observer(self.train_step, rows, around_compiled=self.run.compile.scope != "off")
        observer.watch_hidden(sample=True, totals=totals)
        return observer

    def _find_losses(self, rows: Microbatches, job: ReplayJob) -> list[Any]:
        """Return the largest losses of tokens from a forward pass that is not compiled.

        Before a compiled head is called, FSDP has not gathered its weight.
        """
        observer = Observer(self.train_step, self._build_rows(rows, job))
        with observer, force_eager(True):
            observer.watch_losses(job.tokens)
            self.train_step.evaluate(rows)
        for stage in self.train_step.stages:
            data.reshard_parameters(stage)
        return observer.losses

    # --- tensors

    def _name_parameters(self) -> dict[int, str]:
        stages = self.train_step.stages
        return {id(p): name for stage in stages for name, p in stage.iterate_global_parameters()}

    def _list_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters, with both replicas of a tied weight."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for stage in self.train_step.stages:
            named |= {id(p): (name, p) for name, p in stage.iterate_global_parameters()}
        return list(named.values())

    def _fingerprint(self, kind: str, tensors: Any) -> dict[Key, Fingerprint]:
        fingerprints = fingerprint_tensors(tensors, self.world.device)
        return {(kind, name): value for name, value in fingerprints.items()}

    def _fingerprint_start(self, with_state: bool) -> dict[Key, Fingerprint]:
        """Return the fingerprints of the weights, and of the optimizer's state."""
        state = train_state_dict(self.train_step)
        weights = ((name.removeprefix("model."), x) for name, x in state.items() if name.startswith("model."))
        others = ((name, x) for name, x in state.items() if not name.startswith("model."))
        return self._fingerprint(START, weights) | (self._fingerprint(STATE, others) if with_state else {})

    def _fingerprint_gradients(self) -> dict[Key, Fingerprint]:
        named = self.train_step.named_parameters()
        return self._fingerprint(GRADIENT, ((name, p.grad) for name, p in named if p.grad is not None))

    def _copy_state(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's shards of the state, each with a copy on the host."""
        shards = [local_tensor(x) for x in train_state_dict(self.train_step).values()]
        shards += [local_tensor(p.detach()) for _, p in self._list_parameters()]  # and a tied weight's other replica
        for state in self.train_step.optimizer.state.values():
            shards += [local_tensor(x) for x in state.values() if isinstance(x, Tensor)]
        unique = {(x.data_ptr(), x.dtype): x for x in shards if x.numel()}
        return [(shard, shard.detach().to("cpu", copy=True)) for shard in unique.values()]

    @torch.no_grad()
    def _restore_copy(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        for shard, copy in kept:
            shard.copy_(copy)

    # --- the update

    @torch.no_grad()
    def _fingerprint_update(self) -> dict[Key, Fingerprint]:
        """Return the fingerprints of the weights' updates by made gradients; it spoils the weights."""
        parameters = self._list_parameters()
        for name, p in parameters:
            if p.requires_grad:
                p.grad = torch.empty_like(p)
                init_parameter(p.grad, f"{GRADIENT} of {name}", Normal(MADE_STD), 0)
        if (clip := self.run.training.clip_norm) is not None:
            norms.clip_gradients(self.train_step.list_gradients(), self.train_step.compute_norm(), clip)
        before = [local_tensor(p.detach()).clone() for _, p in parameters]
        self._scale_rates()
        self._update(torch.zeros((), dtype=torch.bool, device=self.world.device))
        for (_, p), old in zip(parameters, before, strict=True):
            local_tensor(p.detach()).sub_(old)
        return self._fingerprint(UPDATE, self.train_step.named_parameters())

    def _scale_rates(self) -> None:
        """Scale all learning rates by one factor, so that the update of a step with a tiny one can be compared."""
        groups = self.train_step.optimizer.param_groups
        largest = max(float(group["lr"]) for group in groups)
        for group in groups if largest else ():
            group["lr"] = group["lr"] * (MADE_RATE / largest)

    # --- operations of one module

    def _record_operations(self, job: ReplayJob, batch: Batch, module: str) -> RankReplay:
        """Compute the step's forward and backward passes, and record the operations in a module."""
        tokens = self.run.training.count_step_tokens(job.step)
        with force_eager(self.run.compile.scope != "off"), OperationWatch(self.train_step, module) as watch:
            self.train_step.backward(self._to_device(batch), 1 / tokens)
        self.train_step.optimizer.zero_grad(set_to_none=True)
        return RankReplay(_make_record(job.step, 0.0, 0.0), {}, {}, operations=tuple(watch.operations))

    # --- randomly rounded repetitions

    def _repeat_rounded(self, job: ReplayJob, batch: Batch, number: int) -> RankReplay:
        """Compute loss and gradients with randomly rounded weights, and put the weights back."""
        rows = self._to_device(batch)
        kept = [(local_tensor(p.detach()), local_tensor(p.detach()).clone()) for _, p in self._list_parameters()]
        rounding.perturb_weights(self._list_parameters(), self.run.precision, number)
        observer = self._build_observer(self._build_rows(rows, job), totals=False)
        tokens = self.run.training.count_step_tokens(job.step)
        with observer:
            loss = self.train_step.backward(rows, 1 / tokens)
        total = self.world.all_reduce(loss.double().reshape(-1)[:1].clone()) / tokens
        norm = self.train_step.compute_norm()
        self.train_step.optimizer.zero_grad(set_to_none=True)
        self._restore_copy(kept)
        samples = self._convert_samples(observer)
        return RankReplay(
            _make_record(job.step, float(total), float(norm)),
            _convert_totals(observer),
            samples,
        )

    def _convert_samples(self, observer: Observer) -> dict[Key, Samples]:
        rank = self.world.rank_info.rank
        return {key: _join_sample(sample, rank) for key, sample in observer.samples.items()}


def _make_record(step: int, loss: float, norm: float) -> dict[str, Any]:
    """Return the record of passes that take no step."""
    return {"loss": loss, "grad_norm": norm, "lr": 0.0, "step": step, "rows": [0, 0], "batch_hash": ""}


def _join_sample(sample: TokenSample, rank: int) -> Samples:
    tokens, values, numbers = (torch.cat(x).numpy() for x in (sample.tokens, sample.values, sample.microbatches))
    return Samples(tokens, values, numbers, numbers * 0 + rank)


def _list_unobserved(observer: Observer) -> dict[str, str]:
    """Return the modules whose outputs were not seen, with the reason."""
    missing = [name for name in observer.watched if name not in observer.forward]
    compiled = dict.fromkeys(observer.inside_compiled, "inside of compiled code")
    return compiled | dict.fromkeys(missing, "not called as a module in this layout")


def _convert_totals(observer: Observer) -> dict[Key, ActivationTotals]:
    forward = {("forward", name): _read_totals(totals) for name, totals in observer.forward.items()}
    return forward | {("backward", name): _read_totals(totals) for name, totals in observer.backward.items()}


def _read_totals(totals: RunningTotals) -> observation.ActivationTotals:
    values = [float(x) for x in (totals.squares, totals.values, totals.largest)]
    return observation.ActivationTotals(values[0], values[1], values[2], totals.count)
