"""Optimizers of other packages: what is found out about each, and that layouts then do the same with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import external_optimizers as table
from tests.support.runs import compose_tiny_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.optimizer.external.classify import RejectedError, Verdict, classify
from titan.optimizer.external.schema import External
from titan.optimizer.external.state import load_updater

OWN = "tests.support.own_optimizers."
SHAPES: dict[str, tuple[int, ...]] = {
    "tok_embeddings.weight": (400, 16), "layers.0.wq.weight": (24, 16), "norm.weight": (16,),
}  # fmt: skip
STACKS = {**SHAPES, "layers.0.experts.w1": (4, 12, 16)}


def judge(cls: str, shapes: Any = SHAPES, is_stacked: bool = False, **arguments: Any) -> Verdict:
    chosen = {n: s for n, s in shapes.items() if not is_stacked or n.startswith("layers.")}
    return classify(load_updater(cls if "." in cls else OWN + cls, arguments), chosen, is_stacked)


@pytest.mark.parametrize(
    ("cls", "shapes", "split"),
    [
        ("Signs", SHAPES, "elements"),
        full("torch.optim.Adam", STACKS, "elements"),
        full("MatrixNorms", STACKS, "matrices"),
        ("TrustRatio", STACKS, "whole"),
        full("Clipped", SHAPES, "whole"),
        full("CoupledDecay", SHAPES, "whole"),
        ("LaterWhole", SHAPES, "whole"),
        ("LargeWhole", SHAPES, "whole"),
        full("GroupCount", SHAPES, "elements"),
        full("EarlyState", SHAPES, "elements"),
        full("Noisy", SHAPES, "whole"),
        full("torch.optim.Adafactor", SHAPES, "whole"),
        full("torch.optim.ASGD", SHAPES, "elements"),
        full("torch.optim.AdamW", STACKS, "elements"),
    ],
)
def test_what_an_optimizer_updates_by_itself(cls: str, shapes: Any, split: str) -> None:
    arguments = {"amsgrad": True} if cls == "torch.optim.Adam" else {}
    assert judge(cls, shapes, **arguments).split == split


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        ("Joint", "jointly"),
        ("Hidden", "outside of its state"),
        ("NoisySystem", "random numbers"),
        full("Unscheduled", "no schedule has an effect"),
        ("Closed", "closure"),
        ("LateState", "late differs"),
        full("ObjectState", "ObjectState, which no checkpoint holds"),
        full("MatricesOnly", "raises ValueError on vectors: only matrices"),
        full("torch.optim.LBFGS", "closure"),
        full("torch.optim.SparseAdam", "does not support dense gradients"),
        full("torch.optim.Rprop", "no schedule has an effect"),
    ],
)
def test_what_no_layout_could_repeat_is_rejected(cls: str, reason: str) -> None:
    with pytest.raises(RejectedError, match=reason):
        judge(cls)


@pytest.mark.full
def test_matrices_alone_may_be_all_that_a_class_takes() -> None:
    assert judge("MatricesOnly", STACKS, is_stacked=True).split == "matrices"
    with pytest.raises(RejectedError, match="ratio differs between matrices"):
        judge("TrustRatio", STACKS, is_stacked=True)


@pytest.mark.full
def test_what_is_state_is_found_and_its_bytes() -> None:
    verdict = judge("GroupCount")
    assert (verdict.traits.counters, verdict.traits.settled) == (("k",), 1)
    assert judge("EarlyState").traits.settled == 3
    verdict = judge("MatrixNorms")
    elements, rows = 400 * 16 + 16, 400 + 1
    assert verdict.other_bytes == pytest.approx((4 * elements + 4 * rows) / elements, rel=0.01)
    assert verdict.matrix_bytes == pytest.approx(4 * (1 + 1 / 16))
    assert (verdict.largest, verdict.largest_bytes) == (6400, 4 * (6400 + 400))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("optimizer.cls=nowhere.Adam", "nowhere is not installed here; install nowhere"),
        ("optimizer.cls=torch.optim.Adan", "torch.optim has no Adan"),
        ("optimizer.cls=torch.nn.Linear", "no torch.optim.Optimizer"),
        ("optimizer.cls=AdamW", "names no module"),
        ("", "optimizer.cls is missing"),
        ("optimizer.cls=torch.optim.AdamW optimizer.args={beta:1}", "no argument beta; .*betas"),
        ("optimizer.cls=torch.optim.AdamW optimizer.args={lr:1}", "titan passes lr itself"),
        ("optimizer.cls=torch.optim.AdamW optimizer.args={params:1}", "params itself; leave it out[.]"),
        ("optimizer.cls=torch.optim.AdamW optimizer.args={eps:-1}", "building it .*epsilon.*; correct optimizer.args"),
        full("optimizer.cls=torch.optim.Adafactor optimizer.split=elements", "needs more than that: .*give auto"),
        full("optimizer.cls=torch.optim.SGD precision=bf16_pure", "precision.weights=bf16"),
        ("optimizer.cls=torch.optim.Rprop optimizer.weight_decay=0.1", "no argument weight_decay"),
        full("optimizer.cls=torch.optim.Muon", "give optimizer.parameters=matrices"),
    ],
)
def test_settings_that_cannot_work(settings: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose_tiny_run(tmp_path, "optimizer=external", *settings.split())


@pytest.mark.parametrize(("arguments", "takes"), [({}, True), ({"betas": 1}, False)], ids=["right", "wrong"])
def test_weight_decay_is_titans_where_arguments_have_no_names(arguments: dict[str, Any], takes: bool) -> None:
    updater = load_updater(f"{OWN}HandsOn", arguments)._replace(lr=0.1, weight_decay=0.0)
    assert ("weight_decay" in updater.takes) == takes
    if takes:
        (group,) = updater.build([torch.nn.Parameter(torch.ones(2))]).param_groups
        assert (group["lr"], group["weight_decay"]) == (0.1, 0.0)  # its default is 0.01


def build_case(cls: str, parameters: str = "all") -> table.Case:
    return table.Case(cls if "." in cls else OWN + cls, parameters=parameters, weight_decay=0.1)


OF_EACH_KIND = (
    build_case("TrustRatio"), build_case("MatrixNorms"), build_case("Signs"), build_case("GroupCount"),
    build_case("EarlyState"), build_case("Noisy"), build_case("MatricesOnly", "matrices"),
    build_case("FirstCounts"), build_case("NoisySigns", "matrices"),
)  # fmt: skip
SOME = OF_EACH_KIND[:2]
"""Those of the quick tier."""


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        full("fsdp", SOME, id="fsdp-some"),
        *(full(layout, OF_EACH_KIND, id=layout.replace(" ", "_")) for layout in table.LAYOUTS),
        full("fsdp of 3", OF_EACH_KIND, id="fsdp_of_3"),
    ],
)
def test_layouts_make_of_the_same_gradients_what_one_device_makes(
    layout: str, cases: tuple[table.Case, ...], tmp_path: Path
) -> None:
    model = table.EXPERTS if layout == "ep" else table.DENSE
    settings = table.LAYOUTS.get(layout, ("parallelism.shard=3",))
    one, several = compose_tiny_run(tmp_path, *model), compose_tiny_run(tmp_path, *model, *settings)
    measured = table.measure_cases(cases, one.model)
    optimizers = {name: found for name, found in measured.items() if isinstance(found, External)}
    assert len(optimizers) == len(cases)
    expected, found = table.step_layout(one, optimizers), table.step_layout(several, optimizers)
    for name in optimizers:
        assert not found[name].problem
        assert float(table.find_difference(found[name], expected[name].weights)) <= table.BOUND


@pytest.mark.full
def test_a_wrong_split_would_be_seen(tmp_path: Path) -> None:
    """With the verdict of an elementwise optimizer, one of the whole tensor becomes another on two ranks."""
    one, several = (compose_tiny_run(tmp_path, *table.DENSE, *s) for s in ((), table.LAYOUTS["fsdp"]))
    case = build_case("TrustRatio")
    settings = table.measure_cases([case], one.model)[case.name]
    assert isinstance(settings, External) and settings.measured
    wrong = dataclasses.replace(settings, measured={**settings.measured, "split": "elements"})
    expected = table.step_layout(one, {"it": settings})["it"].weights
    found = table.step_layout(several, {"it": wrong})["it"]
    assert float(table.find_difference(found, expected)) > 100 * table.BOUND


@pytest.mark.full
def test_one_device_does_what_the_class_does(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, *table.DENSE)
    cases = [case for case in OF_EACH_KIND if "Noisy" not in case.cls and case.parameters == "all"]
    measured = table.measure_cases(cases, run.model)
    found = table.step_layout(run, measured)  # type: ignore[arg-type]
    for name, settings in measured.items():
        assert isinstance(settings, External)
        assert float(table.find_difference(found[name], table.step_class(run, settings))) <= table.BOUND


@pytest.mark.full
def test_weights_to_evaluate_are_those_of_eval() -> None:
    """Here the mean of the weights before each step."""
    verdict = judge("Averaged")
    settings = External(cls=f"{OWN}Averaged", lr=0.1, weight_decay=0.0, measured=verdict.to_document())
    weights = {name: torch.nn.Parameter(table.make_gradient(name, shape, 0)) for name, shape in SHAPES.items()}
    optimizer: Any = settings.build(weights.items())
    before = []
    for step in range(3):
        before.append({name: weight.detach().clone() for name, weight in weights.items()})
        table.set_gradients(weights.items(), step)
        optimizer.step()
    for name, weight in weights.items():
        mean = torch.stack([values[name] for values in before]).mean(0)
        torch.testing.assert_close(optimizer.evaluation_weights(weight), mean)
        assert not torch.equal(weight, mean)


@pytest.mark.full
def test_a_parameter_without_gradient_stays_as_it_is() -> None:
    settings = External(cls=f"{OWN}Signs", lr=0.1, weight_decay=0.1, measured=judge("Signs").to_document())
    weights = {name: torch.nn.Parameter(table.make_gradient(name, shape, 0)) for name, shape in SHAPES.items()}
    optimizer = settings.build(weights.items())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for step in range(2):
        table.set_gradients([(n, w) for n, w in weights.items() if n != "norm.weight" or step == 1], step)
        optimizer.step()
        assert torch.equal(weights["norm.weight"], before["norm.weight"]) == (step == 0)
    counts = {name: float(optimizer.state[weight]["state/steps"]) for name, weight in weights.items()}
    assert counts == {"tok_embeddings.weight": 2, "layers.0.wq.weight": 2, "norm.weight": 1}
