"""Metrics of every layer, every N steps: norms, update-to-weight ratios and attention logits; nothing on other steps.

Activations and attention logits come from one more forward pass before the step, which therefore computes the same
with and without them, compiled or not. Gradients are those before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan.debug.module_hooks import force_eager
from titan.numerics.differences import get_layer_name
from titan.parallelism import data
from titan.parallelism.microbatches import Microbatches
from titan.parallelism.norms import count_replicas, local_tensor, sum_row_squares
from titan.run.run import Run
from titan.training.observe import Observer, StepRows
from titan.training.train_step import TrainStep

GRADIENT, WEIGHT, UPDATE, ACTIVATION, ELEMENTS, LOGIT = range(6)
"""Rows of a step's table: sums of squares, the number of activations, and the largest attention logit."""


class LayerMetrics:
    """Measures the layers on some steps; all ranks call its methods together, in the order of the step."""

    def __init__(self, run: Run, train_step: TrainStep, every: int) -> None:
        """Measure every `every` steps; 0: never."""
        self.run, self.train_step = run, train_step
        self.set_interval(every)
        self._table = torch.zeros(0)
        self._old_weights: list[Tensor] = []
        self._tables: dict[int, Tensor] = {}

    def set_interval(self, every: int) -> None:
        """Measure every `every` steps from now on; 0: never."""
        self.every, self.layers = every, list_layers(self.train_step) if every else ()

    def is_due(self, step: int) -> bool:
        """Whether a step is measured."""
        return self.every > 0 and step % self.every == 0

    def measure_forward(self, step: int, rows: Microbatches) -> None:
        """Run a forward pass before a step that is due, and measure activations and attention logits."""
        if not self.is_due(step):
            return
        table = torch.zeros(LOGIT + 1, len(self.layers), dtype=torch.float64, device=self.train_step.device)
        count = StepRows(self.train_step, self.run.training.find_phase(step).rows, *rows.tokens.shape[1:])
        observer = Observer(self.train_step, count)
        with observer, force_eager(self.run.compile.scope != "off"):
            observer.watch_hidden(blocks_only=True)
            observer.watch_logits()
            self.train_step.evaluate(rows)
        for stage in self.train_step.stages:
            data.reshard_parameters(stage)
        table[LOGIT] = -math.inf
        for (_, name), totals in observer.totals.items():
            index = self.layers.index(name)
            table[ACTIVATION, index], table[ELEMENTS, index] = totals[0], totals[3]
        for name, logit in observer.logits.items():
            table[LOGIT, self.layers.index(name)] = logit
        self._table = table

    def measure_gradients(self, step: int) -> None:
        """Measure complete gradients and weights of a step that is due, and keep the weights."""
        if not self.is_due(step):
            return
        named_parameters = list(iterate_parameters(self.train_step))
        self._old_weights = [local_tensor(p.detach()).clone() for _, p in named_parameters]
        gradients = ((name, p, local_tensor(p.grad)) for name, p in named_parameters if p.grad is not None)
        self._add_squares(GRADIENT, gradients)
        self._add_squares(WEIGHT, ((name, p, local_tensor(p.detach())) for name, p in named_parameters))

    @torch.no_grad()
    def measure_updates(self, step: int) -> None:
        """Measure how far the weights moved in a step that is due, and start to sum the table over the ranks."""
        if not self.is_due(step):
            return
        parameters = zip(iterate_parameters(self.train_step), self._old_weights, strict=True)
        self._add_squares(UPDATE, ((name, p, weight.sub_(local_tensor(p))) for (name, p), weight in parameters))
        self._old_weights = []
        self.train_step.world.all_reduce(self._table[:LOGIT])
        if self.train_step.world.rank_info.world_size > 1:
            dist.all_reduce(self._table[LOGIT], dist.ReduceOp.MAX)
        self._tables = {last: table for last, table in self._tables.items() if last == step - 1} | {step: self._table}

    def _add_squares(self, row: int, parts: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Add this rank's part of the squares' sums to a row of the table.

        Args:
            parts: the name of each parameter, the parameter, and what this rank has of it or of its gradient.
        """
        world = self.train_step.world
        for name, parameter, part in parts:
            square = sum_row_squares(part).sum() / count_replicas(parameter, world)
            self._table[row, self.layers.index(get_layer_name(name))] += square.to(world.device)

    def build_record(self, step: int) -> dict[str, float]:
        """Return the keys of a measured step for metrics.jsonl; none for other steps."""
        table = self._tables.pop(step, None)
        if table is None:
            return {}
        record: dict[str, float] = {}
        for name, column in zip(self.layers, table.T.tolist(), strict=True):
            record |= {f"{key}/{name}": value for key, value in _compute_metrics(column).items()}
        return record


def _compute_metrics(column: list[float]) -> dict[str, float]:
    """Return a layer's metrics from its column of the table."""
    metrics: dict[str, float] = {}
    if column[WEIGHT] > 0:  # a tied head has no weight that is not the embedding's
        metrics["layer_grad_norm"] = math.sqrt(column[GRADIENT])
        metrics["layer_weight_norm"] = math.sqrt(column[WEIGHT])
        metrics["layer_update_ratio"] = math.sqrt(column[UPDATE] / column[WEIGHT])
    if column[ELEMENTS] > 0:
        metrics["layer_activation_rms"] = math.sqrt(column[ACTIVATION] / column[ELEMENTS])
    if column[LOGIT] > -math.inf:
        metrics["layer_attention_logit"] = column[LOGIT]
    return metrics


def list_layers(train_step: TrainStep) -> tuple[str, ...]:
    """Return all layers of the model, in the order of the forward pass; all ranks call it together."""
    rank_layers = [
        get_layer_name(name) for stage in train_step.stages for name, _ in stage.model.named_modules() if name
    ]
    layers = {name for part in train_step.world.all_gather_object(rank_layers) for name in part if name != "layers"}
    return tuple(sorted(layers, key=_build_sort_key))


def _build_sort_key(layer: str) -> tuple[int, int, str]:
    """Return a key that sorts layers by the forward pass: the embedding, the blocks, norm, head."""
    prefix, _, number = layer.partition(".")
    if prefix == "layers":
        return 1, int(number), ""
    return 0 if "emb" in layer else 3 if layer == "head" else 2, 0, layer


def iterate_parameters(train_step: TrainStep) -> Iterator[tuple[str, nn.Parameter]]:
    """Return this rank's parameters with their names; of a tied weight with two replicas only the embedding's."""
    tied = train_step.tied_weights
    replica = None if tied is None or tied.last is tied.first else tied.last
    return ((name, p) for name, p in train_step.named_parameters() if p is not replica)
