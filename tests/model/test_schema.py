"""Counts in closed form agree with the modules, with published figures and with what autograd keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from titan import settings
from titan.model.llama import Llama as Module
from titan.model.schema import Llama
from titan.rng import materialise
from titan.settings import Refusal

CONF = Path(__file__).parents[2] / "conf" / "model"
PUBLISHED = {
    "llama1b": 1_235_814_400,
    "llama3b": 3_212_749_824,
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "llama405b": 405_853_388_800,
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def shipped(name: str) -> Llama:
    """The settings of one of the shipped files."""
    data: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert data.pop("defaults") == ["/schema/model/llama@_here_", "_self_"]
    config: Llama = settings.build(Llama, data, "model")
    config.check()
    return config


def on_meta(config: Llama) -> Module:
    with torch.device("meta"):
        return config.build()


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_shipped_shape_counts(name: str) -> None:
    config = shipped(name)
    counted = sum(p.numel() for p in on_meta(config).parameters())
    assert config.parameters() == counted == PUBLISHED.get(name, counted)


def test_every_published_shape_is_shipped() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {"debug", *PUBLISHED}


@pytest.mark.parametrize("name", ["debug", *PUBLISHED])
def test_first_line_describes(name: str) -> None:
    first = (CONF / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) < 92


def test_defaults_are_the_debug_shape() -> None:
    debug = settings.plain(shipped("debug"))
    assert debug == settings.plain(Llama()) | {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"heads": 6, "kv_heads": 4}, ["model.heads=6", "model.kv_heads=4"], id="groups"),
        pytest.param({"dim": 250}, ["model.dim=250", "model.heads=4", "model.head_dim"], id="heads"),
        pytest.param({"head_dim": 33}, ["model.head_dim=33", "even", "model.head_dim=34"], id="odd-head"),
        pytest.param({"dim": 12}, ["model.head_dim=3", "even", "model.head_dim=4"], id="odd-head-derived"),
        pytest.param({"rope_factor": 8.0, "rope_low": 4.0}, ["model.rope_high=4", "model.rope_low=4"], id="band"),
    ],
)
def test_check_refuses(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Refusal) as refusal:
        Llama(**changes).check()
    assert all(word in str(refusal.value) for word in words)
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"dim": 250, "head_dim": 64}, id="head-dim-given"),
        pytest.param({"rope_low": 4.0}, id="band-unused"),
    ],
)
def test_check_accepts(changes: dict[str, Any]) -> None:
    Llama(**changes).check()


@pytest.mark.parametrize("tied", [False, True])
def test_matmul_parameters_are_the_blocks_matrices_and_the_head(tied: bool) -> None:
    model = on_meta(Llama(tied=tied, head_dim=48))
    matrices = [p for block in model.blocks() for p in block.parameters() if p.dim() == 2]
    assert model.config.matmul_parameters() == sum(p.numel() for p in [*matrices, model.head.weight])


def test_flops_are_those_counted_in_a_step() -> None:
    """Counted with attention as plain products, which computes the full square as the closed form does."""
    config, tokens = Llama(layers=2, dim=64, kv_heads=4, ffn=96, vocab=128), torch.zeros(1, 32, dtype=torch.int64)
    model = config.build()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.head(model(tokens), tokens).backward()
    assert config.flops_per_token(32) * 32 == counter.get_total_flops()


def test_state_bytes() -> None:
    config = Llama()
    assert config.state_bytes() == 16 * config.parameters()
    assert config.state_bytes(optimizer_bytes_per_parameter=2) == 10 * config.parameters()


def kept(model: Module, tokens: torch.Tensor) -> int:
    """Bytes of all storages, parameters aside, that autograd keeps for the backward of a loss."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held, so that no later one takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.head(model(tokens), tokens)
    return sum(storage.nbytes() for storage in storages.values())


def recompute_blocks(model: Module) -> None:
    """Full activation checkpointing."""
    for block in model.blocks():
        forward = block.forward
        block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"vocab": 64}, id="blocks-dominate"),
        pytest.param({"vocab": 2048, "layers": 2}, id="head-dominates"),
        pytest.param({"kv_heads": 4, "head_dim": 64, "ffn": 128, "vocab": 64}, id="attention-dominates"),
    ],
)
def test_activation_bytes(changes: dict[str, Any], checkpointing: Any, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("flash attention on CUDA takes 16-bit types")
    config = Llama(**({"dim": 128, "layers": 4, "ffn": 256} | changes))
    tokens = torch.zeros(2, 128, dtype=torch.int64, device=device)
    model, fused = on_meta(config), device == "cuda"
    materialise(model, model.initial(), 0, device)
    model.to(dtype).init_buffers(device)
    recomputed = 0
    if checkpointing == "full":
        recompute_blocks(model)
        recomputed = config.block_bytes(tokens.numel(), dtype.itemsize, fused)
    gradient = 4 * tokens.numel() * config.vocab
    stated = config.activation_bytes(tokens.numel(), dtype.itemsize, checkpointing, fused)
    assert stated - recomputed - gradient == pytest.approx(kept(model, tokens), rel=0.2)
