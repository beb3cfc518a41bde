"""The same weights give Hugging Face's logits, loss and gradients, to float32 rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import full
from titan.model.layers import stretch_frequencies
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.weights.hf_config import build_config
from titan.weights.interface import list_stored_parts, parse_fused_part

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 128}
MOE: dict[str, Any] = {"experts": 8, "top_k": 3, "expert_ffn": 24, "head_dim": 32}
LLAMA4: dict[str, Any] = {
    **SMALL, "layers": 4, "head_dim": 32, "ffn": 80, "experts": 4, "expert_ffn": 24, "attention_chunk": 48,
    "nope_every": 2, "floor_scale": 20,
}  # fmt: skip
"""Rows have several chunks, and positions far beyond `floor_scale`."""
LATENT: dict[str, Any] = {
    **SMALL, "kv_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "experts": 8, "top_k": 3, "expert_ffn": 24,
}  # fmt: skip
V2: dict[str, Any] = {**LATENT, "scoring_func": "softmax", "norm_topk_prob": False, "bias_rate": None}
GROUPS: dict[str, Any] = {**LATENT, "groups": 4, "topk_groups": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 20}
YARN: dict[str, Any] = {"rope_factor": 4.0, "rope_original": 32, "rope_mscale": 1.0, "rope_mscale_all": 0.7}
ORIGINAL = 32
"""The length before stretching; rows are longer, so that a stretch matters."""
STRETCH: dict[str, Any] = {"rope_factor": 8.0, "rope_original": ORIGINAL}


def hugging_face(config: Decoder) -> torch.nn.Module:
    """Their model of our shape, with random weights of float32, also of what starts at one or zero."""
    values = build_config(config, "float32", positions=1024) | {"initializer_range": 0.1}
    values = {key: value for key, value in values.items() if key not in ("bos_token_id", "eos_token_id")}
    (name,) = values.pop("architectures")
    torch.manual_seed(0)
    theirs = transformers.AutoConfig.for_model(values.pop("model_type"), **values, attn_implementation="eager")
    model: torch.nn.Module = getattr(transformers, name)(theirs)
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:  # one that forgot its weight would go unnoticed
                weight.uniform_(0.5, 1.5)
            if name.endswith("e_score_correction_bias"):
                weight.normal_(0, 0.2)
            if name.endswith("gate.weight") and isinstance(config, DeepseekV3):
                weight.normal_(0, 0.3)
    return model


def named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their parameters or gradients by the names of files, in which each expert has separate tensors."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("mlp.experts"):
            out[name] = tensor
            continue
        parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
        for part, place in parts.items():
            halves = tensor.chunk(len(parts), 1)
            out |= {f"{prefix}.{i}.{part}.weight": one for i, one in enumerate(halves[place])}
    return out


def as_ours(name: str, weight: Tensor, theirs: Mapping[str, Tensor]) -> Tensor:
    """One of our tensors from theirs."""
    parts = [theirs[part] for part, _ in list_stored_parts(name, weight.shape)]
    if (part := parse_fused_part(name)) is not None:
        return parts[0].chunk(part[1], -1)[part[0]].mT
    return torch.stack(parts) if "{}" in name else parts[0]


def ours(config: Decoder, theirs: torch.nn.Module) -> Any:
    """Our model with their weights."""
    model: Any = config.build()
    biases = {name: buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")}
    weights = named(dict(theirs.named_parameters())) | biases
    names, shapes = model.hf_names(), {name: weight.shape for name, weight in model.named_weights()}
    assert {part for name in names for part, _ in list_stored_parts(names[name], shapes[name])} == set(weights)
    with torch.no_grad():
        for name, weight in model.named_weights():
            weight.copy_(as_ours(names[name], weight, weights))
    return model


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """max|a - b| / max|b|."""
    assert a is not None
    assert b is not None
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Llama(**SMALL | {"kv_heads": 4}), id="llama-group-of-1"),
        pytest.param(Llama(**SMALL), id="llama-group-of-2"),
        pytest.param(Llama(**SMALL | {"kv_heads": 1}), id="llama-group-of-4"),
        pytest.param(Llama(**SMALL, **STRETCH), id="llama-stretched-8"),
        pytest.param(Llama(**SMALL | STRETCH | {"rope_factor": 32.0, "kv_heads": 1}), id="llama-stretched-32-of-4"),
        pytest.param(Llama(**SMALL, tied=True), id="llama-tied"),
        pytest.param(Llama(**SMALL | STRETCH | {"rope_factor": 32.0, "tied": True}), id="llama-tied-stretched-32"),
        pytest.param(Llama(**SMALL, head_dim=32), id="llama-wide-heads"),
        pytest.param(Llama(**SMALL, **STRETCH, head_dim=8), id="llama-narrow-heads-stretched-8"),
        pytest.param(Llama(**SMALL, rope_theta=10000.0, norm_eps=1e-3), id="llama-other-theta-and-epsilon"),
        pytest.param(Qwen3(**SMALL), id="qwen3-heads-of-128"),
        pytest.param(Qwen3(**SMALL | {"kv_heads": 4}, head_dim=32), id="qwen3-group-of-1"),
        pytest.param(Qwen3(**SMALL | {"kv_heads": 1}, head_dim=None), id="qwen3-group-of-4"),
        pytest.param(Qwen3(**SMALL, head_dim=32, tied=True), id="qwen3-tied"),
        pytest.param(Qwen3(**SMALL, head_dim=8, rope_theta=10000.0, norm_eps=1e-3), id="qwen3-other-theta-and-epsilon"),
        pytest.param(Qwen3(**SMALL, **STRETCH, head_dim=16), id="qwen3-stretched-8"),
        pytest.param(Qwen3Moe(**SMALL, **MOE), id="qwen3-moe"),
        pytest.param(Llama4(**LLAMA4), id="llama4"),
        full(Llama4(**LLAMA4, moe_every=2, qk_norm=False), id="llama4-interleaved"),
        full(Llama4(**LLAMA4 | STRETCH, rope_low=2.0, rope_high=2.0), id="llama4-stretched"),
        pytest.param(
            Llama4(**LLAMA4 | {"attention_chunk": None, "nope_every": 9, "top_k": 2}),
            id="llama4-whole-rows-of-2",
        ),
        full(Llama4(**LLAMA4, attn_temperature_tuning=False), id="llama4-one-temperature"),
        pytest.param(Qwen3Moe(**SMALL, **MOE | {"norm_topk_prob": False, "top_k": 1}), id="qwen3-moe-of-1"),
        pytest.param(DeepseekV3(**LATENT, norm_eps=1e-3), id="deepseek-v3"),
        pytest.param(DeepseekV3(**GROUPS), id="deepseek-v3-groups-latent-queries"),
        pytest.param(DeepseekV3(**GROUPS, **YARN, first_dense=0), id="deepseek-v3-yarn"),
        pytest.param(
            DeepseekV3(**V2, **YARN | {"rope_mscale_all": 1.0}, routed_scaling_factor=2.0), id="deepseek-v2-yarn"
        ),
    ],
)
def test_equals_hugging_face(config: Decoder) -> None:
    theirs = hugging_face(config)
    model = ours(config, theirs)
    tokens = torch.randint(0, config.vocab, (2, 4 * ORIGINAL))
    targets = torch.randint(0, config.vocab, tokens.shape)
    targets[0, 5:9] = -100

    expected = theirs(tokens).logits
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.autograd.backward(expected_loss)
    hidden = model(tokens)
    loss = model.head(hidden, targets)
    loss.backward()

    assert difference(model.head(hidden), expected) <= 1e-5
    assert difference(loss, expected_loss) <= 1e-6
    gradients = named({name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None})
    names = model.hf_names()
    for name, weight in model.named_parameters():
        assert difference(weight.grad, as_ours(names[name], weight, gradients)) <= 1e-5, name


def test_stretching_without_a_band_is_a_step() -> None:
    below, at, above = stretch_frequencies(2 * math.pi / 1024 * torch.tensor([0.5, 1, 2]), 8.0, 1.0, 1.0, 1024).tolist()
    assert [x * 1024 / (2 * math.pi) for x in (below, at, above)] == pytest.approx([0.5 / 8, 1, 2])


def test_stretching_matters_at_the_tested_length() -> None:
    stretched = Llama(**SMALL, **STRETCH)
    theirs = hugging_face(stretched)
    tokens = torch.randint(0, stretched.vocab, (1, 4 * ORIGINAL))
    plain = ours(Llama(**SMALL), theirs)
    assert difference(plain.head(plain(tokens)), theirs(tokens).logits) > 1e-3
