"""Tiny runs, trained for one attempt by forked ranks, and what the ranks saw."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec  # type: ignore[import-untyped]  # noqa: F401 - so that ranks need not, each for itself
import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from tests.support.composing import compose_test_run
from tests.support.made_weights import make_manifest, write_complete
from tests.support.ranks import run_ranks
from titan.checkpoint import manifest
from titan.checkpoint.state import train_state_dict
from titan.cluster.rank_info import RankInfo
from titan.dataset import permutation
from titan.dataset.corpora import build_mixture, prepare_corpora
from titan.dataset.mixture import RowMixture
from titan.errors import RunError
from titan.metrics.reader import read_records
from titan.model import llama  # noqa: F401
from titan.run import attempts
from titan.run.attempts import Attempt
from titan.run.directory import lock_directory, read_attempts
from titan.run.lineage import prepare_data
from titan.run.run import Run, as_model
from titan.training import worker
from titan.training.trainer import Trainer

TINY = (
    "dataset=synthetic", "dataset.tokens=20000", "dataset.vocab=64", "model.dim=32", "model.layers=2", "model.heads=2",
    "model.kv_heads=1", "model.ffn=48", "model.vocab=64", "training.seq_len=16", "training.global_batch=128",
    "training.steps=3", "precision=fp32", "metrics.plot=false", "evaluation.tokens=0", "cluster=cpu",
)  # fmt: skip
LAYOUTS = {
    "single": ["parallelism=single"],
    "ddp2": ["parallelism=ddp"],
    "ddp3": ["parallelism=ddp", "cluster.devices=3"],
    "fsdp2": ["parallelism=fsdp"],
    "fsdp3": ["parallelism=fsdp", "cluster.devices=3"],
    "fsdp4": ["parallelism=fsdp", "cluster.devices=4"],
    "hsdp4": ["parallelism=hsdp", "parallelism.replicate=2", "parallelism.shard=2"],
}

Tensors = dict[str, Tensor]


@dataclass
class RankOutcome:
    """What one rank saw of an attempt.

    Attributes:
        code: what the trainer returned; None after a failure.
        failure: the sentence of a failure.
        first: whole gradients at the first update, and the state before it.
        last: the state at the end.
        extra: what the test's own `before` returned.
    """

    code: int | None = None
    failure: str | None = None
    gradients: Tensors = field(default_factory=dict)
    first: Tensors = field(default_factory=dict)
    last: Tensors = field(default_factory=dict)
    extra: Any = None


def compose_tiny_run(directory: Path, *overrides: str, layout: str = "single") -> Run:
    """The composed run of a tiny model in `directory`."""
    return compose_test_run([*TINY, *LAYOUTS[layout], *overrides, f"hydra.run.dir={directory}"])


def build_run_mixture(run: Run) -> RowMixture:
    """All rows that a run may read."""
    return build_mixture(run.dataset, run.training, prepare_corpora(run.dataset))


def write_run_checkpoint(run: Run, step: int, science: str = "0" * 12) -> Path:
    """A complete checkpoint of `run` after `step` steps, without weights."""
    rows = run.training.count_rows_before(step + 1)
    data = permutation.build_state(rows, build_run_mixture(run).compute_fingerprint(rows))
    layout, model = run.layout.degrees(), as_model(run)
    past_attempts = read_attempts(Path(run.directory))
    run_id = past_attempts[0]["run_id"] if past_attempts else "run"
    manifest_of = make_manifest(step, data=data, science_id=science, layout=layout, model=model, run_id=run_id)
    return write_complete(manifest.folder_of(Path(run.directory), step), manifest_of, {"weights": b"w" * 100})


def begin_run(run: Run) -> Attempt | None:
    """Prepare the data of `run` and begin an attempt, as launchers do."""
    return attempts.begin_attempt(run, prepare_data(run))


def train_run(run: Run, prepare: Callable[[Trainer], Any] | None = None, timeout: float = 300) -> list[RankOutcome]:
    """Begin an attempt of `run` and train it by forked ranks, which go through `titan.training.worker.work`.

    Args:
        run: the run.
        prepare: called on each rank with its trainer, before it trains.
        timeout: seconds after which all ranks are killed.

    Returns:
        What each rank saw.
    """
    with lock_directory(Path(run.directory)):
        attempt = begin_run(run)
        assert isinstance(attempt, Attempt), "the run has finished already"
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/meeting"
            return run_ranks(
                _train_rank, run.layout.devices, run, attempt, meeting, prepare, timeout=timeout, joined=False
            )


def _train_rank(
    rank: int, size: int, run: Run, attempt: Attempt, meeting: str, prepare: Callable[[Trainer], Any] | None
) -> RankOutcome:
    result = RankOutcome()

    class Watched(Trainer):
        def train(self) -> int:
            result.extra = prepare(self) if prepare else None
            self.train_step.optimizer.register_step_pre_hook(lambda *_: _record_first(result, self))
            code = super().train()
            result.last = gather_tensors(train_state_dict(self.train_step))
            return code

    try:
        with patch.object(worker, "Trainer", Watched):
            result.code = worker.work(run, attempt, RankInfo(rank, size, rank, meeting if size > 1 else ""))
    except RunError as failure:
        result.failure = str(failure)
    return result


def _record_first(result: RankOutcome, trainer: Trainer) -> None:
    if not result.first:
        result.first = gather_tensors(train_state_dict(trainer.train_step))
        gradients = {n: p.grad for n, p in trainer.train_step.named_parameters() if p.grad is not None}
        result.gradients = gather_tensors(gradients)


def gather_tensors(tensors: Tensors) -> Tensors:
    """Copies of whole tensors: parts are gathered, so all ranks call it together."""
    out = {}
    for name, tensor in tensors.items():
        out[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return out


def select_weights(state: Tensors) -> Tensors:
    """The model's part of a state."""
    return {name: tensor for name, tensor in state.items() if name.startswith("model.")}


def are_identical(a: Tensors, b: Tensors) -> bool:
    """Whether two states are bitwise the same."""
    return a.keys() == b.keys() and all(torch.equal(view_bits(a[n]), view_bits(b[n])) for n in a)


def view_bits(tensor: Tensor) -> Tensor:
    """A tensor as integers, so that equal means the same bits: zero's sign and NaN count."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def compute_difference(a: Tensors, b: Tensors) -> float:
    """The largest of max|a - b| / max|b| over tensors of the same name."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max()) for n in a)


def read_step_records(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell of a step; of a step that was done again, the last one."""
    lines = read_records(Path(run.directory) / "metrics.jsonl")
    by_step = {line["step"]: line for line in lines if "loss" in line}
    return [by_step[step] for step in sorted(by_step)]


def read_learned_values(run: Run) -> list[tuple[Any, ...]]:
    """The values of each step's line that training determines: no times, memory or attempts."""
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "rows", "batch_hash")
    return [tuple(map(str, (line[key] for key in keys))) for line in read_step_records(run)]


def read_checkpoint(run: Run, step: int) -> Tensors:
    """All tensors of a checkpoint, read on one device."""
    folder = Path(run.directory) / "checkpoints" / f"step-{step}"
    content = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in content.items()}  # type: ignore[union-attr]
    load(state, checkpoint_id=folder, no_dist=True)
    return state
