"""The body of a rank that replays: train up to the step, look at it, and take it as the run did.

The trainer takes the step, and is watched from outside (`titan.training.train_step.StepWatch`): hooks see the
activations of its forward and backward passes, compiled where the run is compiled. Gradients are looked at when they
are reduced, before they are clipped. Then the state before the step is restored, and the trainer takes the step again
with made gradients, which are bitwise the same on every layout: so that updates differ only where the update does, and
not by the rounding of gradients that Adam amplifies.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from titan.checkpoint import manifest
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.state import train_state_dict
from titan.cluster.rank_info import RankInfo
from titan.dataset.loader import Batch
from titan.debug.module_hooks import force_eager
from titan.model.init_weights import Normal, init_parameter
from titan.numerics.differences import GRADIENT, START, STATE, UPDATE, Fingerprint, Key, Samples
from titan.numerics.fingerprints import fingerprint_tensor, gather_tensor
from titan.parallelism import data
from titan.parallelism.mesh import RunContext
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.norms import local_tensor
from titan.precision.schema import Precision
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.observe import Observer, StepRows
from titan.training.replay.observation import RankReplay, TokenLoss, join_routes, read_rank_replays
from titan.training.replay.request import OPERATIONS, ROUNDED, ReplayJob
from titan.training.replay.routing import OperationWatch, RouteWatch
from titan.training.signals import StopSignals, choose_stop_exit_code
from titan.training.step_metrics import StepResult
from titan.training.train_step import StepWatch, TrainStep
from titan.training.trainer import Trainer
from titan.training.worker import fetch_verified, join_ranks

log = logging.getLogger("titan")

MADE_STD = 0.02
"""Standard deviation of made gradients: their norm is above a usual `clip_norm`, so that clipping is compared too."""
MADE_RATE = 0.01
"""The largest learning rate of an update from made gradients: an update that rounding of the weights does not hide."""


SPACING = {"fp32": 2.0**-23, "bf16": 2.0**-7}
"""The distance of neighbouring numbers between 1 and 2, by compute type."""
EIGHT_BIT_SPACING = 2.0**-3
"""Of float8_e4m3, which all 8-bit matmuls use."""
UNIFORM_STD = 12**-0.5
"""Standard deviation of a number that is uniform over one spacing, as an error of random rounding is."""


def work(job: ReplayJob, rank_info: RankInfo) -> int:
    """Replay as one of the job's ranks.

    Returns:
        0, or 130 when a signal ended it.

    Raises:
        ConfigError: when the checkpoint is corrupt.
        RunError: when the replay can't continue.
    """
    attempt, reader = job.attempt, None
    with join_ranks(job.run, rank_info) as (world, stop):
        if attempt.checkpoint is not None:
            reader = fetch_verified(job.run, attempt.checkpoint, attempt.step, world, "start")
            attempt = replace(attempt, checkpoint=str(reader.folder))
        for name, run in job.passes:
            replayer = Replayer(run, attempt, world, stop, reader)
            code = replayer.replay(job, name)
            if world.exchange is not None:
                world.exchange.drain()  # closing marks that this rank has left, unless all have read all messages
            replayer.trainer.close()
            if code:
                return code
            saved, reader = manifest.folder_of(Path(run.directory), job.step - 1), None
            if saved.is_dir():  # the next pass begins with the state before the step
                rows = run.training.count_rows_before(job.step)
                attempt = replace(attempt, checkpoint=str(saved), weights=None, step=job.step - 1, rows=rows)
            del replayer  # before the next pass builds another model
            if run.compile.scope != "off":
                torch._dynamo.reset()
            gc.collect()
    return 0


class Replayer(StepWatch):
    """Has a trainer train to a step, and watches that step; what it saw is written to a file of this rank."""

    def __init__(
        self, run: Run, attempt: Attempt, world: RunContext, stop: StopSignals, reader: CheckpointReader | None
    ) -> None:
        """Build the run's train step and trainer."""
        self.run, self.world, self.train_step = run, world, build_train_step(run, world, log.info)
        self.compiled = run.compile.scope != "off"
        self.trainer = Trainer(run, attempt, world, self.train_step, stop, reader, watch=self)
        self._watches: Callable[[StepRows], tuple[Observer, RouteWatch]] | None = None
        self._made_loss: Tensor | None = None
        self._gradients: dict[Key, Fingerprint] | None = None

    def replay(self, job: ReplayJob, name: str) -> int:
        """Replay the job's step as a pass; all ranks call it together."""
        trainer = self.trainer
        trainer.restore_state()
        with trainer.reporter.show_progress(trainer.step, job.step):
            trainer.run_steps(job.step - 1 - trainer.step)
            if trainer.requests.stop:
                return choose_stop_exit_code(trainer.requests.requeue)
            if job.save and name == job.passes[0][0]:
                if trainer.step:
                    trainer.saving.finish_saving(trainer.step, trainer.rows)
                else:
                    trainer.saving.save_initial(trainer.rows)
            trainer.timeouts.allow_task()
            batch = trainer.read_batch()
            if job.operations is not None:
                self._write(OPERATIONS, self._record_operations(batch, job.operations))
            elif job.repeats:
                for number in range(job.repeats):
                    self._write(f"{ROUNDED}{number}", self._repeat_rounded(batch, number))
            else:
                self._write(name, self._replay_step(job, name, batch))
        trainer.reporter.progress = None
        return 0

    def _write(self, name: str, seen: RankReplay) -> None:
        seen.write(Path(self.run.directory), name, self.world.rank_info.rank)

    # --- what the trainer's step shows

    def compute_gradients(self, train_step: TrainStep, rows: Microbatches, scale: float) -> Tensor:
        """See `StepWatch`: compute them within what watches the passes, or make them."""
        if self._made_loss is not None:
            with torch.no_grad():
                for name, p in self._list_parameters():
                    if p.requires_grad:  # bitwise the same on every layout
                        p.grad = torch.empty_like(p)
                        init_parameter(p.grad, f"{GRADIENT} of {name}", Normal(MADE_STD), 0)
            return self._made_loss
        if self._watches is None:
            return super().compute_gradients(train_step, rows, scale)
        self.observer, self.routes = self._watches(self._count_rows(rows))
        with self.observer, self.routes:
            return super().compute_gradients(train_step, rows, scale)

    def see_gradients(self) -> None:
        """See `StepWatch`: take their fingerprints in the step that is looked at."""
        if self._gradients is not None and self._made_loss is None:
            named = self.train_step.named_parameters()
            self._gradients = self._fingerprint(GRADIENT, ((n, p.grad) for n, p in named if p.grad is not None))

    def _take_step(self, batch: Batch, tokens: int, pinned: Mapping[str, Samples], *, totals: bool) -> StepResult:
        """Take the step as the trainer does, and watch hidden states and routers, with hooks that exist only then.

        Args:
            tokens: how many with the largest losses to watch for.
            pinned: see `RouteWatch.watch`.
            totals: see `Observer.watch_hidden`.
        """

        def watch_passes(rows: StepRows) -> tuple[Observer, RouteWatch]:
            observer = Observer(self.train_step, rows, around_compiled=self.compiled)
            observer.watch_hidden(sample=True, totals=totals)
            routes = RouteWatch(self.train_step, rows)
            if tokens:
                observer.watch_losses(tokens)
            routes.watch(pinned)
            return observer, routes

        self._watches = watch_passes
        result = self.trainer.take_step(batch)
        self._watches = None
        return result

    # --- the step

    def _replay_step(self, job: ReplayJob, name: str, batch: Batch) -> RankReplay:
        """Take the step while it is watched, then compare the optimizer by made gradients."""
        pinned = join_routes(read_rank_replays(Path(job.pin), name)) if job.pin else {}
        is_first, is_last = (name == job.passes[i][0] for i in (0, -1))
        tokens = job.tokens if is_first else 0
        losses = self._find_losses(batch, tokens) if tokens and self.compiled else None
        fingerprints, kept = self._fingerprint_start(is_first), self._copy_state() if is_last else []
        self.trainer.layer_metrics.set_interval(int(job.layers and is_first))
        self._gradients, start = {}, time.perf_counter()
        result = self._take_step(batch, tokens if losses is None else 0, pinned, totals=is_first)
        seconds = time.perf_counter() - start
        record, observer, routes = self.trainer.reporter.build_record(result), self.observer, self.routes
        missing = [name for name in observer.watched if ("forward", name) not in observer.totals]
        self._restore(kept)
        updates = self._fingerprint_update(batch, result.local_loss) if is_last else {}
        return RankReplay(
            record=record,
            totals=observer.read_totals(),
            samples=observer.read_samples(),
            losses=tuple(observer.losses if losses is None else losses),
            notes=self.trainer.notes,
            fingerprints=fingerprints | self._gradients | updates,
            groups=describe_groups(self.train_step.optimizer, self.train_step.named_parameters()),
            routes=routes.collect(self.world.rank_info.rank),
            unobserved=dict.fromkeys(observer.inside_compiled, "inside of compiled code")
            | dict.fromkeys(missing, "not called as a module in this layout"),
            figures={"step": seconds} | routes.sum_choices(),
        )

    def _count_rows(self, rows: Microbatches) -> StepRows:
        step_rows = self.run.training.find_phase(self.trainer.step).rows
        return StepRows(self.train_step, step_rows, *rows.tokens.shape[1:])

    def _find_losses(self, batch: Batch, count: int) -> list[TokenLoss]:
        """Return the largest losses of tokens from a forward pass that is not compiled.

        Before a compiled head is called, FSDP has not gathered its weight.
        """
        rows = self.trainer.to_device(batch)
        observer = Observer(self.train_step, self._count_rows(rows))
        with observer, force_eager(True):
            observer.watch_losses(count)
            self.train_step.evaluate(rows)
        for stage in self.train_step.stages:
            data.reshard_parameters(stage)
        return observer.losses

    # --- tensors

    def _list_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters, with both replicas of a tied weight."""
        stages = self.train_step.stages
        named = {id(p): (name, p) for stage in stages for name, p in stage.iterate_global_parameters()}
        return list(named.values())

    def _fingerprint(self, kind: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[Key, Fingerprint]:
        device = self.world.device
        return {(kind, name): fingerprint_tensor(gather_tensor(tensor, device)) for name, tensor in tensors}

    def _fingerprint_start(self, with_state: bool) -> dict[Key, Fingerprint]:
        """Return the fingerprints of the weights, and of the optimizer's state."""
        state = train_state_dict(self.train_step)
        weights = ((name.removeprefix("model."), x) for name, x in state.items() if name.startswith("model."))
        others = ((name, x) for name, x in state.items() if not name.startswith("model."))
        return self._fingerprint(START, weights) | (self._fingerprint(STATE, others) if with_state else {})

    def _copy_state(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's shards of the state, each with a copy on the host."""
        shards = [local_tensor(x) for x in train_state_dict(self.train_step).values()]
        shards += [local_tensor(p.detach()) for _, p in self._list_parameters()]  # and a tied weight's other replica
        for state in self.train_step.optimizer.state.values():
            shards += [local_tensor(x) for x in state.values() if isinstance(x, Tensor)]
        unique = {(x.data_ptr(), x.dtype): x for x in shards if x.numel()}
        return [(shard, shard.detach().to("cpu", copy=True)) for shard in unique.values()]

    @torch.no_grad()
    def _restore(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        for shard, copy in kept:
            shard.copy_(copy)
        if self.train_step.scales is not None:
            self.train_step.scales.update()

    # --- the update

    def _fingerprint_update(self, batch: Batch, loss: Tensor) -> dict[Key, Fingerprint]:
        """Return the fingerprints of the weights' updates by a step with made gradients; it spoils the weights.

        Args:
            loss: of the step on this rank; the made one has it too, where it is finite, so that no step is skipped.
        """
        before = [(local_tensor(p.detach()), local_tensor(p.detach()).clone()) for _, p in self._list_parameters()]
        self.trainer.layer_metrics.set_interval(0)
        self._made_loss = loss.nan_to_num(0.0, 0.0, 0.0)
        with self.train_step.optimizer.register_step_pre_hook(lambda *_: self._scale_rates()):
            self.trainer.take_step(batch)
        for weight, old in before:
            weight.sub_(old)
        return self._fingerprint(UPDATE, self.train_step.named_parameters())

    def _scale_rates(self) -> None:
        """Scale all learning rates by one factor, so that the update of a step with a tiny one can be compared."""
        groups = self.train_step.optimizer.param_groups
        largest = max(float(group["lr"]) for group in groups)
        for group in groups if largest else ():
            group["lr"] = group["lr"] * (MADE_RATE / largest)

    # --- operations of one module, and randomly rounded repetitions

    def _record_operations(self, batch: Batch, module: str) -> RankReplay:
        """Take the step, and record the operations in a module."""
        watch = OperationWatch(self.train_step, module)
        with force_eager(self.compiled), watch:
            result = self.trainer.take_step(batch)
        return RankReplay(self.trainer.reporter.build_record(result), {}, {}, operations=tuple(watch.operations))

    def _repeat_rounded(self, batch: Batch, number: int) -> RankReplay:
        """Take the step with randomly rounded weights, and put the state back."""
        kept = self._copy_state()
        perturb_weights(self._list_parameters(), self.run.precision, number)
        result = self._take_step(batch, 0, {}, totals=False)
        self._restore(kept)
        record, observer = self.trainer.reporter.build_record(result), self.observer
        return RankReplay(record, observer.read_totals(), observer.read_samples())


@torch.no_grad()
def perturb_weights(parameters: Iterable[tuple[str, Tensor]], precision: Precision, number: int) -> None:
    """Add the error of a random rounding to each weight, in place; the same on every layout.

    Args:
        precision: the run's; where weights are stored in the compute type already, the error is twice as large, since
            less is rounded away again.
    """
    spacing = EIGHT_BIT_SPACING if precision.eight_bit else SPACING[precision.compute]
    scale = UNIFORM_STD * spacing * (2 if precision.weights == precision.compute else 1)
    for name, p in parameters:
        noise = torch.empty_like(p, dtype=torch.float32)
        init_parameter(noise, f"rounding {number} of {name}", Normal(scale), 0)
        weight = local_tensor(p.detach())
        exponent = weight.float().abs().clamp(min=torch.finfo(torch.float32).tiny).log2().floor().exp2()
        weight.add_((local_tensor(noise) * exponent).to(weight.dtype))


def describe_groups(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Return the parameter group of each of some parameters: its number and its settings."""
    texts: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        values = {key: group[key] for key in ("lr", "weight_decay", "momentum", "betas", "eps") if key in group}
        values = {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}
        words = (
            f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        texts |= dict.fromkeys(map(id, group["params"]), f"group {number} ({', '.join(words)})")
    return {name: texts[id(p)] for name, p in named if id(p) in texts}
