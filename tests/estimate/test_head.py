"""The memory of a compiled head and loss against what the profiler sees allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.tiers import full
from titan.estimate import memory
from titan.estimate.traced.memory import LiveMemory, find_peak
from titan.model.activations import RankBatch
from titan.model.layers import IGNORED, Head
from titan.model.loss_terms import Term, set_head_loss, z_loss
from titan.model.schema import Llama
from titan.run.run import Run
from titan.training.trace.rank import build_rank_trace

TOKENS, WIDTH, VOCAB = 2048, 32, 8192
Z_LOSS = (Term("z_loss", 1e-4, z_loss),)


def measure_peak_bytes(step: Callable[[], object]) -> int:
    """Return the largest number of bytes that a step has allocated and not yet freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    peak = live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


class LossStep:
    """Forward and backward of a head and its loss."""

    def __init__(self, dtype: torch.dtype, terms: tuple[Term, ...], cap: float | None) -> None:
        torch.manual_seed(0)
        self.head, self.targets, self.dtype = Head(WIDTH, VOCAB), torch.randint(0, VOCAB, (1, TOKENS)), dtype
        self.targets[0, :7] = IGNORED
        torch.nn.init.normal_(self.head.weight, std=0.02)
        set_head_loss(self.head, terms, None, cap)

    def __call__(self) -> Tensor:
        """Return the gradient of the hidden states."""
        self.head.weight.grad = None
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, TOKENS, WIDTH, generator=generator).to(self.dtype).requires_grad_()
        out: Tensor = self.head(hidden, self.targets)
        (out[0] if out.ndim else out).backward()
        assert hidden.grad is not None
        return hidden.grad


@pytest.mark.parametrize(
    ("dtype", "terms", "cap", "per_logit"),
    [
        full(torch.bfloat16, Z_LOSS, None, 2, id="bf16-z-loss"),
        full(torch.bfloat16, (), None, 2, id="bf16"),
        full(torch.float32, (), None, 4, id="fp32"),
        full(torch.float32, Z_LOSS, None, 4, id="fp32-z-loss"),
        full(torch.bfloat16, (), 30.0, 8, id="bf16-capped"),
        full(torch.float32, (), 30.0, 8, id="fp32-capped"),
    ],
)
def test_a_compiled_head_keeps_its_logits_once_in_the_compute_type(
    dtype: torch.dtype, terms: tuple[Term, ...], cap: float | None, per_logit: int
) -> None:
    batch = RankBatch(TOKENS, dtype.itemsize, compiled=True)
    stated = Llama(dim=WIDTH, vocab=VOCAB, logit_cap=cap).head_activations(batch, has_terms=bool(terms))
    step = LossStep(dtype, terms, cap)
    expected = step().float()
    step.head.compile(fullgraph=True)
    assert (step().float() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()
    measured = measure_peak_bytes(step)
    assert measured == pytest.approx(stated.backward, rel=0.1)
    assert measured / (TOKENS * VOCAB) == pytest.approx(per_logit, rel=0.1)


def trace_peak(_: int, __: int, run: Run) -> LiveMemory:
    """Return the fullest moment of the first rank's traced step."""
    return find_peak(build_rank_trace(run, 0).events)


@pytest.mark.full
@pytest.mark.parametrize("more", ["parallelism=single", "parallelism=fsdp training.z_loss=1e-4"])
def test_a_trace_of_a_compiled_run_has_its_logits_once(more: str) -> None:
    model = "model.dim=256 model.heads=4 model.kv_heads=2 model.ffn=512 model.vocab=16384 model.layers=4"
    batch = "training.seq_len=512 training.global_batch=8192 dataset=synthetic checkpoint=off cluster.memory_gib=1e6"
    run = compose_test_run(f"model=debug precision=bf16 memory=full compile=block {model} {batch} {more}".split())
    stated = memory.estimate_peak(run, run.layout, run.microbatches, run.machine.device)
    traced = run_ranks(trace_peak, 1, run, joined=False, timeout=600)[0]
    assert stated.phase == "backward of the head"
    assert traced.bytes == pytest.approx(stated.bytes, rel=0.05)


@pytest.mark.full
def test_backends_for_debugging_fuse_nothing() -> None:
    settings = ["model=debug", "precision=bf16", "dataset=synthetic", "checkpoint=off", "cluster.memory_gib=1e6"]
    choices = {
        "off": "compile=off",
        "inductor": "compile=block",
        "aot_eager": "compile=block compile.backend=aot_eager",
    }
    peaks = {}
    for name, choice in choices.items():
        run = compose_test_run([*settings, *choice.split()])
        peaks[name] = memory.estimate_peak(run, run.layout, run.microbatches, "cuda").bytes
    assert peaks["aot_eager"] == peaks["off"] > peaks["inductor"]
