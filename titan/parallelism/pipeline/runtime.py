"""Pipeline parallelism: stages of a model on different ranks, through torch.distributed.pipelining's schedules.

A stage's module goes from tokens, or the hidden states of the stage before, to hidden states, or the summed loss: so
the schedules see one scalar from the last stage, and logits never leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from torch.utils.checkpoint import GraphExecGroup

from titan.parallelism import mesh
from titan.parallelism.grad_norm import local

if TYPE_CHECKING:
    from titan.parallelism.microbatches import Microbatches


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


Links = Mapping[tuple[int, int], dist.ProcessGroup]
"""The group over which one pipeline rank sends to another: by sender and receiver."""


def neighbours(owners: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The pairs of ranks with consecutive stages, each as (lower, higher), in rounds: in a round no rank is twice.

    Args:
        owners: the pipeline rank of each stage.
    """
    rounds: list[list[tuple[int, int]]] = []
    for low, high in sorted({(min(a, b), max(a, b)) for a, b in pairwise(owners) if a != b}):
        free = (one for one in rounds if not {low, high} & {rank for pair in one for rank in pair})
        found = next(free, None)
        if found is None:
            rounds.append(found := [])
        found.append((low, high))
    return rounds


def link(plan: Plan, group: dist.ProcessGroup, timeout: float) -> Links:
    """A group for each direction between neighbours, so that no message waits for one that goes another way.

    With NCCL a group whose communicator exists from the start has one queue for all its messages: a receive that was
    posted early holds up every later send, to whichever rank (pytorch #154132), and in looped schedules ranks may then
    wait for each other in a circle (#195760). Without eager initialisation torch makes a communicator for each pair.
    1F1B is the exception: it sends and receives in one batch, which only a single group makes one operation, and such
    batches cannot block each other.

    Args:
        plan: the pipeline.
        group: the ranks along it; all of them call this together.
        timeout: see `titan.parallelism.mesh.split`.

    Returns:
        This rank's; none for 1F1B.
    """
    if plan.schedule == "1F1B":
        return {}
    ranks, me, links = dist.get_process_group_ranks(group), group.rank(), {}
    for pairs in neighbours(plan.owners):
        alone = [(rank,) for rank in range(len(ranks)) if not any(rank in pair for pair in pairs)]
        lists = [[ranks[i] for i in part] for part in sorted([*pairs, *alone])]  # every rank makes as many groups
        both = [mesh.split(lists, timeout, group) for _ in range(2)]
        for low, high in pairs:
            if me in (low, high):
                links[low, high], links[high, low] = both
    return links


class Pipeline:
    """Takes micro-batches through the stages of this rank and, by way of its neighbours, through all."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        links: Links | None = None,
    ) -> None:
        """Take this rank's stages by their number, and connect it with its neighbours; all ranks along it together.

        Args:
            stages: this rank's, by their number.
            plan: the pipeline.
            group: the ranks along it.
            device: where messages are sent from.
            links: see `link`; what has none goes over `group`.
        """
        self.stages, self.plan, self.group, self.device = dict(sorted(stages.items())), plan, group, device
        self.links = links or {}
        self.last = len(plan.owners) - 1
        self._greet()
        self.losses: list[Tensor] = []
        self.scale = 1.0
        self._schedules: dict[int, Any] = {}

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """One step of the schedule; see `titan.training.train_step.MicrobatchRunner`."""
        self.scale = scale
        self.losses.clear()
        tokens, targets = rows.tokens.flatten(0, 1), _flat(rows.targets)
        x = (tokens,) if 0 in self.stages else ()
        more = {"targets": targets, "positions": _positions(rows.positions, rows.tokens).flatten(0, 1)}
        if rows.documents is not None:
            more["document_ids"] = _flat(rows.documents)
        self._schedule(len(rows.tokens)).step(*x, target=targets, return_outputs=False, **more)
        return torch.stack(self.losses).sum() if self.losses else torch.zeros((), device=self.device)

    def forward(self, rows: Microbatches) -> list[Tensor]:
        """Micro-batch after micro-batch through all stages; see `titan.training.train_step.MicrobatchRunner`."""
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
        peer = dist.get_global_rank(self.group, self.plan.owners[stage])
        for work in dist.batch_isend_irecv([linked(dist.P2POp(how, hidden, peer, self.group), self.links)]):
            work.wait()

    def _greet(self) -> None:
        """Send a message each way between neighbours, while nothing else is under way.

        NCCL connects two ranks at their first message, which both of them wait for: amid a step, with other operations
        under way on other groups, that came to a halt on several nodes (pytorch #160210).
        """
        me, word = self.group.rank(), torch.zeros(1, device=self.device)
        pairs = [pair for one in neighbours(self.plan.owners) for pair in one if me in pair]
        for sender, receiver in (way for low, high in pairs for way in ((low, high), (high, low))):
            how, other = (dist.isend, receiver) if me == sender else (dist.irecv, sender)
            message = dist.P2POp(how, word, dist.get_global_rank(self.group, other), self.group)
            for work in dist.batch_isend_irecv([linked(message, self.links)]):
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
            schedule._warmup_p2p = _describe
        return schedule

    def _stage(self, number: int, module: nn.Module) -> PipelineStage:
        """A stage whose inputs and outputs are told, so that torch need not run it to find out."""
        plan, count = self.plan, len(self.plan.owners)
        hidden = plan.hidden(plan.rows, plan.length, "meta").requires_grad_()
        tokens = torch.empty((plan.rows, plan.length), dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        kind = _Linked if plan.whole else _Reducing
        stage = kind(
            module,
            number,
            count,
            self.device,
            input_args=tokens if number == 0 else hidden,
            output_args=loss if number == self.last else hidden,
            group=self.group,
        )
        stage.links = self.links
        stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]  # before torch 2.13; see `_greet`
        return stage


class _Linked(PipelineStage):
    """A stage whose messages go over the groups that `link` makes."""

    links: Links

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [linked(op, self.links) for op in super().get_fwd_recv_ops(fwd_chunk_id)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [linked(op, self.links) for op in super().get_fwd_send_ops(fwd_chunk_id)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return [linked(op, self.links) for op in super().get_bwd_recv_ops(bwd_chunk_id)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return [linked(op, self.links) for op in super().get_bwd_send_ops(bwd_chunk_id)]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """In a schedule that splits backward, the part for weights, which goes through the graph once for each weight.

        A block that is computed again would be so for each of its weights, and all the copies would stay: here once.
        """
        with GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)


class _Reducing(_Linked):
    """A stage whose gradients FSDP reduces after each micro-batch, so that a rank keeps its part of them only."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
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


def linked(op: dist.P2POp, links: Links) -> dist.P2POp:
    """The same message over the group of its direction, where there is one."""
    ranks = (op.group.rank(), op.group_peer)
    group = links.get(ranks if op.op is dist.isend else ranks[::-1])
    return op if group is None else dist.P2POp(op.op, op.tensor, op.peer, group, op.tag)


@dataclass(frozen=True)
class TiedWeights:
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
            mine.add_(self._exchange(mine.to(self.device)).to(mine.device))  # offloaded gradients live on the host

    def greet(self) -> None:
        """Connect the two ranks, where there are two; see `Pipeline`. Both call it together."""
        if self.first is None or self.last is None:
            self._exchange(torch.zeros(1, device=self.device))

    def _exchange(self, mine: Tensor) -> Tensor:
        """What the other rank gives in return for `mine`, which has the same shape."""
        theirs = torch.empty_like(mine)
        send = dist.P2POp(dist.isend, mine, group=self.group, group_peer=self.other)
        receive = dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=self.other)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return theirs

    @torch.no_grad()
    def align(self, optimizer: torch.optim.Optimizer) -> None:
        """Where one rank has both, make the head's weight and its optimizer state the embedding's."""
        if self.first is None or self.last is None:
            return
        self.last.copy_(self.first)
        for key, value in optimizer.state.get(self.first, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[self.last][key].copy_(value)


def _describe(stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    """In place of the vote that torch's schedules take on whether all stages know their shapes: they do.

    The vote needs messages with values, which a simulation has not. That it connects neighbours, `Pipeline` has done,
    over the groups that its messages take.
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
