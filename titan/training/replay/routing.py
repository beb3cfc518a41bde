"""The experts that routers choose in a replay: recorded, and on request replaced by those of another replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titan.debug.module_hooks import ModuleHooks, StageCall, find_compiled_parts
from titan.errors import RunError
from titan.numerics.differences import Operation, Samples
from titan.training.observe import StepRows
from titan.training.train_step import TrainStep


class RouteWatch(ModuleHooks):
    """Records the experts of each token, and has routers choose given ones.

    Attributes:
        choices: of each router, how many were pinned, and how many of these would have differed.
    """

    def __init__(self, train_step: TrainStep, rows: StepRows) -> None:
        super().__init__(train_step.stages, around_compiled=True)
        self.train_step, self.rows = train_step, rows
        self.seen: dict[str, list[tuple[Tensor, Tensor, int]]] = {}
        self.choices: dict[str, tuple[int, int]] = {}
        self._pinned: list[nn.Module] = []

    def watch(self, pinned: Mapping[str, Samples]) -> None:
        """Watch all routers; those with `pinned` experts use them."""
        for index, stage in enumerate(self.train_step.stages):
            inside = find_compiled_parts(stage)
            for name, router in stage.model.routers().items():
                if router in inside:
                    continue
                self.add_after(index, router, self._build_hook(name))
                if name in pinned:
                    self._pin(index, name, router, pinned[name])

    def _build_hook(self, name: str) -> Callable[..., None]:
        def record(call: StageCall, router: nn.Module, args: tuple[Any, ...], experts: Tensor) -> None:
            if self.rows.is_counted(experts.shape[1]):
                real = experts[: self.rows.count_rows(call.microbatch)]
                tokens = self.rows.number_tokens(call.microbatch, real)
                self.seen.setdefault(name, []).append((tokens, real.flatten(0, 1).cpu(), call.microbatch))

        return record

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
        samples = {}
        for name, parts in self.seen.items():
            tokens, experts = (torch.cat([part[i] for part in parts]).numpy() for i in (0, 1))  # type: ignore[misc]
            microbatches = np.concatenate([np.full(len(part[0]), part[2], np.int64) for part in parts])
            samples[name] = Samples(tokens, experts, microbatches, microbatches * 0 + rank)
        return samples

    def list_experts(self) -> dict[str, Tensor]:
        """Return the experts of this rank's tokens, by router, int64 [tokens, 1 + K]: behind the token's number.

        A router whose choice was not seen, or of whose tokens other ranks count all, has none.
        """
        seen = {name: torch.from_numpy(np.column_stack([s.tokens, s.values])) for name, s in self.collect(0).items()}
        none = torch.zeros(0, 1, dtype=torch.int64)
        return {name: seen.get(name, none) for stage in self.train_step.stages for name in stage.model.routers()}

    def count_choices(self) -> dict[str, Tensor]:
        """Return the choices as tensors [2]."""
        return {name: torch.tensor(counts) for name, counts in self.choices.items()}


def join_experts(ranks: Sequence[Mapping[str, Tensor]], tokens: int) -> dict[str, Samples]:
    """Return the experts of all ranks' tokens, by router; of no router where one's were not all seen.

    Args:
        ranks: as of `RouteWatch.list_experts`.
        tokens: of the step.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    joined: dict[str, Samples] = {}
    for name in names:
        if seen := [rank[name] for rank in ranks if name in rank and len(rank[name])]:
            stacked = torch.cat(seen).numpy()
            numbers, order = np.unique(stacked[:, 0], return_index=True)
            joined[name] = Samples(numbers, stacked[order, 1:], numbers * 0, numbers * 0)
    return joined if all(name in joined and len(joined[name].tokens) == tokens for name in names) else {}


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
        self.operations: list[Operation] = []
        self._stack: ExitStack | None = None
        self._paths: list[str] = []
        for index, stage in enumerate(train_step.stages):
            for path, module in _iterate_inside(stage.model, name):
                self._watch(index, path, module, is_root=path == name)

    def _watch(self, stage: int, path: str, module: nn.Module, is_root: bool) -> None:
        def enter(call: StageCall, module: nn.Module, args: tuple[Any, ...]) -> None:
            if call.microbatch == 0:
                self._paths.append(path)
                if is_root:
                    self._begin()

        def leave(call: StageCall, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if call.microbatch == 0:
                if is_root:
                    self._end()
                self._paths.pop()

        self.add_before(stage, module, enter)
        self.add_after(stage, module, leave)

    def _begin(self) -> None:
        from torch.utils._debug_mode import DebugMode  # only here: it imports much

        self._stack = ExitStack()
        self._stack.enter_context(DebugMode())
        self._stack.enter_context(DebugMode.dispatch_hooks(record_hook=self._record))

    def _end(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def __exit__(self, *error: Any) -> None:
        self._end()
        super().__exit__(*error)

    def _record(self, func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> dict[str, Any]:
        """Record what an operation returns; DebugMode calls it."""
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if tensors and len(self.operations) < LARGEST_COUNT:
            sums = [number for x in tensors for number in _measure(x)]
            path = self._paths[-1] if self._paths else ""
            shapes = tuple(tuple(x.shape) for x in tensors)
            self.operations.append(Operation(path, str(func), shapes, tuple(sums)))
        return {}


def _iterate_inside(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those in it that compute something, with their names in the model."""
    for path, module in model.named_modules():
        if (path == name or path.startswith(f"{name}.")) and type(module).forward is not nn.Module.forward:
            yield path, module


@torch.no_grad()
def _measure(x: Tensor) -> tuple[float, float]:
    """Return a sum of the elements, with weights by which it changes with their order, and one of absolute values."""
    values = x.detach().to(torch.float64).flatten()
    weights = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    return float((values * weights).sum()), float((values.abs() * weights).sum())
