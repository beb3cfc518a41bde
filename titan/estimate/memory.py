"""The peak memory of a rank in closed form, from the schemas alone. Free of torch.

A step is followed through the moments at which its memory can be largest: the head, the final norm, the backward pass
of the last and of the first blocks, the embedding's gradient, the update. In a pipeline each rank is followed through
its schedule, action by action. Every moment is a sum of parts by category; the largest on any rank is the estimate.

What is counted are live tensors, as a trace of the real step sees them (tests/estimate). What processes, kernels and
allocators take besides is added by `titan.estimate.overhead`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from titan.model.activations import Block, Head, Share
from titan.parallelism.pipeline.arithmetic import read_csv
from titan.parallelism.pipeline.schedules import Action, actions_of, order
from titan.parallelism.pipeline.stage_plan import splits_backward, stage_layers, stages_each
from titan.precision.schema import WeightSharding

if TYPE_CHECKING:
    from titan.model.schema import Decoder
    from titan.parallelism.schema import Layout, Parallelism
    from titan.precision.schema import Precision
    from titan.run.schema import Recipe

GIB = 2**30
REDUCE = 4
"""Bytes of a gradient's element while ranks sum it: float32 whatever the compute type."""
SUMS = 4
"""Bytes of an element of the embedding's gradient while a rank sums it."""
PRODUCT = 0.3
"""Of a block's weights those of its largest product: their gradient is there first."""
ALL_FORWARD = ("GPipe", "LoopedBFS")
"""Schedules that take all micro-batches forward before the first goes back."""
STEADY = 8
"""So many micro-batches for each rank lead other schedules through all their states."""
TOKEN = 8
"""Bytes of a token, of a target, of a position and of a document's number."""


@dataclass(frozen=True)
class Usage:
    """Bytes on one rank at one moment of a step.

    Attributes:
        moment: when.
        parts: bytes by category: weights, optimizer, gradients, gathered weights, activations, logits, messages.
    """

    moment: str
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def gib(self) -> float:
        """All of it, in GiB."""
        return self.bytes / GIB

    def plus(self, moment: str = "", **more: float) -> Usage:
        """The same with more of some categories."""
        parts = dict(self.parts)
        for name, size in more.items():
            parts[name] = parts.get(name, 0.0) + size
        return Usage(moment or self.moment, parts)


class Stage(NamedTuple):
    """A part of the model on one rank: its blocks, and whether the embedding and the head are in it."""

    layers: range
    first: bool
    last: bool


def peak(recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda") -> Usage:
    """The largest moment of the fullest rank.

    Args:
        recipe: the choices.
        layout: all degrees.
        microbatches: of a rank in a step.
        device: "cuda" or "cpu", whose kernels keep different tensors.
    """
    return max(peaks(recipe, layout, microbatches, device), key=lambda usage: usage.bytes)


def peaks(recipe: Recipe, layout: Layout, microbatches: int, device: str = "cuda") -> list[Usage]:
    """The largest moment of each rank of a pipeline, in their order; of one rank where there is none."""
    ranks = []
    states = _states(recipe.parallelism, layout.pipeline, microbatches)
    for rank, mine in enumerate(_stages(recipe, layout)):
        one = _Rank(recipe, layout, microbatches, device, mine)
        ranks.append(max(one.moments(states[rank]), key=lambda usage: usage.bytes))
    return ranks


def rank_rows(recipe: Recipe, layout: Layout) -> int:
    """Rows of a global batch that the fullest rank reads."""
    return math.ceil(recipe.training.rows / layout.data_ranks)


def cut(parallelism: Parallelism, layout: Layout) -> WeightSharding:
    """How a layout cuts weights."""
    sharded = 1 if layout.copies else layout.sharded
    return WeightSharding(layout.tensor, sharded, again=isinstance(parallelism.reshard, int))


def largest(recipe: Recipe, layout: Layout, microbatches: int) -> tuple[float, float]:
    """The most bytes that a micro-batch's logits take with their loss and gradient, and those of a whole block."""
    one = _Rank(recipe, layout, microbatches, "cpu", {0: Stage(range(1), False, True)})
    return max(one.head.forward, one.head.backward) - one.head.norm, one.block.kept


def state_bytes(recipe: Recipe, layout: Layout) -> float:
    """Bytes of weights and optimizer state on the fullest rank, wherever they are kept."""
    ranks = [_Rank(recipe, layout, 1, "cpu", mine) for mine in _stages(recipe, layout)]
    return max(rank.weights + rank.optimizer for rank in ranks)


def _stages(recipe: Recipe, layout: Layout) -> list[dict[int, Stage]]:
    """The stages of each pipeline rank by their number."""
    if layout.pipeline == 1:
        return [{0: Stage(range(recipe.model.layers), True, True)}]
    layers = stage_layers(recipe.parallelism, layout, recipe.model, recipe.training.seq_len)
    ranks: list[dict[int, Stage]] = [{} for _ in range(layout.pipeline)]
    for number, (owner, these) in enumerate(layers):
        ranks[owner][number] = Stage(these, number == 0, number == len(layers) - 1)
    return ranks


class State(NamedTuple):
    """What a rank does, and what it has done: all that its memory depends on.

    Attributes:
        stage: the one at work.
        kind: F forward, B backward, I and W its two parts.
        flight: for each stage here the micro-batches that have gone forward and not back, this one included.
        halfway: for each stage here those that have gone back but for the gradients of weights, this one included.
        begun: whether any stage here has gradients of an earlier micro-batch.
    """

    stage: int
    kind: str
    flight: tuple[tuple[int, int], ...]
    halfway: tuple[tuple[int, int], ...]
    begun: bool


def _states(parallelism: Parallelism, ranks: int, microbatches: int) -> list[set[State]]:
    """The different states that each rank of a pipeline goes through."""
    if ranks == 1:
        begun = (False, True) if microbatches > 1 else (False,)
        return [{State(0, kind, ((0, 1),), ((0, 0),), again) for kind in "FB" for again in begun}]
    if parallelism.schedule not in ALL_FORWARD:
        microbatches = min(microbatches, STEADY * ranks)
    return _played(parallelism.schedule, ranks, stages_each(parallelism, ranks), microbatches)


@lru_cache(256)
def _played(schedule: str, ranks: int, stages: int, microbatches: int) -> list[set[State]]:
    custom = schedule.endswith(".csv")
    rows = [list(row) for row in read_csv(schedule).order] if custom else order(schedule, ranks, stages, microbatches)
    return [_fullest(set(_replayed([action for cell in row for action in actions_of(cell)]))) for row in rows]


def _fullest(states: set[State]) -> set[State]:
    """The states that take no less than any other of the same stage and kind."""

    def counts(state: State) -> list[int]:
        return [count for _, count in (*state.flight, *state.halfway)] + [state.begun]

    def less(one: State, other: State) -> bool:
        same = one[:2] == other[:2] and one != other
        return same and all(a <= b for a, b in zip(counts(one), counts(other), strict=True))

    return {one for one in states if not any(less(one, other) for other in states)}


def _replayed(actions: list[Action]) -> Iterator[State]:
    """Each state of a rank."""
    flight, begun = dict.fromkeys(sorted({action.stage for action in actions}), 0), False
    halfway = dict.fromkeys(flight, 0)
    for stage, kind, _ in actions:
        flight[stage] += (kind == "F") - (kind == "I")
        halfway[stage] += kind == "I"
        yield State(stage, kind, tuple(flight.items()), tuple(halfway.items()), begun)
        flight[stage] -= kind == "B"
        halfway[stage] -= kind == "W"
        begun = begun or kind in "BW"


@lru_cache(256)
def _used(model: Decoder, precision: Precision, how: WeightSharding) -> tuple[float, float]:
    """Bytes of the weights in use of one block, and of the head, on one of the ranks that share each product."""
    products, last = model.products(), f"layers.{model.layers - 1}."
    of_block = {name: product for name, product in products.items() if name.startswith(last)}
    used = [precision.used_bytes(these, how) / how.tensor for these in (of_block, {"head": products["head"]})]
    return used[0], used[1]


@lru_cache(256)
def _largest_matrix(model: Decoder) -> int:
    return max(product.inputs * product.outputs for product in model.products().values())


class _Rank:
    """One rank of a layout; sizes in bytes, of what tensor ranks share its part."""

    def __init__(
        self, recipe: Recipe, layout: Layout, microbatches: int, device: str, stages: Mapping[int, Stage]
    ) -> None:
        self.recipe, self.layout, self.stages, self.microbatches = recipe, layout, stages, microbatches
        model, precision = recipe.model, recipe.precision
        rows = math.ceil(rank_rows(recipe, layout) / microbatches)
        self.tokens = math.ceil(rows * recipe.training.seq_len / layout.context)
        self.share = Share(
            self.tokens,
            precision.bytes,
            layout.tensor,
            recipe.parallelism.sequence_parallel,
            fused=device == "cuda",
            compiled=recipe.compile.scope in ("block", "model"),
        )
        self.layers = sum(len(stage.layers) for stage in stages.values())
        self.fsdp = not layout.copies and (layout.sharded > 1 or layout.replicate > 1)
        self.parts = layout.sharded if self.fsdp else 1
        self.whole = recipe.parallelism.accumulates_whole(layout)
        self.block: Block = model.block_activations(self.share, self._core())
        self.head: Head = model.head_activations(
            self.share, parts=recipe.parallelism.loss_parallel, chunk=recipe.training.loss_chunk
        )
        self.splits = layout.pipeline > 1 and splits_backward(recipe.parallelism)
        self._count()

    def _core(self) -> float:
        """Bytes a token that attention keeps where ranks share a row: a second result, and whole rows of keys."""
        model, layout = self.recipe.model, self.layout
        if layout.context == 1:
            return 0.0
        gathered = self.recipe.parallelism.context_method == "allgather"
        keys = 2 * model.kv_heads * (layout.context - 1) if gathered else 0
        return self.share.bytes * model.head_size * (model.heads + keys) / layout.tensor

    def _mask(self) -> float:
        """Bytes of a micro-batch's mask of a row by a row, which keeps documents apart; a ring and flex have none."""
        recipe, layout = self.recipe, self.layout
        method = recipe.parallelism.context_method if layout.context > 1 else ""
        if not recipe.dataset.mask_documents or recipe.training.attention == "flex" or method == "ring":
            return 0.0
        rows = layout.context if method == "ulysses" else 1
        return float(self.share.bytes * self.tokens * recipe.training.seq_len * rows)

    def _count(self) -> None:
        """Elements and bytes of weights, gradients and optimizer state."""
        model, precision, tensor = self.recipe.model, self.recipe.precision, self.layout.tensor
        first, last = (any(getattr(stage, end) for stage in self.stages.values()) for end in ("first", "last"))
        self.block_elements = model.block_parameters() / tensor
        self.embedding_elements = model.embedding_parameters() / tensor if first else 0.0
        self.head_elements = 0.0 if self._tied() or not last else model.head_parameters() / tensor
        self.elements = self.layers * self.block_elements + self.embedding_elements + self.head_elements
        matrices = self.layers * model.block_matmul_parameters() / tensor
        kept = 0.0 if self.recipe.memory.offload else 1.0
        self.weights = kept * precision.weight_bytes * self.elements / self.parts
        self.optimizer = kept * self.recipe.optimizer.state_bytes(
            int(matrices), int(self.elements - matrices), precision.weight_bytes
        ) / self.parts  # fmt: skip
        self.gradient = kept * precision.weight_bytes / self.parts  # of an element, where ranks have summed it
        self.casts, self.head_cast = self._used()
        if self.fsdp:
            self.gathered, self.head_gathered, self.casts, self.head_cast = self.casts, self.head_cast, 0.0, 0.0
        else:
            self.gathered = self.head_gathered = 0.0
        self.embedding_gathered = precision.bytes * self.embedding_elements if self.fsdp else 0.0

    def _used(self) -> tuple[float, float]:
        """Bytes of a block's and of the head's weights in use, as FSDP gathers them or autograd keeps what was cast."""
        how = cut(self.recipe.parallelism, self.layout)
        how = how._replace(sharded=max(2, how.sharded) if self.fsdp else 1)
        block, head = _used(self.recipe.model, self.recipe.precision, how)
        return block, head if any(stage.last for stage in self.stages.values()) else 0.0

    def moments(self, states: set[State]) -> Iterator[Usage]:
        """The moments at which memory can be largest."""
        for state in states:
            stage = self.stages[state.stage]
            whole = (count * self.kept(self.stages[number]) for number, count in state.flight)
            halves = (count * self.halfway(self.stages[number]) for number, count in state.halfway)
            kept = sum(whole) + sum(halves)
            if state.kind == "F":
                yield from self._forward(stage, kept, state.begun)
            elif state.kind == "B":
                yield from self._backward(stage, kept, state.begun)
            else:
                yield from self._split(stage, kept, state)
        yield from self._ends()

    def kept(self, stage: Stage) -> float:
        """Bytes of activations of one micro-batch at a stage, between its forward and its backward pass."""
        rotation: float = 4 * self.recipe.model.head_size * self.tokens
        if self.layout.pipeline == 1:
            rotation /= math.ceil(self.tokens * self.layout.context / self.recipe.training.seq_len)
        ends = self.head.kept + self.head_cast if stage.last else self.block.input
        return self._blocks(stage.layers) + ends + rotation + self._mask()

    def halfway(self, stage: Stage) -> float:
        """The same where the gradients of inputs are there and those of weights are not: all, and what comes back.

        Of a block that is computed again the first part of a backward pass uses all, the second computes it once more.
        """
        whole, again = self.block.kept + self.casts, self._recomputed(stage.layers)
        blocks = again * self.block.input + (len(stage.layers) - again) * whole
        return self.kept(stage) - self._blocks(stage.layers) + blocks + len(stage.layers) * self.block.outputs

    def _recomputed(self, layers: range) -> int:
        """How many of these blocks are computed again as a whole."""
        memory = self.recipe.memory
        every = {"full": 1, "every_n": memory.every}.get(memory.checkpointing)
        return layers.stop // every - layers.start // every if every else 0

    def _blocks(self, layers: range) -> float:
        """Bytes that blocks keep."""
        memory, block, whole = self.recipe.memory, self.block, self.block.kept + self.casts
        count, again = len(layers), self._recomputed(layers)
        return {
            "none": count * whole,
            "full": count * block.input,
            "every_n": (count - again) * whole + again * block.input,
            "selective": count * block.selective,
            "budget": count * (block.input + memory.budget * (whole - block.input)),
        }[memory.checkpointing]

    def _again(self, layers: range) -> float:
        """Bytes that come on top of what the last of these blocks keeps while its backward pass goes on."""
        again = self.block.kept + self.casts - self._blocks(layers[-1:])
        return max(0.0, again) + self.block.backward

    # ---- moments ----

    def _base(self) -> Usage:
        """What is there all the time: state, the batch, and what a pipeline or FSDP keeps."""
        recipe, layout = self.recipe, self.layout
        fields = 3 if recipe.dataset.mask_documents else 2
        batch = TOKEN * fields * rank_rows(recipe, layout) * recipe.training.seq_len
        hidden = (
            self.microbatches
            * self.block.input
            * sum((not stage.first) * (2 if self.splits else 1) + (not stage.last) for stage in self.stages.values())
        )
        base = Usage("", {"weights": self.weights, "optimizer": self.optimizer})
        return base.plus(activations=batch, messages=hidden)

    def _gathered(self, blocks: int, left: int, head: bool = False) -> float:
        """Bytes of gathered weights.

        Args:
            blocks: those that FSDP has at once where it frees them after their forward pass.
            left: of a stage that has them from forward to backward, those that backward has not come to the end of.
            head: whether the head is at work.
        """
        if not self.fsdp:
            return 0.0
        how = self.recipe.parallelism.reshards(self.layout)
        ends = self.head_gathered if head or self._tied() else 0.0
        if how is True:
            return blocks * self.gathered + ends
        if how is False and self.layout.pipeline > 1:  # until the end of the step
            return self.layers * self.gathered + self.head_gathered + self.embedding_gathered
        if how is False:
            return max(blocks, left) * self.gathered + ends + self.embedding_gathered
        return (blocks + left / how) * self.gathered + ends

    def _tied(self) -> bool:
        return self.recipe.model.tied and self.layout.pipeline == 1

    def _gradients(self, elements: float, begun: bool) -> float:
        """Bytes of gradients when those of `elements` are there, and of all from an earlier micro-batch if `begun`."""
        if self.fsdp and self._defers():
            return REDUCE * (self.elements if begun else elements)
        if self.layout.copies or begun:
            elements = self.elements
        return self.gradient * elements

    def _sent(self, elements: float) -> float:
        """Bytes of what FSDP hands over to be summed."""
        return REDUCE * elements if self.fsdp and not self._defers() else 0.0

    def _defers(self) -> bool:
        return self.whole and self.microbatches > 1

    def _unsharded(self, elements: float) -> float:
        """Bytes of gradients as autograd computes them, before FSDP takes them or they are added up."""
        return self.recipe.precision.bytes * elements

    def _forward(self, stage: Stage, kept: float, begun: bool) -> Iterator[Usage]:
        base = self._base().plus(activations=kept, gradients=self._gradients(0.0, begun))
        if stage.last:
            yield base.plus(
                "forward of the head",
                activations=-self.head.kept,
                logits=self.head.forward,
                gathered=self._gathered(1, len(stage.layers), head=True),
            )
        else:
            yield base.plus("forward", gathered=self._gathered(2, len(stage.layers)))

    def _backward(self, stage: Stage, kept: float, begun: bool) -> Iterator[Usage]:
        base, head = self._base().plus(activations=kept), self.head_elements if stage.last else 0.0
        if stage.last:
            yield base.plus(
                "head",
                activations=-self.head.kept,
                logits=self.head.backward,
                gathered=self._gathered(0, len(stage.layers), head=True),
                gradients=self._gradients(0.0, begun),
            )
            base = base.plus(activations=-self.head.kept - self.head_cast)
            after = base.plus(activations=self.head.norm, messages=self._sent(head))
            after = after.plus(gathered=self._gathered(1, len(stage.layers)))
            unsharded = self._gradients(0.0, begun) + self._unsharded(head)
            yield after.plus("the head's gradient", gradients=unsharded)
            yield after.plus("final norm", gradients=self._gradients(head, begun))
        else:
            base = base.plus(activations=-self.block.input)
        if len(stage.layers):
            yield from self._through_blocks(base, stage, head, begun)
        if stage.first:
            yield from self._embedding(base, stage, begun)

    def _split(self, stage: Stage, kept: float, state: State) -> Iterator[Usage]:
        """A part of a backward pass whose gradients of inputs and of weights are computed apart.

        Nothing is freed; what the part for weights computes again stays until its end.
        """
        recomputed = self._recomputed(stage.layers)
        at_work = recomputed if state.kind == "W" else min(1, recomputed)
        again = at_work * (self.block.kept + self.casts)
        base = self._base().plus(activations=kept + again, gathered=self._gathered(2, len(stage.layers)))
        gradients = self._gradients(0.0, state.begun)
        if stage.last:
            logits = self.head.backward - self.head.kept
            yield base.plus("head", logits=logits, gradients=gradients)
        yield base.plus(
            "backward", activations=self.block.backward, gradients=gradients + self._unsharded(self.block_elements)
        )

    def _through_blocks(self, base: Usage, stage: Stage, head: float, begun: bool) -> Iterator[Usage]:
        """The two blocks that backward comes to first, and the two last: each at work, and its gradients reduced."""
        one, count, all_ = self.block_elements, len(stage.layers), self._blocks(stage.layers)
        for done in sorted({0, 1, count - 2, count - 1} & set(range(count))):
            left = stage.layers[: count - done]
            gradients = self._gradients(head + done * one, begun)
            yield base.plus(
                f"backward of block {left[-1]}",
                activations=self._blocks(left) - all_ + self._again(left),
                gradients=gradients + self._unsharded(PRODUCT * one),
                gathered=self._gathered(min(2, len(left)), len(left)),
                messages=self._sent(one if done else head),
            )
            ended = base.plus(
                f"gradients of block {left[-1]}",
                activations=self._blocks(left[:-1]) - all_ + self.block.input,
                gradients=gradients + self._unsharded(one),
            )
            yield ended.plus(
                gathered=self._gathered(min(2, len(left)), len(left)), messages=self._sent(one if done else head)
            )
            yield ended.plus(gathered=self._gathered(min(1, len(left) - 1), len(left) - 1), messages=self._sent(one))

    def _embedding(self, base: Usage, stage: Stage, begun: bool) -> Iterator[Usage]:
        """The embedding's gradient, which is summed in float32 and then rounded."""
        elements = self.embedding_elements
        before = self._gradients(self.elements - elements, begun)
        without = base.plus(activations=self.block.input - self._blocks(stage.layers), gathered=self._gathered(0, 0))
        summed = SUMS * elements + (self._unsharded(elements) if self.recipe.precision.bytes == 2 else 0.0)
        yield without.plus(
            "the embedding's gradient", gradients=before + summed, messages=self._sent(self.block_elements)
        )
        yield without.plus(
            "the embedding's gradient is sent",
            gradients=before + self._unsharded(elements),
            messages=self._sent(elements),
        )

    def _ends(self) -> Iterator[Usage]:
        """When ranks have summed what they kept whole, and the update."""
        base = self._base()
        largest = max(self.block_elements, self.embedding_elements, self.head_elements)
        if self.fsdp and self._defers():
            whole = REDUCE * self.elements
            weights = self._gathered(0, 0)
            yield base.plus("gradients are summed", gradients=whole, messages=REDUCE * largest, gathered=weights)
        matrix = _largest_matrix(self.recipe.model)
        update = self.recipe.optimizer.working_bytes(matrix, int(self.elements / self.parts))
        yield base.plus("update", gradients=self._gradients(self.elements, True), optimizer=update)
