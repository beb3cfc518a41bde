"""The measured time of a step: of finished runs that compute the same on the same devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.composing import compose_test_run
from tests.support.made_runs import Story, StoryAttempt, make_run
from tests.support.runs import TINY
from tests.support.tiers import full, select_cases
from titan.errors import ConfigError
from titan.estimate.plan import SECONDS_PER_HOUR
from titan.run import identity
from titan.run.measured import measure_step
from titan.run.run import Run

FSDP = "parallelism=fsdp"


def compose(tmp_path: Path, *overrides: str) -> Run:
    return compose_test_run([*TINY, f"training.measured={tmp_path}", *overrides, "name=x"])


def make(directory: Path, seconds: float, *overrides: str, **story: Any) -> Path:
    """A finished run on this machine, whose steps all take as long."""
    machine = compose_test_run([*TINY, "name=x"]).machine
    device = {"device": machine.device, "name": machine.name, "cores": machine.cores, **story.pop("device", {})}
    return make_run(directory, Story(seconds=seconds, jitter=0.0, device=device, **story), *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        full((), id="the-same"),
        full(("optimizer.lr=0.5", "training.seed=3", "schedule=cosine"), id="another-rate"),
        pytest.param(("training.steps=9", "checkpoint=off", "evaluation.tokens=64", "dataset.seed=3"), id="length"),
    ],
)
def test_settings_that_change_no_steps_time_may_differ(overrides: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path / "a", 0.5)
    assert measure_step(compose(tmp_path, *overrides)).seconds == pytest.approx(0.5)


@pytest.mark.full
def test_runs_on_another_number_of_nodes_are_rejected(tmp_path: Path) -> None:
    file = make(tmp_path / "a", 0.5) / "run.yaml"
    text = file.read_text()
    assert text.count("    nodes: 1\n") == 1
    file.write_text(text.replace("    nodes: 1\n", "    nodes: 2\n"))
    with pytest.raises(ConfigError, match=r"cluster\.nodes is 2 there and 1 here"):
        measure_step(compose(tmp_path))


@pytest.mark.full
def test_each_variant_is_measured_by_its_own_runs(tmp_path: Path) -> None:
    make(tmp_path / "a", 0.5)
    make(tmp_path / "b", 0.25, FSDP)
    for seed, seconds in enumerate((1.0, 0.2)):
        make(tmp_path / f"c{seed}", seconds, FSDP, seed=seed)
    measured = [measure_step(compose(tmp_path, o)).seconds for o in ("parallelism=single", FSDP)]
    assert measured == pytest.approx([0.5, 0.25])
    assert measure_step(compose(tmp_path / "b", FSDP)).seconds == pytest.approx(0.25)


@pytest.mark.full
def test_a_run_of_an_older_version_is_measured(tmp_path: Path) -> None:
    file = make(tmp_path / "a", 0.5, FSDP) / "run.yaml"
    text = file.read_text().replace("    prefetch: auto\n", "    prefetch: 0\n")
    for line in ("regather: auto", "dispatcher: alltoall", "reduce_buffers: 1", "float8_gather: true"):
        assert f"    {line}\n" in text
        text = text.replace(f"    {line}\n", "")
    file.write_text(text)
    assert measure_step(compose(tmp_path, FSDP)).seconds == pytest.approx(0.5)


DIFFERENT = {
    "layout": ((FSDP,), {}, "layout.shard is 1 there and 2 here"),
    "batch": (("training.global_batch=256",), {}, "training.global_batch is 128 there and 256 here"),
    "memory": (("memory=full",), {}, "memory.checkpointing is none there and full here"),
    "model": (("model.layers=3",), {}, "model.layers is 2 there and 3 here"),
    "optimizer": (("optimizer=sgd",), {}, "optimizer.class is titan.optimizer.AdamW there"),
    "device": ((), {"device": {"name": "another processor"}}, "machine.name is another processor there"),
    "cores": ((), {"device": {"cores": 4096}}, "machine.cores is 4096 there"),
}


@pytest.mark.parametrize(
    ("overrides", "story", "words"),
    select_cases([pytest.param(*c, id=n) for n, c in DIFFERENT.items()], ("layout", "batch", "device")),
)
def test_other_runs_are_rejected_with_what_differs(
    overrides: tuple[str, ...], story: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "a", 0.5, **story)
    with pytest.raises(ConfigError) as error:
        measure_step(compose(tmp_path, *overrides))
    assert words in str(error.value) and "none of its 1 finished run computes as this run does" in str(error.value)


UNFIT = {
    "nothing": None,
    "unfinished": {"attempts": (StoryAttempt(0, 30),)},
    "too-short": {"steps": 5},
    "gave-up": {"bad": 20},
}


@pytest.mark.parametrize(
    "story", select_cases([pytest.param(story, id=name) for name, story in UNFIT.items()], ("unfinished", "too-short"))
)
def test_a_folder_without_a_finished_run_is_rejected(story: dict[str, Any] | None, tmp_path: Path) -> None:
    if story is not None:
        make(tmp_path / "a", 0.5, **story)
    with pytest.raises(ConfigError, match="holds no finished run of at least 6 steps"):
        measure_step(compose(tmp_path))


@pytest.mark.full
def test_the_first_steps_of_the_last_attempt_do_not_count(tmp_path: Path) -> None:
    directory = make(tmp_path / "a", 0.5, attempts=(StoryAttempt(0, 20), StoryAttempt(20, 40)))
    lines = directory / "metrics.jsonl"
    slow = lines.read_text().replace('"step_seconds": 0.5', '"step_seconds": 9.0', 23)
    lines.write_text(slow)
    assert slow.count('"step_seconds": 9.0') == 23
    assert measure_step(compose(tmp_path)).seconds == pytest.approx(0.5)


@pytest.mark.full
def test_a_run_that_has_changed_is_read_again(tmp_path: Path) -> None:
    lines = make(tmp_path / "a", 0.5) / "metrics.jsonl"
    assert measure_step(compose(tmp_path)).seconds == pytest.approx(0.5)
    lines.write_text(lines.read_text().replace('"step_seconds": 0.5', '"step_seconds": 0.75'))
    assert measure_step(compose(tmp_path)).seconds == pytest.approx(0.75)


@pytest.mark.full
def test_hours_by_measured_steps(tmp_path: Path) -> None:
    make(tmp_path / "a", 0.5)
    stepless = [o for o in TINY if not o.startswith("training.steps")]
    words = [*stepless, "training.hours=0.1", "name=x"]
    run = compose_test_run([*words, f"training.measured={tmp_path}"])
    assert run.training.steps == 0.1 * SECONDS_PER_HOUR / 0.5
    with pytest.raises(ConfigError, match=r"training\.step_seconds=2 gives the time of a step, too; leave one"):
        compose_test_run([*words, f"training.measured={tmp_path}", "training.step_seconds=2"])


def test_where_steps_were_measured_is_part_of_no_id(tmp_path: Path) -> None:
    run = compose(tmp_path)
    other = dataclasses.replace(run, training=dataclasses.replace(run.training, measured=None))
    assert identity.compute_trial_id(run) == identity.compute_trial_id(other)
