"""Where a step's first non-finite value comes from: the step is repeated with hooks on every module.

All ranks repeat the step together, from the weights and the batch that are still there; a step that is finite has no
hooks. Each rank notes, for each stage and micro-batch, the first value that is not finite in the forward pass and in
the backward pass. The earliest of all ranks is the origin: forward before backward, then by micro-batch, stage (what a
stage sends on comes later) and order within the stage. Values are checked before they are summed over tensor ranks, so
that the rank is found too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titan.debug.hooks import Call, Hooks, eagerly, submodules
from titan.files.atomic import write_atomic
from titan.parallelism.grad_norm import local
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.observe import token_losses
from titan.training.operations import Operations
from titan.training.train_step import TrainStep

Direction = Literal["forward", "backward"]
WHERE = {"forward": "forward pass", "backward": "backward pass"}
NAMED = 4
"""Rows and tensors that a sentence names."""


@dataclass(frozen=True)
class Origin:
    """The first value that is not finite, on one rank.

    Attributes:
        direction: of the pass.
        module: whose operation gave it.
        detail: which part of the module, where it is not the module as a whole.
        operation: the operation's name in torch; None where it is not known.
        microbatch: its number.
        stage: the stage's number in the model.
        order: how many values of this stage and micro-batch came before.
        rows: indices of rows in the micro-batch; empty where the value belongs to no row.
        rank: the rank.
    """

    direction: Direction
    module: str
    detail: str
    microbatch: int
    stage: int
    order: int
    rows: tuple[int, ...]
    operation: str | None = None
    rank: int = 0


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Attributes:
        origins: at most one of each stage, micro-batch and direction.
        weights, gradients: names of this rank's tensors that are not finite.
    """

    origins: tuple[Origin, ...]
    weights: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Where a step's first non-finite value comes from, over all ranks."""

    sentence: str
    found: tuple[Found, ...]

    def write(self, directory: Path, step: int) -> None:
        """Write the details into `debug/`."""
        file = directory / "debug" / f"not-finite-step-{step}.json"
        file.parent.mkdir(exist_ok=True)
        ranks = [{"rank": rank, **asdict(found)} for rank, found in enumerate(self.found)]
        write_atomic(file, json.dumps({"step": step, "sentence": self.sentence, "ranks": ranks}, indent=1))


def investigate(
    run: Run, train_step: TrainStep, rows: Microbatches, scale: float, number_of: Callable[[int], int | None]
) -> Report:
    """Repeat a step without an update, and return where its first non-finite value comes from.

    All ranks call it together, and get the same sentence.

    Args:
        run: the run.
        train_step: with the weights of the step.
        rows: of the step on this rank.
        scale: see `TrainStep.backward`.
        number_of: the number in the data of a row of this rank, given by its place; None for padding.
    """
    weights = _not_finite((name, p.detach()) for name, p in train_step.named_parameters())
    tracer, compiled = Tracer(train_step, run), run.compile.scope != "off"
    with tracer, eagerly(compiled), nullcontext() if _uses_flex(run) else tracer.operations:
        train_step.backward(rows, scale)
    gradients = _not_finite((name, p.grad) for name, p in train_step.named_parameters() if p.grad is not None)
    train_step.optimizer.zero_grad(set_to_none=True)
    per_call = rows.tokens.shape[1]
    own = tuple(_numbered(origin, train_step.world.rank_info.rank, per_call, number_of) for origin in tracer.origins)
    found = tuple(train_step.world.gather(Found(own, weights, gradients)))
    return Report(_sentence(found, compiled), found)


def _uses_flex(run: Run) -> bool:
    """Whether attention is FlexAttention, which torch compiles only where nothing else sees its operations."""
    return run.training.attention == "flex" or (run.dataset.mask_documents and run.machine.device == "cuda")


def _numbered(origin: Origin, rank: int, per_call: int, number_of: Callable[[int], int | None]) -> Origin:
    """Return an origin with the rows' numbers in the data instead of their places in the micro-batch."""
    numbers = [number_of(origin.microbatch * per_call + row) for row in origin.rows]
    return replace(origin, rank=rank, rows=tuple(n for n in numbers if n is not None))


def _not_finite(tensors: Any) -> tuple[str, ...]:
    return tuple(name for name, x in tensors if not torch.isfinite(local(x)).all().item())


class Tracer(Hooks):
    """Notes the first non-finite value of each stage, micro-batch and direction."""

    def __init__(self, train_step: TrainStep, run: Run) -> None:
        super().__init__(train_step.stages)
        pipeline = train_step.world.coordinate("pipeline")
        self.numbers = list(run.staging.stages_of(pipeline))
        self.found: dict[tuple[Direction, int, int], Origin] = {}
        self.values: dict[tuple[Direction, int, int], int] = {}
        self.bad_tokens: list[Tensor] = []
        self.operations = Operations()
        for index, stage in enumerate(train_step.stages):
            for name, module in submodules(stage.model):
                self.before(index, module, self._entering(name))
                self.after(index, module, self._leaving(name), first=True)

    @property
    def origins(self) -> list[Origin]:
        """What was noted."""
        return list(self.found.values())

    def _entering(self, name: str) -> Callable[..., Any]:
        inside = _parent(name)

        def before(call: Call, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if name == "head" and len(args) > 1 and args[1] is not None:
                self.bad_tokens = [~torch.isfinite(token_losses(module, args[0].detach(), args[1]))]
            out = list(args)
            for place, x in enumerate(args):
                if _is_hidden(x):
                    self._note(call, "forward", inside, f"before {_last(name)}", x)
                    out[place] = self._watch(x, call, name, "")
            return tuple(out)

        return before

    def _leaving(self, name: str) -> Callable[..., Any]:
        inside = _parent(name)

        def after(call: Call, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            rows = self.bad_tokens[0] if name == "head" and out.dim() < 2 and self.bad_tokens else None
            self._note(call, "forward", name, "", out, rows)
            return self._watch(out, call, inside, f"after {_last(name)}")

        return after

    def _watch(self, x: Tensor, call: Call, module: str, detail: str) -> Tensor:
        """Return the same tensor, whose gradient from this use alone is noted."""
        if not x.requires_grad:
            return x
        own, microbatch = x.view_as(x), call.microbatch
        at = Call(call.stage, microbatch)
        hook: Any = own.register_hook
        hook(lambda gradient: self._note(at, "backward", module, detail, gradient.detach()))
        return own

    @torch.no_grad()
    def _note(
        self, call: Call, direction: Direction, module: str, detail: str, x: Tensor, bad: Tensor | None = None
    ) -> None:
        """Note a value that is the first of its pass that is not finite."""
        key = (direction, call.stage, call.microbatch)
        order = self.values[key] = self.values.get(key, -1) + 1
        operation = self.operations.take()
        if key in self.found or torch.isfinite(x).all().item():
            return
        bad = ~torch.isfinite(x.detach()) if bad is None else bad
        rows = tuple(bad.flatten(1).any(1).nonzero().flatten().tolist()) if bad.dim() > 1 else ()
        self.found[key] = Origin(
            direction, module, detail, call.microbatch, self.numbers[call.stage], order, rows, operation
        )


def _is_hidden(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad


def _parent(name: str) -> str:
    """Return the module that contains another: a block for its parts, the model for blocks and what is beside them."""
    above = name.rpartition(".")[0]
    return "the model" if above in ("", "layers") else above


def _last(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def _sentence(found: Sequence[Found], compiled: bool) -> str:
    """Return one sentence on the origin."""
    weights = _named((name, rank) for rank, part in enumerate(found) for name in part.weights)
    origins = sorted((o for part in found for o in part.origins), key=_place)
    if origins:
        first = origins[0]
        alike = [o for o in origins if _place(o)[:-1] == _place(first)[:-1]]
        rows = sorted({row for o in alike if o.rank == first.rank for row in o.rows})
        ranks = sorted({o.rank for o in alike})
        text = (
            f"the first non-finite value is in the {WHERE[first.direction]} of {first.module}"
            f"{f' ({first.detail})' if first.detail else ''}"
            f"{f', operation {first.operation}' if first.operation else ''}, "
            f"micro-batch {first.microbatch}, "
            f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}{_rows(rows)}"
        )
        return f"{text}; not finite before the step: {weights}" if weights else text
    if weights:
        return f"not finite before the step: {weights}"
    gradients = _named((name, rank) for rank, part in enumerate(found) for name in part.gradients)
    if gradients:
        return f"activations and their gradients are finite, and not finite are the gradients of {gradients}"
    how = ", without compilation" if compiled else ""
    return f"the step was finite when it was repeated{how}"


def _place(origin: Origin) -> tuple[Any, ...]:
    """Return a key that sorts origins by the order of computation."""
    backward = origin.direction == "backward"
    stage = -origin.stage if backward else origin.stage
    return backward, origin.microbatch, stage, origin.order, origin.rank


def _rows(rows: Sequence[int]) -> str:
    return f", row{'s' if len(rows) > 1 else ''} {_list(rows)}" if rows else ""


def _list(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return ", ".join(map(str, numbers[:NAMED])) + more


def _named(found: Any) -> str:
    """Return the names of tensors with the ranks that have them; empty where there are none."""
    ranks: dict[str, list[int]] = {}
    for name, rank in found:
        ranks.setdefault(name, []).append(rank)
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    shown = [f"{name} (rank{'s' if len(r) > 1 else ''} {_list(r)})" for name, r in list(ranks.items())[:NAMED]]
    return ", ".join(shown) + more if ranks else ""
