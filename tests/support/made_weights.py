"""Checkpoints made by hand, and weights on disk in every format, written by others than what is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from tests.model.test_parity import GROUPS, V2, YARN, difference, hugging_face
from titan.checkpoint import manifest
from titan.checkpoint.manifest import Manifest, ManifestFile
from titan.config.settings import to_plain
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.weights.interface import Weights

SMALL: dict[str, Any] = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 128}
STRETCH: dict[str, Any] = {"rope_factor": 8.0, "rope_original": 32}
LLAMA, QWEN3 = Llama(**SMALL), Qwen3(**SMALL, head_dim=32)
QWEN3_MOE = Qwen3Moe(**SMALL, head_dim=32, experts=8, top_k=3, expert_ffn=24)
LLAMA4_CHUNKS: dict[str, Any] = {"attention_chunk": 12, "nope_every": 2, "floor_scale": 9}
LLAMA4 = Llama4(**SMALL | {"layers": 4}, **LLAMA4_CHUNKS, head_dim=32, experts=4, expert_ffn=24, moe_every=2)
DEEPSEEK_V3, DEEPSEEK_V2 = DeepseekV3(**GROUPS, **YARN), DeepseekV3(**V2)


class Code:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("this must not be printed",))


def build_module(model: Decoder, seed: int = 0) -> Any:
    """Titan's module with random weights, norms too."""
    out = model.build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in out.named_weights():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return out


def build_tensors(model: Decoder, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same weights by name."""
    return {name: weight.detach().to(dtype) for name, weight in build_module(model, seed).named_weights()}


def write_native(folder: Path, model: Decoder, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A complete checkpoint of random weights, and the weights."""
    weights = build_tensors(model, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"optimizer.norm.weight.step": torch.tensor(3.0)}
    save({f"model.{name}": weight for name, weight in weights.items()} | extra, checkpoint_id=folder, no_dist=True)
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            files[file.name] = manifest.checksum_stream(content)
    kind = {"_target_": f"{type(model).__module__}.{type(model).__name__}"}
    step = int(folder.name[5:]) if folder.name.startswith("step-") else 3
    record = Manifest(step, 100, {}, "0" * 12, "run", {}, kind | to_plain(model), "titan4k", files)
    manifest.write(folder, record)
    return weights


def write_hf(folder: Path, model: Decoder, shard: str = "100KB") -> torch.nn.Module:
    """What transformers saves of a model of its own, and the model."""
    hf_model: Any = hugging_face(model)
    hf_model.save_pretrained(folder, max_shard_size=shard)
    return hf_model


def replace_hf_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors in a folder of one file."""
    from safetensors.torch import load_file

    content = load_file(folder / "model.safetensors") | {k: v for k, v in changes.items() if v is not None}
    for name in [name for name, value in changes.items() if value is None]:
        content.pop(name)
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    """Set values of a JSON file; ... removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def interleave_rows(weight: Tensor, head: int) -> Tensor:
    """Rows of heads whose halves are pairs, as Meta has them: neighbours are pairs."""
    rows = weight.view(-1, 2, head // 2, weight.shape[-1])
    return rows.transpose(1, 2).reshape(weight.shape)


def write_meta(
    folder: Path,
    model: Decoder,
    ranks: int = 1,
    embedding: int = 0,
    dtype: torch.dtype = torch.float32,
    **params: Any,
) -> dict[str, Tensor]:
    """What Meta's own training would leave, cut for `ranks`, and the weights by titan's names."""
    weights = build_tensors(model, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        content = {}
        for name, weight in weights.items():
            if name.endswith(("wq.weight", "wk.weight")):
                weight = interleave_rows(weight, model.head_size)
            content[name.replace("head.", "output.")] = _cut_weight(name, weight, rank, ranks, model, embedding)
        if model.tied:
            content["output.weight"] = content["tok_embeddings.weight"]
        content["rope.freqs"] = torch.zeros(model.head_size // 2)
        torch.save(content, folder / f"consolidated.{rank:02}.pth")
    defaults = {
        "dim": model.dim,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "multiple_of": 32,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
    }
    (folder / "params.json").write_text(json.dumps({k: v for k, v in (defaults | params).items() if v is not ...}))
    return weights


def _cut_weight(name: str, weight: Tensor, rank: int, ranks: int, model: Decoder, embedding: int) -> Tensor:
    if weight.dim() == 1:
        return weight.clone()
    if name.endswith(("wk.weight", "wv.weight")) and ranks > model.kv_heads:
        return weight.chunk(model.kv_heads)[rank * model.kv_heads // ranks].clone()
    dim = embedding if "tok_embeddings" in name else 1 if name.endswith(("wo.weight", "w2.weight")) else 0
    return weight.chunk(ranks, dim)[rank].clone()


def load_module(weights: Weights) -> Any:
    """Titan's module with these weights in their stored type."""
    out = weights.model.build()
    names = [name for name, _ in out.named_weights()]
    assert set(names) == set(weights.shapes)
    out.load_state_dict({name: weights.read(name) for name in names}, strict=False, assign=True)
    if weights.model.tied:
        out.head.weight = out.tok_embeddings.weight
    return out


@torch.no_grad()
def compute_logit_difference(titan_module: Any, hf_model: Any, vocab: int, length: int = 48) -> float:
    """max|a - b| / max|b| of the logits of titan's module and transformers'."""
    tokens = torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(1))
    return difference(titan_module.head(titan_module(tokens)), hf_model(tokens).logits)


def has_tensors(weights: Weights, expected: dict[str, Tensor]) -> bool:
    """Whether they are these tensors, bit by bit."""
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    read = {name: weights.read(name) for name in expected}
    return all(read[n].dtype == expected[n].dtype and torch.equal(read[n], expected[n]) for n in expected)


FILES = {"a.distcp": b"123456789", ".metadata": b"m" * 10}


def make_manifest(step: int = 1, **fields: Any) -> Manifest:
    """What a checkpoint says of itself, but for its files."""
    defaults = {
        "tokens": 100 * step,
        "data": {"rows": step},
        "science_id": "id",
        "run_id": "run",
        "layout": {"shard": 2},
        "model": {},
        "tokenizer": None,
    }
    return Manifest(step, **(defaults | fields))


def write_complete(folder: Path, record: Manifest, files: dict[str, bytes] | None = None) -> Path:
    """A folder with `files` (`FILES`), which a manifest makes a complete checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    checksums: dict[str, ManifestFile] = {}
    for name, content in (FILES if files is None else files).items():
        (folder / name).write_bytes(content)
        with (folder / name).open("rb") as file:
            checksums[name] = manifest.checksum_stream(file)
    manifest.write(folder, Manifest(**{**vars(record), "files": checksums}))
    return folder


def write_checkpoint(directory: Path, step: int, **fields: Any) -> Path:
    """A complete checkpoint of the run in `directory`, of files that hold nothing."""
    return write_complete(manifest.folder_of(directory, step), make_manifest(step, **fields))
