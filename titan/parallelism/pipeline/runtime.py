"""Pipeline parallelism: stages of a model on different ranks, run by torch.distributed.pipelining's schedules.

The first stage's input is tokens, the others' hidden states; the last stage's output is the summed loss. So schedules
see one scalar from the last stage, and logits never leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.utils.checkpoint import GraphExecGroup

from titan.model.loss_terms import attach_loss
from titan.parallelism import data, mesh
from titan.parallelism.norms import local_tensor
from titan.parallelism.pipeline.schedules import find_schedule, format_cell, order_actions

if TYPE_CHECKING:
    from titan.parallelism.microbatches import Microbatches


@dataclass(frozen=True)
class PipelineShape:
    """The schedule of a pipeline, and the shapes of its messages.

    Attributes:
        schedule: its name.
        owners: the pipeline rank of each stage.
        rows: of a micro-batch.
        length: tokens of a row on a rank.
        width: of the hidden states.
        split: ranks that hidden states are split over along the sequence between stages (sequence parallelism).
        dtype: of the hidden states.
        accumulates_whole: FSDP keeps unsharded gradients until the step's last micro-batch; else it reduces after each.
        reshards: FSDP frees gathered weights after each pass of a block.
    """

    schedule: str
    owners: tuple[int, ...]
    rows: int
    length: int
    width: int
    split: int
    dtype: torch.dtype
    accumulates_whole: bool = True
    reshards: bool = False

    def empty_hidden(self, rows: int, length: int, device: torch.device | str) -> Tensor:
        """Return an empty tensor for the hidden states of rows of `length` tokens: [rows, length / split, width]."""
        return torch.empty((rows, length // self.split, self.width), dtype=self.dtype, device=device)


P2PGroups = Mapping[tuple[int, int], dist.ProcessGroup]
"""The process group for messages from one pipeline rank to another, by (sender, receiver)."""


def pair_neighbours(owners: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks with consecutive stages, each as (lower, higher), in rounds of disjoint pairs.

    Args:
        owners: the pipeline rank of each stage.
    """
    rounds: list[list[tuple[int, int]]] = []
    for low, high in sorted({(min(a, b), max(a, b)) for a, b in pairwise(owners) if a != b}):
        disjoint = (pairs for pairs in rounds if not {low, high} & {rank for pair in pairs for rank in pair})
        round_pairs = next(disjoint, None)
        if round_pairs is None:
            rounds.append(round_pairs := [])
        round_pairs.append((low, high))
    return rounds


def create_p2p_groups(shape: PipelineShape, group: dist.ProcessGroup, timeout: float) -> P2PGroups:
    """Create a group for each direction between neighbours, so that messages to different ranks don't block each other.

    With NCCL a group with eager initialisation has one queue for all its messages: a receive that was posted early
    blocks every later send, to any rank (pytorch #154132), and in looped schedules ranks may then deadlock (#195760).
    Without eager initialisation torch creates a communicator for each pair. 1F1B is the exception: it sends and
    receives in one batch, which is one operation only on a single group, and such batches cannot block each other.

    All ranks of `group`, those along the pipeline, call it together.

    Returns:
        This rank's groups; none for 1F1B.
    """
    if shape.schedule == "1F1B":
        return {}
    ranks, rank, groups = dist.get_process_group_ranks(group), group.rank(), {}
    for pairs in pair_neighbours(shape.owners):
        single = [(i,) for i in range(len(ranks)) if not any(i in pair for pair in pairs)]
        lists = [[ranks[i] for i in part] for part in sorted([*pairs, *single])]  # every rank creates as many groups
        both_groups = [mesh.split_group(lists, timeout, group) for _ in range(2)]
        for low, high in pairs:
            if rank in (low, high):
                groups[low, high], groups[high, low] = both_groups
    return groups


class Pipeline:
    """Runs micro-batches through the stages of this rank and exchanges hidden states with its neighbours."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        shape: PipelineShape,
        group: dist.ProcessGroup,
        device: torch.device,
        groups: P2PGroups | None = None,
        loss_counts: tuple[int, int] = (0, 0),
        advance: Callable[[], None] = lambda: None,
        configure_schedule: Callable[[Any], None] = lambda schedule: None,
    ) -> None:
        """Take this rank's stages, and connect to its neighbours; all ranks of the pipeline call it together.

        Args:
            device: where messages are sent from.
            groups: see `create_p2p_groups`; messages without one use `group`.
            loss_counts: the number of loss terms of the logits, and of figures of the model's blocks.
            advance: called when a stage begins with a micro-batch.
            configure_schedule: changes one of torch's schedules before its first step.
        """
        self.advance, self.configure_schedule = advance, configure_schedule
        self.extra_losses, self.block_figure_count = sum(loss_counts), loss_counts[1]
        self.block_figures: list[Tensor] = []
        self.stages, self.shape, self.group, self.device = dict(sorted(stages.items())), shape, group, device
        self.groups = groups or {}
        self.last_stage = len(shape.owners) - 1
        self._connect_neighbours()
        self.losses: list[Tensor] = []
        self.scale = 1.0
        self._schedules: dict[int, tuple[Any, list[_Stage]]] = {}

    def backward(self, rows: Microbatches, scale: float) -> Tensor:
        """Run one step of the schedule; see `titan.training.train_step.MicrobatchRunner`."""
        self.scale = scale
        self.losses.clear()
        self.block_figures.clear()
        fields: Any = rows
        tokens, targets = fields.tokens.flatten(0, 1), fields.targets.flatten(0, 1)
        x = (tokens,) if 0 in self.stages else ()
        kwargs = {"targets": targets, "positions": _expand_positions(rows.positions, rows.tokens).flatten(0, 1)}
        if rows.documents is not None:
            kwargs["document_ids"] = rows.documents.flatten(0, 1)
        count = len(rows.tokens)  # grows with the batch
        if count not in self._schedules:
            self._schedules[count] = self._build_schedule(count)
        schedule, stages = self._schedules[count]
        schedule.step(*x, target=targets, return_outputs=False, **kwargs)
        for stage in stages:
            stage.finish_sends()
        return self._sum_losses()

    def _sum_losses(self) -> Tensor:
        """Return the loss of this rank's stages: the last one's, and of the others what blocks return."""
        zero = torch.zeros((1 + self.extra_losses,) if self.extra_losses else (), device=self.device)
        total = torch.stack(self.losses).sum(0) if self.losses else zero
        if self.block_figures:
            total[-self.block_figure_count :] += torch.stack(self.block_figures).sum(0)
        return total

    def forward(self, rows: Microbatches) -> list[Tensor]:
        """Run one micro-batch after another through all stages; see `titan.training.train_step.MicrobatchRunner`."""
        out = []
        for i in range(len(rows.tokens)):
            x, targets, positions, documents = rows._replace(keys=None).select_microbatch(i)
            positions = _expand_positions(positions, x)
            hidden = x
            for number, stage in self.stages.items():
                hidden = stage(self._receive_input(number, hidden, x), targets, positions, documents)
                self._send_output(number, hidden)
            if self.last_stage in self.stages:
                out.append(hidden)
        return out

    def _receive_input(self, number: int, local: Tensor, tokens: Tensor) -> Tensor:
        """Return a stage's input: `local_tensor`, where this rank has it, or what the previous stage's rank sends."""
        if number == 0 or number - 1 in self.stages:
            return local
        hidden = self.shape.empty_hidden(len(tokens), tokens.shape[-1], self.device)
        self._transfer(dist.irecv, hidden, self.shape.owners[number - 1])
        return hidden

    def _send_output(self, number: int, hidden: Tensor) -> None:
        """Send a stage's output to the next stage, where that is on another rank."""
        if number < self.last_stage and number + 1 not in self.stages:
            self._transfer(dist.isend, hidden.contiguous(), self.shape.owners[number + 1])

    def _transfer(self, operation: Any, tensor: Tensor, rank: int) -> None:
        """Send a tensor to, or receive it from, another rank of the pipeline."""
        message = dist.P2POp(operation, tensor, dist.get_global_rank(self.group, rank), self.group)
        for work in dist.batch_isend_irecv([use_direction_group(message, self.groups)]):
            work.wait()

    def _connect_neighbours(self) -> None:
        """Send a message in each direction between neighbours, while no other operation runs.

        NCCL connects two ranks at their first message, which both of them wait for: within a step, with operations
        running on other groups, that deadlocked on several nodes (pytorch #160210).
        """
        rank, empty = self.group.rank(), torch.zeros(1, device=self.device)
        rank_pairs = [pair for pairs in pair_neighbours(self.shape.owners) for pair in pairs if rank in pair]
        for sender, receiver in (direction for low, high in rank_pairs for direction in ((low, high), (high, low))):
            operation, peer = (dist.isend, receiver) if rank == sender else (dist.irecv, sender)
            self._transfer(operation, empty, peer)

    def _record_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The schedule's loss function: the last stage's output is the loss already."""
        self.losses.append(output.detach())
        return output.sum() * self.scale  # loss terms behind the first element have no gradients

    def attach_losses(self, out: Any) -> Tensor:
        """Return a stage's hidden states, whose loss terms are differentiated in their backward pass."""
        if isinstance(out, Tensor):
            return out
        hidden, extra, figures = out
        self.block_figures.append(figures)
        return attach_loss(hidden, extra, self.scale)

    def _build_schedule(self, microbatches: int) -> tuple[Any, list[_Stage]]:
        """Return the schedule for a number of micro-batches, and its stages."""
        shape, stages = self.shape, [_Stage(self, number, module) for number, module in self.stages.items()]
        common: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": self._record_loss, "scale_grads": False}
        schedule: Any
        if not find_schedule(shape.schedule).in_torch:
            schedule = _PipelineScheduleRuntime(stages, **common)  # type: ignore[no-untyped-call]
            schedule._prepare_schedule_with_comms(list_torch_actions(shape, len(stages), microbatches))
        else:
            schedule_class: Any = get_schedule_class(shape.schedule)
            single = issubclass(schedule_class, PipelineScheduleSingle)
            schedule = schedule_class(stages[0] if single else stages, **common)
        if shape.reshards and isinstance(schedule, _PipelineScheduleRuntime):
            _gather_by_block(schedule)
        if hasattr(schedule, "_warmup_p2p"):  # since torch 2.13
            schedule._warmup_p2p = _set_static_shapes
        self.configure_schedule(schedule)
        return schedule, stages


class _Stage(PipelineStage):
    """A stage whose messages use the groups of `create_p2p_groups`.

    A buffer exists from when its message is awaited until the stage has used it; torch would keep those of all
    micro-batches. Until then its place has a tensor of the same shape on the device "meta". An output exists until it
    has arrived at the next rank; torch would keep it until its backward pass, and messages until the end of the step.

    Attributes:
        pipeline: the stages of this rank.
        sends: messages that may not have arrived, by F or B and micro-batch.
    """

    _get_init_p2p_neighbors_ops = list  # before torch 2.13; see `Pipeline._connect_neighbours`

    def __init__(self, pipeline: Pipeline, number: int, module: nn.Module) -> None:
        """Take a stage with known input and output shapes, so that torch need not run it to infer them."""
        shape, extra_losses = pipeline.shape, pipeline.extra_losses
        hidden = shape.empty_hidden(shape.rows, shape.length, "meta").requires_grad_()
        tokens = torch.empty((shape.rows, shape.length), dtype=torch.int64, device="meta")
        loss = torch.empty((1 + extra_losses,) if extra_losses else (), device="meta", requires_grad=True)
        super().__init__(
            module,
            number,
            len(shape.owners),
            pipeline.device,
            input_args=tokens if number == 0 else hidden,
            output_args=loss if number == pipeline.last_stage else hidden,
            group=pipeline.group,
        )
        self.pipeline, self.sends = pipeline, dict[tuple[str, int], list[dist.Work]]()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Describe the messages of all micro-batches without their buffers."""
        with patch.object(self, "device", torch.device("meta")):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Describe the messages of all micro-batches without their buffers."""
        with patch.object(self, "device", torch.device("meta")):
            return super()._prepare_backward_infra(*args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Record progress: a step of many micro-batches may take long."""
        self.pipeline.advance()
        self._drop_arrived()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _replace_buffers(self.args_recv_info[fwd_chunk_id], "meta")
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """Have the stage's loss terms differentiated."""
        return self.pipeline.attach_losses(super().forward_maybe_with_nosync(*args, **kwargs))  # type: ignore[no-untyped-call]

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Record progress.

        torch keeps the losses of a step, and with them their graphs, which hold the last stage's inputs.
        """
        self.pipeline.advance()
        self._finish_send("F", bwd_chunk_id)  # it has arrived, since its gradient is here
        self._drop_arrived()
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        _replace_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), "meta")
        if loss is not None:
            loss.detach_()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _replace_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return [use_direction_group(op, self.pipeline.groups) for op in super().get_fwd_recv_ops(fwd_chunk_id)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send an output, of which its graph is kept only; return messages that torch has to send."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = (tuple(map(_keep_graph, outputs)), inputs)
        return self._send("F", fwd_chunk_id, ops)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _replace_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return [use_direction_group(op, self.pipeline.groups) for op in super().get_bwd_recv_ops(bwd_chunk_id)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, kind: str, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Start to send messages, and return those that torch has to send."""
        ops = [use_direction_group(op, self.pipeline.groups) for op in ops]
        if self.pipeline.shape.schedule == "1F1B":  # torch sends and receives in one batch, which it waits for
            return ops
        self.sends[kind, microbatch] = torch_schedules._batch_p2p(ops)
        return []

    def _drop_arrived(self) -> None:
        """Drop messages that have arrived. It doesn't wait for others, whose receiver may wait for this rank.

        With gloo a message counts as arrived once it was waited for.
        """
        for key in [key for key, works in self.sends.items() if all(work.is_completed() for work in works)]:
            self._finish_send(*key)

    def _finish_send(self, kind: str, microbatch: int) -> None:
        """Wait for a message, and raise what failed."""
        for work in self.sends.pop((kind, microbatch), ()):
            work.wait()

    def finish_sends(self) -> None:
        """Wait for all messages."""
        for key in list(self.sends):
            self._finish_send(*key)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of weights, in a schedule that splits the backward pass.

        torch goes through the graph once for each weight, and would recompute a checkpointed block each time and keep
        all the results: `GraphExecGroup` lets it recompute once.
        """
        with GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        data.add_computed_gradients(self.submod)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Let FSDP reduce gradients after each micro-batch, or free weights after each pass, where it is to do so.

        torch's method keeps weights and unsharded gradients until the end of the step. A rank's stages retain the
        inputs of one stage's last reduce-scatters, not of each one's.
        """
        module, shape = self.submod, self.pipeline.shape
        if (shape.accumulates_whole and not shape.reshards) or not isinstance(module, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        for other in self.pipeline.stages.values():
            if other is not module and isinstance(other, FSDPModule):
                data.free_reduced_gradients(other)
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(shape.reshards)
        module.set_requires_gradient_sync(not shape.accumulates_whole)
        module.set_requires_all_reduce(not shape.accumulates_whole and last_backward)
        inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*inputs), None


def _gather_by_block(schedule: Any) -> None:
    """Let FSDP gather the weights of each block when it is used, in place of a stage's before its actions."""
    for kind, note in ((_ComputationType.UNSHARD, set.add), (_ComputationType.RESHARD, set.discard)):
        schedule.register_custom_function(
            kind, lambda action, ctx, note=note: note(ctx.schedule_ref.unsharded_stages, action.stage_index)
        )


class _KeepGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.new_empty_strided(output.shape, (0,) * output.dim())  # one element; no view, which torch rejects

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def _keep_graph(output: Tensor) -> Tensor:
    """Return a tensor without values that has the shape and the backward pass of an output."""
    kept: Tensor = _KeepGraph.apply(output)  # type: ignore[no-untyped-call]
    return kept


def _replace_buffers(messages: Sequence[Any], device: torch.device | str) -> None:
    """Create the buffers of messages on a device; those of used messages, which a graph may still need, on "meta".

    The inputs of the first stage and missing gradients have none.
    """
    for message in messages:
        if (buffer := getattr(message, "buffer", None)) is not None:
            message.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)


def use_direction_group(op: dist.P2POp, groups: P2PGroups) -> dist.P2POp:
    """Return the same message in the group of its direction, where there is one."""
    ranks = (op.group.rank(), op.group_peer)
    group = groups.get(ranks if op.op is dist.isend else ranks[::-1])
    return op if group is None else dist.P2POp(op.op, op.tensor, op.peer, group, op.tag)


@dataclass(frozen=True)
class TiedWeights:
    """A tied weight at both ends of a pipeline: two replicas with the same initial values and the same gradients.

    Attributes:
        first: the embedding's weight, where this rank has it.
        last: the head's weight, where this rank has it.
        group: the ranks along the pipeline.
        peer: the pipeline rank that has the other replica.
        device: where messages are sent from.
    """

    first: nn.Parameter | None
    last: nn.Parameter | None
    group: dist.ProcessGroup
    peer: int
    device: torch.device

    def sum_gradients(self) -> None:
        """Replace both replicas' gradients by their sum; both ranks call it together."""
        ends: Any = (self.first, self.last)
        gradients = [local_tensor(parameter.grad) for parameter in ends if parameter is not None]
        if len(gradients) == 2:
            gradients[1].copy_(gradients[0].add_(gradients[1]))
        for local_gradient in gradients if len(gradients) == 1 else ():
            received = self._exchange_tensor(local_gradient.to(self.device))
            local_gradient.add_(received.to(local_gradient.device))  # offloaded gradients are on the host

    def connect(self) -> None:
        """Connect the two ranks, where there are two; see `Pipeline`. Both call it together."""
        if self.first is None or self.last is None:
            self._exchange_tensor(torch.zeros(1, device=self.device))

    def _exchange_tensor(self, tensor: Tensor) -> Tensor:
        """Send a tensor to the peer, and return the peer's, which has the same shape."""
        received = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=self.peer)
        receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=self.peer)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    @torch.no_grad()
    def align(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the embedding's weight and its optimizer state to the head's, where one rank has both."""
        if self.first is None or self.last is None:
            return
        self.last.copy_(self.first)
        for key, value in optimizer.state.get(self.first, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[self.last][key].copy_(value)


def _set_static_shapes(stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    """Replace the vote of torch's schedules on whether all stages know their shapes: they do.

    The vote needs messages with values, which a simulation lacks. It also connects neighbours, which `Pipeline` has
    done in the groups that its messages use.
    """
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def list_torch_actions(shape: PipelineShape, stages_per_rank: int, microbatches: int) -> dict[int, list[Any]]:
    """Return the actions of each rank as torch's runtime takes them."""
    from torch.distributed.pipelining.schedules import _Action

    ranks = len(shape.owners) // stages_per_rank
    rows = order_actions(shape.schedule, ranks, stages_per_rank, microbatches)
    return {rank: [_Action.from_str(format_cell(cell)) for cell in row] for rank, row in enumerate(rows)}


def _expand_positions(positions: Tensor | None, tokens: Tensor) -> Tensor:
    """Return positions for each row: split hidden states don't have the sequence's length."""
    if positions is None:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
    return positions.expand(tokens.shape)
