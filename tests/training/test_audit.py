"""Audits: they change nothing, and name who computes wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bit_flips import LAYOUTS
from tests.support.runs import are_identical, compose_tiny_run, read_learned_values, read_step_records, train_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.parallelism.replicas import RankName
from titan.training.audit import Computation, OutputPrints, Witness, count_expert_span, judge

MODULES = ("tok_embeddings", "layers.0", "the loss")


def compute(*prints: int, noise: float = 0.0) -> Computation:
    return Computation(MODULES, prints, tuple(1.0 + noise * (index + 1) for index in range(len(prints))))


RIGHT, WRONG, LATER, OTHER = compute(1, 2, 3), compute(1, 8, 9), compute(1, 2, 9), compute(5, 6, 7)


def witness(rank: int, **changes: Any) -> Witness:
    """Of rank `rank`, which the next rank audits and the one after that computes a third time: all is right."""
    return replace(
        Witness(
            name=RankName(rank, f"n{rank}", f"n{rank}"),
            trained=RIGHT,
            repeats=(RIGHT, RIGHT),
            auditor=(rank + 1) % 4,
            second=RIGHT,
            again=RIGHT,
            third=RIGHT,
        ),
        **changes,
    )


TWO: dict[str, Any] = {"third": None}


@pytest.mark.parametrize(
    ("changes", "accused", "first"),
    [
        pytest.param({}, None, None, id="all-right"),
        pytest.param({1: {"trained": WRONG}}, [1], "layers.0", id="trained-wrongly"),
        pytest.param({1: {"second": WRONG}}, [2], "layers.0", id="auditor-is-wrong"),
        pytest.param({1: {"trained": WRONG}, 0: {"second": WRONG}}, [1], "layers.0", id="always-wrong"),
        pytest.param({1: {"trained": WRONG, "third": OTHER}}, [1, 2], "layers.0", id="three-results"),
        pytest.param({1: {"trained": WRONG}, 3: {"trained": LATER}}, [1], "layers.0", id="the-first-module-counts"),
        pytest.param({1: {"trained": WRONG, **TWO}}, [1], "layers.0", id="two-and-it-was-a-moment"),
        pytest.param({1: {"second": WRONG, **TWO}}, [2], "layers.0", id="two-and-it-was-the-auditors-moment"),
        pytest.param(
            {1: {"trained": WRONG, "repeats": (WRONG, WRONG), **TWO}}, [1, 2], "layers.0", id="two-and-nobody-decides"
        ),
        pytest.param({1: {"trained": WRONG, "repeats": (WRONG, OTHER)}}, [1], "layers.0", id="it-does-not-repeat"),
    ],
)
def test_who_is_accused(changes: dict[int, dict[str, Any]], accused: list[int] | None, first: str | None) -> None:
    judgement = judge([witness(rank, **changes.get(rank, {})) for rank in range(4)])
    if accused is None:
        assert judgement.difference is None
        return
    assert judgement.difference is not None and judgement.spread is None
    assert [name.rank for name in judgement.difference.odd] == accused
    assert f"of the result of {first}" in judgement.describe()


@pytest.mark.parametrize(("size", "found"), [(3.9e-6, False), (4.1e-6, True)], ids=["within", "beyond"])
def test_kernels_that_do_not_repeat_are_compared_within_the_spread(size: float, found: bool) -> None:
    """The spread of repetitions is 1e-6 of the first module, which has the smallest root mean square."""
    repeats = compute(1, 2, 3), compute(4, 5, 6, noise=1e-6 / 3)
    witnesses = [witness(rank, repeats=repeats, second=compute(7, 8, 9, noise=0.0)) for rank in range(4)]
    witnesses[2] = replace(witnesses[2], second=compute(7, 8, 9, noise=size / 3))
    judgement = judge(witnesses)
    assert judgement.spread == pytest.approx(1e-6, rel=1e-3)
    assert (judgement.difference is not None) == found
    assert ("kernels are not deterministic" in judgement.describe()) == (not found)


@pytest.mark.parametrize("wrong", [3.0, float("nan"), float("inf")])
def test_a_rank_whose_own_repetitions_differ_widely_does_not_widen_the_bound(wrong: float) -> None:
    repeats = compute(1, 2, 3), compute(4, 5, 6, noise=1e-7)
    witnesses = [witness(rank, repeats=repeats, second=compute(7, 8, 9, noise=1e-7)) for rank in range(4)]
    faulty = compute(9, 9, 9, noise=wrong)
    witnesses[1] = replace(witnesses[1], trained=faulty, repeats=(faulty, RIGHT), again=RIGHT)
    judgement = judge(witnesses)
    assert judgement.spread is not None and judgement.spread < 1e-6
    assert judgement.difference is not None


@pytest.mark.parametrize(
    ("expert", "stride", "span"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (2, 4, 1)], ids=["no", "data", "both", "inside"]
)
def test_ranks_that_share_experts_move_together(expert: int, stride: int, span: int) -> None:
    assert count_expert_span(expert, stride) == span


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param(["parallelism=pp"], "parallelism.pipeline=1", id="pipeline"),
        full(["parallelism=ddp", "compile=model"], "compile=block", id="compiled-whole"),
        full(["parallelism=single"], "parallelism.replicate=2", id="one-rank"),
        full([*LAYOUTS["tp2"]], "no other rank computes the same", id="tensor-only"),
        pytest.param([*LAYOUTS["ep4"], "parallelism.expert=4"], "parallelism.expert=4", id="all-share-experts"),
    ],
)
def test_what_can_not_be_audited_is_rejected(settings: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"debug\.audit=5: ") as caught:
        compose_tiny_run(tmp_path, *settings, "debug.audit=5")
    assert says in str(caught.value) and "debug.audit=0" in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param("ddp2", (), id="ddp2"),
        full("ddp3", (), id="ddp3"),
        full("fsdp2", ("precision=bf16", "memory=full"), id="fsdp2-recomputed"),
        full("hsdp4", (), id="hsdp4"),
        full("fsdp_tp", (), id="fsdp-tp"),
        full("fsdp_tp", ("parallelism.sequence_parallel=false",), id="fsdp-tp-whole-rows"),
        full("ep4", (), id="experts"),
        full("fsdp2", ("parallelism=fsdp_cp",), id="context"),
        full("fsdp2", ("compile=block", "compile.backend=eager"), id="compiled"),
        full("ddp2", ("compile=block", "compile.backend=eager"), id="compiled-ddp2"),
        full("fsdp2", ("dataset.mask_documents=true",), id="documents"),
    ],
)
def test_audits_change_nothing(layout: str, more: tuple[str, ...], tmp_path: Path) -> None:
    settings = (*LAYOUTS[layout], "parallelism.microbatches=2", "training.global_batch=256", "checkpoint=off", *more)
    plain, audited = (compose_tiny_run(tmp_path / str(n), *settings, f"debug.audit={n}") for n in (0, 2))
    states = [train_run(run)[0].last for run in (plain, audited)]
    assert read_learned_values(plain) == read_learned_values(audited)
    assert are_identical(*states)
    assert ["audit_seconds" in record for record in read_step_records(audited)] == [False, True, False]


def test_calls_of_compiled_modules_are_observed_from_outside() -> None:
    """A hook that is added later is ignored by compiled code, or compiled in; `OutputPrints` does neither."""

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + 1

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings, self.norm = torch.nn.Embedding(9, 4), torch.nn.LayerNorm(4)
            self.layers = torch.nn.ModuleDict({"0": Block()})

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x: torch.Tensor) -> Any:
            model: Any = self.model
            return model.norm(model.layers["0"](model.tok_embeddings(x))).sum()

    graphs: list[Any] = []
    stage, rows = Stage(), torch.arange(6).view(2, 3)
    block: Any = stage.model.layers["0"]
    block.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    stage(rows)
    compiled = block._compiled_call_impl
    with OutputPrints(stage, 1) as prints:
        stage(rows + 1)
        stage(rows)
        stage(rows + 2)
    assert list(prints.prints) == ["tok_embeddings", "layers.0", "norm", "the loss"]
    with OutputPrints(stage, 0) as again:
        stage(rows)
    assert again.read() == prints.read()
    assert len(graphs) == 1 and block._compiled_call_impl is compiled
