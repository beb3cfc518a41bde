"""The experts that routers choose in a replay: recorded, and on request replaced by those of another replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titan.debug.module_hooks import ModuleHooks, StageCall, find_compiled_parts
from titan.errors import RunError
from titan.numerics.differences import Operation, Samples
from titan.training.observe import SeenTokens, StepRows, join_microbatches
from titan.training.replay.observation import join_samples
from titan.training.train_step import TrainStep


class RouteWatch(ModuleHooks):
    """Records the experts of each token, and has routers choose given ones.

    Attributes:
        choices: of each router, how many were pinned, and how many of these would have differed.
    """

    def __init__(self, train_step: TrainStep, rows: StepRows) -> None:
        super().__init__(train_step.stages, around_compiled=True)
        self.train_step, self.rows = train_step, rows
        self.seen: dict[str, SeenTokens] = {}
        self.choices: dict[str, tuple[int, int]] = {}
        self._pinned: list[nn.Module] = []

    def watch(self, pinned: Mapping[str, Samples]) -> None:
        """Watch all routers; those with `pinned` experts use them."""
        for index, stage in enumerate(self.train_step.stages):
            inside = find_compiled_parts(stage)
            for name, router in stage.model.routers().items():
                if router in inside:
                    continue
                self.add_after(index, router, partial(self._record, name))
                if name in pinned:
                    self._pin(index, name, router, pinned[name])

    def _record(self, name: str, call: StageCall, router: nn.Module, args: tuple[Any, ...], experts: Tensor) -> None:
        if self.rows.is_counted(experts.shape[1]):
            real = experts[: self.rows.count_rows(call.microbatch)]
            tokens = self.rows.number_tokens(call.microbatch, real)
            self.seen.setdefault(name, []).append((tokens, real.flatten(0, 1).cpu(), call.microbatch))

    def _pin(self, stage: int, name: str, router: Any, pinned: Samples) -> None:
        """Have a router choose given experts, and count how many of its own choices would have been others."""
        call, own_choice = self.calls[stage], router.choose_experts

        def choose_pinned(scores: Tensor) -> Tensor:
            own = own_choice(scores)
            real = own[: self.rows.count_rows(call.microbatch)]
            numbers = _find_tokens(pinned.tokens, self.rows.number_tokens(call.microbatch, real).numpy())
            chosen = torch.from_numpy(pinned.values[numbers]).to(own.device).view_as(real)
            other = int((real.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
            count, others = self.choices.get(name, (0, 0))
            self.choices[name] = count + real[..., 0].numel(), others + other
            return torch.cat([chosen, own[len(real) :]])

        router.choose_experts = choose_pinned
        self._pinned.append(router)

    def __exit__(self, *error: Any) -> None:
        for router in self._pinned:
            del router.choose_experts
        super().__exit__(*error)

    def sum_choices(self) -> dict[str, float]:
        """Return the choices over all routers, as figures of a replay; none where none was pinned."""
        sums = [float(sum(counts)) for counts in zip(*self.choices.values(), strict=True)]
        return dict(zip(("pinned", "other"), sums, strict=False))

    def collect(self, rank: int) -> dict[str, Samples]:
        """Return the experts of this rank's tokens, by router."""
        return {name: join_microbatches(seen, rank) for name, seen in self.seen.items()}

    def list_experts(self) -> dict[str, Tensor]:
        """Return the experts of this rank's tokens, by router, int64 [tokens, 1 + K]: behind the token's number.

        A router whose choice was not seen, or of whose tokens other ranks count all, has none.
        """
        seen = {name: torch.from_numpy(np.column_stack([s.tokens, s.values])) for name, s in self.collect(0).items()}
        none = torch.zeros(0, 1, dtype=torch.int64)
        return {name: seen.get(name, none) for stage in self.train_step.stages for name in stage.model.routers()}


def join_experts(ranks: Sequence[Mapping[str, Tensor]], tokens: int) -> dict[str, Samples]:
    """Return the experts of all ranks' tokens, by router; of no router where one's were not all seen.

    Args:
        ranks: as of `RouteWatch.list_experts`.
        tokens: of the step.
    """
    joined: dict[str, Samples] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        seen = [rank[name] for rank in ranks if len(rank.get(name, ()))]
        joined[name] = join_samples(join_microbatches([(part[:, 0], part[:, 1:], 0)], 0) for part in seen)
    return joined if all(len(samples.tokens) == tokens for samples in joined.values()) else {}


def _find_tokens(pinned: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where tokens are among those whose experts are pinned; raises RunError when one is not among them."""
    numbers = np.searchsorted(pinned, wanted)
    if len(pinned) == 0 or not np.array_equal(pinned[np.minimum(numbers, len(pinned) - 1)], wanted):
        raise RunError("pin=routing: the first replay has no experts of some tokens; give the same seq_len and batch.")
    return numbers


LARGEST_COUNT = 10_000
"""Operations that are recorded of a module."""


class OperationWatch(ModuleHooks):
    """Records the operations of one module's first forward pass."""

    stays_in_modes = True

    def __init__(self, train_step: TrainStep, name: str) -> None:
        super().__init__(train_step.stages)
        self.name, self.operations = name, list[Operation]()
        self._recording, self._paths = ExitStack(), list[str]()
        for index, stage in enumerate(train_step.stages):
            for path, module in stage.model.named_modules():  # and those in it that compute something
                if f"{path}.".startswith(f"{name}.") and type(module).forward is not nn.Module.forward:
                    self.add_before(index, module, partial(self._enter, path))
                    self.add_after(index, module, partial(self._leave, path))

    def _enter(self, path: str, call: StageCall, *_: Any) -> None:
        if call.microbatch == 0:
            self._paths.append(path)
            if path == self.name:
                from torch.utils._debug_mode import DebugMode  # only here: it imports much

                self._recording.enter_context(DebugMode())
                self._recording.enter_context(DebugMode.dispatch_hooks(record_hook=self._record_operation))

    def _leave(self, path: str, call: StageCall, *_: Any) -> None:
        if call.microbatch == 0:
            if path == self.name:
                self._recording.close()
            self._paths.pop()

    def __exit__(self, *error: Any) -> None:
        self._recording.close()
        super().__exit__(*error)

    def _record_operation(self, func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> dict[str, Any]:
        """Record what an operation returns; DebugMode calls it."""
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if tensors and len(self.operations) < LARGEST_COUNT:
            sums = [number for x in tensors for number in _measure(x)]
            path = self._paths[-1] if self._paths else ""
            shapes = tuple(tuple(x.shape) for x in tensors)
            self.operations.append(Operation(path, str(func), shapes, tuple(sums)))
        return {}


@torch.no_grad()
def _measure(x: Tensor) -> tuple[float, float]:
    """Return a sum of the elements, with weights by which it changes with their order, and one of absolute values."""
    values = x.detach().to(torch.float64).flatten()
    weights = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    return float((values * weights).sum()), float((values.abs() * weights).sum())
