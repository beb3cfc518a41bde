"""Computation beside the exchange of tokens: passes that take turns, and halves of micro-batches.

Layouts, models and memory modes with both are in `tests/support/matrix_experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.expert_exchange import turns
from experiments.expert_exchange.halves import Halves
from tests.support.matrix import LayoutCase, train_case
from tests.support.matrix_experts import MODELS, PAIRS
from tests.support.runs import are_identical
from tests.support.tiers import full
from titan.memory.kept_values import build_passes
from titan.model.schema_moe import Qwen3Moe
from titan.profile import trace

LAYOUT = ("parallelism=pp", "parallelism.shard=2", "parallelism.expert=2", "parallelism.schedule=DualPipeV")


def build_pass(log: list[str], name: str, exchanges: int, failing: int = -1) -> Callable[[], None]:
    """A pass that writes its name and number before and after each exchange, and may fail before one."""

    def compute() -> None:
        for number in range(exchanges):
            if number == failing:
                raise ValueError(name)
            log.append(f"{name}{number}")
            turns.note_exchange()
            turns.hand_over()
            turns.hand_over()  # of an exchange that was started with the first
        log.append(name)

    return compute


@pytest.fixture
def executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def test_each_continues_when_the_other_waits_or_ends(executor: ThreadPoolExecutor) -> None:
    log: list[str] = []
    turns.take_turns(build_pass(log, "f", 2), build_pass(log, "b", 4), executor)
    assert log == ["f0", "b0", "f1", "b1", "f", "b2", "b3", "b"]
    build_pass(log, "f", 1)()
    assert log[8:] == ["f0", "f"]  # alone it never hands over


def test_a_recomputation_does_not_hand_over(executor: ThreadPoolExecutor) -> None:
    log: list[str] = []

    def compute_again() -> None:
        with build_passes()[1]:
            build_pass(log, "again", 2)()
        build_pass(log, "b", 1)()

    turns.take_turns(build_pass(log, "f", 2), compute_again, executor)
    assert log == ["f0", "again0", "again1", "again", "b0", "f1", "b", "f"]


@pytest.mark.parametrize(
    ("failing", "log"),
    [
        pytest.param({"f": 0}, [], id="forward-at-once"),
        pytest.param({"f": 1}, ["f0", "b0"], id="forward"),
        pytest.param({"b": 0}, ["f0"], id="backward-at-once"),
        pytest.param({"b": 3}, ["f0", "b0", "f1", "b1", "f", "b2"], id="backward-alone"),
        pytest.param({"f": 1, "b": 1}, ["f0", "b0"], id="both"),
    ],
)
def test_what_fails_first_is_raised_when_both_have_ended(
    executor: ThreadPoolExecutor, failing: dict[str, int], log: list[str]
) -> None:
    done: list[str] = []
    passes = (build_pass(done, name, count, failing.get(name, -1)) for name, count in (("f", 2), ("b", 4)))
    with pytest.raises(ValueError, match=next(iter(failing))):
        turns.take_turns(*passes, executor)
    assert done == log
    assert executor.submit(lambda: True).result(timeout=10)
    turns.hand_over()


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("memory=full",), id="recomputed"),
        pytest.param(("parallelism.replicate=2",), id="hsdp"),
        full(("parallelism.context=2", "parallelism.expert=4"), id="cp"),
        pytest.param(("compile=block", "compile.backend=aot_eager", "memory=full"), id="compiled"),
    ],
)
def test_turns_change_no_bit(more: tuple[str, ...], tmp_path: Path) -> None:
    found = []
    for exchange in ((PAIRS,), ()):
        case = LayoutCase("pairs", (*LAYOUT, "parallelism.microbatches=4", *more, *exchange))
        found.append(train_case(tmp_path / f"{len(exchange)}", case, MODELS["qwen3_moe"]))
    for name in ("gradients", "last"):
        assert are_identical(*(trained.merge_tensors(name) for trained in found))


@pytest.mark.full
def test_a_profile_has_the_operations_of_both_passes(tmp_path: Path) -> None:
    settings = ("profile=once", "profile.wait=0", "profile.active=1", "parallelism.microbatches=4")
    trained = train_case(tmp_path, LayoutCase("pairs", (*LAYOUT, PAIRS, *settings)), MODELS["qwen3_moe"])
    (file,) = Path(trained.run.directory).glob("profile/*/*.json.gz")
    threads = {entry.thread for entry in trace.read(file).slices if entry.name == "aten::mm"}
    assert len(threads) == 2


@pytest.mark.parametrize("own", ["block", "experts"])
def test_a_forward_of_ones_own_is_called(own: str) -> None:
    block = Qwen3Moe(dim=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=8, experts=4, top_k=2,
                     expert_ffn=8).build().layers["0"]  # fmt: skip
    module = block if own == "block" else block.feed_forward
    kind: Any = type(module)
    module.__class__ = type("Own", (kind,), {"forward": lambda self, x, *more: kind.forward(self, 2 * x, *more)})
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, rotation = torch.randn(3, 4, 16), torch.ones(1, 4, 1, 4)
    expected = block(x, rotation, rotation, None)
    halved: Any = SimpleNamespace(blocks=lambda: [block], build_block_inputs=None)
    Halves().change_model(halved)
    assert torch.allclose(block(x, *[(rotation, rotation)] * 2, (None, None)), expected, atol=1e-6)
