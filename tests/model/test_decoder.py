"""What each family promises beside parity: documents, positions, precision, compilation, its declaration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tiers import full
from titan.model.init_weights import Normal, Ones, materialise_model
from titan.model.layers import RMSNorm, compute_rotation, rotate_halves
from titan.model.schema import Decoder, Llama, Qwen3

VOCAB = 64
FAMILIES = [pytest.param(Llama, id="llama"), pytest.param(Qwen3, id="qwen3")]
each_family = pytest.mark.parametrize("family", FAMILIES)


def make(family: type[Decoder], **changes: Any) -> Any:
    """A small model with initial weights; with larger ones than in training, so that errors would show."""
    config = family(**({"dim": 32, "layers": 2, "head_dim": 8, "ffn": 48, "vocab": VOCAB} | changes))
    with torch.device("meta"):
        model = config.build()
    materialise_model(model, model.initial(), 1, "cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() == 2 else 1)
    return model


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor | None, tolerance: float = 1e-5) -> bool:
    assert b is not None
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


@each_family
def test_later_tokens_change_nothing_before(family: type[Decoder]) -> None:
    model, tokens = make(family), sample(1, 12)
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert close(after[:, :7], before[:, :7])
    assert not close(after[:, 7:], before[:, 7:], 1e-2)


@pytest.mark.parametrize("restart", [False, True], ids=["positions-run-on", "positions-restart"])
@each_family
def test_masked_documents_are_as_if_alone(family: type[Decoder], restart: bool) -> None:
    model, tokens, lengths = make(family), sample(2, 12), [5, 4, 3]
    ids = torch.repeat_interleave(torch.tensor([7, 1, 3]), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]) if restart else None
    packed = model(tokens, positions, ids)
    alone = torch.cat([model(part) for part in torch.split(tokens, lengths, dim=1)], dim=1)
    assert close(packed, alone)
    assert not close(packed, model(tokens), 1e-2)


@each_family
def test_documents_differ_by_row(family: type[Decoder]) -> None:
    model, tokens = make(family), sample(2, 8)
    ids = torch.stack([torch.zeros(8), torch.arange(8) // 4]).long()
    out = model(tokens, document_ids=ids)
    assert close(out[0], model(tokens)[0])
    assert close(out[1, 4:], model(tokens[1:, 4:])[0])


@each_family
def test_positions_are_relative_and_by_row_and_count_from_zero(family: type[Decoder]) -> None:
    model, tokens = make(family), sample(2, 9)
    expected = model(tokens)
    assert torch.equal(model(tokens, torch.arange(9)), expected)
    assert torch.equal(model(tokens, torch.arange(9).expand(2, -1)), expected)
    far = torch.stack([torch.arange(9), torch.arange(9) + 1000])
    stretched = torch.stack([torch.arange(9), torch.arange(9) * 3])
    assert close(model(tokens, far), expected, 1e-4)
    assert close(model(tokens, stretched)[0], expected[0])
    assert not close(model(tokens, stretched)[1], expected[1], 1e-2)


@each_family
def test_head_gives_logits_or_the_summed_loss(family: type[Decoder]) -> None:
    model, tokens, targets = make(family), sample(2, 6), sample(2, 6, seed=1)
    targets[0, :4] = -100
    hidden = model(tokens)
    logits, loss = model.head(hidden), model.head(hidden, targets)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    assert logits.shape == (2, 6, VOCAB)
    assert loss.shape == ()
    assert close(loss, each.sum())
    assert close(model.head(hidden[:, :3], targets[:, :3]) + model.head(hidden[:, 3:], targets[:, 3:]), loss)


@each_family
def test_no_valid_target_is_no_loss(family: type[Decoder]) -> None:
    model, tokens = make(family), sample(1, 4)
    loss = model.head(model(tokens), torch.full_like(tokens, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@each_family
def test_embedding_decides_the_compute_type(family: type[Decoder]) -> None:
    """bf16 activations with float32 weights: hidden states and logits in bf16, the loss and gradients in float32."""
    model, tokens, targets = make(family), sample(2, 32), sample(2, 32, seed=1)
    exact = model(tokens)
    exact_loss = model.head(exact, targets)
    exact_loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.tok_embeddings.dtype = torch.bfloat16
    hidden = model(tokens)
    loss = model.head(hidden, targets)
    loss.backward()
    assert (hidden.dtype, model.head(hidden).dtype, loss.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert not torch.equal(hidden.float(), exact)
    assert close(hidden.float(), exact, 3e-2)
    assert close(loss, exact_loss, 3e-3)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        assert close(weight.grad, gradients[name], 6e-2), name


@each_family
def test_casting_weights_at_use_equals_casting_them_before(family: type[Decoder]) -> None:
    """So that one device and FSDP2, which gathers weights in bf16, compute the same."""
    model, tokens, targets = make(family), sample(2, 16), sample(2, 16, seed=1)
    model.tok_embeddings.dtype = torch.bfloat16
    at_use = model.head(model(tokens), targets)
    model.to(torch.bfloat16).init_buffers("cpu")
    assert torch.equal(model.head(model(tokens), targets), at_use)


def test_norms_rotation_and_loss_are_exact_inside_bf16() -> None:
    """Each differs from its float32 result by the rounding of its output alone."""
    x = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = RMSNorm(8, 1e-5)
    norm.weight.data = torch.linspace(0.5, 1.5, 8).bfloat16().float()
    assert torch.equal(norm(x), norm(x.float()).bfloat16())
    angles = compute_rotation(torch.tensor([1.0, 0.3, 0.1, 0.01]), 1000 + torch.arange(16)[None])
    assert torch.equal(rotate_halves(x, *angles), rotate_halves(x.float(), *angles).bfloat16())


@pytest.mark.parametrize(
    ("family", "masked"),
    [pytest.param(Qwen3, True, id="qwen3-documents"), full(Llama, False, id="llama-causal")],
)
@pytest.mark.full
def test_one_graph_serves_all_blocks(family: type[Decoder], masked: bool) -> None:
    model, tokens = make(family, layers=4), sample(2, 16)
    ids = (torch.arange(16) // 5).expand(2, -1) if masked else None
    expected = model(tokens, document_ids=ids)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks():
        block.compile(fullgraph=True, backend="aot_eager")
    out = model(tokens, document_ids=ids)
    out.sum().backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert close(out, expected)
    assert graphs == 1


@pytest.mark.parametrize("tied", [False, True])
@each_family
def test_declaration_names_every_parameter(family: type[Decoder], tied: bool) -> None:
    model = make(family, tied=tied)
    names = {name for name, _ in model.named_parameters()}
    assert set(model.initial()) == set(model.hf_names()) == names
    assert ("head.weight" in names) is not tied
    assert (model.head.weight is model.tok_embeddings.weight) is tied
    assert set(model.state_dict()) == names | {"head.weight"}


@each_family
def test_tensor_plan_covers_every_parameter(family: type[Decoder]) -> None:
    model = make(family)
    plan = model.tensor_plan()
    assert {name.removesuffix(".weight") for name, _ in model.named_parameters()} <= set(plan)
    assert all(model.get_submodule(name) is not None for name in plan)
    heads = {name for name, cut in plan.items() if cut == "heads"}
    norms = {f"layers.{i}.attention.{norm}" for i in range(2) for norm in ("q_norm", "k_norm")}
    assert heads == (norms if family is Qwen3 else set())


@each_family
@pytest.mark.parametrize("weight", ["wq", "wk"])
def test_only_qwen3_is_blind_to_the_size_of_queries_and_keys(family: type[Decoder], weight: str) -> None:
    model, tokens = make(family), sample(2, 12)
    before = model(tokens)
    with torch.no_grad():
        for block in model.blocks():
            getattr(block.attention, weight).weight.mul_(3)
    assert close(model(tokens), before, 1e-3) is (family is Qwen3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("tok_embeddings.weight", Normal(0.02), id="embedding"),
        pytest.param("head.weight", Normal(0.02), id="head"),
        pytest.param("norm.weight", Ones(), id="final-norm"),
        pytest.param("layers.1.ffn_norm.weight", Ones(), id="norm"),
        pytest.param("layers.0.attention.wq.weight", Normal(0.02), id="query"),
        pytest.param("layers.7.attention.wo.weight", Normal(0.02 / math.sqrt(16)), id="attention-output"),
        pytest.param("layers.7.feed_forward.w2.weight", Normal(0.02 / math.sqrt(16)), id="ffn-output"),
        pytest.param("layers.7.feed_forward.w3.weight", Normal(0.02), id="ffn-input"),
    ],
)
@each_family
def test_initial_values(family: type[Decoder], name: str, expected: Normal | Ones) -> None:
    initial = make(family, layers=8).initial()
    assert initial[name] == expected
    assert all(value == Ones() for key, value in initial.items() if key.endswith(("q_norm.weight", "k_norm.weight")))


@each_family
def test_residual_stream_stays_of_one_size_with_depth(family: type[Decoder]) -> None:
    """At the start the loss is near ln(vocab), and a deep model's stream is hardly larger than a shallow one's."""
    sizes = []
    for layers in (2, 24):
        with torch.device("meta"):
            model = family(dim=64, layers=layers, head_dim=16, ffn=160, vocab=256).build()
        materialise_model(model, model.initial(), 1, "cpu")
        seen: list[Tensor] = []
        model.norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        tokens = torch.arange(64)[None]
        loss = model.head(model(tokens), tokens) / 64
        assert abs(loss.item() - math.log(256)) < 0.3
        sizes.append(seen[0].std().item())
    assert sizes[1] < 1.5 * sizes[0]
