"""Counts in closed form agree with the modules, with published figures and with what a step holds in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.tiers import full
from titan.cluster import devices
from titan.config import settings
from titan.errors import ConfigError
from titan.memory.checkpointing import checkpoint_blocks
from titan.memory.schema import Memory
from titan.model.activations import RankBatch
from titan.model.init_weights import materialise_model
from titan.model.loss import compute_loss_in_chunks
from titan.model.schema import Decoder, Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.run import identity
from titan.run.axes import PLUGGABLE

CONF = Path(__file__).parents[2] / "conf" / "model"
PUBLISHED = {
    "llama1b": 1_235_814_400,
    "llama3b": 3_212_749_824,
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "llama405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "llama4_17b_16e": 107_769_861_120,
    "llama4_17b_128e": 400_711_848_960,
    "deepseek_v2_lite": 15_706_484_224,
    "moonlight_16b": 15_960_108_544,
    "deepseek_v3_671b": 671_026_404_352,
}
ACTIVE = {
    "qwen3_30b_a3b": 3_353_032_704,
    "qwen3_235b_a22b": 22_190_763_520,
    "llama4_17b_16e": 17_172_894_720,
    "llama4_17b_128e": 17_184_691_200,
    "deepseek_v2_lite": 2_661_150_208,
    "moonlight_16b": 2_914_774_528,
    "deepseek_v3_671b": 37_552_282_624,
}
DEBUG = ["debug", "qwen3_debug", "qwen3_moe_debug", "llama4_debug", "deepseek_v3_debug"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FAMILIES = [pytest.param(Llama, id="llama"), pytest.param(Qwen3, id="qwen3")]
each_family = pytest.mark.parametrize("family", FAMILIES)


def shipped(name: str) -> Any:
    """The settings of one of the shipped files."""
    data: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    (schema, own) = data.pop("defaults")
    assert own == "_self_"
    family = PLUGGABLE["model"][schema.removeprefix("/schema/model/").removesuffix("@_here_")]
    config = settings.build(family, data, "model")
    assert type(config) is family
    config.check()
    return config


def on_meta(config: Decoder) -> Any:
    with torch.device("meta"):
        return config.build()


def numbers(*modules: torch.nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_shipped_shape_counts(name: str) -> None:
    config = shipped(name)
    counted = numbers(on_meta(config))
    assert config.parameters() == counted == PUBLISHED.get(name, counted)
    assert config.parameter_names() == tuple(name for name, _ in on_meta(config).named_parameters())
    assert name.endswith("_debug") or config.active_parameters() == ACTIVE.get(name, counted)
    for layer, *_ in config.kinds().values():
        expert = sum(matmul.inputs * matmul.outputs for matmul in config.expert_matmuls(layer).values())
        assert expert * getattr(config, "experts", 0) == config.expert_parameters(layer)


def test_every_published_shape_is_shipped() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {*DEBUG, *PUBLISHED}


@pytest.mark.parametrize("name", [*DEBUG, *PUBLISHED])
def test_first_line_describes(name: str) -> None:
    first = (CONF / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) < 92


def test_defaults_are_the_debug_shapes() -> None:
    assert settings.to_plain(shipped("debug")) == settings.to_plain(Llama()) | {"rope_theta": 10000.0}
    assert settings.to_plain(shipped("qwen3_debug")) == settings.to_plain(Qwen3()) | {
        "rope_theta": 10000.0,
        "tied": True,
    }


def test_qwen3_is_published_with_a_million_for_rotation_and_heads_of_128() -> None:
    for name in (name for name in PUBLISHED if name.startswith("qwen3")):
        config = shipped(name)
        assert (config.rope_theta, config.rope_factor, config.norm_eps) == (1e6, 1, 1e-6)
        keys = 4 if name in ACTIVE else 8  # with experts
        assert (config.head_size, config.kv_heads, config.vocab) == (128, keys, 151936)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "named"),
    [
        pytest.param("debug", {}, id="llama"),
        pytest.param("qwen3_debug", {"model": "titan.model.schema.Qwen3"}, id="qwen3"),
        pytest.param("qwen3_0.6b", {"model": "titan.model.schema.Qwen3"}, id="name-with-a-dot"),
    ],
)
def test_families_are_told_apart_and_ids_of_llamas_stay(
    model: str, named: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    science = identity.select_settings(compose_test_run([f"model={model}"]), science=True)
    assert {name: value for name, value in science.items() if name == "model"} == named


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"heads": 6, "kv_heads": 4}, ["model.heads=6", "model.kv_heads=4"], id="groups"),
        pytest.param({"dim": 250}, ["model.dim=250", "model.heads=4", "model.head_dim"], id="heads"),
        pytest.param({"head_dim": 33}, ["model.head_dim=33", "even", "model.head_dim=34"], id="odd-head"),
        pytest.param({"dim": 12}, ["model.head_dim=3", "even", "model.head_dim=4"], id="odd-head-derived"),
        pytest.param({"rope_factor": 8.0, "rope_low": 5.0}, ["model.rope_high=4", "model.rope_low=5"], id="band"),
    ],
)
def test_check_raises(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Llama(**changes).check()
    assert all(word in str(error.value) for word in words)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"dim": 250, "head_dim": 64}, id="head-dim-given"),
        pytest.param({"rope_low": 5.0}, id="band-unused"),
        pytest.param({"rope_factor": 8.0, "rope_low": 4.0}, id="band-without-width"),
    ],
)
def test_check_accepts(changes: dict[str, Any]) -> None:
    Llama(**changes).check()


@each_family
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_part_by_part(family: type[Decoder], tied: bool) -> None:
    model = on_meta(family(tied=tied, head_dim=48))
    matrices = [p for block in model.blocks() for p in block.parameters() if p.dim() == 2]
    config = model.config
    assert config.matmul_parameters() == sum(p.numel() for p in [*matrices, model.head.weight])
    assert {config.block_parameters()} == {numbers(block) for block in model.blocks()}
    assert config.embedding_parameters() == numbers(model.tok_embeddings)
    assert config.head_parameters() == numbers(model.norm, model.head)
    assert config.parameters() == numbers(model)


@each_family
def test_flops_are_those_counted_in_a_step(family: type[Decoder]) -> None:
    """Counted with attention as plain matmuls, which compute the full square as the closed form does."""
    config = family(layers=2, dim=64, kv_heads=4, head_dim=32, ffn=96, vocab=128)
    model, tokens = config.build(), torch.zeros(1, 32, dtype=torch.int64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as whole:
            model.head(model(tokens), tokens).backward()
        with FlopCounterMode(display=False) as blocks:
            model(tokens).sum().backward()
    assert config.flops_per_token(32) * 32 == whole.get_total_flops()
    assert config.layers * config.block_flops(32) * 32 == blocks.get_total_flops()
    assert config.head_flops() * 32 == whole.get_total_flops() - blocks.get_total_flops()


def test_flops_of_attention_in_chunks() -> None:
    """Each kind of block by itself: the span of chunked attention is a chunk, of full attention the row."""
    config = shipped("llama4_17b_128e")
    whole = replace(config, attention_chunk=None)
    chunked, full = 12 * 40 * 128 * 8192, 12 * 40 * 128 * 65536
    assert [config.attention_flops(65536, layer) for layer in range(4)] == [chunked, chunked, chunked, full]
    assert whole.flops_per_token(65536) - config.flops_per_token(65536) == 36 * (full - chunked)
    assert config.flops_per_token(8192) == whole.flops_per_token(8192)
    weights = 6 * (config.active_parameters() - config.embedding_parameters() - (2 * 48 + 1) * 5120)
    assert config.flops_per_token(0) == weights
    assert [config.needs_mask(length) for length in (8192, 8193)] == [False, True]
    assert not whole.needs_mask(65536)


def test_flops_of_latent_attention_are_those_counted_in_a_step() -> None:
    """In dense blocks, for the counter does not know experts; without those of the zeros that values end with."""
    shape: dict[str, Any] = {"layers": 2, "dim": 64, "heads": 4, "ffn": 96, "vocab": 128, "first_dense": 2}
    config = DeepseekV3(**shape, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=6)
    model, tokens = config.build(), torch.zeros(1, 32, dtype=torch.int64)
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counted,
    ):
        model.head(model(tokens), tokens).backward()
    zeros = 6 * config.heads * (config.head_size - config.v_head_dim) * 32 * config.layers
    assert (config.flops_per_token(32) + zeros) * 32 == counted.get_total_flops()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"kv_heads": 2}, ["model.kv_heads=2", "model.kv_heads=4"], id="fewer-keys"),
        pytest.param({"head_dim": 64}, ["model.head_dim=64", "model.qk_nope_head_dim"], id="head-dim"),
        pytest.param({"qk_rope_head_dim": 7}, ["model.qk_rope_head_dim=7", "give 8"], id="odd"),
        pytest.param({"v_head_dim": 193}, ["model.v_head_dim=193", "192"], id="wide-values"),
        pytest.param({"groups": 5}, ["model.groups=5", "model.experts=64"], id="unequal-groups"),
        pytest.param({"groups": 64, "topk_groups": 6}, ["model.groups=64", "at least 2"], id="groups-of-one"),
        pytest.param({"groups": 4, "topk_groups": 5}, ["model.topk_groups=5", "model.groups=4"], id="more-groups"),
        pytest.param({"groups": 16}, ["model.topk_groups=1", "model.top_k=6"], id="too-few-experts"),
        pytest.param({"first_dense": 7}, ["model.first_dense=7", "model.layers=6"], id="more-dense-blocks"),
    ],
)
def test_deepseek_check_raises(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        DeepseekV3(**changes).check()
    assert all(word in str(error.value) for word in words)


class Live(TorchDispatchMode):
    """Bytes of all storages that operations made, the model's own aside: as they are now, and at most."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.own = {p.untyped_storage()._cdata for p in model.parameters()}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.own:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        return sum(size for _, size in self.storages.values())


def between(config: Decoder, checkpointing: Any, dtype: torch.dtype, device: str) -> int:
    """Bytes that are there between forward and backward of a step of 256 tokens."""
    tokens = torch.zeros(2, 128, dtype=torch.int64, device=device)
    model = on_meta(config)
    materialise_model(model, model.initial(), 0, device)
    model.to(dtype).init_buffers(device)
    checkpoint_blocks(model.blocks(), Memory(checkpointing=checkpointing))
    with Live(model) as live:
        loss = model.head(model(tokens), tokens)
        return live.bytes() if loss.requires_grad else 0


DOMINANT = {
    "blocks-dominate": {"vocab": 64},
    "head-dominates": {"vocab": 2048, "layers": 3},
    "attention-dominates": {"kv_heads": 4, "head_dim": 64, "ffn": 128, "vocab": 64},
}
FULL32, HALF = torch.float32, torch.bfloat16
KEPT = [
    ("blocks-dominate", "none", HALF, "qwen3"),
    ("blocks-dominate", "full", FULL32, "qwen3"),
    ("head-dominates", "full", FULL32, "qwen3"),
    ("head-dominates", "full", HALF, "qwen3"),
    ("head-dominates", "selective", FULL32, "qwen3"),
    ("head-dominates", "selective", HALF, "qwen3"),
    ("attention-dominates", "none", FULL32, "qwen3"),
    ("attention-dominates", "full", FULL32, "llama"),
    ("attention-dominates", "full", HALF, "qwen3"),
    *(("attention-dominates", "selective", dtype, family) for dtype in (FULL32, HALF) for family in ("llama", "qwen3")),
]
MORE = [
    ("blocks-dominate", "none", HALF, "llama"),
    ("blocks-dominate", "selective", FULL32, "llama"),
    ("head-dominates", "none", FULL32, "llama"),
]


def kept() -> list[Any]:
    """The cases on each device."""
    return [
        case(*values, device, id=f"{dominant}-{how}-{dtype}-{device}-{family}")
        for cases, case in ((KEPT, pytest.param), (MORE, full))
        for values in cases
        for dominant, how, dtype, family in [values]
        for device in DEVICES
    ]


@pytest.mark.full
@pytest.mark.parametrize(("dominant", "checkpointing", "dtype", "family", "device"), kept())
def test_what_is_kept_between_forward_and_backward(
    dominant: str, checkpointing: Any, dtype: torch.dtype, device: str, family: str
) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("flash attention on CUDA takes 16-bit types")
    kind = {"llama": Llama, "qwen3": Qwen3}[family]
    config = kind(**({"dim": 128, "layers": 4, "head_dim": 32, "ffn": 256} | DOMINANT[dominant]))
    share = RankBatch(256, dtype.itemsize, fused=device == "cuda")
    block = config.block_activations(share)
    kept = {"none": block.saved, "full": block.input, "selective": block.selective}[checkpointing]
    stated = config.layers * kept + config.head_activations(share).saved
    assert stated == pytest.approx(between(config, checkpointing, dtype, device), rel=0.06 if device == "cpu" else 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [32, 100, 1000])
def test_a_head_in_chunks_takes_what_is_stated(chunk: int, dtype: torch.dtype) -> None:
    config = Llama(dim=64, vocab=1024)
    hidden, weight = torch.randn(256, config.dim).to(dtype), torch.randn(config.vocab, config.dim).to(dtype)
    with Live(torch.nn.ParameterList([hidden, weight])) as live:
        compute_loss_in_chunks(hidden, weight, torch.zeros(256, dtype=torch.int64), chunk, (True, True))
    share = RankBatch(256, dtype.itemsize)
    head = config.head_activations(share, chunk=chunk)
    stated = head.forward - 256 * share.count_norm_bytes(config.dim) - dtype.itemsize * hidden.numel()
    assert stated * 0.5 <= live.peak <= stated * 1.05
    if chunk < 256:
        assert head.forward < config.head_activations(share).backward


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        # input 16, queries 32, values 8, w1 40, attention's output 32: 2 bytes each; log-sum-exp 4 heads of 4
        pytest.param(Llama, 2 * 128 + 16, id="llama"),
        pytest.param(Qwen3, 2 * 128 + 16, id="qwen3"),
    ],
)
def test_what_selective_checkpointing_keeps(family: type[Decoder], kept: int) -> None:
    config = family(dim=16, heads=4, kv_heads=1, head_dim=8, ffn=40)
    assert config.block_activations(RankBatch(10, 2)).selective == 10 * kept


@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_ranks_share_what_their_products_keep(sequence: bool) -> None:
    """Of D elements a token ranks keep their part, of what a region gathers all."""
    config = Llama(dim=128, heads=4, kv_heads=2, head_dim=32, ffn=256)
    one, two = (config.block_activations(RankBatch(64, 2, tensor, sequence)) for tensor in (1, 2))
    gathered = 2 * 2 * 128 * 64
    assert two.input == one.input / (2 if sequence else 1)
    assert two.saved - gathered >= (one.saved - gathered) / 2
    assert (two.saved - gathered == (one.saved - gathered) / 2) == sequence
