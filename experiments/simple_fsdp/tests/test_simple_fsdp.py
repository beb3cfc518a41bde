"""SimpleFSDP learns as one device does; its shards, checkpoints and rejected settings fit those of FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from experiments.simple_fsdp.measure import trace_step
from experiments.simple_fsdp.parametrisation import parametrise
from tests.checkpoint.test_manager import in_two_attempts
from tests.support.matrix import EXACT, PIPELINED, LayoutCase, compare_layouts, train_case
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, are_identical, compose_tiny_run, compute_difference, read_step_records, train_run
from tests.support.tiers import full, select_cases
from titan.checkpoint import manifest
from titan.cluster.forked_tasks import map_in_forks
from titan.errors import ConfigError
from titan.estimate.plan import check_sharding

CONF = Path(__file__).resolve().parents[1] / "conf"
SIMPLE = (f"hydra.searchpath=[file://{CONF}]", "+sharding@parallelism.groups.all=simple_fsdp")


class Layer(nn.Module):
    """A weight that 3 does not divide, one of fewer rows than ranks, one that two layers share, one without a use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 7 * 5).view(7, 5))
        self.back = nn.Linear(7, 5, bias=False)
        self.short = nn.Parameter(torch.tensor([0.5]))
        self.unused = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            self.back.weight.copy_(torch.linspace(1, -1, 5 * 7).view(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(F.linear(x, self.weight).tanh()) * self.short
        return out


class Twice(nn.Module):
    """Calls a layer, and its forward again in a checkpoint, as titan checkpoints a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.layer.forward, self.layer(x), use_reentrant=False)
        return again.square().sum()


def sum_up(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Return the gradients of two micro-batches, with an evaluation between them, whole."""
    model(x).backward()
    with torch.no_grad():
        model(x)
    model(2 * x).backward()
    return {name: None if p.grad is None else make_whole(p.grad) for name, p in model.named_parameters()}


def make_whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_both(rank: int, world: int, replicas: int, frees: bool) -> None:
    sizes, names = ((replicas, world // replicas), ("replicate", "shard")) if replicas > 1 else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    rows = [torch.linspace(0, 1 + r, 10).view(2, 5) for r in range(world)]
    whole, simple, fsdp = Twice(), Twice(), Twice()
    parametrise([simple.layer], mesh, torch.float32, torch.float32, frees)
    parametrise([simple], mesh, None, torch.float32, False)
    fully_shard(fsdp, mesh=mesh).set_gradient_divide_factor(1.0)
    fsdp.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    for (name, ours), (other_name, theirs) in zip(simple.named_parameters(), fsdp.named_parameters(), strict=True):
        assert name == other_name and isinstance(ours, DTensor) and isinstance(theirs, DTensor)
        assert ours._spec == theirs._spec and torch.equal(ours.to_local(), theirs.to_local())
    assert simple.state_dict().keys() == whole.state_dict().keys()
    assert isinstance(simple.layer.weight, DTensor), "outside of a pass no rank waits for others"
    found = sum_up(simple, rows[rank])
    for row in rows:
        expected = sum_up(whole, row)
    for name, gradient in expected.items():
        got = found[name]
        assert (got is None) == (gradient is None) == (name == "layer.unused")
        if gradient is not None and got is not None:
            assert (got - gradient).abs().max() <= 1e-5 * gradient.abs().max()


@pytest.mark.parametrize(
    ("ranks", "replicas", "frees"),
    [full(3, 1, True, id="uneven"), full(4, 2, True, id="replicas"), full(3, 1, False, id="kept")],
)
def test_shards_are_those_of_fsdp2_and_gradients_those_of_one_device(ranks: int, replicas: int, frees: bool) -> None:
    run_ranks(shard_both, ranks, replicas, frees)


def share_between_units() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    parametrise([first], mesh, None, None, True)
    with pytest.raises(NotImplementedError, match="shares a parameter with a module that is gathered by itself"):
        parametrise([second], mesh, None, None, True)
    with pytest.raises(NotImplementedError, match="a scalar parameter has no rows"):
        parametrise([nn.ParameterList([nn.Parameter(torch.ones(()))])], mesh, None, None, True)


def test_parameters_that_can_not_be_sharded() -> None:
    run_ranks(lambda *_: share_between_units(), 1)


OWN = ("modules=[tests]", "model._target_=tests.support.own_models.OwnLlama", "+model.attention=linear")
MOE = ("model=qwen3_moe_debug", *(setting for setting in TINY if setting.startswith("model.")), "model.expert_ffn=24")
TP = ("parallelism.tensor=2", "model.kv_heads=2", "model.heads=4")
MOMENTUM = ("optimizer=sgd", "optimizer.momentum=0.9")
AOT = "compile.backend=aot_eager"
CASES = {
    "tied-uneven": ("parallelism.shard=3", "model.tied=true"),
    "tensor": ("parallelism.shard=2", *TP),
    "replicas-tensor-tied": ("parallelism.shard=2", "parallelism.replicate=2", *TP, "model.tied=true"),
    "tensor-pipeline-tied": ("parallelism.shard=2", *TP, *PIPELINED, "model.tied=true", "model.layers=4"),
    "zero-bubble": ("parallelism.shard=2", "parallelism.schedule=ZBVZeroBubble", *PIPELINED, "model.layers=4"),
    "context": ("parallelism.shard=2", "parallelism.context=2"),
    "accumulated": ("parallelism.shard=2", "parallelism.replicate=2", "parallelism.microbatches=2"),
    "recomputed": ("parallelism.shard=2", "memory=full", *TP, "parallelism.regather=true"),
    "selective": ("parallelism.shard=2", "memory=selective"),
    "kept": ("parallelism.shard=2", "parallelism.reshard=never"),
    "chunked": ("parallelism.shard=2", "training.loss_chunk=7"),
    "experts": ("parallelism.shard=2", *MOE),
    "own-model": ("parallelism.shard=3", *OWN),
    "block": ("parallelism.shard=2", "compile=block", AOT),
    "block-selective": ("parallelism.shard=2", "compile=block", AOT, "memory=selective"),
    "block-pipeline": ("parallelism.shard=2", "compile=block", AOT, *PIPELINED),
    "model": ("parallelism.shard=3", "compile=model", AOT, "model.tied=true"),
    "model-tensor": ("parallelism.shard=2", "compile=model", AOT, *TP),
    "inductor": ("parallelism.shard=2", "compile=block"),
}  # fmt: skip


OFTEN = ("tied-uneven", "tensor-pipeline-tied", "experts", "block", "model")
"""Those that `make test-rest` runs."""


@pytest.mark.parametrize("name", select_cases(CASES, []))
def test_it_learns_what_one_device_learns(name: str, tmp_path: Path) -> None:
    science = tuple(s for s in CASES[name] if s.startswith(("mod", "+model")))
    execution = tuple(s for s in CASES[name] if s not in science)
    expected = train_case(tmp_path / "one", None, science)
    got = train_case(tmp_path, LayoutCase(name, (*SIMPLE, *execution)), science)
    found = compare_layouts(got, expected)
    assert found.pop("same start") and found.pop("same rows")
    assert {key: value for key, value in found.items() if not value <= EXACT} == {}


@pytest.mark.parametrize(("first", "then"), [full(SIMPLE, (), id="to-fsdp2"), full((), SIMPLE, id="from-fsdp2")])
def test_a_checkpoint_resumes_under_fsdp2_and_on_other_ranks(
    first: tuple[str, ...], then: tuple[str, ...], tmp_path: Path
) -> None:
    export = ("checkpoint.export=hf", "checkpoint.export_dtype=fp32")
    settings = ("training.steps=4", "model.tied=true", *export, *MOMENTUM)
    one = compose_tiny_run(tmp_path / "one", *settings)
    (whole,) = train_run(one)
    before = compose_tiny_run(tmp_path / "run", *first, "parallelism.shard=3", *settings)
    after = compose_tiny_run(tmp_path / "run", *then, "parallelism.shard=2", *settings)
    stopped, resumed = in_two_attempts(before, after)
    assert are_identical(resumed[0].first, stopped[0].last)
    assert resumed[0].last.keys() == whole.last.keys()
    for line, expected in zip(read_step_records(after), read_step_records(one), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    folders = (manifest.folder_of(Path(run.directory), 4) / "hf" for run in (after, one))
    exported, expected_export = (load_file(folder / "model.safetensors") for folder in folders)
    assert compute_difference(exported, expected_export) <= EXACT


@pytest.mark.full
def test_bf16_is_that_of_fsdp2(tmp_path: Path) -> None:
    """The same casts at the same places: with two ranks also the same sums, so that not a bit differs."""
    settings = ("precision=bf16", "parallelism.shard=2", "optimizer=sgd")
    simple, fsdp = (
        train_run(compose_tiny_run(tmp_path / str(i), *more, *settings)) for i, more in enumerate((SIMPLE, ()))
    )
    assert are_identical(simple[0].gradients, fsdp[0].gradients) and are_identical(simple[0].last, fsdp[0].last)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallelism.reshard=2", "parallelism.shard=4"], r"parallelism\.reshard=2: only FSDP has it"),
        (["parallelism.accumulate=whole"], r"parallelism\.accumulate=whole: only FSDP has it"),
        (["memory.offload=true"], r"memory\.offload=true: only FSDP has it"),
        (["parallelism.reduce_buffers=2"], r"parallelism\.reduce_buffers=2: only FSDP has it"),
        ([*MOE, "parallelism.expert=2"], r"parallelism\.expert=2: only FSDP has it"),
        (["parallelism.groups.all.match=[head]"], r"shards the whole model; give \['\*'\]"),
    ],
    ids=["ranks", "whole", "offload", "buffers", "experts", "part"],
)
def test_what_only_fsdp2_does_is_rejected(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_tiny_run(tmp_path, *SIMPLE, "parallelism.shard=2", *settings)


@pytest.mark.full
def test_a_plan_of_it_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"titan\.plan estimates FSDP, and experiments\.simple_fsdp"):
        check_sharding(compose_tiny_run(tmp_path, *SIMPLE, "parallelism.shard=2"))


@pytest.mark.parametrize(
    ("settings", "gathers", "reductions"),
    [
        pytest.param(SIMPLE, 2 * 2 * 9 + 4, 2 * 9 + 3, id="freed"),  # the last norm in both passes, the ends in one
        full((*SIMPLE, "parallelism.reshard=never"), 2 * 9 + 3, 2 * 9 + 3, id="kept"),
        full((), 2 * 2 + 3, 2 + 3, id="fsdp2"),
    ],
)
def test_a_step_gathers_and_reduces_each_weight(settings: tuple[str, ...], gathers: int, reductions: int) -> None:
    overrides = (*TINY, "parallelism=fsdp", "cluster.devices=2", *settings)
    (step,) = map_in_forks(trace_step, [(overrides,)], 1, 120)
    assert (step.counts["all-gather"], step.counts["reduce-scatter"]) == (gathers, reductions)
