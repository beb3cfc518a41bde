"""What is alive at the peak of a step's memory."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs import compose_tiny_run, train_run
from titan.profile import summary
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
)
from titan.training.profiling import describe_snapshot


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
