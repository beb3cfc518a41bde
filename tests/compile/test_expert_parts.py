"""Blocks whose tokens travel between ranks are compiled in parts, and titan knows which graphs ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.matrix_experts import LAYOUTS, MODELS, skew_routers
from tests.support.ranks import run_ranks
from tests.support.runs import compose_tiny_run, compute_difference
from tests.support.tiers import full
from titan.cluster.rank_info import RankInfo
from titan.compile.backend import GraphLabel, GraphWatch, compile_stage, count_calls, label_calls
from titan.compile.schema import Compile
from titan.model.layers import FeedForward
from titan.model.parts import Part
from titan.parallelism import mesh
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.reporter import RunReporter

EXACT = 1e-5
ROUTED = {"attention": 1, "feed_forward.router": 1, "feed_forward.experts": 1}


def gradients(rank: int, size: int, runs: Sequence[Run]) -> list[tuple[dict[str, Tensor], dict[str, int]]]:
    """Return each run's gradients, and how many graphs of each part of its blocks ran."""
    results = []
    for run in runs:
        torch._dynamo.reset()
        world = mesh.build_world(RankInfo(rank, size, rank), run.layout, torch.device("cpu"))
        train_step = build_train_step(run, world)
        if getattr(run.model, "top_k", 0) == 1:
            skew_routers(SimpleNamespace(train_step=train_step))  # type: ignore[arg-type]
        watch = GraphWatch(train_step.graph_labels)
        shape = (run.microbatches, run.microbatch_rows, run.training.seq_len)
        generator = torch.Generator().manual_seed(rank)
        tokens, targets = (torch.randint(0, 64, shape, generator=generator) for _ in range(2))
        loss = train_step.backward(Microbatches(tokens, targets), 1.0)
        grads: dict[str, Any] = {name: parameter.grad for name, parameter in train_step.named_parameters()}
        named = {name: grad.full_tensor() for name, grad in grads.items()}
        graphs = {label.part: count for label, count in watch.count_graphs().items() if label.kind != "head"}
        train_step.evaluate(Microbatches(tokens, targets))  # further graphs of the same code
        results.append(({"loss": loss.detach(), **named}, graphs))
    return results


@pytest.mark.parametrize(
    ("model", "memory", "layout", "graphs"),
    [
        full("qwen3_moe", "full", "ep", ROUTED, id="full"),
        full("qwen3_moe", "none", "ep", ROUTED, id="none"),
        full("qwen3_moe", "selective", "ep", ROUTED, id="selective"),
        full("deepseek_v3", "full", "ep", {"": 1, **ROUTED, "feed_forward.shared": 1}, id="deepseek-full"),
        full("deepseek_v3", "selective", "ep", {"": 1, **ROUTED, "feed_forward.shared": 1}, id="deepseek-selective"),
        full("llama4", "selective", "ep", {"": 1, **ROUTED, "feed_forward.shared": 1}, id="llama4-selective"),
        full("qwen3_moe", "full", "ep_in_tp", ROUTED, id="experts-in-tensor-ranks"),
        full("qwen3_moe", "full", "fsdp", {"": 1}, id="whole-blocks"),
        full("qwen3_moe", "full", "one-expert", ROUTED, id="rank-without-rows"),
    ],
)
def test_every_part_is_one_graph_and_computes_the_same(
    model: str, memory: str, layout: str, graphs: dict[str, int], tmp_path: Path
) -> None:
    layouts = LAYOUTS | {"one-expert": (*LAYOUTS["ep"], "model.top_k=1", "model.bias_rate=0")}
    heads = ("model.heads=4", "model.kv_heads=2")
    common = (*heads, *MODELS[model], *layouts[layout], f"memory={memory}", "checkpoint=off")
    how = ("compile=block", "compile.backend=aot_eager")
    runs = [compose_tiny_run(tmp_path / name, *common, *s) for name, s in (("a", ("compile=off",)), ("b", how))]
    for eager, compiled in run_ranks(gradients, 2, runs):
        assert eager[1] == {}
        assert compiled[1] == graphs
        assert compute_difference(compiled[0], eager[0]) <= EXACT


def test_graphs_are_counted_where_they_run() -> None:
    labels = [GraphLabel("dense"), GraphLabel("experts", "router"), GraphLabel("experts", "attention")]
    graphs = [label_calls(label, count_calls(lambda x: x + 1)) for label in (labels[0], labels[1], labels[1])]
    assert graphs[0](1) == 2
    watch = GraphWatch([*labels, *labels])
    assert [graph(1) for graph in (*graphs[1:], *graphs[1:])] == [2] * 4
    assert watch.count_graphs() == dict(zip(labels, (0, 2, 0), strict=True))
    assert watch.describe() == "dense: 0; experts: router 2, attention 0"
    own = GraphLabel(":ParallelBlock,norm:RMSNorm {'norm.weight': (32,)} []", "attention")
    assert (GraphWatch([own, labels[0]]).describe(), str(own)) == (
        "ParallelBlock: attention 0; dense: 0", "ParallelBlock (attention)",
    )  # fmt: skip
    assert watch.list_missing() == [labels[0], labels[2]]


def warnings(labels: Sequence[GraphLabel], missing_by_rank: Sequence[Sequence[GraphLabel]], rank: int = 0) -> list[str]:
    """What a rank whose parts have no graphs warns of, and that its own are what it sends."""
    lines: list[str] = []

    def all_gather_object(missing: Sequence[GraphLabel]) -> Sequence[Sequence[GraphLabel]]:
        assert missing == missing_by_rank[rank]
        return missing_by_rank

    reporter: Any = SimpleNamespace(
        show=lambda line: None,
        warn=lines.append,
        run=SimpleNamespace(compile=SimpleNamespace(scope="block")),
        world=SimpleNamespace(
            is_rank0=rank == 0, rank_info=SimpleNamespace(rank=rank), all_gather_object=all_gather_object
        ),
    )
    RunReporter.report_graphs(reporter, GraphWatch(labels))
    return lines


def test_what_should_be_compiled_and_is_not_is_warned_of() -> None:
    assert warnings([], [[]]) == []
    [line] = warnings([GraphLabel("experts", "attention")], [[GraphLabel("experts", "attention")]])
    assert "no graph of experts (attention) ran in the first step on rank 0: " in line


def test_rank_0_warns_of_what_later_stages_of_a_pipeline_lack() -> None:
    head, missing = [GraphLabel("head")], [[], [], [GraphLabel("head")], [GraphLabel("head")]]
    [line] = warnings([], missing)
    assert "no graph of head ran in the first step on ranks 2, 3: " in line
    assert warnings([], missing, rank=1) == []
    assert warnings(head, missing, rank=2) == [line]


KINDS = 10
"""More than the graphs of one function that torch compiles."""


@pytest.mark.full
def test_blocks_of_different_kinds_share_the_graphs_of_equal_parts() -> None:
    torch._dynamo.reset()
    blocks = [torch.nn.Sequential(FeedForward(4, 4), FeedForward(4, 4)) for _ in range(KINDS)]
    parts = [[Part(block[0], name="router"), Part(block[1], name="experts")] for block in blocks]
    config = SimpleNamespace(kind=lambda layer: f"kind {layer}")
    model = SimpleNamespace(layers={str(layer): block for layer, block in enumerate(blocks)}, config=config, head=None)
    labels = compile_stage(SimpleNamespace(model=model), Compile("block", "eager"), parts=parts)
    watch, before = GraphWatch(labels), counters["stats"]["unique_graphs"]
    for block in blocks[:-1]:
        block(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] - before == 2  # the input of the second requires gradients
    missing = [GraphLabel(f"kind {KINDS - 1}", name) for name in ("router", "experts")]
    assert watch.count_graphs() == {label: int(label not in missing) for label in labels}
    assert len(labels) == 2 * KINDS and watch.list_missing() == missing
