"""Context parallel attention against attention to whole rows on one rank."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch._dynamo.backends.debugging  # aot_eager: once here, not in each of the ranks that fork from here
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests.model.test_attention import listed, visible
from tests.support.process_groups import simulate_rank
from tests.support.ranks import run_ranks
from tests.support.tiers import full
from titan.model import attention
from titan.model.layers import Block, CausalAttention, compute_rotation, document_mask, inverse_frequencies
from titan.model.schema import Llama
from titan.parallelism import context, context_kernels, context_ring
from titan.parallelism.context import ContextAttention, replace_attention
from titan.parallelism.context_chunks import compute_positions
from titan.parallelism.schema import count_key_repeats

METHODS = ("allgather", "ulysses", "ring")
BALANCE = (False, True)
ROWS, HEADS, SEQ, WIDTH = 2, 8, 32, 8
CHUNK = 5
SCALE = 0.5  # of scores; by default it is WIDTH**-0.5
EXACT, ROUNDED = 1e-5, 1.5e-2  # law 3; bfloat16 against float32: 8e-3 measured, CausalAttention itself 5e-3


class Case(NamedTuple):
    method: str
    balance: bool
    kv_heads: int
    documents: bool
    dtype: torch.dtype = torch.float32
    kernel: str = "flash"
    chunk: int | None = None

    def __str__(self) -> str:
        words = [self.method, "balanced" if self.balance else "in order", f"{HEADS // self.kv_heads} a kv head"]
        words += [self.kernel] * (self.kernel != "flash") + ["chunks"] * (self.chunk is not None)
        return ", ".join(words + ["documents"] * self.documents + ["bf16"] * (self.dtype == torch.bfloat16))


def table(
    *kv_heads: int, dtype: torch.dtype = torch.float32, kernel: str = "flash", chunk: int | None = None
) -> list[Case]:
    return [Case(*x, dtype, kernel, chunk) for x in itertools.product(METHODS, BALANCE, kv_heads, BALANCE)]


def documents(seq: int = SEQ) -> Tensor:
    """Ids [ROWS, seq], of documents of about six tokens; the rows differ, and ids are no small numbers."""
    starts = torch.rand(ROWS, seq, generator=torch.Generator().manual_seed(5)) < 0.15
    return starts.cumsum(1) * 7 + 2**40 + 1


def inside(ids: Tensor | None) -> Tensor:
    """The positions of tokens in their documents, as the loader gives them: [1 or ROWS, SEQ]."""
    if ids is None:
        return torch.arange(SEQ)[None]
    begins = torch.cat([torch.ones(ROWS, 1, dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1)
    return torch.arange(SEQ) - torch.where(begins, torch.arange(SEQ), 0).cummax(1).values


def exact_mask(ids: Tensor | None, chunk: int | None) -> Tensor | None:
    """The mask of whole rows: of documents, and of chunks of them."""
    if chunk is None:
        return None if ids is None else document_mask(ids, torch.float32)
    chunks = inside(ids) // chunk
    alone = torch.zeros(1, SEQ, dtype=torch.int64) if ids is None else ids
    same = (chunks[:, :, None] == chunks[:, None]) & (alone[:, :, None] == alone[:, None])
    return torch.zeros(same.shape).masked_fill(~same.tril(), -torch.inf)[:, None]


def inputs(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, the gradient of the output, and document ids: of whole rows."""
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
    tensors = [torch.randn(ROWS, h, SEQ, WIDTH, generator=generator).to(case.dtype) for h in heads]
    return tensors, documents() if case.documents else None


def attend(core: nn.Module, tensors: list[Tensor], seen: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v = leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = core(q, k, v, seen)
    out.backward(tensors[3])
    return [out.detach(), *(cast(Tensor, x.grad) for x in leaves)]


def error(ours: list[Tensor], exact: list[Tensor]) -> float:
    """The largest max|a - b| / max|b|."""
    if any(a.shape != b.shape for a, b in zip(ours, exact, strict=True)):
        return float("inf")
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact, strict=True))


def case_error(case: Case, group: dist.ProcessGroup) -> float:
    """How far this rank's part is from attention to whole rows in float32."""
    tensors, ids = inputs(case)
    exact = attend(CausalAttention(SCALE), [x.float() for x in tensors], exact_mask(ids, case.chunk))
    mine = compute_positions(SEQ, group.size(), group.rank(), case.balance)
    core = ContextAttention(case.method, group, case.balance, kernel=case.kernel, scale=SCALE)
    seen = core.mask(None if ids is None else ids[:, mine], inside(ids)[:, mine], case.dtype, case.chunk)
    seen = seen if case.chunk is None else seen.chunked
    ours = attend(core, [x[:, :, mine] for x in tensors], seen)
    plain = all(type(x) is Tensor and x.dtype == case.dtype for x in ours)
    return error(ours, [x[:, :, mine] for x in exact]) if plain else float("inf")


def no_guard(*tensors: Tensor) -> None:
    pass


def set_all(settings: dict[str, Any]) -> None:
    """Give modules other values of names, in a process of its own."""
    for path, value in settings.items():
        module, name = path.rsplit(".", 1)
        setattr(importlib.import_module(module), name, value)


def rank_errors(rank: int, world: int, cases: list[Case], strided: bool, settings: dict[str, Any]) -> list[float]:
    """Errors of this rank; `strided`: groups of every other rank."""
    group = dist.group.WORLD
    if strided:
        group = [dist.new_group(list(range(first, world, 2))) for first in (0, 1)][rank % 2]
    set_all(settings)
    return [case_error(case, cast(dist.ProcessGroup, group)) for case in cases]


SETTINGS: dict[str, dict[str, Any]] = {
    "math": {"titan.parallelism.context_kernels.MAX_SCORES": ROWS * HEADS * SEQ * 3},  # tiles
    "flex": {
        "torch.nn.attention.flex_attention._validate_device": no_guard,
        "titan.model.attention.BLOCK": 4,
        "titan.parallelism.context_ring.BLOCK": 4,
    },
}
"""What a kernel needs for these tests: on CPUs a guard is in the way of FlexAttention's gradient, which is right."""


@functools.cache
def errors(
    world: int,
    kv_heads: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    kernel: str = "flash",
) -> dict[str, float]:
    """The largest error of any rank, for each case; all cases on the same ranks, since these cost more than cases."""
    cases = table(*kv_heads, dtype=dtype, kernel=kernel) + table(2, dtype=dtype, kernel=kernel, chunk=CHUNK)
    results = run_ranks(rank_errors, world, cases, strided, SETTINGS.get(kernel, {}), timeout=300)
    return {str(case): max(column) for case, column in zip(cases, zip(*results, strict=True), strict=True)}


def parameters(cases: list[Case]) -> list[Any]:
    return [pytest.param(str(case), id=str(case)) for case in cases]


# --- which tokens


@given(st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_every_token_is_on_one_rank_and_balance_makes_work_even(size: int, length: int, balance: bool) -> None:
    seq = size * length * (2 if balance else 1)
    parts = [compute_positions(seq, size, rank, balance) for rank in range(size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(seq))
    assert {p.dtype for p in parts} == {torch.int64}
    assert {len(p) for p in parts} == {seq // size}
    if balance:
        assert len({int((p + 1).sum()) for p in parts}) == 1  # keys seen by a rank's queries


def test_positions_in_local_order() -> None:
    assert [compute_positions(8, 2, r, True).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [compute_positions(8, 2, r, False).tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("seq", "size", "rank", "balance", "message"),
    [
        pytest.param(9, 2, 0, False, "9 tokens can't be split into 2", id="no halves"),
        pytest.param(10, 2, 0, True, "10 tokens can't be split into 4", id="no quarters"),
        pytest.param(8, 2, 2, True, r"rank 2: must be in \[0, 2\)", id="no such rank"),
    ],
)
def test_what_cannot_be_split(seq: int, size: int, rank: int, balance: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_positions(seq, size, rank, balance)


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="must be one of allgather, ulysses, ring"):
        ContextAttention("rings", cast(Any, None), True)
    q = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match="3 tokens on a rank"):
        ContextAttention("ring", cast(Any, None), True)(q, q, q, None)


@pytest.mark.parametrize(
    ("heads", "size", "repeats"),
    [(8, 2, 1), (2, 4, 2), (1, 8, 8), (3, 2, 2), (6, 4, 2)],
)
def test_key_heads_are_repeated_as_little_as_needed(heads: int, size: int, repeats: int) -> None:
    assert count_key_repeats(heads, size) == repeats


# --- the numbers

OF_DOCUMENTS = [case for case in table(2) if case.documents]


@pytest.mark.parametrize(
    ("world", "case"),
    [
        *(pytest.param(4, case.values[0], id=f"4-{case.id}") for case in parameters(table(8, 4, 2, 1))),
        *(full(2, case.values[0], id=f"2-{case.id}") for case in parameters(OF_DOCUMENTS)),
    ],
)
def test_as_on_one_rank(world: int, case: str) -> None:
    assert errors(world, (8, 4, 2, 1))[case] <= EXACT


@pytest.mark.full
@pytest.mark.parametrize("case", parameters(OF_DOCUMENTS))
def test_as_on_one_rank_with_eight(case: str) -> None:
    assert errors(8, (2,))[case] <= EXACT


@pytest.mark.full
@pytest.mark.parametrize("case", parameters(table(2)))
def test_a_group_of_every_other_rank(case: str) -> None:
    assert errors(4, (2,), strided=True)[case] <= EXACT


@pytest.mark.parametrize("case", parameters(table(2, kernel="math")))
def test_the_formula_in_tiles(case: str) -> None:
    assert errors(2, (2,), kernel="math")[case] <= EXACT


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", parameters(table(2, kernel="flex")))
def test_masks_of_blocks(case: str) -> None:
    assert errors(2, (2,), kernel="flex")[case] <= EXACT


@pytest.mark.full
@pytest.mark.parametrize("case", parameters(table(2, dtype=torch.bfloat16)))
def test_in_bfloat16(case: str) -> None:
    assert errors(4, (2,), torch.bfloat16)[case] <= ROUNDED


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        (full if kernel == "flex" else pytest.param)(kernel, str(case), id=f"{kernel}-{case}")
        for kernel in ("flash", "flex")
        for case in table(2, chunk=CHUNK)
    ],
)
def test_chunks(case: str, kernel: str) -> None:
    heads, case = ((8, 4, 2, 1), case) if kernel == "flash" else ((2,), case.replace("chunks", "flex, chunks"))
    assert errors(2, heads, kernel=kernel)[case] <= EXACT


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(1, 5), st.integers(0, 99))
def test_a_message_loses_no_bit(dtype: torch.dtype, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, 1, 3, tokens, 2, generator=generator).to(dtype)
    dkv = torch.randn(kv.shape, generator=generator)
    first, second = context_ring._unpack_message(context_ring._pack_message(kv, dkv), kv)
    assert torch.equal(first, kv)
    assert torch.equal(second, dkv)


# --- document masks


class Ranks:
    """A process group that has only a size and a rank."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def masks(core: ContextAttention, ids: Tensor, mine: Tensor) -> tuple[Any, list[tuple[Any, Tensor]]]:
    """Return a method's mask, and the block masks in it, each with the positions of its keys."""
    mask, whole = core.mask(ids[:, mine], mine[None], torch.float32), torch.arange(SEQ)
    if core.kernel != "flex":
        return mask, []
    if core.method != "ring":
        return mask, [(mask, whole)]
    size, rank, balance = core.group.size(), core.group.rank(), core.balance
    ring = context_ring._Ring("", rank, size, balance, "flex", None)
    keys = [compute_positions(SEQ, size, source, balance) for source in range(size)]
    return mask, [(context_ring._make_block_mask(ring, n, len(mine), list(mask)), of) for n, of in enumerate(keys)]


@pytest.mark.parametrize("balance", BALANCE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_blocks_show_what_tokens_may_see(
    rank: int, method: str, balance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs the formula reads each block's function, on GPUs kernels read the lists, too: both are right."""
    ids, size = documents(), 4
    parts = torch.stack([ids[:, compute_positions(SEQ, size, n, balance)] for n in range(size)])
    for module in (context, context_ring):
        monkeypatch.setattr(module, "all_gather", lambda x, dim, group: parts)
    monkeypatch.setattr(context_ring, "BLOCK", 2)
    monkeypatch.setattr(attention, "BLOCK", 2)
    core = ContextAttention(method, cast(Any, Ranks(size, rank)), balance, kernel="flex")
    mine = compute_positions(SEQ, size, rank, balance)
    queries = torch.arange(SEQ) if method == "ulysses" else mine
    for mask, keys in masks(core, ids, mine)[1]:
        exact = (ids[:, queries, None] == ids[:, None, keys]) & (queries[:, None] >= keys)
        assert torch.equal(visible(mask, ROWS), exact)
        some = exact.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).any(4).any(2)
        part, full = listed(mask)
        assert torch.equal(part | full, some)  # and nothing else is looked at


def rank_mask_uses(rank: int, world: int, kernel: str) -> dict[str, tuple[int, int]]:
    """By method: how often ranks gather ids in a forward pass of two layers, and how many masks layers take."""
    found = {}
    set_all(SETTINGS.get(kernel, {}))
    for method in METHODS:
        gathers, taken = [0], set[int]()
        gather = context.all_gather

        def counted(*args: Any, gathers: list[int] = gathers, gather: Any = gather) -> Tensor:
            gathers[0] += 1
            return gather(*args)

        model, mine = small_model(), compute_positions(SEQ, world, rank, True)
        replace_attention(model, method, cast(dist.ProcessGroup, dist.group.WORLD), True, kernel)
        for block in model.blocks():
            block.attention.core.register_forward_pre_hook(lambda core, args, taken=taken: taken.add(id(args[3])))
        context.all_gather = context_ring.all_gather = counted
        model(torch.zeros(ROWS, SEQ // world, dtype=torch.int64), mine, documents()[:, mine])
        context.all_gather = context_ring.all_gather = gather
        found[method] = (gathers[0], len(taken))
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["flash", full("flex")])
def test_masks_are_made_once_for_all_layers(kernel: str) -> None:
    assert run_ranks(rank_mask_uses, 2, kernel) == [dict.fromkeys(METHODS, (1, 1))] * 2


@pytest.mark.parametrize("chunk", [SEQ, SEQ + 1])
def test_rows_of_one_chunk_have_one_mask(chunk: int) -> None:
    mine = compute_positions(SEQ, 4, 1, True)
    core = ContextAttention("allgather", cast(Any, Ranks(4, 1)), True)
    core.gather_ids = lambda part: documents()  # type: ignore[method-assign]
    found = core.mask(documents()[:, mine], inside(documents())[:, mine], torch.float32, chunk)
    assert found.full is found.chunked
    assert core.mask(None, mine[None], torch.float32, chunk) == (None, None)


def test_masks_of_tokens_are_as_large_as_what_a_rank_has() -> None:
    """Of a row's T queries by T keys a rank makes the part of its own queries, up to the end of each chunk."""
    core = ContextAttention("allgather", cast(Any, Ranks(4, 1)), True)
    ids = documents()
    core.gather_ids = lambda part: ids  # type: ignore[method-assign]
    first, last = core.mask(ids[:, compute_positions(SEQ, 4, 1, True)], torch.arange(8)[None], torch.bfloat16)
    assert (first.shape, last.shape) == ((ROWS, 1, 4, 8), (ROWS, 1, 4, 28))
    whole = document_mask(ids, torch.bfloat16)
    assert torch.equal(first, whole[:, :, 4:8, :8])
    assert torch.equal(last, whole[:, :, 24:28, :28])


# --- work and messages


def rank_events(rank: int, world: int, balance: bool) -> tuple[list[str], int]:
    """Return the operations of the ring's forward pass, in order, and the number of pairs of query and key."""
    events: list[str] = []
    pairs = 0

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal pairs
            events.append(name)
            pairs += args[1].shape[2] * args[2].shape[3] if name == "block" else 0
            return function(*args)

        return call

    context_ring._send_to_next = noted("hop", context_ring._send_to_next)
    context_kernels.forward = noted("block", context_kernels.forward)
    context_ring.wait = noted("wait", context_ring.wait)
    (q, k, v, _), _ = inputs(Case("ring", balance, 2, False))
    mine = compute_positions(SEQ, world, rank, balance)
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    ContextAttention("ring", group, balance)(q[:, :, mine], k[:, :, mine], v[:, :, mine], None)
    return events, pairs


@pytest.mark.full
def test_keys_are_sent_while_a_block_is_computed_and_later_keys_cost_nothing() -> None:
    even, uneven = (run_ranks(rank_events, 4, balance) for balance in (True, False))
    round_trip = ["hop", "block", *["wait", "hop", "block"] * 2, "wait", "block"]
    assert all(events == round_trip for events, _ in even)
    square = (SEQ // 4) ** 2
    assert [pairs for _, pairs in even] == [square + 3 * square // 2] * 4
    assert [pairs for _, pairs in uneven] == [square * n for n in (1, 2, 3, 4)]


# --- in a model


def small_model() -> Any:
    torch.manual_seed(0)
    model = Llama(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64).build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def train(model: Any, tokens: Tensor, targets: Tensor, **arguments: Any) -> list[Tensor]:
    """Hidden states and the gradients of all weights."""
    hidden = model(tokens, **arguments)
    model.head(hidden, targets).backward()
    return [hidden.detach(), *(p.grad for p in model.parameters())]


def rank_model_errors(rank: int, world: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(64, (2, ROWS, SEQ), generator=generator)
    found = {}
    for method, balance, ids in itertools.product(METHODS, BALANCE, (None, documents())):
        whole, *exact = train(small_model(), tokens, targets, document_ids=ids)
        model, mine = small_model(), compute_positions(SEQ, world, rank, balance)
        replace_attention(model, method, cast(dist.ProcessGroup, dist.group.WORLD), balance)
        local = None if ids is None else ids[:, mine]
        hidden, *ours = train(model, tokens[:, mine], targets[:, mine], positions=mine, document_ids=local)
        for gradient in ours:
            dist.all_reduce(gradient)
        left = sum(type(m) is CausalAttention for m in model.modules())
        name = f"{method} {balance} {ids is not None}, {left} left"
        found[name] = max(error([hidden], [whole[:, mine]]), error(ours, exact))
    return found


@pytest.mark.full
def test_a_model_learns_the_same() -> None:
    for found in run_ranks(rank_model_errors, 2):
        assert {name.split(", ")[1] for name in found} == {"0 left"}
        assert {name: e for name, e in found.items() if e > EXACT} == {}


# --- with other techniques


KEPT = ("attention", "all_gather", "all_to_all", "wait_tensor")


def selective(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep attention's results and what came from other ranks."""
    from torch.utils.checkpoint import CheckpointPolicy

    keep = any(word in str(op) for word in KEPT)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(block: nn.Module, how: str) -> Callable[..., Tensor]:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    forward: Callable[..., Tensor] = block
    if "full" in how:
        forward = lambda *x: checkpoint(block, *x, use_reentrant=False)
    if "selective" in how:
        choose = functools.partial(create_selective_checkpoint_contexts, selective)
        forward = lambda *x: checkpoint(block, *x, use_reentrant=False, context_fn=choose)
    return torch.compile(forward, backend="aot_eager", fullgraph=True) if "compiled" in how else forward


def compiled_flex(q: Tensor) -> Any:
    """As on CUDA, where what attends in a ring is compiled, too: inside of an operation of a compiled block."""
    return flex_attention if torch.compiler.is_compiling() else AOT_FLEX


CHECK = "torch._functorch.config.check_custom_op_aliasing"
"""A look at operations of one's own when they first run, in which the formula that attends on CPUs can't."""
AOT_FLEX = torch.compile(flex_attention, backend="aot_eager", dynamic=False)


def block_results(rank: int, world: int, method: str, balance: bool, masked: bool, how: str) -> list[Tensor]:
    """The output and the gradients of input and weights of a block."""
    torch.manual_seed(3)
    block: Any = Block(32, 4, 2, 8, 48, 1e-5)
    x, mine = torch.randn(ROWS, SEQ, 32), compute_positions(SEQ, world, rank, balance)
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.3)
    if "flex" in how:
        set_all(SETTINGS["flex"] | {"titan.model.attention._choose_flex": compiled_flex, CHECK: False})
    model: Any = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    replace_attention(
        model, method, cast(dist.ProcessGroup, dist.group.WORLD), balance, "flex" if "flex" in how else "flash"
    )
    x = x[:, mine].requires_grad_()
    cos, sin = compute_rotation(inverse_frequencies(8, 1e4), mine[None])
    mask = block.attention.core.mask(documents()[:, mine] if masked else None, mine[None], x.dtype)
    out = wrapped(block, how)(x, cos, sin, mask)
    out.square().sum().backward()
    return [out.detach(), cast(Tensor, x.grad), *(cast(Tensor, p.grad) for p in block.parameters())]


COMPILED = [
    ("allgather", True, True, "compiled selective"),
    ("ulysses", True, False, "compiled"),
    ("ring", False, False, "compiled full"),  # the first rank uses nothing of what it receives
    ("ring", True, True, "compiled flex"),
    ("allgather", True, True, "compiled flex"),
]
"""Compiling takes seconds, so only this."""
EAGER = list(itertools.product(METHODS, BALANCE, BALANCE, ("full", "selective")))


def rank_wrapped_errors(rank: int, world: int, cases: list[Any]) -> dict[str, float]:
    found = {}
    for *case, how in cases:
        exact = block_results(rank, world, *case, "plain flex" if "flex" in how else "plain")
        found[f"{case} {how}"] = error(block_results(rank, world, *case, how), exact)
    return found


@pytest.mark.full
@pytest.mark.parametrize("cases", [pytest.param(EAGER, id="eager"), full(COMPILED, id="compiled")])
def test_checkpointing_and_compiling_change_nothing(cases: list[Any]) -> None:
    for found in run_ranks(rank_wrapped_errors, 2, cases, timeout=300):
        assert len(found) == len(cases)
        assert {name: e for name, e in found.items() if e > 0} == {}


def rank_hops(rank: int, world: int) -> dict[str, int]:
    found, hop = {}, context_ring._send_to_next
    for how in ("plain", "full", "selective"):
        count = [0]

        def counted(*args: Any, count: list[int] = count) -> Tensor:
            count[0] += 1
            return hop(*args)

        context_ring._send_to_next = counted
        block_results(rank, world, "ring", True, False, how)
        found[how] = count[0]
    return found


@pytest.mark.full
def test_a_round_that_is_kept_is_not_made_again() -> None:
    backward = 2 + 1
    assert run_ranks(rank_hops, 2) == [{"plain": 1 + backward, "full": 2 + backward, "selective": 1 + backward}] * 2


def test_the_ring_is_a_proper_operation() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 4, 8, generator=generator).transpose(1, 2).requires_grad_()
    kv = torch.randn(2, 2, 2, 6, 8, generator=generator, requires_grad=True)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    with simulate_rank(0, 1):
        ring = dist.group.WORLD.group_name, False, "flash", None  # type: ignore[union-attr]
        torch.library.opcheck(torch.ops.titan.ring_attention.default, (q, kv, [], *ring), test_utils=utils)


def rank_shapes(rank: int, world: int) -> list[str]:
    """A long row in a world that is not there: which cases fail."""
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    failed = []
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    for method, balance, masked in itertools.product(METHODS, BALANCE, BALANCE):
        with FakeTensorMode():
            shapes = [(1, h, 262144 // 8, 64) for h in (8, 2, 2, 8)]
            tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
            ids = torch.zeros(1, 262144 // 8, dtype=torch.int64) if masked else None
            core = ContextAttention(method, cast(dist.ProcessGroup, dist.group.WORLD), balance)
            mine = torch.arange(262144 // 8)[None]
            out, *gradients = attend(core, tensors, core.mask(ids, mine, torch.bfloat16))
            if [out.shape, *(g.shape for g in gradients)] != [tensors[0].shape, *(t.shape for t in tensors[:3])]:
                failed.append(f"{method} {balance} {masked}")
    dist.destroy_process_group()
    return failed


@pytest.mark.full
def test_a_long_row_in_a_fake_world() -> None:
    assert run_ranks(rank_shapes, 1, joined=False) == [[]]
