"""Where the time and memory of a step went, from made traces whose answer is known."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import compose_tiny_run, train_run
from titan.cluster import operation_kinds as kinds
from titan.estimate.step_time import CAUSES
from titan.profile import summary
from titan.profile.breakdown import Breakdown, compute_breakdowns
from titan.profile.trace import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    TEMPORARY,
    WEIGHTS,
    Allocation,
    Slice,
    Trace,
    find_peak,
    read,
)
from titan.training.profiling import describe_snapshot


def event(category: str, name: str, start: float, end: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "args": arguments, **times}


def of(tmp_path: Path, *events: dict[str, Any]) -> Breakdown:
    """The breakdown of the only step of a trace."""
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (found,) = compute_breakdowns(read(file))
    return found


def test_a_step_on_a_cpu(tmp_path: Path) -> None:
    """Operations count without those that they call; gloo's collectives have the kind of the call that starts them."""
    found = of(
        tmp_path,
        event("user_annotation", "ProfilerStep#7", 0, 20),
        event("user_annotation", "data", 0, 1),
        event("cpu_op", "aten::linear", 1, 5),
        event("cpu_op", "aten::mm", 2, 5),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 6, 8),
        event("cpu_op", "aten::mul", 7, 8),
        event("user_annotation", "recomputation", 9, 11),
        event("cpu_op", "aten::mm", 9, 11),
        event("cpu_op", "c10d::_reduce_scatter_base_", 11, 12),
        event("user_annotation", "gloo:all_reduce", 11, 15, thread=2),
        event("cpu_op", "aten::_scaled_dot_product_flash_attention_for_cpu", 14, 16),
        event("cpu_op", "aten::mm", 21, 30),
    )
    assert found.parts == pytest.approx(
        {"matmuls": 3, "attention": 2, "other kernels": 2, "recomputation": 2, "reduce-scatter": 3,
         "waiting for data": 1, "host": 7}
    )  # fmt: skip
    assert found.hidden == pytest.approx({"reduce-scatter": 1})
    assert (found.step, found.seconds, found.communication_seconds, found.own_seconds) == (7, 20, 3, 16)


def test_a_step_on_a_gpu(tmp_path: Path) -> None:
    """Kernels are the step's by the range on the device, and recomputed by the call that launched them."""
    found = of(
        tmp_path,
        event("user_annotation", "ProfilerStep#3", 0, 9),
        event("gpu_user_annotation", "ProfilerStep#3", 10, 30, thread=7),
        event("user_annotation", "recomputation", 2, 4),
        event("cuda_runtime", "cudaLaunchKernel", 3, 3.5, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 5, 5.5, correlation=2),
        event("cuda_runtime", "cudaStreamSynchronize", 28, 29),
        event("kernel", "sm90_xmma_gemm_bf16", 10, 14, thread=7, correlation=1),
        event("kernel", "nvjet_tst_128x256", 14, 18, thread=7, correlation=2),
        event("kernel", "flash_fwd_kernel", 18, 19, thread=7, correlation=3),
        event("kernel", "vectorized_elementwise_kernel", 19, 21, thread=7, correlation=4),
        event("gpu_memcpy", "Memcpy DtoD", 21, 22, thread=7, correlation=5),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 17, 26, thread=8),
        event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", 26, 27, thread=9),
    )
    assert found.parts == pytest.approx(
        {"recomputation": 4, "matmuls": 4, "attention": 1, "other kernels": 2, "copies": 1, "all-gather": 4,
         "send and receive": 1, "idle": 1, "host": 2}
    )  # fmt: skip
    assert found.hidden == pytest.approx({"all-gather": 5})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::_reduce_scatter_base_", "reduce-scatter"), ("gloo:all_to_all", "all-to-all"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all-reduce"), ("aten::scatter", None), ("aten::gather", None),
        ("c10d::recv_", "send and receive"), ("_c10d_functional::all_gather_into_tensor", "all-gather"),
    ],
)  # fmt: skip
def test_kinds_of_collectives(name: str, kind: str | None) -> None:
    assert kinds.classify_collective(name) == kind


@pytest.mark.parametrize(
    "name", ["titan::grouped_product", "titan::low_grouped_grads", "titan::float32_product", "aten::_grouped_mm"]
)
def test_products_of_experts_are_matmuls(name: str) -> None:
    assert kinds.classify_operation(name) == kinds.MATMULS


def test_every_predicted_cause_has_its_row() -> None:
    assert sorted(cause for causes in summary.PREDICTED.values() for cause in causes) == sorted(CAUSES)


def test_the_table_has_the_prediction_and_names_the_slow_rank() -> None:
    def rank(number: int, matmuls: float) -> summary.Summary:
        step = Breakdown(5, 1.0, {"matmuls": matmuls, "all-gather": 1 - matmuls})
        return summary.average_steps(number, [step, step], {"matmuls": 0.4, "weights and gradients": 0.3})

    ranks = [rank(0, 0.4), rank(1, 0.8), rank(2, 0.41)]
    text = "\n".join(summary.format_table(ranks[0]))
    assert "matmuls                        0.4   40.0%      0.4 s" in text
    assert "communication                  0.6   60.0%      0.3 s" in text
    assert summary.compare_ranks(ranks)[-1] == "rank 1 is slow: its own work takes 1.95 times the median rank's"
    assert "no rank is slow" in summary.compare_ranks([ranks[0], ranks[2]])[-1]


@pytest.mark.parametrize(("factor", "named"), [(1.25, False), (1.1, True)])
def test_the_factor_of_a_slow_rank_is_that_of_the_run(factor: float, named: bool, tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    for number, matmuls in enumerate((0.4, 0.48, 0.4)):
        parts = {"matmuls": matmuls, "all-gather": 1 - matmuls}
        one = summary.average_steps(number, [Breakdown(5, 1.0, parts)], {})
        summary.write(tmp_path / "profile", dataclasses.replace(one, slow_factor=factor))
    assert ("rank 1 is slow" in summary.compare_ranks(summary.read(tmp_path, None))[-1]) is named


def ranges(**times: tuple[float, float]) -> list[Slice]:
    return [Slice(name, "user_annotation", *at, thread="1", correlation=-1) for name, at in times.items()]


def test_the_peak_by_category() -> None:
    """Of what is allocated at one address in turn, each block counts by itself; others' memory does not."""
    changes = [
        (1, 7, 500), (5, 10, 100), (6, 11, 40), (7, 11, -40), (8, 11, 30), (21, 12, 50), (22, 13, 60), (23, 13, -60),
        (24, 10, -100), (25, 14, 20), (35, 12, -50), (45, 15, 9999),
    ]  # fmt: skip
    slices = ranges(**{"ProfilerStep#4": (2, 40), "forward": (3, 10), "backward": (20, 30), "layer 3": (21, 24)})
    trace = Trace(slices, [Allocation(*change) for change in changes])
    found = find_peak(trace, 4, {WEIGHTS: 200, OPTIMIZER: 400}, gradients={12})
    assert found is not None
    assert found.parts == {WEIGHTS: 200, OPTIMIZER: 400, ACTIVATIONS: 130, GRADIENTS: 50, TEMPORARY: 60}
    assert " in backward, layer 3 were alive: optimizer 0.0 MiB (48%), weights" in found.sentence
    assert find_peak(Trace(slices, []), 4, {}, set()) is None


def test_a_snapshot_of_cuda() -> None:
    blocks = [("active_allocated", 2**30), ("inactive", 2**31), ("active_allocated", 3 * 2**30)]
    segment = {"address": 4096, "blocks": [{"state": state, "size": size} for state, size in blocks]}
    known = {"weights": {4096: 2**30}, "optimizer": {1: 5}}
    assert describe_snapshot([segment], known) == (
        "at the peak of 4.00 GiB were alive: activations and temporary 3.00 GiB (75%), weights 1.00 GiB (25%)"
    )


def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    """Weights and optimizer state have the sizes that follow from the model; logits are activations."""
    settings = [
        "profile.active=1",
        "profile.wait=1",
        "profile.memory=true",
        "training.steps=4",
        "parallelism.microbatches=2",
    ]
    train_run(compose_tiny_run(tmp_path, *settings, "compile=off", "checkpoint=off", "metrics.sample_tokens=0"))
    (found,) = summary.read(tmp_path, None)
    assert found.memory[WEIGHTS] == 4 * 19_616
    assert 2 * 4 * 19_616 <= found.memory[OPTIMIZER] <= 2 * 4 * 19_616 + 1024
    assert found.memory[ACTIVATIONS] > 4 * 16 * 64 * 4
    assert found.memory[GRADIENTS] == 4 * 19_616, "of the first micro-batch, at the peak of the second"
    assert "were alive" in "\n".join(summary.format_table(found))
