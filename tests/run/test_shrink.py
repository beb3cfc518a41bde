"""The shrunk run of a proof: it keeps the kinds of things that a layout can get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from launchers.command import plan_command
from titan.cluster.devices import detect_machine
from titan.model.schema import Llama
from titan.run.run import Run
from titan.run.shrink import Shrunk, list_uncovered, reduce_to_one_device, shrink_run, widen_run

H100 = ("cluster=h100", "cluster.nodes=64", "cluster.memory_gib=4000")
ROWS = ("training.seq_len=8192", "training.global_batch=8388608")
LLAMA = ("model=llama405b", *H100, *ROWS)
CHUNKED = ("parallelism.schedule=Interleaved1F1B", "parallelism.stages=64", "parallelism.microbatches=32")
DEEPSEEK = ("model=deepseek_v3_671b", *H100, *ROWS, "parallelism=fsdp_pp", "parallelism.pipeline=16")


def shrink(folder: Path, *words: str) -> Shrunk:
    """The shrunk run of a command line of titan.train."""
    found: list[Run] = []
    plan_command([*words, "memory=full"], lambda run: found.append(run) or 0, lambda trials: [])  # type: ignore[func-returns-value]
    return shrink_run(found[0], detect_machine("cpu"), str(folder))


LAYOUTS = [
    pytest.param((*LLAMA, "parallelism=fsdp", "cluster.devices=256"), {"shard": 2}, id="divides"),
    pytest.param((*LLAMA, "parallelism=fsdp", "cluster.devices=96"), {"shard": 3}, id="remainders"),
    pytest.param((*LLAMA, "parallelism=fsdp_tp", "parallelism.tensor=8"), {"shard": 3, "tensor": 2}, id="two"),
    pytest.param(
        (*LLAMA, "parallelism=3d", "parallelism.tensor=8", "parallelism.pipeline=8", *CHUNKED),
        {"shard": 3, "tensor": 2, "pipeline": 2}, id="chunks",
    ),
    pytest.param(
        (*LLAMA, "parallelism=fsdp_cp", "parallelism.context=4", "parallelism.context_method=ring"),
        {"shard": 3, "context": 3}, id="ring",
    ),
    pytest.param((*LLAMA, "parallelism=fsdp", "parallelism.reshard=8"), {"shard": 4}, id="resharded-to-a-part"),
    pytest.param((*DEEPSEEK, "parallelism.expert=8"), {"shard": 4, "pipeline": 3, "expert": 2}, id="experts-of-some"),
    pytest.param((*DEEPSEEK, "parallelism.expert=32"), {"shard": 2, "pipeline": 3, "expert": 2}, id="experts-of-all"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("words", "degrees"), LAYOUTS)
def test_each_dimension_has_as_few_ranks_as_its_kind_needs(
    words: Sequence[str], degrees: dict[str, int], tmp_path: Path
) -> None:
    run = shrink(tmp_path, *words).run
    ones = dict.fromkeys((*run.layout.degrees(), "expert"), 1)
    assert run.layout.degrees() | {"expert": run.layout.expert} == ones | degrees
    assert reduce_to_one_device(run, str(tmp_path)).layout.devices == 1


@pytest.mark.full
def test_remainders_stay_remainders_and_chunks_stay_chunks(tmp_path: Path) -> None:
    uneven = shrink(tmp_path, *LLAMA, "parallelism=fsdp", "cluster.devices=96").run
    assert uneven.model.ffn % 3 and uneven.model.vocab % 3 == 0  # as 53,248 and 128,256 by 96
    chunks = shrink(tmp_path, *LLAMA, "parallelism=3d", "parallelism.tensor=8", "parallelism.pipeline=8", *CHUNKED)
    assert chunks.run.staging.count == 4 and chunks.target.model.layers % 64 and chunks.run.model.layers == 5
    assert chunks.run.microbatches == 4 and chunks.run.model.heads == 2 * chunks.run.model.kv_heads


@pytest.mark.full
def test_a_deepseek_keeps_its_kinds_of_blocks_and_groups(tmp_path: Path) -> None:
    model = shrink(tmp_path, *DEEPSEEK, "parallelism.expert=8").run.model
    assert (model.first_dense, model.groups, model.topk_groups, model.shared_experts) == (1, 2, 1, 1)  # type: ignore[attr-defined]
    assert len(model.kinds()) == 2 and model.parameters() < 1e6


@pytest.mark.full
def test_the_target_with_few_blocks_keeps_its_widths_and_degrees(tmp_path: Path) -> None:
    shrunk = shrink(tmp_path, *LLAMA, "parallelism=3d", "parallelism.tensor=8", "parallelism.pipeline=8", *CHUNKED)
    wide = widen_run(shrunk)
    assert (wide.model.dim, wide.model.layers, wide.layout.tensor, wide.layout.shard) == (16384, 5, 8, 8)
    assert wide.staging.layers == shrunk.run.staging.layers and wide.microbatches == shrunk.run.microbatches


@dataclass(frozen=True)
class WindowLlama(Llama):
    """A model of one's own with a length."""

    window: int = 4096
    pattern: int = 3


@pytest.mark.full
def test_a_length_of_an_own_model_that_short_rows_do_not_reach_is_listed(tmp_path: Path) -> None:
    run = shrink(tmp_path, *LLAMA, "parallelism=fsdp").run
    own = replace(run, model=WindowLlama())
    assert not any("stays as it is" in text for text in list_uncovered(run))
    assert "model.window=4096: it stays as it is, and rows have 64 tokens" in list_uncovered(own)
    assert not any("pattern" in text for text in list_uncovered(own))


@pytest.mark.full
def test_what_a_cpu_cannot_show_is_listed(tmp_path: Path) -> None:
    words = ("parallelism=fsdp", "precision=float8", "training.grow=[[8388608,16777216]]")
    listed = " ".join(shrink(tmp_path, *LLAMA, *words).uncovered)
    assert all(text in listed for text in ("NCCL", "eight-bit", "training.grow", "aot_eager", "synthetic"))
