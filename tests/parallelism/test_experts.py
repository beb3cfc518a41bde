"""Expert parallelism: the exchange of tokens, what a layout with it learns, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_manager import in_two_attempts
from tests.support.composing import compose_test_run
from tests.support.matrix import EXACT, LayoutCase, TrainedLayout
from tests.support.matrix_experts import (
    HALVES,
    LAYOUTS,
    MODELS,
    ChoiceMargin,
    OneDevice,
    check_margin,
    list_cases,
    measure_case,
)
from tests.support.ranks import run_ranks
from tests.support.runs import RankOutcome, are_identical, compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full, select_cases
from titan.config import warning
from titan.errors import ConfigError
from titan.model import experts as model_experts
from titan.model.experts import Router, dispatch
from titan.parallelism.expert import ExpertDispatch


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> OneDevice:
    return OneDevice(tmp_path_factory.mktemp("one"))


QUICK = (
    "qwen3_moe-ep_zbv-none-2", "qwen3_moe-ep_in_tp-full-1", "capacity-ep_cp", "muon-ep_hsdp",
    "documents-ep_tp",
)  # fmt: skip


@pytest.mark.parametrize("case", select_cases([pytest.param(case, id=case.id) for case in list_cases()], QUICK))
def test_gradients_of_each_expert_are_those_of_one_device(
    case: LayoutCase, one_device: OneDevice, tmp_path: Path
) -> None:
    found = measure_case(case, one_device.find_outcome(case), tmp_path)
    assert found.pop("same start")
    assert found.pop("same rows")
    assert {name: value for name, value in found.items() if not value <= EXACT} == {}


@pytest.mark.full
def test_a_seed_whose_choice_rounding_may_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_experts, "select_top_k", model_experts.select_top_k)
    margin = ChoiceMargin()
    run = compose_test_run(["model=qwen3_moe_debug", "training.seed=7"])
    router = Router(3, 3, top_k=2)
    torch.nn.init.eye_(router.weight)
    router(torch.tensor([[2.0, 1.0, 0.5]]))
    check_margin(TrainedLayout(run, [RankOutcome(extra=margin)], 0.0))
    router(torch.tensor([[2.0, 1.0, 1.0 - 1e-5]]))
    with pytest.raises(AssertionError, match=r"training.seed=7: .* by only 1.0e-05 of it"):
        check_margin(TrainedLayout(run, [RankOutcome(extra=margin)], 0.0))


EXPERTS, WIDTH, RANKS = 6, 8, 3
CHOICES = {
    "even": [[0, 3], [1, 4], [2, 5], [5, 0]],
    "one-expert": [[4, 4], [4, 4], [4, 4], [4, 4]],
    "dropped": [[0, 6], [6, 6], [6, 2], [3, 6]],
}
"""Of rank 0; the others' are rotated. 6 stands for a choice that is dropped."""


def computed(x: Tensor, weights: Tensor | None, ends: Tensor, exact: bool, first: int) -> Tensor:
    """Rows times their expert's number and one more, and their weights; checks that the ends are those of the rows."""
    starts = [0, *ends.tolist()[:-1]]
    assert weights is not None and (not exact or ends[-1] == len(x))
    rows = (x * weights[:, None]).to(x.dtype)
    rows = torch.cat([rows[a:b] * (first + i + 1) for i, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True))])
    return torch.cat([rows, rows.new_zeros(len(x) - len(rows), WIDTH)])


def exchanged(rank: int, world: int, choices: list[list[int]], dtype: torch.dtype) -> list[bool]:
    """Whether results and gradients are those of all experts on one rank, to the bit."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weights = torch.rand(4, 2, generator=generator, requires_grad=True)
    experts = torch.tensor([[e if e == EXPERTS else (e + rank) % EXPERTS for e in chosen] for chosen in choices])
    exchange, first = ExpertDispatch(torch.distributed.group.WORLD), rank * EXPERTS // RANKS  # type: ignore[arg-type]
    found, wanted = (
        function(x, experts, weights, EXPERTS, lambda x, w, ends, exact=False, at=at: computed(x, w, ends, exact, at))
        for function, at in ((exchange, first), (dispatch, 0))
    )
    is_dropped = (experts == EXPERTS).all(1)
    upstream = torch.randn(found.shape, generator=generator, dtype=dtype)
    gradients = [torch.autograd.grad(out, (x, weights), upstream) for out in (found, wanted)]
    same = [torch.equal(one, other) for one, other in zip(*gradients, strict=True)]
    return [torch.equal(found, wanted), all(same), not found[is_dropped].any()]


@pytest.mark.parametrize(
    ("choices", "dtype"),
    [
        pytest.param("even", torch.float32, id="even-fp32"),
        pytest.param("one-expert", torch.float32, id="one-expert-fp32"),
        pytest.param("dropped", torch.float32, id="dropped-fp32"),
        full("dropped", torch.bfloat16, id="dropped-bf16"),
    ],
)
def test_the_exchange_computes_what_one_rank_does(choices: str, dtype: torch.dtype) -> None:
    assert run_ranks(exchanged, RANKS, CHOICES[choices], dtype) == [[True] * 3] * RANKS


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ep", "single"),
        full("ep_fsdp", "single"),
        full("single", "ep_tp"),
        full("ep_4d", "ep"),
        full("ep_cp", "tp"),
        full("ep_pp", "ep_hsdp"),
    ],
)
def test_any_layout_resumes_with_experts_load_and_bias(before: str, after: str, tmp_path: Path) -> None:
    others = {"single": ("parallelism=single",), "tp": ("parallelism=tp",)}
    layouts = LAYOUTS | others
    settings = ("model.layers=4", "model.heads=4", "model.kv_heads=2", *MODELS["qwen3_moe"], "training.steps=4")
    runs = [compose_tiny_run(tmp_path / "parts", *settings, *layouts[name]) for name in (before, after)]
    first, second = (TrainedLayout(run, seen, 0) for run, seen in zip(runs, in_two_attempts(*runs), strict=True))
    saved = first.merge_tensors("last")
    assert {"model.layers.3.feed_forward.router.bias", "state.layers.3.feed_forward.router.load"} <= saved.keys()
    assert are_identical(second.merge_tensors("first"), saved)
    whole = compose_tiny_run(tmp_path / "whole", *settings)
    train_run(whole)
    for line, wanted in zip(read_step_records(runs[1]), read_step_records(whole), strict=True):
        assert line["loss/aux_loss"] == pytest.approx(wanted["loss/aux_loss"], rel=EXACT)
        assert line["loss"] == pytest.approx(wanted["loss"], rel=EXACT)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            ("model=debug", "parallelism=fsdp", "parallelism.expert=2"), "the model has no experts", id="dense"
        ),
        pytest.param(
            ("parallelism=fsdp", "parallelism.expert=3"), "can't divide 8 experts; give one of 1, 2", id="odd"
        ),
        pytest.param(("parallelism=fsdp", "parallelism.expert=4"), "can't divide the 2 ranks of", id="ranks"),
        pytest.param(("parallelism=ddp", "parallelism.expert=2"), "can't divide the 1 ranks", id="ddp"),
        pytest.param(("parallelism.expert=0",), "must be 1 or more, or -1", id="zero"),
        pytest.param(
            ("parallelism=tp", "parallelism.expert=2", "parallelism.sequence_parallel=false"),
            "tensor ranks must have different tokens",
            id="whole-sequences",
        ),
        pytest.param(
            ("parallelism=fsdp", "parallelism.expert=2", "parallelism.groups={mine:{match:['*.experts']}}"),
            "parallelism.groups.mine: matches experts",
            id="groups",
        ),
        pytest.param(
            ("parallelism=ep", "parallelism.halves=true"),
            r"parallelism.halves=true: is an experiment now; give parallelism.halves=false \+exchange@para",
            id="halves",
        ),
        pytest.param(
            ("parallelism=ep", "parallelism.dispatcher=deepep"), "parallelism.dispatcher=deepep: is an ex", id="deepep"
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_test_run(["model=qwen3_moe_debug", *settings])


@pytest.mark.full
def test_minus_one_is_all_ranks_that_may_share_experts() -> None:
    layout = compose_test_run(["model=qwen3_moe_debug", "parallelism=3d", "parallelism.expert=-1"]).layout
    assert (layout.expert, layout.expert_shards, str(layout).split()[-2:]) == (4, 1, ["expert", "4"])
    assert layout.list_groups("expert") == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "expert"),
    [
        pytest.param(("parallelism=ep",), 2, id="cpu"),
        pytest.param(("parallelism=ep", "model=debug"), 1, id="no-experts"),
        pytest.param(("parallelism=ep", "cluster=h100", "cluster.devices=64", "model.experts=48"), 8, id="a-node"),
        pytest.param(("parallelism=ep", "cluster=h100", "cluster.devices=64", "model.experts=12"), 4, id="divides"),
        pytest.param(("parallelism=tp", "parallelism.expert=auto"), 2, id="tensor"),
        pytest.param(
            ("parallelism=tp", "parallelism.expert=auto", "parallelism.sequence_parallel=false"),
            1,
            id="whole-sequences",
        ),
    ],
)
def test_auto_divides_the_experts_over_ranks_of_a_node(settings: tuple[str, ...], expert: int) -> None:
    assert compose_test_run(["model=qwen3_moe_debug", *settings], remote=True).layout.expert == expert


@pytest.mark.full
def test_experts_that_a_dense_model_lacks_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    warning.warn_once.cache_clear()
    compose_test_run(["parallelism=ep", "model=debug", "name=x"])
    sentence = "parallelism.expert=auto: has no effect, because the model has no experts; choose parallelism=fsdp"
    assert sentence in capsys.readouterr().err
    compose_test_run(["parallelism=ep", "model=qwen3_moe_debug", "name=x"])
    compose_test_run(["parallelism=fsdp", "model=debug", "name=x"])
    assert capsys.readouterr().err == ""


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        full((), id="single"),
        pytest.param(LAYOUTS["ep"], id="ep"),
        full((*LAYOUTS["ep"], HALVES, "memory=selective"), id="halves"),
    ],
)
def test_compiled_blocks_learn_the_same(layout: tuple[str, ...], tmp_path: Path) -> None:
    losses = []
    for name, how in (("eager", ("compile=off",)), ("compiled", ("compile=block", "compile.backend=aot_eager"))):
        run = compose_tiny_run(tmp_path / name, *MODELS["qwen3_moe"], *layout, *how, "checkpoint=off")
        train_run(run)
        losses.append([line["loss"] for line in read_step_records(run)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
