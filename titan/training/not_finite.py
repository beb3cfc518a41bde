"""Where a step's first non-finite value comes from: the step is repeated with hooks on every module.

All ranks repeat the step together, from the weights and the batch that are still there; a step that is finite has no
hooks. Each rank notes, for each stage and micro-batch, the first value that is not finite in the forward pass and in
the backward pass. The earliest of all ranks is the origin: forward before backward, then by micro-batch, stage (what a
stage sends on comes later) and order within the stage. Values are checked before they are summed over tensor ranks, so
that the rank is found too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titan.debug.module_hooks import ModuleHooks, StageCall, force_eager, iterate_submodules
from titan.files.atomic import write_atomic
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.norms import local_tensor
from titan.run.run import Run
from titan.training.non_finite_op_mode import NonFiniteOpMode
from titan.training.observe import compute_token_losses
from titan.training.train_step import TrainStep

Direction = Literal["forward", "backward"]
PASS_NAMES = {"forward": "forward pass", "backward": "backward pass"}
MAX_NAMED = 4
"""Rows and tensors that a sentence names."""


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first value that is not finite, on one rank.

    Attributes:
        direction: of the pass.
        module: whose operation gave it.
        detail: which part of the module, where it is not the module as a whole.
        microbatch: its number.
        stage: the stage's number in the model.
        order: how many values of this stage and micro-batch came before.
        rows: indices of rows in the micro-batch; empty where the value belongs to no row.
        operation: the operation's name in torch; None where it is not known.
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
class RankFindings:
    """What one rank found.

    Attributes:
        origins: at most one of each stage, micro-batch and direction.
        weights: names of this rank's weights that are not finite.
        gradients: names of the weights whose gradients are not finite.
    """

    origins: tuple[NonFiniteOrigin, ...]
    weights: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class NonFiniteReport:
    """Where a step's first non-finite value comes from, over all ranks."""

    sentence: str
    rank_findings: tuple[RankFindings, ...]

    def write(self, directory: Path, step: int) -> None:
        """Write the details into `debug/`."""
        file = directory / "debug" / f"not-finite-step-{step}.json"
        file.parent.mkdir(exist_ok=True)
        ranks = [{"rank": rank, **asdict(findings)} for rank, findings in enumerate(self.rank_findings)]
        write_atomic(file, json.dumps({"step": step, "sentence": self.sentence, "ranks": ranks}, indent=1))


def investigate_step(
    run: Run, train_step: TrainStep, rows: Microbatches, scale: float, row_number_of: Callable[[int], int | None]
) -> NonFiniteReport:
    """Repeat a step without an update, and return where its first non-finite value comes from.

    All ranks call it together, and get the same sentence.

    Args:
        train_step: with the weights of the step.
        rows: of the step on this rank.
        scale: see `TrainStep.backward`.
        row_number_of: the number in the data of a row of this rank, given by its place; None for padding.
    """
    weights = _list_not_finite((name, p.detach()) for name, p in train_step.named_parameters())
    tracer, compiled = NonFiniteTracer(train_step, run), run.compile.scope != "off"
    operations = nullcontext() if _uses_flex(run) else tracer.op_mode
    with tracer, force_eager(compiled), operations, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the tracer's views, which nothing writes to
        train_step.backward(rows, scale)
    gradients = _list_not_finite((name, p.grad) for name, p in train_step.named_parameters() if p.grad is not None)
    train_step.optimizer.zero_grad(set_to_none=True)
    rows_per_microbatch = rows.tokens.shape[1]
    origins = tuple(
        _number_rows(origin, train_step.world.rank_info.rank, rows_per_microbatch, row_number_of)
        for origin in tracer.origins
    )
    rank_findings = tuple(train_step.world.all_gather_object(RankFindings(origins, weights, gradients)))
    return NonFiniteReport(_describe_origin(rank_findings, compiled), rank_findings)


def _uses_flex(run: Run) -> bool:
    """Whether attention is FlexAttention, which torch compiles only where nothing else sees its operations."""
    return run.training.attention == "flex" or (run.dataset.mask_documents and run.machine.device == "cuda")


def _number_rows(
    origin: NonFiniteOrigin, rank: int, rows_per_microbatch: int, row_number_of: Callable[[int], int | None]
) -> NonFiniteOrigin:
    """Return an origin with the rows' numbers in the data instead of their places in the micro-batch."""
    numbers = [row_number_of(origin.microbatch * rows_per_microbatch + row) for row in origin.rows]
    return replace(origin, rank=rank, rows=tuple(n for n in numbers if n is not None))


def _list_not_finite(tensors: Any) -> tuple[str, ...]:
    return tuple(name for name, x in tensors if not torch.isfinite(local_tensor(x)).all().item())


class NonFiniteTracer(ModuleHooks):
    """Notes the first non-finite value of each stage, micro-batch and direction."""

    def __init__(self, train_step: TrainStep, run: Run) -> None:
        super().__init__(train_step.stages)
        pipeline = train_step.world.get_coordinate("pipeline")
        self.stage_numbers = list(run.staging.list_stages(pipeline))
        self.origins_by_pass: dict[tuple[Direction, int, int], NonFiniteOrigin] = {}
        self.value_counts: dict[tuple[Direction, int, int], int] = {}
        self.bad_tokens: list[Tensor] = []
        self.op_mode = NonFiniteOpMode()
        for index, stage in enumerate(train_step.stages):
            for name, module in iterate_submodules(stage.model):
                self.add_before(index, module, self._build_pre_hook(name))
                self.add_after(index, module, self._build_post_hook(name), first=True)

    @property
    def origins(self) -> list[NonFiniteOrigin]:
        """What was noted."""
        return list(self.origins_by_pass.values())

    def _build_pre_hook(self, name: str) -> Callable[..., Any]:
        parent = _find_parent(name)

        def check_inputs(call: StageCall, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if name == "head" and len(args) > 1 and args[1] is not None:
                self.bad_tokens = [~torch.isfinite(compute_token_losses(module, args[0].detach(), args[1]))]
            out = list(args)
            for index, x in enumerate(args):
                if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad:
                    self._note_value(call, "forward", parent, f"before {_shorten_name(name)}", x)
                    out[index] = self._watch_gradient(x, call, name, "")
            return tuple(out)

        return check_inputs

    def _build_post_hook(self, name: str) -> Callable[..., Any]:
        parent = _find_parent(name)

        def check_output(call: StageCall, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            rows = self.bad_tokens[0] if name == "head" and out.dim() < 2 and self.bad_tokens else None
            self._note_value(call, "forward", name, "", out, rows)
            return self._watch_gradient(out, call, parent, f"after {_shorten_name(name)}")

        return check_output

    def _watch_gradient(self, x: Tensor, call: StageCall, module: str, detail: str) -> Tensor:
        """Return the same tensor, whose gradient from this use alone is noted."""
        if not x.requires_grad:
            return x
        view, microbatch = x.view_as(x), call.microbatch
        gradient_call = StageCall(call.stage, microbatch)
        hook: Any = view.register_hook
        hook(lambda gradient: self._note_value(gradient_call, "backward", module, detail, gradient.detach()))
        return view

    @torch.no_grad()
    def _note_value(
        self, call: StageCall, direction: Direction, module: str, detail: str, x: Tensor, is_bad: Tensor | None = None
    ) -> None:
        """Note a value that is the first of its pass that is not finite."""
        key = (direction, call.stage, call.microbatch)
        order = self.value_counts[key] = self.value_counts.get(key, -1) + 1
        operation = self.op_mode.take_first()
        if key in self.origins_by_pass or torch.isfinite(x).all().item():
            return
        is_bad = ~torch.isfinite(x.detach()) if is_bad is None else is_bad
        rows = tuple(is_bad.flatten(1).any(1).nonzero().flatten().tolist()) if is_bad.dim() > 1 else ()
        self.origins_by_pass[key] = NonFiniteOrigin(
            direction, module, detail, call.microbatch, self.stage_numbers[call.stage], order, rows, operation
        )


def _find_parent(name: str) -> str:
    """Return the module that contains another: a block for its parts, the model for blocks and what is beside them."""
    parent = name.rpartition(".")[0]
    return "the model" if parent in ("", "layers") else parent


def _shorten_name(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def _describe_origin(rank_findings: Sequence[RankFindings], compiled: bool) -> str:
    """Return one sentence on the origin."""
    weights = _format_names((name, rank) for rank, part in enumerate(rank_findings) for name in part.weights)
    origins = sorted((o for part in rank_findings for o in part.origins), key=_build_sort_key)
    if origins:
        first = origins[0]
        same_origins = [o for o in origins if _build_sort_key(o)[:-1] == _build_sort_key(first)[:-1]]
        rows = sorted({row for o in same_origins if o.rank == first.rank for row in o.rows})
        ranks = sorted({o.rank for o in same_origins})
        text = (
            f"the first non-finite value is in the {PASS_NAMES[first.direction]} of {first.module}"
            f"{f' ({first.detail})' if first.detail else ''}"
            f"{f', operation {first.operation}' if first.operation else ''}, "
            f"micro-batch {first.microbatch}, "
            f"rank{'s' if len(ranks) > 1 else ''} {_format_list(ranks)}{_format_rows(rows)}"
        )
        return f"{text}; not finite before the step: {weights}" if weights else text
    if weights:
        return f"not finite before the step: {weights}"
    gradients = _format_names((name, rank) for rank, part in enumerate(rank_findings) for name in part.gradients)
    if gradients:
        return f"activations and their gradients are finite; non-finite gradients: {gradients}"
    condition = ", without compilation" if compiled else ""
    return f"the step was finite when it was repeated{condition}"


def _build_sort_key(origin: NonFiniteOrigin) -> tuple[Any, ...]:
    """Return a key that sorts origins by the order of computation."""
    backward = origin.direction == "backward"
    stage = -origin.stage if backward else origin.stage
    return backward, origin.microbatch, stage, origin.order, origin.rank


def _format_rows(rows: Sequence[int]) -> str:
    return f", row{'s' if len(rows) > 1 else ''} {_format_list(rows)}" if rows else ""


def _format_list(numbers: Sequence[int]) -> str:
    remainder = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return ", ".join(map(str, numbers[:MAX_NAMED])) + remainder


def _format_names(names_and_ranks: Any) -> str:
    """Return the names of tensors with the ranks that have them; empty where there are none."""
    ranks: dict[str, list[int]] = {}
    for name, rank in names_and_ranks:
        ranks.setdefault(name, []).append(rank)
    remainder = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    formatted = [
        f"{name} (rank{'s' if len(r) > 1 else ''} {_format_list(r)})" for name, r in list(ranks.items())[:MAX_NAMED]
    ]
    return ", ".join(formatted) + remainder if ranks else ""
