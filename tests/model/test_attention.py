"""Attention kernels: all give the same result; documents need one mask or block masks; the choice is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.runs import compose_tiny_run
from tests.support.tiers import full
from titan.cluster import devices
from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError
from titan.memory.checkpointing import checkpoint_blocks
from titan.memory.schema import Memory
from titan.model import attention, init_weights
from titan.model.attention import BLOCK, FlexAttention, make_block_mask
from titan.model.layers import attend, document_mask
from titan.model.schema import Llama
from titan.model.schema_llama4 import Llama4
from titan.parallelism import mesh
from titan.training.build import build_train_step as assemble

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
EXACT = 1e-5  # law 3
CPU = torch.device("cpu")


def documents(rows: int, length: int, share: float, seed: int = 0) -> Tensor:
    """Ids [rows, length]; they need not grow."""
    starts = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < share
    return (starts.cumsum(1) * 7919) % 104729


def visible(mask: flex.BlockMask, rows: int) -> Tensor:
    """Return a block mask as a dense one, [rows, t, s]: whole blocks, and its `mask_mod` in the others."""
    (length, keys), (block, _) = mask.seq_lengths, mask.BLOCK_SIZE
    query, key = torch.arange(length)[:, None], torch.arange(keys)
    inner = mask.mask_mod(torch.arange(rows)[:, None, None], torch.zeros(1), query, key)
    part, full = (x.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :keys] for x in listed(mask))
    return ((part & inner) | full).expand(rows, -1, -1)


def listed(mask: flex.BlockMask) -> tuple[Tensor, Tensor]:
    """The blocks of keys that blocks of queries see in part, and in full, [B, N, M]; also what keys say of queries."""
    found = []
    for kind in ("", "full_"):
        queries, keys = (
            dense(getattr(mask, f"{kind}{side}_num_blocks"), getattr(mask, f"{kind}{side}_indices"))
            for side in ("kv", "q")
        )
        assert torch.equal(queries, keys.mT)
        found.append(queries)
    return found[0], found[1]


def dense(counts: Tensor, indices: Tensor) -> Tensor:
    """Which of its list each block has: [B, N, M]."""
    some = torch.zeros(indices.shape, dtype=torch.bool)
    for row, _, block in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        some[row, 0, block, indices[row, 0, block, : counts[row, 0, block]].long()] = True
    return some[:, 0]


@given(st.integers(1, 2), st.integers(1, 5 * BLOCK), st.sampled_from([0, 0.002, 0.01, 0.3]), st.integers(0, 9))
@pytest.mark.full
def test_blocks_show_what_a_mask_of_tokens_shows(rows: int, length: int, share: float, seed: int) -> None:
    ids = documents(rows, length, share, seed)
    mask = make_block_mask(ids, torch.arange(length)[None], torch.float32)
    assert torch.equal(visible(mask, rows), document_mask(ids, torch.float32)[:, 0] == 0)
    assert mask.shape[-2:] == (length, length)


def test_blocks_that_hide_all_are_passed_over() -> None:
    """As many blocks are looked at as torch finds, which makes a mask of tokens by tokens to find them."""
    length = 8 * BLOCK
    ids = (torch.arange(length) // (2 * BLOCK))[None]
    mask = make_block_mask(ids, torch.arange(length)[None], torch.float32)
    seen = lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j])
    theirs = flex.create_block_mask(seen, 1, None, length, length, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(theirs, name))


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any result, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.names = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name)
        self.elements = max([self.elements, *(t.numel() for t in [out] if isinstance(t, Tensor))])
        return out


def test_blocks_are_found_without_tokens_by_tokens_and_without_the_host() -> None:
    ids = documents(1, 16 * BLOCK, 0.01)
    with Largest() as largest:
        make_block_mask(ids, torch.arange(16 * BLOCK)[None], torch.float32)
    assert largest.elements <= 16 * BLOCK
    assert not largest.names & {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def qkv(length: int, heads: int, pairs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, n, length, 16, generator=generator) for n in (heads, pairs, pairs)]


@pytest.mark.full
@pytest.mark.parametrize(("heads", "pairs"), [pytest.param(4, 4, id="heads"), pytest.param(4, 2, id="grouped")])
@pytest.mark.parametrize("share", [0, 0.02, None], ids=["one", "documents", "none"])
def test_flex_gives_what_the_mask_gives(heads: int, pairs: int, share: float | None) -> None:
    tensors = qkv(300, heads, pairs)
    ids = None if share is None else documents(2, 300, share)
    mask = make_block_mask(ids, torch.arange(300)[None], torch.float32)
    found = FlexAttention(scale=0.5)(*tensors, mask)
    seen = None if ids is None else document_mask(ids, torch.float32)
    expected = attend(*tensors, seen, scale=0.5)  # type: ignore[misc]
    assert (found - expected).abs().max() <= EXACT * expected.abs().max()


def model() -> Any:
    torch.manual_seed(0)
    built = Llama(dim=32, layers=3, heads=4, kv_heads=2, ffn=48, vocab=64).build()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def train(built: Any, ids: Tensor | None) -> list[Tensor]:
    """The loss and all gradients."""
    tokens = torch.randint(64, (2, 150), generator=torch.Generator().manual_seed(1))
    loss = built.head(built(tokens, document_ids=ids), tokens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in built.parameters())]


def far(ours: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact, strict=True))


def plain(built: Any) -> None:
    pass


def checkpointed(built: Any) -> None:
    checkpoint_blocks(built.blocks(), Memory(checkpointing="full"))


def compiled(built: Any) -> None:
    for block in built.blocks():
        block.compile(backend="aot_eager", fullgraph=True)


def llama4() -> Any:
    torch.manual_seed(0)
    shape = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, "experts": 4, "expert_ffn": 16}
    built = Llama4(**shape, attention_chunk=37, nope_every=2, moe_every=2, floor_scale=20).build()
    init_weights.materialise_model(built, built.initial(), 0, "cpu")
    return built


@pytest.mark.full
@pytest.mark.parametrize("build", [model, llama4])
@pytest.mark.parametrize(
    ("ids", "how"),
    [
        pytest.param(documents(2, 150, 0.03), checkpointed, id="documents-full"),
        full(documents(2, 150, 0.03), compiled, id="documents-block"),
        full(None, plain, id="one-plain"),
    ],
)
def test_a_model_learns_the_same_by_flex(
    build: Callable[[], Any], how: Callable[[Any], Any], ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a guard of torch's is in the way of the backward pass, and the formula behind it is right."""
    monkeypatch.setattr(flex, "_validate_device", lambda *args: None)
    built = build()
    attention.set_kernels(built, "flex", CPU, use_flex=True)
    assert {type(block.attention.core) for block in built.blocks()} == {FlexAttention}
    how(built)
    assert far(train(built, ids), train(build(), ids)) <= EXACT


@pytest.mark.parametrize(
    "how", [pytest.param(plain, id="plain"), pytest.param(checkpointed, id="full"), full(compiled, id="block")]
)
def test_a_mask_is_made_once_for_all_layers(how: Callable[[Any], Any]) -> None:
    built, seen, ids = model(), list[Any](), documents(2, 150, 0.03)
    make = built.mask
    built.mask = lambda *args: seen.append(make(*args)) or seen[-1]
    how(built)
    found = train(built, ids)
    assert [(x.shape, x.dtype) for x in seen] == [((2, 1, 150, 150), torch.float32)]
    assert far(found, train(model(), ids)) <= EXACT
    assert far(found, train(model(), None)) > 1e-2


SMALL = ["model.dim=32", "model.ffn=48", "model.expert_ffn=24", "model.layers=2", "model.heads=4", "model.head_dim=8"]
DOCUMENTS = ["dataset.mask_documents=true", "dataset.longest=12"]
CHUNKS = ["model=llama4_debug", *SMALL, "model.attention_chunk=15"]
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("how", [plain, full(compiled)], ids=["plain", "block"])
@pytest.mark.parametrize(
    ("choice", "flash"),
    [pytest.param("auto", True), pytest.param("flash", True), pytest.param("math", False)],
)
def test_the_chosen_kernel_attends(choice: str, flash: bool, how: Callable[[Any], Any]) -> None:
    built = model()
    attention.set_kernels(built, choice, CPU, use_flex=False)
    how(built)
    with profile(activities=[ProfilerActivity.CPU]) as watch:
        found = train(built, None)
    assert (FLASH in {event.name for event in watch.events()}) is flash
    assert far(found, train(model(), None)) <= EXACT
    name = attention.query_selected_kernel(
        (4, 2, 8), torch.float32, CPU, built.layers["0"].attention.core.kernels, has_mask=False
    )
    assert name == ("flash" if flash else "math")


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        pytest.param((9, 0), ["cudnn", "flash", "efficient", "math"], id="hopper"),
        pytest.param((8, 0), ["flash", "efficient", "math"], id="ampere"),
    ],
)
def test_on_gpus_the_fastest_comes_first(
    capability: tuple[int, int], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    assert attention.choose_kernels("auto", cuda) == tuple(attention.BACKENDS[name] for name in names)
    assert attention.choose_kernels("flash", cuda) == (attention.BACKENDS["flash"],)


def test_no_kernel_that_can_is_said() -> None:
    with pytest.raises(attention.NoKernelError):
        attention.query_selected_kernel(
            (4, 2, 8), torch.float32, CPU, (attention.BACKENDS["efficient"],), has_mask=False
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        pytest.param([], "flash (CPU)", id="auto"),
        pytest.param(["training.attention=math"], "math (CPU)", id="math"),
        pytest.param(DOCUMENTS, "flash (CPU), dense document mask", id="documents"),
        pytest.param(CHUNKS, "flash (CPU), dense mask of chunks", id="chunks"),
        pytest.param([*CHUNKS, "model.attention_chunk=16"], "flash (CPU)", id="one-chunk"),
    ],
)
def test_the_kernel_is_said(overrides: list[str], line: str, tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, *overrides)
    assert f"attention kernel: {line}" in assemble(run, mesh.connect_world(RankInfo(), run.layout, "cpu", 30)).notes


RING = ["parallelism=cp", "parallelism.context_method=ring", "dataset.mask_documents=true"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        full(["training.attention=flex"], "flex|backward|GPU|auto", id="flex"),
        full(["training.attention=cudnn"], "cudnn|no such kernel for CPUs|math", id="cudnn"),
        pytest.param(["training.attention=efficient"], "efficient|no such kernel for CPUs|math", id="efficient"),
        full([*RING, "training.attention=flash"], "flash|mask_documents=true|auto or math", id="ring"),
        pytest.param([*RING[:2], *CHUNKS, "training.attention=flash"], "can't mask chunks|model.att", id="ring-chunks"),
        pytest.param(["training.attention=quick"], "quick|choose one of|flash", id="unknown"),
        pytest.param(["training.loss_chunk=0"], "loss_chunk=0|at least 1", id="chunk"),
    ],
)
def test_refusals(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        compose_tiny_run(tmp_path, *overrides)
    assert [word for word in words.split("|") if word not in str(error.value)] == []


@pytest.mark.full
@pytest.mark.parametrize("method", [full("allgather"), full("ulysses"), "ring"])
def test_documents_are_kept_apart_by_blocks_on_gpus(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    monkeypatch.setattr("titan.run.resolve.importlib.util.find_spec", lambda name: object())
    overrides = ["cluster.memory_gib=1e6", "cluster.devices=2", "parallelism=cp", "dataset.mask_documents=true"]
    assert compose_test_run([*overrides, f"parallelism.context_method={method}"]).training.attention == "flex"
    assert compose_test_run([*overrides[:3], f"parallelism.context_method={method}"]).training.attention == "auto"
    chunks = [*overrides[:3], "model=llama4_debug", f"parallelism.context_method={method}"]
    assert compose_test_run([*chunks, "training.seq_len=256"]).training.attention == "flex"
    assert compose_test_run([*chunks, "training.seq_len=128"]).training.attention == "auto"


@pytest.mark.parametrize(("kernel", "method"), [("math", "ulysses"), ("flex", "ring")])
def test_kernels_reach_ranks_that_share_rows(kernel: str, method: str) -> None:
    """Where a core is replaced by one for parts of rows, what it may use stays."""
    from titan.parallelism import context

    built: Any = model()
    attention.set_kernels(built, kernel, CPU, use_flex=kernel == "flex")
    context.replace_attention(built, method, None, balance=True, kernel=kernel)  # type: ignore[arg-type]
    cores = [block.attention.core for block in built.blocks()]
    assert {type(core) for core in cores} == {context.ContextAttention}
    if kernel == "flex":
        assert built.mask.__func__ is context.ContextAttention.mask
    else:
        assert {(core.kernel, core.kernels) for core in cores} == {("math", (attention.BACKENDS["math"],))}
