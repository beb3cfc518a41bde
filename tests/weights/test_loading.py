"""Weights into models on any layout: the same as on one device, each rank reading what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.made_weights import LLAMA, QWEN3, SMALL, write_hf, write_meta, write_native
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.runs import compose_tiny_run, gather_tensors
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.config.settings import format_value, to_plain
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama, Qwen3
from titan.parallelism import mesh
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.weights.formats import open_weights
from titan.weights.interface import Weights
from titan.weights.load import load_weights
from titan.weights.model_config import check_model

TIED = Llama(**SMALL, tied=True)
LAYOUTS = {
    "single": (),
    "ddp": ("parallelism.replicate=2",),
    "fsdp": ("parallelism.shard=2",),
    "fsdp3": ("parallelism.shard=3", "training.global_batch=96"),
    "tp": ("parallelism.tensor=2",),
    "fsdp_tp": ("parallelism.shard=2", "parallelism.tensor=2"),
    "pp": ("parallelism.pipeline=2", "parallelism.microbatches=4"),
    "zbv": ("parallelism.pipeline=2", "parallelism.microbatches=4", "parallelism.schedule=ZBVZeroBubble"),
    "3d": ("parallelism=3d", "parallelism.microbatches=4"),
}


class Counted:
    """Weights that count the numbers read of them."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.numbers = weights, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        part = self.weights.read(name, offsets, lengths)
        self.numbers += part.numel()
        return part


def run_of(model: Decoder, directory: Path, *layout: str) -> Run:
    """A run of this model; `zbv` needs four layers, for two ranks have two stages each."""
    kind = "debug" if isinstance(model, Llama) else "qwen3_debug"
    shape = [f"model.{key}={format_value(value)}" for key, value in to_plain(model).items()]
    return compose_tiny_run(directory, f"model={kind}", *shape, "dataset.vocab=128", *layout)


def load_on(rank: int, size: int, run: Run, path: Path, meeting: str) -> tuple[Mapping[str, Tensor], int, int]:
    """A rank's parameters, whole; how many numbers it has read, and how many it holds."""
    world = mesh.connect_world(RankInfo(rank, size, rank, meeting if size > 1 else ""), run.layout, "cpu", 300)
    train_step = build_train_step(run, world)
    weights = Counted(open_weights(path))
    state = dict(train_step.named_parameters())
    load_weights(state, weights, no_dist=size == 1)
    if train_step.tied_weights is not None:
        train_step.tied_weights.align(train_step.optimizer)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in state.values())
    aliases = {name for stage in train_step.stages for name in stage.model.aliases}
    tied_weights = {n: p for stage in train_step.stages for n, p in stage.model.named_parameters() if n in aliases}
    found = gather_tensors(dict(state)) | {f"twin.{n}": p for n, p in gather_tensors(dict(tied_weights)).items()}
    world.barrier()  # before anyone leaves; one that fails leaves at once, after its error is told
    world.close()
    return found, weights.numbers, held


def on_ranks(run: Run, path: Path, tmp_path: Path) -> list[tuple[dict[str, Tensor], int, int]]:
    return run_ranks(load_on, run.layout.devices, run, path, f"file://{tmp_path}/meeting", joined=False)


WRITERS: dict[str, Callable[[Path, Decoder], Any]] = {
    "native": write_native,
    "hf": write_hf,
    "meta": lambda folder, model: write_meta(folder, model, 2),
}


@pytest.mark.parametrize(
    ("layout", "write", "model"),
    [
        pytest.param("single", "meta", LLAMA, id="single-meta"),
        full("ddp", "native", LLAMA, id="ddp-native"),
        full("fsdp", "hf", QWEN3, id="fsdp-hf-qwen3"),
        full("fsdp3", "meta", TIED, id="fsdp3-meta-tied"),
        pytest.param("tp", "meta", LLAMA, id="tp-meta"),
        full("tp", "native", TIED, id="tp-native-tied"),
        full("fsdp_tp", "hf", LLAMA, id="fsdp_tp-hf"),
        full("pp", "hf", TIED, id="pp-hf-tied"),
        full("zbv", "meta", Llama(**SMALL | {"layers": 4}, tied=True), id="zbv-meta-tied"),
        full("3d", "hf", TIED, id="3d-hf-tied"),
    ],
)
def test_every_layout_has_what_one_device_has(layout: str, write: str, model: Decoder, tmp_path: Path) -> None:
    WRITERS[write](tmp_path / "weights", model)
    run = run_of(model, tmp_path, *LAYOUTS[layout])
    weights = open_weights(tmp_path / "weights")
    seen = on_ranks(run, tmp_path / "weights", tmp_path)
    names: set[str] = set()
    for state, numbers, held in seen:
        for name, tensor in state.items():
            assert torch.equal(tensor, weights.read(name.removeprefix("twin.").replace("head.", _head(model)))), name
        names |= {name for name in state if not name.startswith("twin.")}
        assert numbers == held
    assert names == set(weights.shapes)


def _head(model: Decoder) -> str:
    return "tok_embeddings." if model.tied else "head."


def test_a_tied_head_fills_a_head_of_its_own(tmp_path: Path) -> None:
    written = write_native(tmp_path / "weights", TIED)
    run = run_of(LLAMA, tmp_path)
    ((state, _, _),) = on_ranks(run, tmp_path / "weights", tmp_path)
    assert torch.equal(state["head.weight"], written["tok_embeddings.weight"])
    assert torch.equal(state["tok_embeddings.weight"], written["tok_embeddings.weight"])


def test_values_are_cast(tmp_path: Path) -> None:
    written = write_native(tmp_path / "weights", LLAMA, torch.bfloat16)
    ((state, _, _),) = on_ranks(run_of(LLAMA, tmp_path), tmp_path / "weights", tmp_path)
    assert all(state[name].dtype == torch.float32 for name in written)
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in written.items())


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        pytest.param("fsdp", {"layers": 3}, "lacks layers.2.", id="fsdp-missing"),
        pytest.param(
            "single", {"ffn": 64}, r"w1.weight has the shape \[96, 64\], and in the model \[64, 64\]", id="single-shape"
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, int], sentence: str, layout: str, tmp_path: Path) -> None:
    write_native(tmp_path / "weights", LLAMA)
    run = run_of(Llama(**SMALL | changes), tmp_path, *LAYOUTS[layout])
    with pytest.raises(RankFailedError, match=rf"ConfigError: checkpoint.weights=.*{sentence}"):
        on_ranks(run, tmp_path / "weights", tmp_path)


def test_a_file_that_breaks_while_it_is_read_is_refused_on_every_rank(tmp_path: Path) -> None:
    write_native(tmp_path / "weights", LLAMA)
    file = tmp_path / "weights" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RankFailedError, match=r"titan.errors.ConfigError: checkpoint.weights=.*can't be read from"):
        on_ranks(run_of(LLAMA, tmp_path, *LAYOUTS["fsdp"]), tmp_path / "weights", tmp_path)


ALIKE = [
    pytest.param(LLAMA, LLAMA, id="same"),
    pytest.param(Llama(**SMALL, head_dim=16), LLAMA, id="head-width-given"),
    pytest.param(LLAMA, TIED, id="tied-to-untied"),
    pytest.param(Llama(**SMALL, rope_original=99), LLAMA, id="no-stretch"),
]
DIFFERENT = [
    pytest.param(TIED, LLAMA, "than model.tied=true; give model.tied=false.", id="untied-to-tied"),
    pytest.param(
        Llama(**SMALL | {"dim": 32, "vocab": 99}),
        LLAMA,
        "than model.dim=32, model.head_dim=8, model.vocab=99; give model.dim=64 model.head_dim=16 model.vocab=128.",
        id="two",
    ),
    pytest.param(Llama(**SMALL, rope_theta=7.0), LLAMA, "give model.rope_theta=500000.0.", id="base"),
    pytest.param(LLAMA, Llama(**SMALL, rope_factor=8.0), "than model.rope_factor=1.0", id="stretch"),
    pytest.param(QWEN3, LLAMA, "the weights are of a Llama, and the model is a Qwen3", id="family"),
]


@pytest.mark.parametrize(("model", "found"), ALIKE)
def test_weights_of_the_model_pass(model: Decoder, found: Decoder) -> None:
    check_model(model, found, "checkpoint.weights=x")


@pytest.mark.parametrize(("model", "found", "sentence"), DIFFERENT)
def test_weights_of_another_model_are_refused(model: Decoder, found: Decoder, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_model(model, found, "checkpoint.weights=x")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("checkpoint.weights=x: ")


def test_families_differ_by_type() -> None:
    with pytest.raises(ConfigError, match="weights are of a Qwen3"):
        check_model(LLAMA, Qwen3(**SMALL), "x")
