"""Audits: every N steps a micro-batch of each rank is computed a second time on another rank, and compared.

1. In a step that is due, each rank takes fingerprints of what its modules return for one micro-batch, while it trains.
   All ranks take the same one, by a generator that depends on seed and step only.
2. Before the weights change, each rank sends the micro-batch's tokens to the rank that has the same part of the model
   and other rows, `shift` data-parallel ranks before it, and computes the one that it receives: forward only, with the
   code that training uses, compiled or not. The gradients stay as they are.
3. It returns the fingerprints, and one number says whether any differ on any rank.

Ranks that divide a model compute together: all of them work on the same other rows. Ranks that share experts keep their
places among each other, because rows of the same experts are one product.

Only if some differ, `judge` decides which rank is wrong, from further computations.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan.debug.module_hooks import ModuleHooks, StageCall
from titan.numerics.differences import compare_figures
from titan.numerics.fingerprints import fingerprint
from titan.parallelism import data
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.norms import local_tensor
from titan.parallelism.replicas import RankName, ReplicaDifference, get_rank_name
from titan.run.run import Run
from titan.training.observe import iterate_hidden_modules
from titan.training.train_step import TrainStep

OUTPUT = "the loss"


class OutputPrints(ModuleHooks):
    """Takes fingerprints of what the modules of a stage return for one micro-batch, while its context is open."""

    def __init__(self, stage: Any, microbatch: int) -> None:
        """Take the stage, and the number of the micro-batch among its calls."""
        super().__init__([stage], around_compiled=True)
        self.microbatch = microbatch
        self.prints: dict[str, Tensor] = {}
        self.sizes: dict[str, Tensor] = {}
        hidden = [(name, module) for name, module in iterate_hidden_modules(stage) if name.count(".") < 2]
        for name, module in [*hidden, (OUTPUT, stage)]:  # the embedding, the blocks, the final norm, and the loss
            self.add_after(0, module, partial(self._record, name))

    def read(self) -> Computation:
        """Return the fingerprints and the root mean squares, on the host."""
        prints, sizes = (stacked.tolist() for stacked in self.stack())
        return Computation(tuple(self.prints), tuple(prints), tuple(sizes))

    def stack(self) -> tuple[Tensor, Tensor]:
        """Return the fingerprints, int64 [modules], and the root mean squares, float64."""
        return torch.stack([*self.prints.values()]), torch.stack([*self.sizes.values()])

    @torch.no_grad()
    def _record(self, name: str, call: StageCall, module: nn.Module, args: Any, out: Tensor) -> None:
        if call.microbatch == self.microbatch:
            value = local_tensor(out)
            self.prints[name] = fingerprint(value)
            norm = torch.linalg.vector_norm(value, dtype=torch.float32)  # without a copy in that type
            self.sizes[name] = norm.double() / math.sqrt(max(1, value.numel()))


class Audit:
    """The audits of a rank. All ranks call its methods together, in the order of a step."""

    def __init__(self, run: Run, train_step: TrainStep) -> None:
        """Take the run, whose settings allow audits, and what is trained."""
        self.every, self.seed, self.train_step = run.debug.audit, run.training.seed, train_step
        self.world, layout = train_step.world, run.layout
        self.stride = layout.context * layout.tensor
        self.span = count_expert_span(layout.expert, self.stride)
        self.data_ranks = layout.data_ranks
        self.seconds: dict[int, float] = {}
        self.last_clean = 0
        self._recorded: OutputPrints | None = None

    def is_due(self, step: int) -> bool:
        """Whether a step is audited."""
        return self.every > 0 and step % self.every == 0

    @contextmanager
    def record(self, step: int, rows: Microbatches) -> Iterator[None]:
        """Record what the modules return for one of the step's micro-batches, in a step that is due."""
        if not self.is_due(step):
            yield
            return
        microbatch = self._build_generator(step).randrange(len(rows.tokens))
        with OutputPrints(self.train_step.stages[0], microbatch) as self._recorded:
            yield

    def check(self, step: int, rows: Microbatches) -> str:
        """Let another rank compute the micro-batch that was recorded, and compare.

        Returns:
            A warning: what differs, and is no error; empty without one.

        Raises:
            DifferingRanksError: on all ranks, when a rank computes wrongly.
        """
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return ""
        start_time = time.monotonic()
        own_rows = Microbatches._make(
            None if part is None else part[recorded.microbatch][None] for part in rows
        ).to_fields()
        shifts = self._choose_shifts(step)
        peer_rows = self._exchange(own_rows, -shifts[0])
        peer = self._compute(peer_rows)
        own_prints, answer = recorded.stack()[0], self._exchange(peer.stack()[0], shifts[0])
        differs = (own_prints != answer).any().long()
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        warning = self._decide(step, recorded, own_rows, peer, peer_rows, shifts) if differs.item() else ""
        self.last_clean = step
        seconds = time.monotonic() - start_time  # read when the next step has begun
        self.seconds = {last: value for last, value in self.seconds.items() if last == step - 1} | {step: seconds}
        return warning

    def build_record(self, step: int) -> dict[str, float]:
        """Return what the record of a step says of its audit; empty for steps without one."""
        return {"audit_seconds": self.seconds[step]} if step in self.seconds else {}

    def _build_generator(self, step: int) -> random.Random:
        return random.Random(f"audit {self.seed} {step}")

    def _choose_shifts(self, step: int) -> tuple[int, ...]:
        """Return by how many data-parallel ranks rows move to be computed a second time, and a third time.

        The third is left out where there are only two places.
        """
        places = self.data_ranks // self.span
        generator = self._build_generator(step)
        generator.random()  # not the number that chose the micro-batch
        return tuple(place * self.span for place in generator.sample(range(1, places), min(2, places - 1)))

    def _find_rank(self, shift: int) -> int:
        """Return the rank with the same part of the model, `shift` data-parallel ranks behind this one."""
        rank, place = self.world.rank_info.rank, self.world.data_shard.rank
        return rank + ((place + shift) % self.data_ranks - place) * self.stride

    def _exchange(self, tensor: Tensor, shift: int) -> Tensor:
        """Send a tensor to the rank `shift` behind this one; return that of the rank as far before it."""
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor.contiguous(), self._find_rank(shift)),
            dist.P2POp(dist.irecv, received, self._find_rank(-shift)),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def _compute(self, fields: Tensor) -> OutputPrints:
        """Compute one micro-batch as in training, without its backward pass."""
        with OutputPrints(self.train_step.stages[0], 0) as prints:
            self.train_step.repeat_forward(Microbatches.from_fields(fields))
        for stage in self.train_step.stages:
            data.reshard_parameters(stage)
        return prints

    # --- after a difference

    def _decide(
        self,
        step: int,
        recorded: OutputPrints,
        own_rows: Tensor,
        peer: OutputPrints,
        peer_rows: Tensor,
        shifts: tuple[int, ...],
    ) -> str:
        """Compute own and received rows again, and let a third rank compute them where there is one; then judge."""
        witness = Witness(
            name=get_rank_name(self.world.rank_info.rank),
            trained=recorded.read(),
            repeats=tuple(self._compute(own_rows).read() for _ in range(2)),
            auditor=self._find_rank(-shifts[0]),
            second=self._send_back(peer, shifts[0]),
            again=self._send_back(self._compute(peer_rows), shifts[0]),
        )
        for shift in shifts[1:]:
            third = self._send_back(self._compute(self._exchange(own_rows, -shift)), shift)
            witness = replace(witness, third=third)
        judgement = judge(self.world.all_gather_object(witness))
        if judgement.difference is None:
            return f"step {step}: {judgement.describe()}"
        difference = judgement.difference
        since = f"step {self.last_clean}, of the last audit without a difference," if self.last_clean else "the start"
        raise difference.build_error(
            f"step {step}, audit of a micro-batch: {judgement.describe()}. Checkpoints since {since} may be wrong too. "
            f"Repeat the command {difference.advise()}."
        )

    def _send_back(self, prints: OutputPrints, shift: int) -> Computation:
        """Send what this rank computed to the rank whose rows they were; return what others computed of its rows."""
        values, sizes = (self._exchange(part, shift).tolist() for part in prints.stack())
        return Computation(tuple(prints.prints), tuple(values), tuple(sizes))


def count_expert_span(expert: int, stride: int) -> int:
    """Return the data-parallel ranks that share experts, of which each has `stride` consecutive ranks."""
    return max(1, expert // stride)


SPREAD_FACTOR = 4.0
"""How many times the spread of repetitions two ranks may differ, where kernels are not deterministic."""


@dataclass(frozen=True)
class Computation:
    """What the modules returned for a micro-batch: names in the order of the model, fingerprints, root mean squares."""

    names: tuple[str, ...]
    prints: tuple[int, ...]
    sizes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Witness:
    """What was computed of one rank's micro-batch.

    Attributes:
        name: the rank's.
        trained: by it, in the step.
        repeats: by it, afterwards.
        auditor: the rank that computed it a second time.
        second: by the auditor.
        again: by the auditor, once more.
        third: by a third rank; None without one.
    """

    name: RankName
    trained: Computation
    repeats: tuple[Computation, ...]
    auditor: int
    second: Computation
    again: Computation
    third: Computation | None = None


@dataclass(frozen=True)
class Judgement:
    """What the witnesses say: who is wrong, and the first module; None where all is within the spread of repetitions.

    `spread` is relative, None where kernels are deterministic; `decided`: it is known which of the ranks is wrong.
    """

    difference: ReplicaDifference | None
    spread: float | None = None
    decided: bool = True

    def describe(self) -> str:
        """Return who is wrong, or how far repetitions differ, in one sentence without a full stop."""
        if self.difference is None:
            return f"kernels are not deterministic: audits compare within the spread of repetitions, {self.spread:.1e}"
        return self.difference.describe() + (", for the same tokens and weights" if self.decided else "")


def judge(witnesses: Sequence[Witness]) -> Judgement:
    """Return which ranks are wrong."""
    repeated = sum(w.repeats[0].prints == w.repeats[1].prints for w in witnesses)
    # a rank that does not repeat its results while most do is wrong; the largest spread of all ranks would let one that
    # computes wrongly now and then widen its bound; of two ranks the median still does
    spread = None if 2 * repeated >= len(witnesses) else statistics.median_high(map(_measure_spread, witnesses))
    first = {w.name.rank: _find_first(w.trained, w.second, spread) for w in witnesses}
    found = [index for index in first.values() if index is not None]
    if not found:
        return Judgement(None, spread)
    origin = min(found)
    concerned = [w for w in witnesses if first[w.name.rank] == origin]
    accused = {rank for w in concerned for rank in _accuse(w, spread)}
    involved = {rank for w in concerned for rank in (w.name.rank, w.auditor)}
    names = {w.name.rank: w.name for w in witnesses}
    odd = tuple(names[rank] for rank in sorted(accused))
    others = tuple(names[rank] for rank in sorted(involved - accused))
    difference = ReplicaDifference(f"the result of {witnesses[0].trained.names[origin]}", 1, odd, others)
    return Judgement(difference, spread, decided=involved != accused)


def _measure_spread(w: Witness) -> float:
    """Return the largest relative difference of a module's root mean square between a rank's repetitions."""
    return max(_compare_sizes(x, y) for x, y in zip(w.repeats[0].sizes, w.repeats[1].sizes, strict=True))


def _compare_sizes(x: float, y: float) -> float:
    """Return the difference of two numbers relative to the larger one."""
    return compare_figures(*sorted((x, y), key=abs))


def _find_first(a: Computation, b: Computation, spread: float | None) -> int | None:
    """Return the index of the first module in which two computations differ; None if in none."""
    differs: Callable[[int], bool] = (
        (lambda i: a.prints[i] != b.prints[i])
        if spread is None
        else (lambda i: _compare_sizes(a.sizes[i], b.sizes[i]) > SPREAD_FACTOR * spread)
    )
    return next((index for index in range(len(a.names)) if differs(index)), None)


def _accuse(w: Witness, spread: float | None) -> set[int]:
    """Return which of the ranks are wrong that computed a micro-batch with different results."""

    def agree(a: Computation, b: Computation) -> bool:
        return _find_first(a, b, spread) is None

    own, auditor = w.name.rank, w.auditor
    if w.third is not None and agree(w.third, w.trained):
        return {auditor}
    if w.third is not None and agree(w.third, w.second):
        return {own}
    if w.third is None and agree(w.repeats[0], w.second):
        return {own}
    if w.third is None and agree(w.again, w.trained):
        return {auditor}
    return {own, auditor}
