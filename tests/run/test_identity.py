"""Ids: what is the same experiment, walked over every field of every axis."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from tests.support.composing import compose_test_run
from tests.support.machines import NO_COMPILER, make_detector
from tests.support.tiers import full, select_cases
from titan.cluster import devices
from titan.config import settings
from titan.dataset.schema import KINDS as DATASETS
from titan.evaluation.schema import Task
from titan.hooks.schema import Hook
from titan.metrics.schema import Tracker
from titan.optimizer.schema import SGD, AdamW, Muon
from titan.run import identity
from titan.run.run import Run, as_config
from titan.run.schema import Recipe
from titan.schedule.schema import KINDS as SCHEDULES
from titan.training.loss_terms import LossTerm

pytestmark = pytest.mark.usefixtures("laptop")
ROOT = Path(__file__).resolve().parents[2]
EXECUTION = {  # in an axis of science, but without a say in what is learned
    "training.attention", "training.gc_every", "training.loss_chunk", "training.repeat", "training.tokens",
    "training.hours", "training.step_seconds", "training.measured",
    "dataset.cache", "dataset.prefetch", "dataset.path", "dataset.tokenizer", "dataset.epochs",
    "dataset.workers", "dataset.stream", "dataset.sources", "dataset.keep_gib", "dataset.name", "dataset.revision",
    "optimizer.implementation", "precision.emulate", "precision.float8_gather",
}  # fmt: skip
SCIENCE = ("model", "dataset", "optimizer", "schedule", "training", "precision")
HINTS = typing.get_type_hints(Recipe)
KINDS: dict[str, list[type]] = {axis: [HINTS[axis]] for axis in Recipe.axes()}
KINDS |= {"dataset": list(DATASETS.values()), "optimizer": [AdamW, SGD, Muon], "schedule": list(SCHEDULES.values())}
ALL = [pytest.param(axis, kind, id=kind.__name__) for axis, kinds in KINDS.items() for kind in kinds]


@pytest.fixture(scope="module")
def base() -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "detect_machine", make_detector("cpu"))
        return compose_test_run(["name=x"])


def another(value: Any, kind: Any) -> Any:
    """A value of the same type that is not `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, tuple):
        return (0.5, 0.25)
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != value)
    return 7 if int in typing.get_args(kind) else f"{value}-other" if value else "other"


def given(kind: type) -> dict[str, Any]:
    """A value for each field that has to be given."""
    return {f.name: "given" for f in dataclasses.fields(kind) if f.default == settings.MISSING}


def of(run: Run, digest: str = "d", parent: str | None = None) -> identity.Ids:
    return identity.compute_ids(run, identity.collect_science(run, digest, parent))


@pytest.mark.parametrize(
    ("axis", "kind"), select_cases(ALL, ("AdamW", "WSD", "InverseSqrt", "Constant", "Memory", "Debug"))
)
def test_every_field_is_in_one_id_and_not_in_the_other_or_untold(axis: str, kind: type, base: Run) -> None:
    differ = {}
    for field in dataclasses.fields(kind):
        name = field.name
        science = axis in SCIENCE and f"{axis}.{name}" not in EXECUTION
        in_ids = field.metadata.get("in_ids", True)
        group = (science and name != "seed") or (axis, name) == ("dataset", "seed")
        wanted = {"science": science, "execution": not science and in_ids, "group": group, "code": False}
        if (found := changed(axis, kind, name, base)) != wanted:
            differ[name] = found
    assert differ == {}


def changed(axis: str, kind: type, name: str, base: Run) -> dict[str, bool]:
    """Return which ids another value of a field changes."""
    before = kind(**given(kind))
    value = another(getattr(before, name), typing.get_type_hints(kind)[name])
    after = dataclasses.replace(before, **{name: value})
    old, new = (of(dataclasses.replace(base, **{axis: content})) for content in (before, after))
    return {key: getattr(old, key) != getattr(new, key) for key in ("science", "execution", "group", "code")}


@pytest.mark.full
@pytest.mark.parametrize("axis", ["dataset", "optimizer", "schedule"])
def test_kinds_with_equal_settings_are_told_apart(axis: str, base: Run) -> None:
    ids = {of(dataclasses.replace(base, **{axis: kind(**given(kind))})).science for kind in KINDS[axis]}
    assert len(ids) == len(KINDS[axis])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTask(Task):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTerm(LossTerm):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnHook(Hook):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTracker(Tracker):
    pass


def with_part(base: Run, part: Any) -> Run:
    """The run with a part at the place where the user gives it a name."""
    if isinstance(part, Hook):
        return dataclasses.replace(base, hooks={"a": part})
    places = {Task: ("evaluation", "tasks"), LossTerm: ("training", "loss_terms"), Tracker: ("metrics", "trackers")}
    (axis, field) = next(place for kind, place in places.items() if isinstance(part, kind))
    return dataclasses.replace(base, **{axis: dataclasses.replace(getattr(base, axis), **{field: {"a": part}})})


@pytest.mark.parametrize(
    ("titans", "own", "changes"),
    [
        pytest.param(Task(path="p"), OwnTask(path="p"), "execution", id="task"),
        pytest.param(LossTerm(), OwnTerm(), "science", id="loss-term"),
        pytest.param(Hook(), OwnHook(), "execution", id="hook"),
        pytest.param(Tracker(), OwnTracker(), "execution", id="tracker"),
    ],
)
def test_the_class_of_a_named_part_is_in_one_id_and_in_run_yaml(titans: Any, own: Any, changes: str, base: Run) -> None:
    old, new = (of(with_part(base, part)) for part in (titans, own))
    assert [key for key in ("science", "execution") if getattr(old, key) != getattr(new, key)] == [changes]
    assert f"'_target_': '{__name__}.{type(own).__name__}'" in str(as_config(with_part(base, own)))


def test_tasks_of_titan_have_the_ids_from_before_classes_were_recorded(base: Run) -> None:
    content = {"path": "p", "format": "arc", "limit": None, "bos": False}
    found = identity.select_settings(with_part(base, Task(path="p", format="arc")), science=False)
    assert found["evaluation.tasks"] == {"a": content}


@pytest.mark.full
@pytest.mark.parametrize(
    "override",
    [full("parallelism=fsdp"), full("memory=full"), "checkpoint=off", "metrics=wandb",
     full("compile=block", marks=pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)),
     full("debug=deterministic"), "profile=once", full("cluster=cpu"), full("name=y"), full("hydra.run.dir=z")],
)  # fmt: skip
def test_execution_choices_change_no_science(override: str, base: Run) -> None:
    assert of(compose_test_run([override])).science == of(base).science


@pytest.mark.full
def test_layout_as_resolved_is_execution() -> None:
    assert (
        of(compose_test_run(["parallelism=fsdp"])).execution
        != of(compose_test_run(["parallelism=fsdp", "cluster.devices=3"])).execution
    )


@pytest.mark.full
def test_a_default_that_is_spelled_out_changes_nothing(base: Run) -> None:
    defaults = [  # an empty mapping is the default of a setting that is a class
        f"{axis}.{field.name}=" + ("{}" if dataclasses.is_dataclass(d := field.default) else settings.format_value(d))
        for axis in ("training", "parallelism", "memory", "debug")
        for field in dataclasses.fields(KINDS[axis][0])
    ]
    assert of(compose_test_run(defaults)) == of(base)


def test_a_new_field_with_its_old_meaning_changes_no_id(base: Run) -> None:
    old = type(base.training)
    wider = dataclasses.make_dataclass(
        "Training", [("sharpening", float, settings.setting(0.0, "new"))], bases=(old,), frozen=True
    )
    fields = {f.name: getattr(base.training, f.name) for f in dataclasses.fields(old)}

    class Wider(Run):
        training: wider  # type: ignore[valid-type]

    Wider.__annotations__["training"] = wider
    values = {f.name: getattr(base, f.name) for f in dataclasses.fields(Run)}
    same = Wider(**values | {"training": wider(**fields)})
    other = Wider(**values | {"training": wider(**fields, sharpening=0.1)})
    assert of(same) == of(base)
    assert of(other).science != of(base).science


def test_data_and_parent_are_science(base: Run) -> None:
    ids = {of(base).science, of(base, digest="e").science, of(base, parent="abc@3").science}
    assert len(ids) == 3


def test_group_is_the_same_for_all_seeds(base: Run) -> None:
    runs = [compose_test_run([f"training.seed={seed}"]) for seed in range(3)]
    assert len({of(run).science for run in runs}) == 3
    assert {of(run).group for run in runs} == {of(base).group}


def test_a_schedule_counts_as_resolved() -> None:
    """Ids of runs from before `auto` existed, when 1F1B was the default."""
    lines = (["parallelism=pp"], ["parallelism=pp", "parallelism.schedule=1F1B"], [])
    assert [of(compose_test_run(line)).execution for line in lines] == ["e87ba372f58f", "e87ba372f58f", "e93812440609"]
    few = ["parallelism=pp", "training.global_batch=256"]
    assert of(compose_test_run(few)) == of(compose_test_run([*few, "parallelism.schedule=GPipe"]))


@pytest.mark.parametrize(("kind", "same_as"), [full("cpu", "fp32"), ("gpu", "bf16")])
def test_precision_counts_as_resolved(kind: str, same_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector(kind))
    ids = {choice: of(compose_test_run([f"precision={choice}"])).science for choice in ("auto", "fp32", "bf16")}
    assert ids["auto"] == ids[same_as]
    assert ids["fp32"] != ids["bf16"]


@pytest.mark.full
def test_ids_are_the_same_in_another_process(base: Run) -> None:
    program = (
        "from titan.run import compose, identity; from titan.cluster import devices\n"
        "from tests.support.machines import make_detector\n"
        "devices.detect_machine = make_detector('cpu'); run = compose.compose_run(['name=y'])\n"
        "ids = identity.compute_ids(run, identity.collect_science(run, 'd', None))\n"
        "print(ids.science, ids.group, ids.execution)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    ids = of(base)
    assert done.stdout.split() == [ids.science, ids.group, ids.execution]


def test_digest_has_not_changed_its_meaning() -> None:
    content = {"training.steps": 5, "data": "d", "optimizer.betas": [0.9, 0.95], "model.head_dim": None}
    assert (
        identity.compute_digest(content) == identity.compute_digest(dict(reversed(content.items()))) == "d89fb93c14ba"
    )
