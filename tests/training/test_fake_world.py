"""Jobs of hundreds of ranks, in one process: the real assembly and a real step, on tensors that have shapes only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.ranks import run_ranks
from titan.cluster import devices
from titan.cluster.rank_info import RankInfo
from titan.parallelism import mesh
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.build import build_train_step


class MatmulFlops(TorchDispatchMode):
    """Counts floating-point operations of matmuls of this rank's own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.flops += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return out


@dataclass(frozen=True)
class Simulated:
    """What a rank of a big job did in a step."""

    flops: float
    parameters: int
    tokens: int


def simulate(run: Run, rank: int) -> Simulated:
    """Assemble one rank of a run and take a step, in a process of its own."""
    return run_ranks(_simulated, 1, run, rank, joined=False, timeout=300)[0]


def _simulated(_: int, __: int, run: Run, rank: int) -> Simulated:
    size = run.layout.devices
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    world = mesh.build_world(RankInfo(rank, size, rank % 8, ""), run.layout, torch.device("cpu"))
    train_step = build_train_step(run, world, memory=fake)
    shape = (run.microbatches, -(-run.rank_rows // run.microbatches), run.training.seq_len)
    with fake, MatmulFlops() as matmuls:
        tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        train_step.backward(Microbatches(tokens, targets), 1.0)
        train_step.compute_norm()
        train_step.optimizer.step()
    length = shape[-1] if train_step.token_positions is None else len(train_step.token_positions(shape[-1]))
    return Simulated(matmuls.flops, sum(p.numel() for p in train_step.parameters()), length)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))


def cluster(directory: Path, *overrides: str, nodes: int) -> Run:
    """The composed run on so many nodes of 8 devices."""
    return compose_test_run([*overrides, f"hydra.run.dir={directory}", "checkpoint=off"], ranks=nodes * 8)


def stage_flops(run: Run, rank: int) -> float:
    """What the matmuls of a rank's stages take for its tokens, in closed form: 6 for each weight and token."""
    model, tokens = run.model, run.microbatches * -(-run.rank_rows // run.microbatches) * run.training.seq_len
    mine = run.staging.list_stages(run.layout.compute_coordinates(rank)["pipeline"])
    layers = sum(end - first for first, end in (run.staging.layers[s] for s in mine))
    weights = layers * model.block_matmul_parameters()
    weights += model.vocab * model.dim if run.staging.count - 1 in mine else 0
    return 6.0 * weights * tokens / (run.layout.tensor * run.layout.context)


JOBS = [
    pytest.param(
        ["model=llama8b", "parallelism=3d", "parallelism.schedule=Interleaved1F1B", "model.layers=16"],
        8,
        63,
        id="8b-3d",
    ),
    pytest.param(
        ["model=llama8b", "parallelism=3d", "parallelism.schedule=ZBVZeroBubble", "model.layers=16"], 8, 5, id="8b-zbv"
    ),
    pytest.param(["model=qwen3_8b", "parallelism=fsdp_tp", "model.layers=4", "memory=full"], 4, 9, id="qwen-fsdp-tp"),
    pytest.param(
        [
            "model=llama405b",
            "parallelism=3d",
            "parallelism.pipeline=16",
            "parallelism.microbatches=16",
            "memory=full",
            "cluster.memory_gib=96",
        ],
        64,
        511,
        id="405b-on-512",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("overrides", "nodes", "rank"), JOBS)
def test_a_rank_of_a_big_job_computes_its_share(
    overrides: list[str], nodes: int, rank: int, on_gpus: None, tmp_path: Path
) -> None:
    recompute = any(o in ("memory=full", "memory=selective") for o in overrides)
    run = cluster(tmp_path, *overrides, "training.seq_len=4096", "training.global_batch=4194304", nodes=nodes)
    did = simulate(run, rank)
    expected = stage_flops(run, rank)
    assert expected * (4 / 3 if recompute else 1) >= did.flops >= expected
    if not recompute:
        assert did.flops == expected
    assert 0 < did.parameters <= run.model.parameters()


@pytest.mark.full
def test_muon_orthogonalises_a_ranks_share_only(on_gpus: None, tmp_path: Path) -> None:
    """Of 14 matrices each of 16 ranks has one at most; five matmuls of squares of the shorter side, and of both."""
    job = ["model=llama8b", "model.layers=2", "parallelism=fsdp_tp", "parallelism.tensor=8", "optimizer=muon"]
    run = cluster(tmp_path, *job, "training.seq_len=4096", "training.global_batch=4194304", nodes=2)
    dim, ffn = run.model.dim, run.model.ffn
    last, first = (simulate(run, rank).flops - stage_flops(run, rank) for rank in (15, 0))
    assert last == 0
    assert first == 5 * 2 * dim**2 * ffn


@pytest.mark.full
@pytest.mark.parametrize("method", ["allgather", "ulysses", "ring"])
def test_rows_of_262144_tokens(method: str, on_gpus: None, tmp_path: Path) -> None:
    settings = ["model=llama8b", "model.layers=2", "parallelism=4d", "parallelism.context=4", "parallelism.tensor=2"]
    how = [f"parallelism.context_method={method}", "parallelism.pipeline=1", "memory=full"]
    lengths = ["training.seq_len=262144", "training.global_batch=1048576"]
    run = cluster(tmp_path, *settings, *how, *lengths, nodes=2)
    did = simulate(run, 3)
    assert did.tokens == 65536
    assert did.flops >= stage_flops(run, 3)
