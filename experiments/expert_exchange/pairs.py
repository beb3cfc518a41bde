"""Pairs of a pipeline's schedule: the forward pass of a micro-batch in one stage of a rank, and the backward pass of
another one in another stage, which take turns (`experiments.expert_exchange.turns`).

torch runs them one after another, or calls a function that may do otherwise (`register_custom_function`). Messages to
other ranks come before and after both, as in torch's own order.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import FORWARD, OVERLAP_F_B, _wait_batch_p2p
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from experiments.expert_exchange.turns import hand_over, note_exchange, take_turns
from titan.parallelism.collectives import PendingExchange
from titan.parallelism.expert import ExpertDispatch
from titan.parallelism.schema import ExpertExchange
from titan.profile.waits import BACKWARD


class TurnedExchange(PendingExchange):
    """An exchange of rows beside which the other computation of a pair runs."""

    def start(self, x: Tensor) -> None:
        """See `PendingExchange.start`."""
        note_exchange()
        super().start(x)

    def start_gradient(self, grad: Tensor) -> None:
        """See `PendingExchange.start_gradient`."""
        note_exchange()
        super().start_gradient(grad)

    def take(self) -> Tensor:
        """See `PendingExchange.take`; another computation that takes turns with this one runs first."""
        hand_over()
        return super().take()


class TurnedDispatch(ExpertDispatch):
    """Titan's all-to-all with such exchanges."""

    pending_type = TurnedExchange


@dataclass(frozen=True, kw_only=True)
class Pairs(ExpertExchange):
    """Pairs of a pipeline's schedule take turns, each pass beside the exchange of the other's tokens."""

    uses_threads: ClassVar[bool] = True

    def build(self, group: dist.ProcessGroup) -> TurnedDispatch:
        """See `ExpertExchange.build`."""
        return TurnedDispatch(group)

    def configure_schedule(self, schedule: Any, device: torch.device) -> None:
        """See `ExpertExchange.configure_schedule`; a schedule without pairs stays as it is."""
        if hasattr(schedule, "register_custom_function"):
            schedule.register_custom_function(OVERLAP_F_B, PairRunner(device).run_pair)


class PairRunner:
    """Runs pairs, whose backward passes are started from a thread that all of them share."""

    def __init__(self, device: torch.device) -> None:
        """Take the rank's device."""
        self.executor = ThreadPoolExecutor(1, BACKWARD, _use_device, (device,))

    def run_pair(self, pair: Any, context: Any) -> None:
        """Run a pair; see torch's `register_custom_function`."""
        schedule = context.schedule_ref
        stages = {stage.stage_index: stage for stage in schedule._stages}
        forward, backward = sorted(pair.sub_actions, key=lambda action: action.computation_type != FORWARD)
        _await_message(schedule.fwd_recv_ops, forward, stages, forward.stage_index - 1)
        _await_message(schedule.bwd_recv_ops, backward, stages, backward.stage_index + 1)
        modes = _get_current_dispatch_mode_stack()
        take_turns(
            partial(_run_forward, schedule, stages, forward, context),
            partial(_run_in_modes, modes, partial(_run_backward, schedule, stages, backward)),
            self.executor,
        )


def _use_device(device: torch.device) -> None:
    """Let a new thread use the rank's GPU, on the default stream, as the main thread does."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _run_in_modes(modes: list[TorchDispatchMode], compute: Any) -> None:
    """Compute in another thread's dispatch modes, such as those that trace a step."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        compute()


def _await_message(receives: Any, action: Any, stages: Any, neighbour: int) -> None:
    """Wait for what a stage gets from its neighbour, where that is on another rank."""
    if 0 <= neighbour < stages[action.stage_index].num_stages and neighbour not in stages:
        _wait_batch_p2p(receives.pop((action.stage_index, action.microbatch_index)))


def _run_forward(schedule: Any, stages: Any, action: Any, context: Any) -> None:
    """Do as torch's schedules for an action FORWARD."""
    stage, number = stages[action.stage_index], action.microbatch_index
    schedule._assert_unsharded(stage)
    inputs = context.arg_mbs[number], context.kwarg_mbs[number]
    output = stage.forward_one_chunk(number, *inputs, save_forward_output=False)
    schedule._maybe_compute_loss(stage, output, context.target_mbs, number)
    if following := stages.get(action.stage_index + 1):
        following.set_local_fwd_input(output, number)


def _run_backward(schedule: Any, stages: Any, action: Any) -> None:
    """Do as torch's schedules for an action FULL_BACKWARD."""
    stage, number = stages[action.stage_index], action.microbatch_index
    schedule._assert_unsharded(stage)
    loss = schedule._maybe_get_loss(stage, number)
    schedule.backward_counter[action.stage_index] += 1
    is_last = schedule.backward_counter[action.stage_index] == schedule._n_microbatches
    stage.backward_one_chunk(number, loss=loss, full_backward=True, last_backward=is_last)
    if previous := stages.get(action.stage_index - 1):
        previous.set_local_bwd_input(stage.get_local_bwd_output(number), number)
