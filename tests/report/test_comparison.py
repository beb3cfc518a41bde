"""Whole comparisons: speed, failures, notes, sweeps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.support.made_runs import H200, Story, StoryAttempt, make_run, make_sweep, write_failure
from tests.support.shown_report import show_markdown, show_text
from titan.errors import ConfigError
from titan.report.comparison import compare
from titan.sweep.ledger import SweepSpec

S = Story()
SINGLE, FSDP = "parallelism=single", "parallelism=fsdp"


def test_only_what_differs_and_what_is_shared(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S, SINGLE)
    make_run(tmp_path / "b", S, FSDP)
    found = compare([tmp_path])
    assert found.differs == {"parallelism": ("single", "fsdp")}
    assert "parallelism" not in found.common and "devices" not in found.common
    assert found.common["training"] == "40 steps of 128 tokens, rows of 16"
    assert (found.title, found.question, found.margin, found.target) == (str(tmp_path), None, 0.02, None)
    assert [variant.baseline for variant in found.variants] == [True, False]


def test_a_lone_run_is_shown(tmp_path: Path) -> None:
    found = compare([make_run(tmp_path / "a")])
    assert len(found.variants) == 1 and found.variants[0].speed_ratio is None and found.differs == {}


def test_the_baseline_comes_first(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S, SINGLE)
    make_run(tmp_path / "b", S, FSDP)
    for named in (FSDP, "fsdp", "b"):  # a setting, its value alone, a run's name
        assert compare([tmp_path], baseline=named).variants[0].label == FSDP
    with pytest.raises(ConfigError, match="baseline=parallelism=tp"):
        compare([tmp_path], baseline="parallelism=tp")


def test_a_ratio_from_one_run_each_has_no_interval(tmp_path: Path) -> None:
    make_run(tmp_path / "a", replace(S, steps=200), SINGLE)
    make_run(tmp_path / "b", replace(S, steps=200, seconds=0.2, luck=1), FSDP)
    variant = compare([tmp_path]).variants[1]
    assert variant.speed_ratio is not None and variant.speed_ratio.low is None and variant.few
    assert variant.speed_ratio.estimate == pytest.approx(1.25, abs=0.02)  # 2.5 times, on two devices


def test_a_ratio_from_several_runs_is_from_pairs(tmp_path: Path) -> None:
    for seed, factor in enumerate((0.9, 1.0, 1.1)):
        make_run(tmp_path / f"a{seed}", replace(S, seed=seed, seconds=0.5 * factor, jitter=0), SINGLE)
        make_run(tmp_path / f"b{seed}", replace(S, seed=seed, seconds=0.2 * factor, jitter=0), FSDP)
    variant = compare([tmp_path]).variants[1]
    assert variant.speed_ratio is not None and variant.speed_ratio.low == pytest.approx(1.25)
    assert (
        variant.speed is not None and variant.speed.low is not None and variant.speed.low < 0.9 * variant.speed.estimate
    )
    assert not variant.few and not variant.speed_doubt


def test_ratios_of_runs_without_pairs_are_of_independent_runs(tmp_path: Path) -> None:
    for seed, factor in enumerate((0.9, 1.0, 1.1)):
        make_run(tmp_path / f"a{seed}", replace(S, seed=seed, seconds=0.5 * factor, jitter=0), SINGLE)
        make_run(tmp_path / f"b{seed}", replace(S, seed=seed + 5, seconds=0.2 * factor, jitter=0), FSDP)
    ratio = compare([tmp_path]).variants[1].speed_ratio
    assert ratio is not None and ratio.estimate == pytest.approx(1.25) and ratio.low is not None and ratio.low < 1.05


def test_a_speed_of_few_steps_has_no_interval(tmp_path: Path) -> None:
    found = compare([make_run(tmp_path / "a", Story(steps=9))]).variants[0].speed
    assert found is not None and found.low is None


@pytest.mark.full
def test_failures_are_listed_with_reasons(tmp_path: Path) -> None:
    make_run(tmp_path / "good", S, SINGLE)
    bad = make_run(tmp_path / "bad", replace(S, attempts=(StoryAttempt(0, 20),)), FSDP)
    write_failure(bad, "out of memory in model=x")
    none = make_run(tmp_path / "none", replace(S, attempts=(StoryAttempt(0, 1),)), "memory=full")
    (none / "metrics.jsonl").unlink()
    found = compare([tmp_path])
    assert {(f.label, f.state, f.reason.partition(";")[0]) for f in found.failed} == {
        (FSDP, "failed", "out of memory in model=x"),
        ("memory=full training.seed=0 training.steps=40", "stopped", "it ended without an error message"),
    }
    assert [variant.label for variant in found.variants] == [FSDP, SINGLE]
    assert any("1 of 1 runs not finished (1 failed)" in note for note in found.variants[0].notes)


def test_other_code_is_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S, SINGLE)
    make_run(tmp_path / "b", replace(S, code="abc"), FSDP)
    found = compare([tmp_path])
    assert "different code: abc; the baseline: c0de00000000" in found.variants[1].notes
    assert any("2 different versions of code or libraries: abc" in note for note in found.notes)
    with open(tmp_path / "b" / "run.yaml", "a") as record:
        record.write("own_code: {mine: a1}\n")
    assert any("code or libraries (not all use your mine): abc" in note for note in compare([tmp_path]).notes)


def test_a_layout_that_changed_is_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", replace(S, attempts=(StoryAttempt(0, 20), StoryAttempt(20, 40, (FSDP,)))))
    assert any("settings changed between attempts" in note for note in compare([tmp_path]).variants[0].notes)


def test_how_many_seeds_the_margin_takes_is_told(tmp_path: Path) -> None:
    for seed in range(4):
        make_run(tmp_path / str(seed), replace(S, seed=seed, level=3 + 0.01 * (seed % 2)))
    notes = compare([tmp_path]).notes
    assert any("deviation of 0.0058 nats over 4 seeds" in note and "takes 4 seeds" in note for note in notes)


@pytest.mark.full
def test_pairs_tell_how_many_more_seeds_each_variant_takes(tmp_path: Path) -> None:
    for letter, setting, noise in (
        ("a", SINGLE, 0.0),
        ("b", "optimizer.weight_decay=0.2", 0.001),
        ("c", "optimizer.lr=0.5", 0.05),
    ):
        for seed in range(3):
            story = replace(S, seed=seed, level=3 + 0.2 * seed + noise * (-1) ** seed)
            make_run(tmp_path / f"{letter}{seed}", story, setting)
    (note,) = (note for note in compare([tmp_path]).notes if "to show a difference" in note)
    assert re.search(r"pairs of seeds: .*weight_decay=0.2 has enough seeds, lr=0.5 .* needs \d+ more seeds$", note)


def test_a_sweep_gives_question_baseline_margin_and_target(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S, SINGLE)
    make_run(tmp_path / "b", S, FSDP)
    asked = SweepSpec("which layout?", {"parallelism": ("single", "fsdp")}, {"parallelism": "fsdp"}, 0.5, 3.2)
    make_sweep(tmp_path, asked, {"a": (SINGLE,), "b": (FSDP,), "c": ("parallelism=tp",)})
    found = compare([tmp_path])
    assert (found.title, found.question, found.margin, found.target) == (tmp_path.name, "which layout?", 0.5, 3.2)
    assert [variant.label for variant in found.variants] == [FSDP, SINGLE] and found.variants[0].reached is not None
    assert [(f.label, f.state) for f in found.failed] == [("parallelism=tp", "planned")]
    said = compare([tmp_path], baseline=SINGLE, margin=0.1, target=2.0)
    assert (said.variants[0].label, said.margin, said.target) == (SINGLE, 0.1, 2.0)


def test_texts_of_runs_change_no_terminal(tmp_path: Path) -> None:
    hostile = "a\x1b[2J\x1b]0;b\x07"
    make_run(tmp_path / "a", S, SINGLE)
    make_run(tmp_path / "b", replace(S, seed=1), FSDP)
    file = tmp_path / "b/run.yaml"
    documents = list(yaml.safe_load_all(file.read_text()))
    documents[-1]["choices"]["model"] = documents[-1]["config"]["optimizer"]["kind"] = hostile
    file.write_text(yaml.safe_dump_all(documents, explicit_start=True))
    asked = SweepSpec(hostile, {"parallelism": ("single", "fsdp")})
    make_sweep(tmp_path, asked, {"a": (SINGLE,), "b": (FSDP, f"name={hostile}"), "c": (hostile,)})
    found = compare([tmp_path])
    for text in (show_text(found, 100), show_markdown(found)):
        assert "\x1b" not in text and "\x07" not in text and "x1b[2J" in text


def test_a_sweeps_baseline_without_figures_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S, SINGLE)
    make_sweep(tmp_path, SweepSpec(baseline={"parallelism": "tp"}), {"a": (SINGLE,), "b": ("parallelism=tp",)})
    assert any("the sweep's baseline (parallelism=tp) has no metrics" in note for note in compare([tmp_path]).notes)


def test_of_several_sweeps_none_asks(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_run(tmp_path / name / "a", S, SINGLE)
        make_sweep(tmp_path / name, SweepSpec("?", margin=0.5), {"a": (SINGLE,)})
    found = compare([tmp_path / "one", tmp_path / "two"])
    assert (found.question, found.margin, len(found.variants), len(found.variants[0].runs)) == (None, 0.02, 1, 2)
    assert any("several sweeps" in note for note in found.notes)


def test_failures_only(tmp_path: Path) -> None:
    make_sweep(tmp_path, SweepSpec(), {"a": ("x=1",)}, {"event": "ended", "id": "a", "code": 2, "reason": "refused"})
    found = compare([tmp_path])
    assert (found.variants, found.failed[0].reason) == ((), "refused")


def test_other_hardware_makes_another_variant(tmp_path: Path) -> None:
    make_run(tmp_path / "a", S)
    make_run(tmp_path / "b", replace(S, device=H200 | {"name": "NVIDIA H100"}))
    assert [variant.label for variant in compare([tmp_path]).variants] == [
        "hardware=NVIDIA H200",
        "hardware=NVIDIA H100",
    ]
