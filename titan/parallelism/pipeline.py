"""Pipeline parallelism: stages of a model on different ranks, through torch.distributed.pipelining's schedules.

A stage's module goes from tokens, or the hidden states of the stage before, to hidden states, or the summed loss: so
the schedules see one scalar from the last stage, and logits never leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from titan.parallelism.norm import local

if TYPE_CHECKING:
    from titan.engine import Rows


@dataclass(frozen=True)
class Plan:
    """A pipeline as numbers.

    Attributes:
        schedule: its name at torch, or a CSV file.
        owners: the pipeline rank of each stage.
        rows: of a micro-batch.
        length: tokens of a row that a rank has.
        width: of the hidden states that travel.
        cut: parts of the sequence that hidden states are cut into between stages (sequence parallelism).
        dtype: of the hidden states.
        whole: FSDP keeps unsharded gradients until the step's last micro-batch; else it reduces those of each.
    """

    schedule: str
    owners: tuple[int, ...]
    rows: int
    length: int
    width: int
    cut: int
    dtype: torch.dtype
    whole: bool = True

    def hidden(self, rows: int, length: int, device: torch.device | str) -> Tensor:
        """Room for the hidden states of rows of `length` tokens."""
        return torch.empty((rows, length // self.cut, self.width), dtype=self.dtype, device=device)


class Pipeline:
    """Takes micro-batches through the stages of this rank and, by way of its neighbours, through all."""

    def __init__(
        self, stages: Mapping[int, nn.Module], plan: Plan, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Take this rank's stages by their number, and the ranks along the pipeline."""
        self.stages, self.plan, self.group, self.device = dict(sorted(stages.items())), plan, group, device
        self.last = len(plan.owners) - 1
        self.losses: list[Tensor] = []
        self.scale = 1.0
        self._schedules: dict[int, Any] = {}

    def backward(self, rows: Rows, scale: float) -> Tensor:
        """One step of the schedule; see `titan.engine.Runner`."""
        self.scale = scale
        self.losses.clear()
        tokens, targets = rows.tokens.flatten(0, 1), _flat(rows.targets)
        x = (tokens,) if 0 in self.stages else ()
        more = {"targets": targets, "positions": _positions(rows.positions, rows.tokens).flatten(0, 1)}
        if rows.documents is not None:
            more["document_ids"] = _flat(rows.documents)
        self._schedule(len(rows.tokens)).step(*x, target=targets, return_outputs=False, **more)
        return torch.stack(self.losses).sum() if self.losses else torch.zeros((), device=self.device)

    def forward(self, rows: Rows) -> list[Tensor]:
        """Micro-batch after micro-batch through all stages; see `titan.engine.Runner`."""
        out = []
        for i in range(len(rows.tokens)):
            x, targets, positions, documents = rows.at(i)
            places = _positions(positions, x)
            hidden = x
            for number, stage in self.stages.items():
                hidden = stage(self._received(number, hidden, x), targets, places, documents)
                self._hand_on(number, hidden)
            if self.last in self.stages:
                out.append(hidden)
        return out

    def _received(self, number: int, here: Tensor, tokens: Tensor) -> Tensor:
        """The input of a stage: `here`, what came out of the stage before or is the first's, or what a rank sends."""
        if number == 0 or number - 1 in self.stages:
            return here
        hidden = self.plan.hidden(len(tokens), tokens.shape[-1], self.device)
        self._carry(dist.irecv, hidden, number - 1)
        return hidden

    def _hand_on(self, number: int, hidden: Tensor) -> None:
        if number < self.last and number + 1 not in self.stages:
            self._carry(dist.isend, hidden.contiguous(), number + 1)

    def _carry(self, how: Any, hidden: Tensor, stage: int) -> None:
        """Send to, or receive from, the rank of another stage."""
        message = dist.P2POp(how, hidden, group=self.group, group_peer=self.plan.owners[stage])
        for work in dist.batch_isend_irecv([message]):
            work.wait()

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """What a schedule takes for the loss: the last stage has computed it."""
        self.losses.append(output.detach())
        return output * self.scale

    def _schedule(self, microbatches: int) -> Any:
        """The schedule of a step with so many micro-batches: a step may have more of them than those before."""
        if microbatches not in self._schedules:
            self._schedules[microbatches] = self._build(microbatches)
        return self._schedules[microbatches]

    def _build(self, microbatches: int) -> Any:
        plan, stages = self.plan, [self._stage(number, module) for number, module in self.stages.items()]
        common: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": self._loss, "scale_grads": False}
        if plan.schedule.endswith(".csv"):
            schedule: Any = _PipelineScheduleRuntime(stages, **common)  # type: ignore[no-untyped-call]
            schedule._load_csv(plan.schedule)
        else:
            kind: Any = get_schedule_class(plan.schedule)
            schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, **common)
        if hasattr(schedule, "_warmup_p2p"):  # since torch 2.13
            schedule._warmup_p2p = _told
        return schedule

    def _stage(self, number: int, module: nn.Module) -> PipelineStage:
        """A stage whose inputs and outputs are told, so that torch need not run it to find out."""
        plan, count = self.plan, len(self.plan.owners)
        hidden = plan.hidden(plan.rows, plan.length, "meta").requires_grad_()
        tokens = torch.empty((plan.rows, plan.length), dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        kind = PipelineStage if plan.whole else _ReducingStage
        stage = kind(
            module,
            number,
            count,
            self.device,
            input_args=tokens if number == 0 else hidden,
            output_args=loss if number == self.last else hidden,
            group=self.group,
        )
        if (
            self.device.type == "cpu"
        ):  # before torch 2.13 a stage greets the next one, and gloo can't greet its own rank
            stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        return stage


class _ReducingStage(PipelineStage):
    """A stage whose gradients FSDP reduces after each micro-batch, so that a rank keeps its part of them only."""

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """In place of torch's, which lets unsharded gradients add up until the end of the step."""
        module = self.submod
        if not isinstance(module, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(True)
        module.set_requires_all_reduce(last_backward)
        inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*inputs), None


@dataclass(frozen=True)
class Twins:
    """A tied weight at both ends of a pipeline: two copies that start the same, get the same gradient, and stay so.

    Attributes:
        first: the embedding's, where this rank has it.
        last: the head's, where this rank has it.
        group: the ranks along the pipeline.
        other: the pipeline rank that has the other one.
        device: where ranks send from.
    """

    first: nn.Parameter | None
    last: nn.Parameter | None
    group: dist.ProcessGroup
    other: int
    device: torch.device

    def meet(self) -> None:
        """Give both the sum of their gradients."""
        if self.first is not None and self.last is not None:
            one, two = _gradient(self.first), _gradient(self.last)
            two.copy_(one.add_(two))
        elif self.first is not None or self.last is not None:
            mine = _gradient(self.first if self.first is not None else self.last)
            sent = mine.to(self.device)  # offloaded gradients live on the host
            theirs = torch.empty_like(sent)
            send = dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.other)
            receive = dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=self.other)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            mine.add_(theirs.to(mine.device))

    @torch.no_grad()
    def align(self, optimizer: torch.optim.Optimizer) -> None:
        """Where one rank has both, make the head's weight and its optimizer state the embedding's."""
        if self.first is None or self.last is None:
            return
        self.last.copy_(self.first)
        for key, value in optimizer.state.get(self.first, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[self.last][key].copy_(value)


def _told(stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    """In place of the vote that torch's schedules take on whether all stages know their shapes: they do.

    The vote needs messages with values, which a simulation has not.
    """
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _gradient(parameter: nn.Parameter | None) -> Tensor:
    if parameter is None or parameter.grad is None:
        raise RuntimeError("a tied weight has no gradient")
    return local(parameter.grad)


def _flat(rows: Tensor | None) -> Tensor:
    """Micro-batches one after the other, as torch's schedules take them."""
    if rows is None:
        raise RuntimeError("a step without targets")
    return rows.flatten(0, 1)


def _positions(positions: Tensor | None, tokens: Tensor) -> Tensor:
    """Positions for each row: hidden states that are cut along the sequence don't tell how long it is."""
    if positions is None:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
    return positions.expand(tokens.shape)
