"""The state of a run as named tensors, weights and optimizer state, and copies of them in host memory.

With a copy training continues while it is written (`Staging`). The copy overlaps with the next step's forward and
backward; only the update of the weights waits for it. On a GPU it goes to pinned memory on a separate stream, and the
update waits on the device; on a CPU a thread copies. The buffers are allocated at the first copy and reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.errors import RunError
from titan.optimizer.evaluation_weights import HasEvaluationWeights, compute_evaluation_weights
from titan.parallelism import data
from titan.parallelism.norms import local_tensor
from titan.precision.low_precision import unwrap_tensor

AVERAGE = "ema"
"""The key of the weights' moving average beside the optimizer's state. A checkpoint may have it or lack it."""
MODEL, EVALUATION, STATE = "model.", "evaluation.", "state."
"""Prefixes of the weights, of the weights to evaluate in their place, which only some optimizers have, and of other
state."""


class TrainState(Protocol):
    """What a checkpoint needs of the objects that a rank trains."""

    @property
    def stages(self) -> tuple[nn.Module, ...]:
        """The rank's pipeline stages; without a pipeline the whole model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over their parameters."""

    @property
    def tied_weights(self) -> Any:
        """The tied weight of which the rank has one copy or both (`titan.parallelism.pipeline.runtime.TiedWeights`)."""

    @property
    def device(self) -> torch.device:
        """The rank's device."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the rank's parameters by their names in the whole model, each name once."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and what files of weights hold beside them."""

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a step leaves for the next one beside weights and optimizer state."""


def train_state_dict(state: TrainState) -> dict[str, Tensor]:
    """Return all tensors that a resume needs, by name: `model.NAME`, `optimizer.NAME.KEY` and `state.NAME`."""
    for stage in state.stages:
        data.reshard_parameters(stage)  # the optimizer's state belongs to the sharded parameters
    parameters = dict(state.named_parameters())
    tensors = {f"{MODEL}{name}": unwrap_tensor(weight) for name, weight in state.named_weights()}
    tensors |= {f"{STATE}{name}": value for name, value in state.named_state()}
    for name, parameter in parameters.items():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def evaluation_state_dict(state: TrainState) -> dict[str, Tensor]:
    """Return the weights to evaluate where they are not the parameters: `evaluation.NAME`.

    They are saved for what reads weights without the optimizer; a resume computes them again.
    """
    if not isinstance(state.optimizer, HasEvaluationWeights):
        return {}
    weights = dict(state.named_weights())
    weights |= {name: compute_evaluation_weights(state.optimizer, p) for name, p in state.named_parameters()}
    return {f"{EVALUATION}{name}": unwrap_tensor(weight) for name, weight in weights.items()}


def is_average(name: str) -> bool:
    """Return whether a tensor of `train_state_dict` is a moving average."""
    return name.startswith("optimizer.") and name.endswith(f".{AVERAGE}")


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Initialise the optimizer's state with zeros, as before a first update, unless it has state already.

    Optimizers create their state in the first update, so one is done with zero gradients and a zero learning rate.
    Otherwise a skipped first step would leave no state for a checkpoint, and fused SGD an uninitialised momentum.

    Raises:
        RunError: for something in the state that a checkpoint would not hold.
    """
    if optimizer.state:
        return
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if problem := _explain_unsaved(parameter, value):
                raise RunError(f"{type(optimizer).__name__}: its state {name} is {problem}.")
            if isinstance(value, Tensor):
                value.zero_()


def _explain_unsaved(parameter: Tensor, value: Any) -> str:
    """Return why a checkpoint would not hold a value of a parameter's state; empty where it does."""
    if value is None:
        return ""
    if not isinstance(value, Tensor):
        kind = "a number" if isinstance(value, (int, float)) else f"of type {type(value).__name__}"
        return f"{kind}, which no checkpoint holds; keep it as a tensor, such as torch.zeros(())"
    is_sharded = isinstance(parameter, DTensor) and any(
        not placement.is_replicate() for placement in parameter.placements
    )
    if is_sharded and value.dim() and not isinstance(value, DTensor):
        return (
            f"a tensor {list(value.shape)} of one rank for a parameter that is cut over ranks, of which a checkpoint "
            "would hold one rank's; make it like the parameter, such as torch.zeros_like(p)"
        )
    return ""


class Staging:
    """Copies of a state's tensors."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for a state on `device`; nothing is allocated yet."""
        self.on_gpu = device.type == "cuda"
        self.copies: dict[str, Tensor] = {}
        self.thread = None if self.on_gpu else ThreadPoolExecutor(1, "titan-staging")
        self.stream: Any = torch.cuda.Stream(device) if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.pending_copy: Any = None

    def start_copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy `state`; the returned tensors are valid once `wait_for_copies` has returned.

        The copies of the previous call must no longer be in use, and the state must not change before
        `wait_before_update`.
        """
        copies = {name: self._get_copy(name, tensor) for name, tensor in state.items()}
        pairs = [(local_tensor(copies[name]), local_tensor(tensor)) for name, tensor in state.items()]
        if self.on_gpu:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                _copy_tensors(pairs)
            self.pending_copy = self.stream.record_event()
        elif self.thread is not None:
            self.pending_copy = self.thread.submit(_copy_tensors, pairs)
        return copies

    def wait_before_update(self) -> None:
        """Wait until the state is copied (on a GPU only the device waits); call it before the state changes."""
        if self.on_gpu and self.pending_copy is not None:
            torch.cuda.current_stream().wait_event(self.pending_copy)
        elif isinstance(self.pending_copy, Future):
            wait([self.pending_copy])

    def wait_for_copies(self) -> None:
        """Wait until the copies are complete; call it before they are read."""
        if self.on_gpu and self.pending_copy is not None:
            self.pending_copy.synchronize()
        elif isinstance(self.pending_copy, Future):
            self.pending_copy.result()

    def close(self) -> None:
        """End the thread and free the buffers."""
        if self.thread is not None:
            self.thread.shutdown()
        self.copies.clear()

    def _get_copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor, created once: creating a DTensor is slow, and this is the training thread.

        Its memory on the host is allocated once; offloaded tensors are copied too, because they will change.
        """
        tensor_copy, local = self.copies.get(name), local_tensor(tensor)
        if tensor_copy is None or (isinstance(tensor_copy, DTensor) and tensor_copy._spec != tensor._spec):  # type: ignore[attr-defined]
            empty = partial(torch.empty, local.shape, dtype=local.dtype, pin_memory=self.on_gpu)
            buffer = empty() if tensor_copy is None else local_tensor(tensor_copy)
            # torch's private constructor: `DTensor.from_local` would move the copy back to the mesh's device
            is_sharded = isinstance(tensor, DTensor)
            tensor_copy = DTensor(buffer, tensor._spec, requires_grad=False) if is_sharded else buffer  # type: ignore[attr-defined, no-untyped-call]
            self.copies[name] = tensor_copy
        return tensor_copy


def _copy_tensors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, tensor in pairs:
            buffer.copy_(tensor, non_blocking=True)
