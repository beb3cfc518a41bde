"""Regions that gather their input again in backward: the same gradients, fewer bytes, collectives beside matmuls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.test_parity import GROUPS, LATENT
from tests.support.own_models import OwnLlama
from tests.support.ranks import run_ranks
from tests.support.tiers import full
from titan.model.layers import Linear
from titan.model.schema import Decoder, Llama
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.parallelism import tensor
from titan.precision import low_precision

SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64}
MODELS = {
    "llama": Llama(**SHAPE),
    "llama4": Llama4(**SHAPE, experts=4, top_k=1, expert_ffn=16),
    "latent-queries": DeepseekV3(**GROUPS),
    "plain-queries": DeepseekV3(**LATENT),
}


class Trained(NamedTuple):
    """A step: the loss, the rank's part of all gradients, bytes that autograd saved, and operations of backward."""

    loss: Tensor
    gradients: dict[str, Tensor]
    saved: int
    operations: list[str]


class Operations(TorchDispatchMode):
    """Lists matmuls and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "mm" or "c10d" in func._schema.name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Scaled(Linear):
    """A layer of a user's own, which is no product with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@dataclass(frozen=True, kw_only=True)
class ScaledLlama(Llama):
    """A model whose first feed-forward has such a layer."""

    def build(self) -> Any:
        model = super().build()
        w1 = model.blocks()[0].feed_forward.w1
        model.blocks()[0].feed_forward.w1 = Scaled(w1.in_features, w1.out_features)
        return model


def quantize_all(model: Any, kind: str) -> None:
    """Let all layers of blocks but the keys' multiply in eight bits."""
    for block in model.blocks():
        for name, layer in block.named_modules():
            if isinstance(layer, Linear) and not name.endswith("wk"):
                layer.product = low_precision.build_product(kind, emulate=True)


CALLED: list[str] = []


def hook_on_first_rank(model: Any) -> None:
    """Let one rank alone observe a layer in both passes."""
    if torch.distributed.get_rank() == 0:
        model.blocks()[0].attention.wq.register_forward_hook(lambda *args: CALLED.append("forward"))
        model.blocks()[1].attention.wq.register_full_backward_hook(lambda *args: CALLED.append("backward"))


def train(
    config: Decoder,
    regather: bool,
    dtype: torch.dtype = torch.float32,
    backend: str = "",
    prepare: Callable[[Any], None] = lambda model: None,
) -> Trained:
    torch.manual_seed(0)
    model: Any = config.build().to(dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    tensor.apply_tensor_plan(model, mesh, sequence_parallel=True, loss_parallel=True, regather=regather)
    prepare(model)
    for block in model.blocks() if backend else ():
        block.compile(backend=backend, fullgraph=True)
    tokens = torch.randint(config.vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model.head(model(tokens), tokens)
    with Operations() as operations:
        loss.backward()
    gradients = {name: weight.grad.to_local() for name, weight in model.named_parameters()}
    return Trained(loss, gradients, sum(saved.values()), operations.names)


def compare(
    rank: int, world: int, config: Decoder, dtype: torch.dtype, backend: str, kind: str = ""
) -> tuple[list[str], int, int]:
    """The gradients that differ by a bit, and the bytes that are saved without and with the setting."""
    prepare = partial(quantize_all, kind=kind) if kind else lambda model: None
    kept, gathered = (train(config, regather, dtype, backend, prepare) for regather in (False, True))
    assert torch.equal(kept.loss, gathered.loss)
    different = [name for name in kept.gradients if not torch.equal(kept.gradients[name], gathered.gradients[name])]
    return different, kept.saved, gathered.saved


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        pytest.param("llama", torch.float32, "", id="llama"),
        full("llama", torch.bfloat16, "", id="bf16"),
        full("llama4", torch.float32, "", id="llama4"),
        full("latent-queries", torch.float32, "", id="latent-queries"),
        full("plain-queries", torch.float32, "", id="plain-queries"),
        full("llama", torch.float32, "aot_eager", id="compiled"),
    ],
)
def test_gradients_are_bitwise_the_same_and_fewer_bytes_are_saved(name: str, dtype: torch.dtype, backend: str) -> None:
    for different, kept, gathered in run_ranks(compare, 2, MODELS[name], dtype, backend):
        assert different == []
        assert gathered < kept


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        full("float8", "", id="float8"),
        full("float8_rowwise", "", id="rowwise"),
        full("mxfp8", "", id="mxfp8"),
        full("float8", "aot_eager", id="compiled"),
        full("mxfp8", "aot_eager", id="mxfp8-compiled"),
    ],
)
def test_products_in_eight_bits_are_bitwise_the_same_too(kind: str, backend: str) -> None:
    pytest.importorskip("torchao")
    config = replace(MODELS["llama"], dim=128, ffn=128)
    for different, kept, gathered in run_ranks(compare, 2, config, torch.bfloat16, backend, kind):
        assert different == []
        assert gathered < kept


def test_a_forward_of_a_users_own_saves_what_it_gathers() -> None:
    config = OwnLlama(**SHAPE, attention="gated")
    ((different, kept, gathered), _) = run_ranks(compare, 2, config, torch.float32, "")
    feed_forward_bytes = config.layers * 4 * 2 * 16 * config.dim // 2  # half of the input [2, 16, D] of each block
    assert (different, kept - gathered) == ([], feed_forward_bytes)


@pytest.mark.full
def test_a_layer_of_a_users_own_is_called() -> None:
    for different, kept, gathered in run_ranks(compare, 2, ScaledLlama(**SHAPE), torch.float32, ""):
        assert different == []
        assert gathered < kept


def train_hooked(rank: int, world: int) -> tuple[list[str], bool]:
    """The collectives of backward where one rank has a hook, and whether loss and gradients are those without it."""
    config = Llama(**SHAPE)
    plain, hooked = train(config, regather=True), train(config, regather=True, prepare=hook_on_first_rank)
    assert (["forward", "backward"] if rank == 0 else []) == CALLED
    same = all(torch.equal(plain.gradients[name], hooked.gradients[name]) for name in plain.gradients)
    return [name for name in hooked.operations if name != "mm"], same and torch.equal(plain.loss, hooked.loss)


@pytest.mark.full
def test_a_hook_on_one_rank_changes_no_collectives() -> None:
    (first, first_same), (second, second_same) = run_ranks(train_hooked, 2, timeout=60)
    assert first_same and second_same
    assert [n for n in first if n != "wait_tensor"] == [n for n in second if n != "wait_tensor"]


def list_operations(rank: int, world: int) -> list[str]:
    return train(Llama(**SHAPE | {"layers": 1}), regather=True).operations


@pytest.mark.full
def test_collectives_of_backward_run_beside_matmuls() -> None:
    region = ["all_gather_into_tensor", "mm", "mm", "wait_tensor", "reduce_scatter_tensor", "mm", "mm", "wait_tensor"]
    operations, _ = run_ranks(list_operations, 2)
    starts = [i for i in range(len(operations)) if operations[i : i + len(region)] == region]
    assert len(starts) == 1, operations
