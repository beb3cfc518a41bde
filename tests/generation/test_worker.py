"""A model made for generation: its weights are loaded in the type to compute in, on one device and cut over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.generation.test_decode import continued, prompts, tiny, tokens
from tests.model.test_parity import SMALL
from tests.support.ranks import run_ranks
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.generation.decode import BatchDecoder as Decoding
from titan.generation.decode import Continuation, SamplingRules
from titan.model import init_weights
from titan.model.schema import Decoder, Llama, Qwen3
from titan.parallelism import mesh
from titan.parallelism.mesh import World
from titan.parallelism.schema import Layout
from titan.precision.schema import Precision
from titan.training import build as assemble
from titan.weights.load import load_weights

CPU = torch.device("cpu")
ALONE = World(RankInfo(), Layout(), CPU)
FP32, BF16 = Precision("fp32"), Precision("bf16")


@dataclass
class InMemory:
    """Weights that are nowhere on disk; remembers how much was read of each."""

    model: Decoder
    tensors: Mapping[str, Tensor]
    path: str = ""
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        self.taken: dict[str, int] = {}

    def read(self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        part = self.tensors[name]
        for dim, (offset, length) in enumerate(zip(offsets or (), lengths or (), strict=True)):
            part = part.narrow(dim, offset, length)
        self.taken[name] = part.numel()
        return part


def weights_of(model: Any) -> InMemory:
    return InMemory(model.config, {name: parameter.detach() for name, parameter in model.named_parameters()})


def made(weights: InMemory, precision: Precision, world: World) -> Any:
    model = assemble.build_for_generation(weights.model, precision, world)
    load_weights(dict(model.named_parameters()), weights, no_dist=world.rank_info.world_size == 1)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_are_kept_in_the_type_to_compute_in(tied: bool) -> None:
    trained = tiny(tied=tied)
    model = made(weights_of(trained), BF16, ALONE)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (model.head.weight is model.tok_embeddings.weight) is tied
    assert model.inv_freq.dtype == torch.float32
    # what training computes in bf16: a cast where a weight is used is a cast beforehand
    trained.tok_embeddings.dtype = torch.bfloat16
    row = torch.tensor(prompts(lengths=(20,)))
    assert torch.equal(model.head(model(row)), trained.head(trained(row)))


@pytest.mark.full
def test_in_fp32_it_is_the_same_model() -> None:
    trained = tiny()
    model = made(weights_of(trained), FP32, ALONE)
    assert tokens(continued(model, prompts())) == tokens(continued(trained, prompts()))


def cut(rank: int, size: int, weights: InMemory, precision: Precision, temperature: float) -> Any:
    layout = Layout(tensor=size)
    world = mesh.build_world(RankInfo(rank, size, rank), layout, CPU)
    model = made(weights, precision, world)
    rows = [Continuation(prompt, sample) for prompt in prompts() for sample in range(2)]
    rules = SamplingRules(temperature=temperature, max_tokens=40)
    Decoding(model, rules, device=CPU, chunk=16, broadcast=world.broadcast_rows).run(rows)
    heads = model.layers["0"].attention.wk.weight.to_local().shape[0]
    return tokens(rows), heads, weights.taken


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        pytest.param(Llama(**SMALL), 1.0, id="llama-drawn"),
        full(Llama(**SMALL, tied=True), 1.0, id="llama-tied-drawn"),
        pytest.param(Qwen3(**SMALL, head_dim=16), 1.0, id="qwen3-drawn"),
        full(Llama(**SMALL, tied=True), 0.0, id="llama-tied-greedy"),
    ],
)
def test_tensor_ranks_give_the_tokens_of_one_device(config: Decoder, temperature: float) -> None:
    with torch.device("meta"):
        model = config.build()
    init_weights.materialise_model(model, model.initial(), 0, "cpu")
    weights = InMemory(
        config, {name: 5 * p.detach() if p.dim() > 1 else p.detach() for name, p in model.named_parameters()}
    )
    expected = tokens(continued(made(weights, FP32, ALONE), prompts(), samples=2, temperature=temperature))
    results = run_ranks(cut, 2, weights, FP32, temperature)
    for found, width, taken in results:
        assert found == expected
        assert width == config.kv_heads * config.head_size // 2
        assert taken["layers.0.attention.wq.weight"] == weights.tensors["layers.0.attention.wq.weight"].numel() // 2
        assert taken["norm.weight"] == config.dim


@pytest.mark.full
def test_tensor_ranks_agree_in_bf16() -> None:
    first, second = (found for found, _, _ in run_ranks(cut, 2, weights_of(tiny()), BF16, 1.0))
    assert first == second
