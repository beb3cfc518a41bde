"""Activation checkpointing: results are bitwise the same, and each mode recomputes and saves what it should."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from tests.support.runs import Tensors, are_identical, compose_tiny_run
from tests.support.tiers import full
from titan.debug.module_hooks import ModuleHooks, StageCall
from titan.errors import ConfigError
from titan.memory.checkpointing import ATTENTION, COLLECTIVES, MATMULS, _Policy, checkpoint_blocks
from titan.memory.schema import Memory
from titan.model import init_weights
from titan.model.activations import RankBatch
from titan.model.schema import Decoder, Llama
from titan.model.schema_moe import Qwen3Moe
from titan.parallelism import tensor
from titan.training.train_step import ModelStage

SHAPE = Llama(dim=32, layers=4, heads=4, kv_heads=2, ffn=48, vocab=64)
TOKENS = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(2))
NONE = Memory()
MODES = [
    pytest.param(Memory("gate"), id="gate"),
    pytest.param(Memory("every_n"), id="every_n"),
    pytest.param(Memory("every_n", every=3), id="every_third"),
    pytest.param(Memory("selective"), id="selective"),
    pytest.param(Memory("full"), id="full"),
]


def stage(how: Memory = NONE, compute: torch.dtype = torch.float32, shape: Decoder = SHAPE) -> ModelStage:
    with torch.device("meta"):
        model: Any = shape.build()
    model.tok_embeddings.dtype = compute  # type: ignore[union-attr]
    checkpoint_blocks(model.blocks(), how)
    init_weights.materialise_model(model, model.initial(), 1, "cpu")
    model.init_buffers("cpu")
    return ModelStage(model)


def batch(rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    return TOKENS[rows, :-1].contiguous(), TOKENS[rows, 1:].contiguous()


def gradients(of: Any, loss: Tensor) -> Tensors:
    found: Tensors = {name: p.grad for name, p in of.named_parameters()}
    return {"loss": loss.detach(), **found}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by kind, and knows what is alive of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self.results: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().partition(".")[0]
        kinds = {"matmuls": MATMULS, "attention": ATTENTION, "collectives": COLLECTIVES}
        self.seen.update([kind for kind, names in kinds.items() if name in names])
        out = op(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if type(x) is Tensor:
                storage = x.untyped_storage()
                self.results[StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
        return out

    def alive(self) -> int:
        here = [not result.expired() for result in self.results]  # type: ignore[no-untyped-call]
        return sum(itertools.compress(self.results.values(), here))


@pytest.mark.full
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", MODES)
def test_no_bit_changes_with_two_micro_batches_in_flight(how: Memory, compute: torch.dtype) -> None:
    found = []
    for mode in (NONE, how):
        one = stage(mode, compute)
        positions, documents = torch.arange(16).expand(2, 16), torch.arange(16).expand(2, 16) // 5
        losses = [one(*batch(rows), positions, documents) for rows in (slice(2), slice(2, 4))]
        for loss in losses:
            loss.backward()
        found.append(gradients(one, torch.stack(losses)))
    assert are_identical(*found)


AGAIN = [
    pytest.param(NONE, 0, 0, id="none"),
    pytest.param(Memory("gate"), 0, 0, id="gate"),
    # Recomputing stops where all that backward needs is there: before the seventh, w2.
    pytest.param(Memory("every_n"), 2 * 6, 2, id="every_n"),
    pytest.param(Memory("every_n", every=3), 6, 1, id="every_third"),
    pytest.param(Memory("every_n", every=5), 0, 0, id="every_fifth_of_four"),
    pytest.param(Memory("selective"), 4 * 3, 0, id="selective"),
    pytest.param(Memory("full"), 4 * 6, 4, id="full"),
]


@pytest.mark.parametrize(("how", "matmuls", "attention"), AGAIN)
def test_each_mode_recomputes(how: Memory, matmuls: int, attention: int) -> None:
    loss = stage(how)(*batch())
    with Watch() as watch:
        loss.backward()
    own = 2 * (4 * 7 + 1)  # backward has two matmuls for each of forward
    assert (watch.seen["matmuls"] - own, watch.seen["attention"]) == (matmuls, attention)


def kept(how: Memory) -> int:
    one = stage(how)
    with Watch() as watch:
        loss = one(*batch())
    return watch.alive() if loss.requires_grad else 0


@pytest.mark.full
def test_keeps_what_the_mode_says() -> None:
    full, block = kept(Memory("full")), SHAPE.block_activations(RankBatch(4 * 16, 4, fused=False))
    assert kept(Memory("selective")) - full == SHAPE.layers * (block.selective - block.input)
    gate_and_product = 2 * 4 * SHAPE.ffn * 4 * 16
    assert kept(NONE) - kept(Memory("gate")) == SHAPE.layers * gate_and_product
    whole = (kept(NONE) - full) / SHAPE.layers
    assert whole > block.selective
    assert kept(Memory("every_n")) - full == 2 * whole
    assert kept(Memory("every_n", every=3)) - full == 3 * whole


def evaluated(how: Memory) -> tuple[float, int]:
    one = stage(how)
    with torch.no_grad(), Watch() as watch:
        loss = one(*batch())
    return loss.item(), watch.alive()


@pytest.mark.parametrize("how", MODES)
def test_a_hook_that_multiplies_within_a_block_changes_no_bit(how: Memory) -> None:
    expected, watched = stage(how), stage(how)

    @torch.no_grad()
    def multiply(call: StageCall, module: Any, args: tuple[Any, ...], *out: Tensor) -> None:
        (out or args)[0] @ torch.ones(32, 3)

    with ModuleHooks([watched]) as hooks:
        for block in watched.model.blocks():
            hooks.add_before(0, block.ffn_norm, multiply)
            hooks.add_after(0, block.attention_norm, multiply)
        loss = watched(*batch())
        loss.backward()
    expected_loss = expected(*batch())
    expected_loss.backward()
    assert are_identical(gradients(watched, loss), gradients(expected, expected_loss))


@pytest.mark.parametrize("how", MODES)
def test_evaluation_keeps_nothing_and_gives_the_same(how: Memory) -> None:
    assert evaluated(how) == evaluated(NONE)
    weights = sum(4 * p.numel() for p in stage().parameters())  # there are views of them
    assert evaluated(how)[1] <= weights + 4


@pytest.mark.parametrize("how", [*MODES, pytest.param(Memory("budget"), id="budget")])
def test_names_stay(how: Memory) -> None:
    assert stage(how).state_dict().keys() == stage().state_dict().keys()


def test_a_budget_is_the_compilers_affair() -> None:
    assert kept(Memory("budget")) == kept(NONE)
    assert [Memory(mode, budget=0.25).share for mode in ("budget", "none", "full")] == [0.25, None, None]


def test_the_same_product_gets_the_same_answer_in_both_passes() -> None:
    policy, op = _Policy(7), torch.ops.aten.mm.default
    first = [policy(SimpleNamespace(is_recompute=False), op) for _ in range(7)]  # type: ignore[arg-type]
    again = [policy(SimpleNamespace(is_recompute=True), op) for _ in range(7)]  # type: ignore[arg-type]
    assert first == again
    assert [answer.name for answer in first[:3]] == ["MUST_SAVE", "PREFER_RECOMPUTE", "MUST_SAVE"]
    assert first[-1].name == "PREFER_RECOMPUTE", "nothing in the block needs the last matmul"


def test_what_ranks_gather_is_gathered_again_and_what_they_sum_is_kept() -> None:
    policy, ops = _Policy(7), torch.ops._c10d_functional
    asked = (ops.all_gather_into_tensor.default, ops.reduce_scatter_tensor.default, ops.all_reduce.default)
    answers = [policy(SimpleNamespace(is_recompute=False), op).name for op in asked]  # type: ignore[arg-type]
    assert answers == ["PREFER_RECOMPUTE", "MUST_SAVE", "MUST_SAVE"]


def coordinator(rank: int, size: int) -> dict[str, tuple[int, Tensors]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, found = init_device_mesh("cpu", (size,)), {}
    for mode in ("none", "selective", "full"):
        with torch.device("meta"):
            model = SHAPE.build()
        initial = model.initial()
        tensor.apply_tensor_plan(model, mesh, sequence_parallel=True, loss_parallel=True)
        checkpoint_blocks(model.blocks(), Memory(mode))
        init_weights.materialise_model(model, initial, 1, "cpu")
        model.init_buffers("cpu")
        loss = ModelStage(model)(*batch())
        with Watch() as watch:
            loss.backward()
        parts = {name: p.grad.to_local() for name, p in model.named_parameters()}  # type: ignore[union-attr]
        found[mode] = watch.seen["collectives"], {"loss": loss.detach(), **parts}
    return found


@pytest.mark.full
def test_what_ranks_said_is_not_said_again_selectively() -> None:
    for found in run_ranks(coordinator, 2):
        recomputed = {mode: count for mode, (count, _) in found.items()}
        assert recomputed["none"] == recomputed["selective"] < recomputed["full"]
        assert are_identical(found["selective"][1], found["none"][1])
        assert are_identical(found["full"][1], found["none"][1])


CHOICES = [
    full("none", NONE, id="none"),
    pytest.param("full", Memory("full"), id="full"),
    full("every_n", Memory("every_n", every=2), id="every_n"),
    pytest.param("selective", Memory("selective"), id="selective"),
]


@pytest.mark.full
@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_choices(choice: str, expected: Memory, tmp_path: Path) -> None:
    assert compose_tiny_run(tmp_path, f"memory={choice}").memory == expected


@pytest.mark.full
def test_a_budget_can_be_chosen_with_a_compiler(tmp_path: Path) -> None:
    how = compose_tiny_run(
        tmp_path, "memory=budget", "memory.budget=0.3", "compile=block", "compile.backend=aot_eager"
    ).memory
    assert how == Memory("budget", budget=0.3)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        pytest.param("memory.budget=1.5", "at most 1", id="budget"),
        pytest.param("memory.every=0", "at least 1", id="every"),
        pytest.param("memory.checkpointing=some", "every_n, selective", id="mode"),
    ],
)
def test_refusals(typed: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wanted):
        compose_tiny_run(tmp_path, typed)


def test_every_other_matmul_of_a_block_with_experts_is_kept() -> None:
    shape = Qwen3Moe(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=64, experts=4, top_k=2, expert_ffn=24)
    loss = stage(Memory("selective"), shape=shape)(*batch())
    with Watch() as watch:
        loss.backward()
    own = 2 * (2 * 5 + 1) + 2 * 3  # backward has two matmuls for each of forward; weights' of experts are another kind
    assert watch.seen["matmuls"] - own == 2 * 4, "wk, wo, w1 and w2 are computed again"
