"""The memory estimate against the peak of live tensors in traces of real steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import pytest
from torch import Tensor

from tests.support.composing import compose_test_run
from tests.support.ranks import run_ranks
from tests.support.tiers import full, select_cases
from titan.estimate import memory, pipeline_states
from titan.estimate.pipeline_states import ALL_FORWARD, find_rank_states, find_schedule_states
from titan.estimate.traced.memory import LiveMemory, find_peak
from titan.model.loss_terms import LossInputs
from titan.parallelism.pipeline import runtime
from titan.parallelism.pipeline.schedules import SCHEDULES
from titan.parallelism.schema import Parallelism
from titan.run.run import Run
from titan.training.loss_terms import LossTerm
from titan.training.trace.rank import trace_rank

CLOSE = 0.05
SHAPES = {
    "blocks": "model.dim=512 model.heads=8 model.kv_heads=2 model.ffn=1536 model.vocab=512 model.layers=6 "
    "training.seq_len=512 training.global_batch=8192",
    "head": "model.dim=256 model.heads=4 model.kv_heads=2 model.ffn=512 model.vocab=16384 model.layers=4 "
    "training.seq_len=512 training.global_batch=8192",
    "state": "model.dim=1024 model.heads=8 model.kv_heads=2 model.ffn=3072 model.vocab=8192 model.layers=6 "
    "training.seq_len=128 training.global_batch=1024",
}
"""Models and batches whose peak is in the blocks, in the head, or where gradients and weights are largest."""
MICROBATCHES = "parallelism.microbatches=4"
WHOLE, SHARDED = f"{MICROBATCHES} parallelism.accumulate=whole", f"{MICROBATCHES} parallelism.accumulate=sharded"
INTERLEAVED = f"parallelism=fsdp_pp parallelism.schedule=Interleaved1F1B {MICROBATCHES}"
LAYOUTS = {
    "single": "parallelism=single",
    "accumulating": f"parallelism=single {MICROBATCHES}",
    "fsdp": "parallelism=fsdp",
    "fsdp-8": "parallelism=fsdp cluster.devices=8",
    "fsdp-tied": "parallelism=fsdp model.tied=true",
    "fsdp-kept": "parallelism=fsdp parallelism.reshard=never",
    "fsdp-accumulating": f"parallelism=fsdp {MICROBATCHES}",
    "fsdp-accumulating-whole": f"parallelism=fsdp {WHOLE}",
    "fsdp-buffers": "parallelism=fsdp parallelism.reduce_buffers=3",
    "fsdp-whole-buffers": f"parallelism=fsdp {WHOLE} parallelism.reduce_buffers=2",
    "fsdp-whole-bf16": f"parallelism=fsdp {WHOLE} precision.accumulate=bf16",
    "fsdp-whole-buffers-bf16": f"parallelism=fsdp {WHOLE} parallelism.reduce_buffers=2 precision.accumulate=bf16",
    "hsdp": "parallelism=hsdp",
    "tp": "parallelism=tp",
    "tp-kept": "parallelism=tp parallelism.regather=false",
    "tp-regathered": "parallelism=tp parallelism.regather=true",
    "tp-whole-sequence": "parallelism=tp parallelism.sequence_parallel=false",
    "fsdp-tp": "parallelism=fsdp_tp",
    "cp": "parallelism=cp",
    "cp-ring": "parallelism=cp parallelism.context_method=ring",
    "cp-ulysses": "parallelism=cp parallelism.context_method=ulysses",
    "pp-first": "parallelism=pp parallelism.microbatches=8",
    "pp-last": "parallelism=pp parallelism.microbatches=8",
    "gpipe-last": f"parallelism=pp {MICROBATCHES} parallelism.schedule=GPipe",
    "interleaved-first": f"parallelism=pp {MICROBATCHES} parallelism.schedule=Interleaved1F1B",
    "3d-first": f"parallelism=3d {MICROBATCHES}",
    "3d-last": f"parallelism=3d {MICROBATCHES}",
    "3d-bf16-first": f"parallelism=3d {MICROBATCHES} precision.accumulate=bf16",
    "3d-bf16-last": f"parallelism=3d {MICROBATCHES} precision.accumulate=bf16",
    "interleaved-bf16": f"{INTERLEAVED} precision.accumulate=bf16",
    "3d-reduced": f"parallelism=3d {SHARDED}",
    "3d-buffers": f"parallelism=3d {MICROBATCHES} parallelism.reduce_buffers=3",
    "3d-reduced-buffers": f"parallelism=3d {SHARDED} parallelism.reduce_buffers=2",
    "interleaved-reduced": f"{INTERLEAVED} parallelism.stages=6 parallelism.accumulate=sharded model.layers=6",
    "interleaved-7-stages": f"{INTERLEAVED} parallelism.stages=14 model.layers=14",
    "interleaved-resharded": f"{INTERLEAVED} parallelism.stages=6 parallelism.reshard=always model.layers=6",
    "pp-resharded": f"parallelism=fsdp_pp {MICROBATCHES} parallelism.reshard=always",
    "4d": f"parallelism=4d {MICROBATCHES}",
    "fsdp-groups": "parallelism=fsdp cluster.devices=4 "
    "+parallelism.groups={whole:{match:[tok_embeddings,layers.0,layers.*.w1],shard:1},pairs:{match:[head],shard:2}}",
    "documents": "parallelism=fsdp dataset.mask_documents=true",
}
RANKS = {"pp-last": 1, "gpipe-last": 1, "3d-last": 4, "3d-bf16-last": 4}
"""The ranks that are traced; of other layouts the first."""
MODES = {"blocks": ("none", "full", "selective"), "head": ("none",), "state": ("full",)}
"""How activations are kept, which counts where the peak is in the blocks."""
EVERY_N = ("single", "fsdp-kept", "tp", "cp-ring", "pp-first", "interleaved-first", "3d-last")
"""Where every second block, or the gated product, is computed again too."""
CASES = [
    pytest.param(shape, layout, mode, id=f"{shape}-{layout}-{mode}")
    for shape in SHAPES
    for layout in LAYOUTS
    for mode in (*MODES[shape], *(["gate", "every_n"] if shape == "blocks" and layout in EVERY_N else []))
]


def run(shape: str, layout: str, *more: str) -> Run:
    """A composed run on fewer than ten ranks, however much memory it takes."""
    common = ("model=debug", "checkpoint=off", "dataset=synthetic", "compile=off", "cluster.memory_gib=1e6")
    return compose_test_run([*common, "precision=bf16", *SHAPES[shape].split(), *LAYOUTS[layout].split(), *more])


def traced(one: Run, rank: int, device: str = "cpu") -> LiveMemory:
    """The fullest moment of the traced step of a rank, in a process of its own."""
    return run_ranks(_traced, 1, one, rank, device, joined=False, timeout=600)[0]  # type: ignore[no-any-return]


def _traced(_: int, __: int, one: Run, rank: int, device: str) -> LiveMemory:
    return find_peak(trace_rank(one, rank, device).events)


def both(one: Run, rank: int, device: str = "cpu") -> tuple[float, LiveMemory]:
    """Bytes that are estimated for a rank, and its traced peak."""
    stage = one.layout.compute_coordinates(rank)["pipeline"]
    return memory.estimate_peaks(one, one.layout, one.microbatches, device)[stage].bytes, traced(one, rank, device)


@pytest.mark.parametrize(
    ("shape", "layout", "mode"), select_cases(CASES, ("blocks-fsdp-8-full", "blocks-gpipe-last-none"))
)
def test_the_estimate_is_the_traced_peak(shape: str, layout: str, mode: str) -> None:
    estimated, found = both(run(shape, layout, f"memory={mode}"), RANKS.get(layout, 0))
    assert estimated == pytest.approx(found.bytes, rel=CLOSE), str(found)


CAPPED = ("training.label_smoothing=0.1", "model.logit_cap=30")
ONE_ROW = ("parallelism.microbatches=16", "model.layers=2")
REGATHERED = ("memory=none", "model.kv_heads=8", "parallelism.tensor=8")
AVERAGED = "evaluation.ema=0.9"


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "layout", "device", "more"),
    [
        pytest.param("blocks", "fsdp", "cuda", ["memory=none"], id="norms-fsdp"),
        pytest.param("blocks", "tp", "cuda", ["memory=selective"], id="norms-tp-selective"),
        pytest.param("blocks", "3d-first", "cuda", ["memory=full"], id="norms-3d-full"),
        pytest.param("blocks", "single", "cuda", ["precision=fp32"], id="norms-fp32"),
        pytest.param("blocks", "tp", "cuda", [*ONE_ROW, *REGATHERED], id="regathered-one-row"),
        full("blocks", "tp", "cuda", REGATHERED, id="regathered-narrow-outputs"),
        full("blocks", "tp", "cuda", [*REGATHERED, "model=llama4_debug"], id="regathered-shared-experts"),
        full("blocks", "tp", "cuda", [*REGATHERED, "model=deepseek_v3_debug"], id="regathered-latent-attention"),
        pytest.param("head", "single", "cpu", ["training.z_loss=1e-4"], id="z-loss"),
        full("head", "tp", "cpu", CAPPED, id="capped-tp"),
        full("head", "single", "cpu", [*CAPPED, "precision=fp32"], id="capped-fp32"),
        full("head", "tp", "cpu", ["training.z_loss=1e-4", "precision=fp32"], id="z-loss-tp-fp32"),
        pytest.param("state", "fsdp-8", "cpu", [AVERAGED], id="average"),
        pytest.param("state", "single", "cpu", ["precision=bf16_pure", AVERAGED], id="average-bf16"),
    ],
)
def test_the_estimate_is_the_traced_peak_with_other_settings(
    shape: str, layout: str, device: str, more: Sequence[str]
) -> None:
    """Norms as GPUs compute them, regions that gather their input again, loss terms, and the moving average."""
    estimated, found = both(run(shape, layout, *more), RANKS.get(layout, 0), device)
    assert estimated == pytest.approx(found.bytes, rel=CLOSE), str(found)


@dataclass(frozen=True, kw_only=True)
class LogProbabilities(LossTerm):
    """The entropy of docs/extending.md."""

    needs_logits: ClassVar[bool] = True

    def build(self) -> Callable[[LossInputs], Tensor]:
        return _entropy


def _entropy(tokens: LossInputs) -> Tensor:
    log_p = (tokens.logits / 1.0).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def with_term(one: Run, term: LossTerm) -> Run:
    return dataclasses.replace(one, training=dataclasses.replace(one.training, loss_terms={"own": term}))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "more"), [("single", 4.0), ("tp", 4.5)])
def test_a_term_that_needs_logits_counts_them_again(layout: str, more: float) -> None:
    one = run("head", layout)
    without, needs = (
        memory.estimate_peak(r, r.layout, r.microbatches, "cpu").bytes
        for r in (with_term(one, LossTerm()), with_term(one, LogProbabilities()))
    )
    logits = 4 * one.microbatch_rows * one.training.seq_len * one.model.vocab
    assert needs - without == pytest.approx(more * logits, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "tp", "gpipe-last", "pp-last"])
def test_a_term_of_logits_is_in_the_trace(layout: str) -> None:
    estimated, found = both(with_term(run("head", layout), LogProbabilities()), RANKS.get(layout, 0))
    assert estimated == pytest.approx(found.bytes, rel=CLOSE), str(found)


@pytest.mark.parametrize(("layout", "shards"), [("single", 1), full("fsdp-8", 8), full("fsdp-tp", 4)])
def test_the_moving_average_takes_4_bytes_of_each_weight_sharded_as_they_are(layout: str, shards: int) -> None:
    without, one = run("state", layout), run("state", layout, AVERAGED)
    before, now = (memory.estimate_peak(r, r.layout, r.microbatches, "cpu").bytes for r in (without, one))
    norms = (2 * one.model.layers + 1) * one.model.dim  # whole on each tensor rank
    each = (one.model.parameters() + (one.layout.tensor - 1) * norms) / shards
    assert now - before == pytest.approx(4 * each)
    assert (
        sum(memory.count_checkpoint_bytes(one)) - sum(memory.count_checkpoint_bytes(without))
        == 4 * one.model.parameters()
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "mode"),
    [
        ("ZBVZeroBubble", "none"),
        ("ZBVZeroBubble", "full"),
        full("ZBVZeroBubble", "every_n"),
        full("InterleavedZeroBubble", "none"),
        full("DualPipeV", "none"),
        ("DualPipeV", "full"),
    ],
)
def test_schedules_that_split_backward(schedule: str, mode: str) -> None:
    """Without checkpointing as close as others; with it a block that is computed again once for each part."""
    how = (f"parallelism.schedule={schedule}", f"memory={mode}", "model.layers=4", "parallelism.microbatches=4")
    estimated, found = both(run("blocks", "pp-first", *how), 0)
    too_high = CLOSE if mode == "none" else 0.1
    assert found.bytes * (1 - CLOSE) <= estimated <= found.bytes * (1 + too_high), str(found)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        ("Interleaved1F1B", 1),
        full("1F1B", 1),
        full("1F1B", 0),
        full("Interleaved1F1B", 0),
        full("ShallowInterleaved1F1B", 0),
    ],
)
def test_more_microbatches_need_no_more_buffers_of_messages(schedule: str, rank: int) -> None:
    settings = (f"parallelism.schedule={schedule}", "memory=full", "model.layers=4", "model.vocab=64")
    few, many = (
        run("blocks", "pp-first", *settings, f"parallelism.microbatches={n}", f"training.global_batch={512 * n}")
        for n in (8, 16)
    )
    (estimated, found), (estimated_many, found_many) = (both(one, rank, "cuda") for one in (few, many))
    message = 2 * few.training.seq_len * few.model.dim
    assert found_many.bytes - found.bytes < message
    assert estimated_many - estimated < message
    assert estimated_many == pytest.approx(found_many.bytes, rel=CLOSE), str(found_many)


@pytest.mark.full
def test_outputs_that_were_sent_are_not_kept() -> None:
    """Of six micro-batches of two stages in flight on the first rank, one output at most exists on a GPU."""
    one = run("blocks", "interleaved-first")
    message, in_flight = 2 * one.microbatch_rows * one.training.seq_len * one.model.dim, 6
    estimated, found = both(one, 0, "cuda")
    with mock.patch.object(runtime, "_keep_graph", lambda output: output):
        kept = traced(one, 0, "cuda")
    assert kept.bytes - found.bytes == pytest.approx((in_flight - 1) * message, rel=1e-3)
    assert estimated == pytest.approx(found.bytes, rel=CLOSE)


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {*ALL_FORWARD}))
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 32), (4, 64), (8, 63)])
def test_some_microbatches_lead_a_schedule_through_all_its_states(schedule: str, ranks: int, microbatches: int) -> None:
    each = 1 if schedule == "1F1B" else 2
    parallelism = Parallelism(schedule=schedule, stages=each * ranks)
    with mock.patch.object(pipeline_states, "find_schedule_states", wraps=find_schedule_states) as find:
        found = find_rank_states(parallelism, ranks, microbatches)
    assert found == find_schedule_states(schedule, ranks, each, microbatches)
    assert find.call_args.args[3] < microbatches
    assert {states[0].kind for states in found} == {"F"}, "equally full phases are named in the order of the step"


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        "parallelism=fsdp parallelism.microbatches=4 parallelism.accumulate=whole",
        full("parallelism=pp parallelism.microbatches=8"),
        full("parallelism=3d parallelism.microbatches=8 parallelism.schedule=InterleavedZeroBubble"),
        full(
            "parallelism=pp cluster.devices=4 model.layers=8 parallelism.schedule=ZBVZeroBubble "
            "parallelism.microbatches=8"
        ),
        "parallelism=pp parallelism.schedule=GPipe parallelism.microbatches=16",
    ],
    ids=["fsdp", "1f1b", "zero-bubble", "v", "gpipe"],
)
def test_the_phases_of_a_step_have_its_peak(layout: str) -> None:
    one = run("blocks", "single", *layout.split())
    peaks = memory.estimate_peaks(one, one.layout, one.microbatches)
    for rank, most in enumerate(peaks):
        steps = list(memory.iterate_step_phases(one, one.layout, one.microbatches, rank))
        assert max(usage.bytes for _, phases in steps for usage in phases) == pytest.approx(most.bytes)
        assert [phases[-1].phase for _, phases in steps][-1] == "optimizer step"
        assert all(phases[0].phase == "start of forward" for action, phases in steps if action and action.kind == "F")
        first, last = steps[0][1][0], steps[-1][1][-1]
        assert first.bytes == min(usage.bytes for _, phases in steps for usage in phases)
        assert first.parts["weights"] == last.parts["weights"] and len(steps) > one.microbatches / 2
