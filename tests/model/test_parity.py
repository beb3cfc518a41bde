"""The same weights give Hugging Face's logits, loss and gradients, to float32 rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titan.model.llama import Llama as Module
from titan.model.schema import Llama

transformers = pytest.importorskip("transformers")

SMALL = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 128}
ORIGINAL = 32
"""The length before stretching; rows are longer, so that a stretch matters."""


def hugging_face(config: Llama) -> torch.nn.Module:
    """Their model of our shape, with random weights of float32."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low,
            "high_freq_factor": config.rope_high,
            "original_max_position_embeddings": config.rope_original,
        }
    theirs = transformers.LlamaConfig(
        hidden_size=config.dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.ffn,
        vocab_size=config.vocab,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        max_position_embeddings=1024,
        rope_parameters=rope,
        initializer_range=0.1,
        attn_implementation="eager",
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.LlamaForCausalLM(theirs)
    with torch.no_grad():  # they start norms at one, where a norm that forgot its weight would go unnoticed
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def ours(config: Llama, theirs: torch.nn.Module) -> Module:
    """Our model with their weights."""
    model: Module = config.build()
    weights = dict(theirs.named_parameters())
    names = model.hf_names()
    assert set(names.values()) == set(weights)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[names[name]])
    return model


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """max|a - b| / max|b|."""
    assert a is not None
    assert b is not None
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kv_heads": 4}, id="group-of-1"),
        pytest.param({"kv_heads": 2}, id="group-of-2"),
        pytest.param({"kv_heads": 1}, id="group-of-4"),
        pytest.param({"rope_factor": 8.0, "rope_original": ORIGINAL}, id="stretched-8"),
        pytest.param({"rope_factor": 32.0, "rope_original": ORIGINAL, "kv_heads": 1}, id="stretched-32-group-of-4"),
        pytest.param({"tied": True}, id="tied"),
        pytest.param({"tied": True, "rope_factor": 32.0, "rope_original": ORIGINAL}, id="tied-stretched-32"),
        pytest.param({"head_dim": 32}, id="wide-heads"),
        pytest.param({"head_dim": 8, "rope_factor": 8.0, "rope_original": ORIGINAL}, id="narrow-heads-stretched-8"),
        pytest.param({"rope_theta": 10000.0, "norm_eps": 1e-3}, id="other-theta-and-epsilon"),
    ],
)
def test_equals_hugging_face(changes: dict[str, float | bool]) -> None:
    config = Llama(**(SMALL | changes))  # type: ignore[arg-type]
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
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    names = model.hf_names()
    for name, weight in model.named_parameters():
        assert difference(weight.grad, gradients[names[name]]) <= 1e-5, name


def test_stretching_matters_at_the_tested_length() -> None:
    stretched = Llama(**SMALL, rope_factor=8.0, rope_original=ORIGINAL)  # type: ignore[arg-type]
    theirs = hugging_face(stretched)
    tokens = torch.randint(0, stretched.vocab, (1, 4 * ORIGINAL))
    plain = ours(Llama(**SMALL), theirs)  # type: ignore[arg-type]
    assert difference(plain.head(plain(tokens)), theirs(tokens).logits) > 1e-3
