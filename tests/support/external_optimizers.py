"""Optimizers on several layouts; `tests.measure.optimizer_table` prints those of several packages.

Each rank of each layout builds the model, and steps each optimizer with the same made gradients, so that layouts differ
in nothing but how the optimizer runs.
"""

from __future__ import annotations

import dataclasses
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from tests.support.runs import Tensors, gather_tensors
from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.optimizer.external.schema import External
from titan.optimizer.external.state import load_updater, run_uncompiled
from titan.optimizer.matrix_gather import compute_local_slices
from titan.parallelism import mesh
from titan.run.run import Run
from titan.training.build import build_train_step

PIPELINED = ("parallelism.pipeline=2", "parallelism.microbatches=4")
LAYOUTS = {
    "ddp": ("parallelism.replicate=2",),
    "fsdp": ("parallelism.shard=2",),
    "hsdp": ("parallelism.replicate=2", "parallelism.shard=2"),
    "tp": ("parallelism.tensor=2",),
    "fsdp tp": ("parallelism.shard=2", "parallelism.tensor=2"),
    "pp": PIPELINED,
    "cp": ("parallelism.shard=1", "parallelism.context=2"),
    "ep": ("parallelism.shard=2", "parallelism.expert=2"),
}
"""The layouts; hsdp and fsdp tp have four ranks, the others two."""
DENSE = ("model.kv_heads=2", "model.tied=true", "checkpoint=off")
EXPERTS = (
    "model=qwen3_moe_debug", "model.experts=4", "model.top_k=2", "model.expert_ffn=24", "model.head_dim=16",
    "model.kv_heads=2", "checkpoint=off",
)  # fmt: skip
STEPS = 6
"""Steps of each optimizer."""
RATES = (0.2, 0.6, 1.0, 0.8, 0.5, 0.2)
"""The learning rate of each, as factors."""
BOUND = 1e-5
"""Law 3's bound in fp32."""


class Case(NamedTuple):
    """An optimizer of the table; see `External`."""

    cls: str
    args: Mapping[str, Any] = {}
    parameters: str = "all"
    lr: float = 0.01
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """The class, its arguments, and what it updates."""
        words = [self.cls.replace("emerging_optimizers.", "emerging."), *(f"{k}={v}" for k, v in self.args.items())]
        return " ".join(words + (["(matrices)"] if self.parameters == "matrices" else []))

    def build(self) -> External:
        """Return the settings, before anything is measured."""
        return External(
            cls=self.cls, args=dict(self.args), parameters=self.parameters, lr=self.lr, weight_decay=self.weight_decay
        )  # type: ignore[arg-type]


class Result(NamedTuple):
    """What became of a case on one layout: the ranks' weights together, or why there are none."""

    weights: Tensors
    problem: str = ""


def make_gradient(name: str, shape: Sequence[int], step: int) -> Tensor:
    """Return the made gradient of a parameter: rows of different sizes, a large one in one step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}".encode()))
    rows = 10 ** (2 * torch.rand((shape[0], *[1] * (len(shape) - 1)), generator=generator) - 1)
    return (3.0 if step == 2 else 0.03) * rows * torch.randn(tuple(shape), generator=generator)


def set_gradients(named: Iterable[tuple[str, Any]], step: int) -> None:
    """Set this rank's shards of the made gradients."""
    for name, parameter in named:
        gradient = make_gradient(name, parameter.shape, step)
        if not isinstance(parameter, DTensor):
            parameter.grad = gradient
            continue
        shard = gradient[compute_local_slices(parameter)].contiguous()
        parameter.grad = DTensor.from_local(
            shard, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip


def measure_cases(cases: Sequence[Case], model: Decoder) -> dict[str, External | str]:
    """Return the measured settings of each case, or why it is rejected."""
    found: dict[str, External | str] = {}
    for case in cases:
        try:
            settings = case.build()
            settings.check(model)
            found[case.name] = settings.measure(model)
        except ConfigError as error:
            found[case.name] = str(error)
    return found


def step_layout(run: Run, optimizers: Mapping[str, External]) -> dict[str, Result]:
    """Step all optimizers on the ranks of a run's layout."""
    with tempfile.TemporaryDirectory() as folder:
        size = run.layout.devices
        ranks = run_ranks(_step_rank, size, run, dict(optimizers), f"file://{folder}/meeting", joined=False)
    return {
        name: Result(
            {n: t for results in ranks for n, t in results[name].weights.items()},
            next((results[name].problem for results in ranks if results[name].problem), ""),
        )
        for name in optimizers
    }


def _step_rank(rank: int, size: int, run: Run, optimizers: Mapping[str, External], meeting: str) -> dict[str, Result]:
    world = mesh.connect_world(RankInfo(rank, size, rank, meeting if size > 1 else ""), run.layout, "cpu", 60)
    results = {}
    for name, settings in optimizers.items():
        try:
            results[name] = Result(_step_optimizer(dataclasses.replace(run, optimizer=settings), world))
        except Exception as error:
            results[name] = Result({}, f"{type(error).__name__}: {error}")
    world.close()
    return results


def _step_optimizer(run: Run, world: Any) -> Tensors:
    train_step = build_train_step(run, world)
    for step, factor in enumerate(RATES):
        set_gradients(train_step.named_parameters(), step)
        for group in train_step.optimizer.param_groups:
            group["lr"] = run.optimizer.peak_lr * factor * group["factor"]
        train_step.optimizer.step()
    return gather_tensors(dict(train_step.named_parameters()))  # type: ignore[arg-type]


def step_class(run: Run, settings: External) -> Tensors:
    """Step the class itself with all of its parameters; return what it has updated."""
    from titan.parallelism.mesh import RunContext
    from titan.parallelism.schema import Layout

    world = RunContext(RankInfo(0, 1, 0, ""), Layout(), torch.device("cpu"))
    named = dict(build_train_step(run, world).named_parameters())
    chosen = {n: p for n, p in named.items() if settings.choose_settings(n, p.dim()).orthogonal}
    updater = load_updater(settings.cls, dict(settings.args or {}))
    rates = {"lr": settings.peak_lr, "weight_decay": settings.weight_decay}
    optimizer = updater._replace(**rates).build(list(chosen.values()))
    for step, factor in enumerate(RATES):
        set_gradients(chosen.items(), step)
        optimizer.param_groups[0]["lr"] = settings.peak_lr * factor
        with run_uncompiled():
            optimizer.step()
    return {name: parameter.detach() for name, parameter in chosen.items()}


def find_difference(result: Result, expected: Tensors) -> str:
    """Return the largest difference relative to the largest weight of a tensor, or the problem."""
    if result.problem:
        return result.problem
    differences = [float((result.weights[n] - t).abs().max() / t.abs().max()) for n, t in expected.items()]
    return "0" if max(differences) == 0 else f"{max(differences):.0e}"
