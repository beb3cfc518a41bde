"""Weights in Hugging Face's format: transformers writes them, titan reads them, and their logits are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hub_server import COMMIT, Repositories, serve_repositories
from tests.support.made_weights import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    LLAMA,
    LLAMA4,
    QWEN3_MOE,
    SMALL,
    STRETCH,
    compute_logit_difference,
    edit_json,
    load_module,
    replace_hf_tensors,
    write_hf,
)
from titan.errors import ConfigError
from titan.model.schema import Decoder, Llama, Qwen3
from titan.weights.formats import compute_digest, open_weights
from titan.weights.hf_config import build_config, build_schema

STRETCHED = {
    "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS = [
    pytest.param(LLAMA, id="llama"),
    pytest.param(Llama(**SMALL, **STRETCH, rope_theta=1e4, norm_eps=1e-3), id="llama-stretched"),
    pytest.param(Llama(**SMALL, tied=True, head_dim=32), id="llama-tied-wide-heads"),
    pytest.param(Qwen3(**SMALL, head_dim=32), id="qwen3"),
    pytest.param(Qwen3(**SMALL, **STRETCH, head_dim=8, tied=True), id="qwen3-tied-stretched"),
    pytest.param(QWEN3_MOE, id="qwen3-moe"),
    pytest.param(LLAMA4, id="llama4"),
    pytest.param(DEEPSEEK_V3, id="deepseek-v3"),
    pytest.param(DEEPSEEK_V2, id="deepseek-v2"),
]


@pytest.mark.parametrize("shard", [pytest.param("10MB", id="one-file"), pytest.param("100KB", id="several")])
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_those_of_transformers(model: Decoder, shard: str, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path, model, shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "100KB")
    weights = open_weights(tmp_path)
    assert type(weights.model) is type(model)
    assert compute_logit_difference(load_module(weights), theirs, model.vocab) <= 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_a_config_goes_out_and_in(model: Decoder) -> None:
    config = json.loads(json.dumps(build_config(model, "bfloat16")))
    again = build_schema(config, "x")
    assert build_config(again, "bfloat16") == config
    v5 = build_schema({key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}, "x")
    v4 = build_schema({key: value for key, value in config.items() if key != "rope_parameters"}, "x")
    assert v4 == v5 == again


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    theirs = write_hf(tmp_path, DEEPSEEK_V3, "10MB")
    replace_hf_tensors(tmp_path, {"model.layers.2.eh_proj.weight": torch.ones(2)})
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
    assert compute_logit_difference(load_module(open_weights(tmp_path)), theirs, DEEPSEEK_V3.vocab) <= 1e-5


YARN = build_config(DEEPSEEK_V3, "bfloat16")["rope_parameters"]
CONFIGS: list[tuple[Decoder, dict[str, Any], str]] = [
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func=softmax"),
    (DEEPSEEK_V3, {"topk_method": "group_limited_greedy"}, "topk_method=group_limited_greedy"),
    (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=false"),
    (DEEPSEEK_V3, {"rope_parameters": {"rope_type": "llama3"}}, "supports only yarn"),
    (DEEPSEEK_V3, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "no original_max"),
    (DEEPSEEK_V3, {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0}}, "no mscale_all_dim"),
    (DEEPSEEK_V3, {"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "no factor"),
    (DEEPSEEK_V3, {"rope_parameters": {"factor": "x"}}, "rope_parameters.factor is 'x'"),
    (DEEPSEEK_V3, {"num_key_value_heads": 2}, "model.kv_heads=2"),
    (DEEPSEEK_V3, {"n_group": 3}, "model.groups=3"),
    (LLAMA4, {"moe_layers": [0, 3]}, "has moe_layers at no fixed interval"),
    (LLAMA4, {"no_rope_layers": [0, 1, 1, 0]}, "has no_rope_layers at no fixed interval"),
    (LLAMA4, {"layer_types": ["chunked_attention"] * 4}, "has layer_types that differ from no_rope_layers"),
    (LLAMA4, {"num_hidden_layers": "x"}, "num_hidden_layers is 'x'"),
    (LLAMA4, {"num_hidden_layers": 10**30}, "000, and lists for 4; fetch it again"),
    (LLAMA, {"rope_scaling": "x"}, "rope_scaling is 'x', where a mapping is due"),
    (LLAMA, {"max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
    (LLAMA, {"architectures": [[]]}, "has the architecture []"),
    (LLAMA, {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM, and titan supports LlamaForCausalLM"),
    (LLAMA, {"architectures": ...}, "architecture null"),
    (LLAMA, {"layer_types": 3}, "layer_types is 3, where a list is due"),
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=sliding_attention"),
    (LLAMA, {"rope_parameters": {**STRETCHED, "factor": 0}}, "rope_factor=0: must be at least 1"),
    (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, "but no factor"),
    (LLAMA, {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
    (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (LLAMA, {"attention_bias": True}, "attention_bias=true"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias=true"),
    (LLAMA, {"sliding_window": 64}, "sliding_window=64"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act=gelu"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts=8"),
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=fp8"),
    (LLAMA, {"hidden_size": ...}, "has no hidden_size"),
    (LLAMA, {"hidden_size": "x"}, "dim=x: expected a whole number"),
    (LLAMA, {"num_key_value_heads": 3}, "model.kv_heads=3"),
]
"""Models, what is changed in their config.json (...: left out), and what is said of it."""


@pytest.mark.parametrize(("model", "changes", "words"), CONFIGS, ids=[words for *_, words in CONFIGS])
def test_a_config_that_titan_has_not_is_refused(model: Decoder, changes: dict[str, Any], words: str) -> None:
    config = build_config(model, "bfloat16") | {"rope_scaling": None} | changes
    with pytest.raises(ConfigError) as refused:
        build_schema({key: value for key, value in config.items() if value is not ...}, "x")
    assert words in str(refused.value)
    assert str(refused.value).startswith("x: ") and "\n" not in str(refused.value)


LACKING: list[tuple[Decoder, dict[str, Any], str]] = [
    (DEEPSEEK_V3, {"bias_rate": None}, "has no model.bias_rate=null"),
    (DEEPSEEK_V2, {"bias_rate": 0.0}, "has no model.bias_rate=0.0"),
    (DEEPSEEK_V2, {"norm_topk_prob": True}, "has no model.norm_topk_prob=true"),
    (DEEPSEEK_V2, {"groups": 2}, "has no model.groups=2"),
    (DEEPSEEK_V3, {"shared_experts": 0}, "has no model.shared_experts=0"),
    (DEEPSEEK_V3, {"rope_mscale": 2.0, "rope_mscale_all": 0.0}, "has no model.rope_mscale=2.0"),
    (LLAMA4, {"bias_rate": 0.0}, "does not have model.bias_rate=0.0"),
    (LLAMA4, {"norm_topk_prob": True}, "does not have model.norm_topk_prob=true"),
]


@pytest.mark.parametrize(("model", "changes", "words"), LACKING, ids=[words for *_, words in LACKING])
def test_a_model_that_hugging_face_has_not_is_refused(model: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^format=hf: .* {words}; give format=titan\.$"):
        build_config(replace(model, **changes), "bfloat16")


def test_what_an_old_config_leaves_out_is_as_in_transformers() -> None:
    config = build_config(Llama(**SMALL | {"kv_heads": 4}, rope_theta=1e4, norm_eps=1e-6), "float32")
    for key in ("rope_theta", "rope_parameters", "rope_scaling", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        del config[key]
    model = build_schema(config, "x")
    assert (model.rope_theta, model.kv_heads, model.head_size, model.norm_eps) == (1e4, 4, 16, 1e-6)


def test_any_part_is_read(tmp_path: Path) -> None:
    write_hf(tmp_path, LLAMA)
    weights = open_weights(tmp_path)
    whole = weights.read("layers.1.attention.wq.weight")
    assert torch.equal(weights.read("layers.1.attention.wq.weight", [5, 7], [20, 30]), whole[5:25, 7:37])
    assert torch.equal(weights.read("norm.weight", [60], [4]), weights.read("norm.weight")[60:])


@pytest.mark.parametrize("model", [pytest.param(QWEN3_MOE, id="each"), pytest.param(LLAMA4, id="fused")])
def test_any_part_of_experts_is_read(model: Decoder, tmp_path: Path) -> None:
    write_hf(tmp_path, model)
    weights, name = open_weights(tmp_path), "layers.1.feed_forward.experts.w3.weight"
    assert torch.equal(weights.read(name, [1, 5, 7], [3, 10, 30]), weights.read(name)[1:4, 5:15, 7:37])


def test_the_text_model_of_one_with_vision_is_read(tmp_path: Path) -> None:
    theirs = write_hf(tmp_path, LLAMA4, "10MB")
    content = load_file(tmp_path / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in content.items()}
    vision = {"vision_model.class_embedding": torch.ones(4), "multi_modal_projector.linear_1.weight": torch.ones(4, 4)}
    save_file(named | vision, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text()) | {"attn_temperature_tuning": 4, "bos_token_id": 7}
    for key in ("architectures", "no_rope_layer_interval", "layer_types", "interleave_moe_layer_step"):
        text.pop(key)
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = open_weights(tmp_path)
    assert weights.model == LLAMA4
    assert weights.config["bos_token_id"] == 7  # type: ignore[attr-defined]
    assert compute_logit_difference(load_module(weights), theirs, LLAMA4.vocab) <= 1e-5


@pytest.mark.parametrize(
    "spare",
    [
        pytest.param({"lm_head.weight": torch.ones(128, 64)}, id="a-tied-head"),
        pytest.param({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}, id="rotary-frequencies"),
    ],
)
def test_what_is_stored_in_vain_is_left_out(spare: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = Llama(**SMALL, tied=True)
    theirs = write_hf(tmp_path, model, "10MB")
    replace_hf_tensors(tmp_path, {**spare})
    weights = open_weights(tmp_path)
    assert "head.weight" not in weights.shapes
    assert compute_logit_difference(load_module(weights), theirs, model.vocab) <= 1e-5


def index(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").rename(folder / "a.safetensors")


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def double(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


NORM = "model.norm.weight"


def outside(folder: Path) -> None:
    """Name a file of another folder, which is there and would serve."""
    (folder.parent / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index(folder, **{NORM: "../x.safetensors"})


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: edit_json(f / "config.json", attention_bias=True), "attention_bias=true"),
    (lambda f: edit_json(f / "config.json", vocab_size=99), "has the shape [128, 64], and"),
    (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (lambda f: (f / "model.safetensors").unlink(), "no *.safetensors"),
    (lambda f: cut(f / "model.safetensors", 100_000), "broken or incomplete"),
    (lambda f: cut(f / "model.safetensors", 5), "broken or incomplete"),
    (lambda f: index(f, **{NORM: "gone.safetensors"}), "lacks gone.safetensors"),
    (outside, "lacks ../x.safetensors"),
    (lambda f: index(f), "has no weight_map"),
    (double, "is in a.safetensors and in b.safetensors"),
    (lambda f: replace_hf_tensors(f, {NORM: None}), f"lacks {NORM}"),
    (lambda f: replace_hf_tensors(f, {"x": torch.ones(2)}), "has x, which"),
    (lambda f: replace_hf_tensors(f, {NORM: torch.ones(3)}), f"{NORM} has the shape [3], and"),
    (lambda f: replace_hf_tensors(f, {NORM: torch.ones(64, dtype=torch.int8)}), f"{NORM} is stored as I8"),
]


@pytest.mark.parametrize(("spoil", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refusals(spoil: Callable[[Path], Any], sentence: str, tmp_path: Path) -> None:
    write_hf(tmp_path, LLAMA, "10MB")
    spoil(tmp_path)
    with pytest.raises(ConfigError) as refused:
        open_weights(tmp_path, "")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path}: ") and "\n" not in str(refused.value)


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    theirs = write_hf(tmp_path / "made", LLAMA)
    files = {file.name: file.read_bytes() for file in (tmp_path / "made").iterdir()}
    files |= {"original/consolidated.00.pth": b"x" * 100, "pytorch_model.bin": b"x" * 100, "README.md": b"hello"}
    with serve_repositories(Repositories({"someone/tiny": files})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.chdir(tmp_path)
        weights = open_weights(f"someone/tiny@{COMMIT}")
        assert weights.model == LLAMA
        assert not any("consolidated" in asked or ".bin" in asked for asked in hub.requests)
        with pytest.raises(ConfigError, match="no such repository on the hub"):
            open_weights("someone/else")
    assert compute_logit_difference(load_module(weights), theirs, LLAMA.vocab) <= 1e-5
    assert compute_digest(weights) == compute_digest(open_weights(tmp_path / "made"))
