"""Steps whose loss or gradients are not finite: where that began, and when there are too many of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan.config.settings import format_value
from titan.console.numbers import format_plural
from titan.dataset.loader import Batch
from titan.dataset.mixture import RowMixture
from titan.debug.module_hooks import ModuleHooks, StageCall, force_eager
from titan.errors import RunError
from titan.files.atomic import write_atomic
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.norms import local_tensor
from titan.run.run import Run
from titan.training.observe import compute_token_losses
from titan.training.step_metrics import StepResult
from titan.training.train_step import TrainStep


@dataclass(eq=False)
class BadSteps:
    """Examines steps for values that are not finite, and repeats them; all ranks call it together.

    `allow_task` lets the ranks wait longer for each other, as a repeated step needs. `count` is how many steps in a row
    were bad, of those whose metrics were read. `latest`: whether the latest step was bad, bool [] on the device; the
    weights wait then until the host has found the cause.
    """

    run: Run
    train_step: TrainStep
    mix: RowMixture
    allow_task: Callable[[], None]
    to_device: Callable[[Batch], Microbatches]
    warn: Callable[[str], None]
    count: int = 0

    def __post_init__(self) -> None:
        """Begin without a bad step."""
        self.latest = torch.zeros((), dtype=torch.bool, device=self.train_step.device)

    def examine(self, result: StepResult) -> tuple[str, str] | None:
        """Return the symptom and the cause of a bad step; None for a finite step.

        The symptom is what was not finite, on which ranks, and the step's rows; the cause is where the first value that
        is not finite came from. A warning has both, and a file in `debug/` the details.
        """
        if isfinite(result.loss + result.grad_norm):
            self.count = 0
            return None
        self.count += 1
        self.latest = torch.zeros_like(self.latest)  # the weights need not wait for the next step
        losses = self.train_step.world.all_gather_object(float(result.local_loss.flatten()[0]))
        ranks = [rank for rank, loss in enumerate(losses) if not isfinite(loss)]
        origin = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradients (the loss is finite)"
        symptom = f"{origin}, rows {result.batch.first} to {result.batch.last}"
        self.allow_task()
        findings = self._investigate(result)
        cause = _describe_origin(findings, self.run.compile.scope != "off")
        if self.train_step.world.is_rank0:
            file = Path(self.run.directory) / "debug" / f"not-finite-step-{result.step}.json"
            file.parent.mkdir(exist_ok=True)
            parts = [{"rank": rank, **asdict(part)} for rank, part in enumerate(findings)]
            write_atomic(file, json.dumps({"step": result.step, "sentence": cause, "ranks": parts}, indent=1))
        self.warn(f"step {result.step}: not finite: {symptom}: {cause}; the weights are unchanged")
        return symptom, cause

    def build_error(self, step: int, symptom: str, cause: str, saved_step: int) -> RunError:
        """Return the error that ends the run after too many bad steps, of which this is the last one."""
        return RunError(
            f"{format_plural(self.count, 'step')} in a row without finite values, the last one step {step}: {symptom}: "
            f"{cause}; lower optimizer.lr={format_value(self.run.optimizer.lr)}, or raise "
            f"training.bad_steps={self.run.training.bad_steps}. The last checkpoint is from step {saved_step}."
        )

    def _investigate(self, result: StepResult) -> Sequence[RankFindings]:
        """Repeat a step without an update; return what each rank found; all ranks call it together."""
        run, train_step, rows = self.run, self.train_step, self.to_device(result.batch)
        weights = _list_not_finite((name, p.detach()) for name, p in train_step.named_parameters())
        tracer = NonFiniteTracer(train_step, run)
        # torch compiles FlexAttention only where nothing else sees its operations
        uses_flex = run.training.attention == "flex" or (run.dataset.mask_documents and run.machine.device == "cuda")
        operations = nullcontext() if uses_flex else tracer.op_mode
        with tracer, force_eager(run.compile.scope != "off"), operations, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the tracer's views, which nothing writes to
            train_step.backward(rows, 1 / run.training.count_step_tokens(result.step))
        gradients = _list_not_finite((name, p.grad) for name, p in train_step.named_parameters() if p.grad is not None)
        train_step.optimizer.zero_grad(set_to_none=True)
        training, shard, origins = run.training, train_step.world.data_shard, list[NonFiniteOrigin]()
        rank_rows = shard.slice_rows(training.find_phase(result.step).rows)
        indices = np.arange(rank_rows.start, rank_rows.stop) + training.count_rows_before(result.step)
        numbers = self.mix.compute_row_numbers(indices).tolist()
        for origin in tracer.origins_by_pass.values():  # with the rows' numbers in the data; padding has none
            first_row = origin.microbatch * rows.tokens.shape[1]
            in_data = tuple(numbers[row] for row in (first_row + r for r in origin.rows) if row < len(numbers))
            origins.append(replace(origin, rank=train_step.world.rank_info.rank, rows=in_data))
        return train_step.world.all_gather_object(RankFindings(tuple(origins), weights, gradients))


Direction = Literal["forward", "backward"]
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
    order: int = 0
    rows: tuple[int, ...] = ()
    operation: str | None = None
    rank: int = 0


@dataclass(frozen=True)
class RankFindings:
    """What one rank found: at most one origin of each stage, micro-batch and direction, and the names of weights that
    are not finite, and of those whose gradients are not.
    """

    origins: tuple[NonFiniteOrigin, ...]
    weights: tuple[str, ...]
    gradients: tuple[str, ...]


def _list_not_finite(tensors: Any) -> tuple[str, ...]:
    return tuple(name for name, x in tensors if not torch.isfinite(local_tensor(x)).all().item())


class NonFiniteTracer(ModuleHooks):
    """Notes the first non-finite value of each stage, micro-batch and direction."""

    def __init__(self, train_step: TrainStep, run: Run) -> None:
        super().__init__(train_step.stages)
        self.stage_numbers = list(run.staging.list_stages(train_step.world.get_coordinate("pipeline")))
        self.origins_by_pass: dict[tuple[Direction, int, int], NonFiniteOrigin] = {}
        self.value_counts: dict[tuple[Direction, int, int], int] = {}
        self.bad_tokens: list[Tensor] = []
        self.op_mode = NonFiniteOpMode()
        for index, stage in enumerate(train_step.stages):
            for name, module in stage.model.named_modules():
                if name and not isinstance(module, nn.ModuleDict | nn.ModuleList):
                    self.add_before(index, module, partial(self._check_inputs, name))
                    self.add_after(index, module, partial(self._check_output, name), first=True)

    def _check_inputs(self, name: str, call: StageCall, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        parent, inputs, before = _find_parent(name), list(args), f"before {_shorten_name(name)}"
        if name == "head" and len(args) > 1 and args[1] is not None:
            self.bad_tokens = [~torch.isfinite(compute_token_losses(module, args[0].detach(), args[1]))]
        for index, x in enumerate(args):
            if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad:
                self._note_value(self._locate("forward", call, parent, before), x)
                inputs[index] = self._watch_gradient(self._locate("backward", call, name), x)
        return tuple(inputs)

    def _check_output(
        self, name: str, call: StageCall, module: nn.Module, args: tuple[Any, ...], out: Tensor
    ) -> Tensor:
        rows = self.bad_tokens[0] if name == "head" and out.dim() < 2 and self.bad_tokens else None
        self._note_value(self._locate("forward", call, name), out, rows)
        after = f"after {_shorten_name(name)}"
        return self._watch_gradient(self._locate("backward", call, _find_parent(name), after), out)

    def _locate(self, direction: Direction, call: StageCall, module: str, detail: str = "") -> NonFiniteOrigin:
        """Return the origin that a value of a call would be."""
        return NonFiniteOrigin(direction, module, detail, call.microbatch, self.stage_numbers[call.stage])

    def _watch_gradient(self, origin: NonFiniteOrigin, x: Tensor) -> Tensor:
        """Return the same tensor, whose gradient from this use alone is noted."""
        if not x.requires_grad:
            return x
        view = x.view_as(x)
        hook: Any = view.register_hook
        hook(partial(self._note_value, origin))
        return view

    @torch.no_grad()
    def _note_value(self, origin: NonFiniteOrigin, x: Tensor, is_bad: Tensor | None = None) -> None:
        """Note a value that is the first of its pass that is not finite."""
        key = (origin.direction, origin.stage, origin.microbatch)
        order = self.value_counts[key] = self.value_counts.get(key, -1) + 1
        operation = self.op_mode.take_first()
        if key in self.origins_by_pass or torch.isfinite(x).all().item():
            return
        is_bad = ~torch.isfinite(x.detach()) if is_bad is None else is_bad
        rows = tuple(is_bad.flatten(1).any(1).nonzero().flatten().tolist()) if is_bad.dim() > 1 else ()
        self.origins_by_pass[key] = replace(origin, order=order, rows=rows, operation=operation)


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
        parts = [
            f"the first non-finite value is in the {first.direction} pass of {first.module}"
            f"{f' ({first.detail})' if first.detail else ''}",
            *([f"operation {first.operation}"] if first.operation else []),
            f"micro-batch {first.microbatch}",
            _format_list("rank", sorted({o.rank for o in same_origins})),
            *([_format_list("row", rows)] if rows else []),
        ]
        return ", ".join(parts) + (f"; not finite before the step: {weights}" if weights else "")
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


def _format_list(noun: str, numbers: Sequence[int]) -> str:
    remainder = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:MAX_NAMED]))}{remainder}"


def _format_names(names_and_ranks: Any) -> str:
    """Return the names of tensors with the ranks that have them; empty where there are none."""
    ranks: dict[str, list[int]] = {}
    for name, rank in names_and_ranks:
        ranks.setdefault(name, []).append(rank)
    remainder = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return ", ".join(f"{name} ({_format_list('rank', r)})" for name, r in list(ranks.items())[:MAX_NAMED]) + remainder


UNWRITTEN = ("empty", "new_empty", "resize", "set_", "as_strided")
"""Beginnings of names of operations whose result has no value yet."""


class NonFiniteOpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation with finite arguments and a result that is NaN or infinite.

    Minus infinity is no such result: attention masks have it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first: str | None = None

    def take_first(self) -> str | None:
        """Return the name of the first such operation since the last call, such as "mul"; None when there is none."""
        first, self._first = self._first, None
        return first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "_opname", None) or func.__name__)
        # the result of a collective may not be complete yet
        is_complete = "c10d" not in str(getattr(func, "namespace", "")) and not name.startswith(UNWRITTEN)
        skips_check = self._first is not None or not is_complete
        inputs = [] if skips_check else list(_iterate_tensors((args, kwargs)))
        inputs_finite = name.endswith("_") and all(map(_is_finite, inputs))  # asked before it changes one of them
        out = func(*args, **(kwargs or {}))
        if (
            inputs
            and not all(map(_is_finite, _iterate_tensors(out)))
            and (inputs_finite or all(map(_is_finite, inputs)))
        ):
            self._first = name
        return out


def _iterate_tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point())


@torch.no_grad()
def _is_finite(x: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity but minus infinity; assumed of types with separate storage."""
    x = local_tensor(x)
    return type(x) not in (Tensor, torch.nn.Parameter) or bool((x < torch.inf).all())
