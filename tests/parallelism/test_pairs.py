"""Pairs of a pipeline's schedule: two passes that take turns, and what computes beside the exchanges of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.parallelism.test_halves import LEAST_BYTES, SIZES, name_matmul
from tests.support.composing import compose_test_run
from tests.support.matrix import LayoutCase, build_paired_schedule, train_case
from tests.support.matrix_experts import MODELS
from tests.support.ranks import run_ranks
from tests.support.runs import are_identical
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.estimate.traced.events import Event
from titan.memory.kept_values import build_passes
from titan.parallelism import turns
from titan.parallelism.pipeline.stage_plan import list_overlaps
from titan.profile import trace
from titan.profile.waits import BACKWARD, Waits
from titan.run.run import Run
from titan.training.trace.rank import build_rank_trace

LAYOUT = (
    "parallelism=pp", "parallelism.shard=2", "parallelism.expert=2", "parallelism.schedule=DualPipeV",
    "parallelism.pairs=true",
)  # fmt: skip


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


def list_beside(events: Sequence[Event], forward: tuple[int, int], backward: tuple[int, int]) -> dict[str, list[str]]:
    """Return what is computed until each exchange of rows of a pair is waited for: passes and kinds of matmuls.

    Args:
        events: of a rank.
        forward: stage and micro-batch of the forward pass.
        backward: likewise.
    """
    pair = [
        e
        for e in events
        if (e.region.action, e.region.stage, e.region.microbatch) in (("F", *forward), ("B", *backward))
    ]
    found: dict[str, list[str]] = {"F": [], "B": []}
    pending: dict[int, tuple[str, set[str]]] = {}
    size = 0.0
    for event in pair:
        if event.kind == "collective" and event.stream == "expert":
            size = event.size
        elif event.kind == "record" and event.stream == "expert" and size > LEAST_BYTES:
            pending[event.key] = event.region.action, set()
        elif event.kind == "wait" and event.key in pending:
            action, kinds = pending.pop(event.key)
            found[action].append(" ".join(sorted(kinds)))
        elif event.kind == "op" and len(event.shape) >= 3:
            for _, kinds in pending.values():
                kinds.add(f"{event.region.action}:{name_matmul(event)}")
    return found


@pytest.mark.parametrize(
    ("mode", "rank", "stages", "forward", "backward"),
    [
        pytest.param(
            "none", 1, (2, 1),
            ["F:shared", "B:experts B:shared", "B:attention B:other F:shared", "B:experts B:shared"],
            ["F:experts", "B:shared F:attention F:other F:shared", "F:experts", "B:shared"],
            id="none",
        ),
        full(
            "full", 0, (3, 0),
            ["B:attention B:experts B:other B:shared F:shared", "B:experts B:shared"] * 2,
            ["B:shared", "", "F:experts", "B:shared F:attention F:other F:shared",
             "B:shared", "", "F:experts", "B:shared F:other"],
            id="full",
        ),
    ],
)  # fmt: skip
def test_what_computes_beside_each_exchange(
    mode: str, rank: int, stages: tuple[int, int], forward: list[str], backward: list[str]
) -> None:
    """Of two blocks each; with `full` the first two of each block's four in backward are of its recomputation."""
    sizes = [f"{name}={size}" for name, size in (SIZES | {"model.layers": 8}).items()]
    one = compose_test_run(
        [
            "model=deepseek_v3_debug", *sizes, "dataset=synthetic", "precision=bf16", "cluster=h100",
            "cluster.devices=4", *LAYOUT, "parallelism.split=layers", "parallelism.microbatches=4", "compile=off",
            "training.global_batch=8192", "training.seq_len=512", f"memory={mode}", "checkpoint=off",
        ],
        remote=True,
    )  # fmt: skip
    events = run_ranks(_trace, 1, one, 2 * rank, joined=False, timeout=300)[0]
    assert list_beside(events, (stages[0], 2), (stages[1], 0)) == {"F": forward, "B": backward}


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("memory=full",), id="recomputed"),
        full(
            ("parallelism.schedule=paired", "parallelism.accumulate=sharded", "parallelism.reshard=always"),
            id="gathered-and-reduced",
        ),
        pytest.param(("parallelism.replicate=2",), id="hsdp"),
        full(("parallelism.context=2", "parallelism.expert=4"), id="cp"),
        pytest.param(("compile=block", "compile.backend=aot_eager", "memory=full"), id="compiled"),
    ],
)
def test_turns_change_no_bit(more: tuple[str, ...], tmp_path: Path) -> None:
    found = []
    for pairs in ("true", "false"):
        settings = (*LAYOUT, "parallelism.microbatches=4", *more, f"parallelism.pairs={pairs}")
        folder = tmp_path / pairs
        folder.mkdir()
        found.append(train_case(folder, LayoutCase(pairs, settings), MODELS["qwen3_moe"]))
    for name in ("gradients", "last"):
        assert are_identical(*(trained.merge_tensors(name) for trained in found))


@pytest.mark.full
def test_a_profile_has_the_operations_of_both_passes(tmp_path: Path) -> None:
    settings = ("profile=once", "profile.wait=0", "profile.active=1", "parallelism.microbatches=4")
    trained = train_case(tmp_path, LayoutCase("pairs", (*LAYOUT, *settings)), MODELS["qwen3_moe"])
    (file,) = Path(trained.run.directory).glob("profile/*/*.json.gz")
    threads = {entry.thread for entry in trace.read(file).slices if entry.name == "aten::mm"}
    assert len(threads) == 2


def test_the_wait_of_a_backward_pass_in_its_thread_counts() -> None:
    waits = Waits(torch.device("cpu"), compiled=False)
    wait = waits._wrap_function(lambda: None)
    for name in (BACKWARD, "another"):
        with ThreadPoolExecutor(1, name) as threads:
            threads.submit(wait).result()
    assert len(waits.take_waits()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(("parallelism.expert=1",), "no ranks share experts", id="no-experts"),
        pytest.param(
            ("parallelism.halves=true", "training.global_batch=4096", "training.seq_len=32"),
            "parallelism.halves=true computes beside the same",
            id="halves",
        ),
        pytest.param(("parallelism.schedule=1F1B",), "the pipeline's schedule has no pairs; give", id="no-pairs"),
        pytest.param(("parallelism.pipeline=1", "parallelism.schedule=1F1B"), "has no pairs", id="no-pipeline"),
        pytest.param(
            ("parallelism.dispatcher=deepep", "cluster=h100", "cluster.devices=4", "precision=bf16"),
            "nothing computes beside the exchange",
            id="deepep",
        ),
    ],
)
def test_pairs_that_do_nothing_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"parallelism.pairs=true: .*{message}.*, or parallelism.pairs=false"):
        compose_test_run(["model=qwen3_moe_debug", "model.layers=4", *LAYOUT, *settings], remote=True)


@pytest.mark.full
def test_a_file_whose_overlaps_are_no_pairs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(build_paired_schedule())
    settings = ["model=qwen3_moe_debug", "model.layers=4", *LAYOUT, f"parallelism.schedule={file}"]
    assert len(list_overlaps(compose_test_run(settings).parallelism)) == 6
    file.write_text("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    with pytest.raises(
        ConfigError, match=r"\(1F1;1B0\)OVERLAP_F_B in .* is no forward and backward pass of two stages"
    ):
        compose_test_run(settings)


def _trace(_: int, __: int, one: Run, rank: int) -> Sequence[Event]:
    return build_rank_trace(one, rank, full=True).events
