"""The acceptance suite: what its parts conclude from runs, that it goes on where it was, and its report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from titan.bench import command
from titan.bench.acceptance import parts, report
from titan.bench.acceptance.lab import Findings, Lab, Trained
from titan.bench.acceptance.parts import PARTS, Part
from titan.bench.command import main
from titan.errors import ConfigError

STEPS = [{"step": n, "loss": 8.0 - n / 10, "step_seconds": 0.5, "memory_gib": 2.0} for n in range(1, 6)]


class Told(Lab):
    """A lab whose runs end as a test says."""

    def __init__(self, folder: Path, runs: Mapping[str, Mapping[str, Any]], device: str = "cuda") -> None:
        super().__init__(folder, device, 2)
        object.__setattr__(self, "runs", runs)

    def train(self, name: str, *settings: str, **more: Any) -> Trained:
        how = {"code": 0, "output": "", "steps": STEPS, **self.runs.get(name, {})}  # type: ignore[attr-defined]
        return Trained(self.folder / "runs" / name, how["code"], how["output"], how["steps"], 1.0)


class Failing(Lab):
    """A lab whose commands end at once, as on a machine where nothing is installed."""

    def run(self, *given: Any, **more: Any) -> tuple[int, str]:
        return 2, "titan: it is not installed; install it.\n"


def changed(factor: float) -> list[dict[str, Any]]:
    return [{**line, "loss": line["loss"] * factor} for line in STEPS]


HUNG = "no step for 12 s: waiting for rank 1 in the all-gather (fsdp), step 6; rank 1: updating the weights"
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "another-loss": ("losses", {"losses-device": {"steps": changed(1.001)}}, "differ by 1.0e-03"),
    "a-loss-missing": ("losses", {"losses-device": {"steps": STEPS[:4]}}, "losses-cpu has 5 losses"),
    "a-failed-run": ("losses", {"losses-cpu": {"code": 1, "output": "it broke\n"}}, "exit code 1: it broke"),
    "a-layout": ("layouts", {"layouts-tp": {"steps": changed(1.01)}}, "tp: the losses"),
    "saves-change-losses": ("saves", {"saves-async": {"steps": changed(1.0001)}}, "saves-async"),
    "nan-not-marked": ("not-finite", {}, "steps [] are marked"),
    "nothing-said": ("stands-still", {}, "nothing was said about a step that stood still"),
    "no-snapshot": ("out-of-memory", {"out-of-memory": {"code": 1, "output": "out of memory"}}, "no snapshot"),
    "stopped-with-1": ("preemption", {"preemption": {"code": 1}}, "ended the run with exit code 1"),
    "no-profile": ("profile", {}, "no profile was written"),
    "another-rank": ("hang", {"hang": {"code": 1, "output": HUNG.replace("rank 1 in", "rank 0 in")}}, "rank 1 is not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_a_problem(name: str, tmp_path: Path) -> None:
    part, runs, problem = WRONG[name]
    (question,) = parts.select(part)
    assert any(problem in found for found in question.answer(Told(tmp_path, runs)).problems)


def test_what_holds_has_no_problem(tmp_path: Path) -> None:
    marked = [{**line, "not_finite": "the loss"} if line["step"] == 3 else line for line in STEPS]
    runs = {"not-finite": {"steps": marked}, "hang": {"code": 1, "output": HUNG}}
    (tmp_path / "runs/hang/debug/flight_recorder").mkdir(parents=True)
    (tmp_path / "runs/hang/debug/flight_recorder/rank_0").touch()
    for name in ("losses", "not-finite", "layouts", "hang", "saves", "experts"):
        (part,) = parts.select(name)
        assert part.answer(Told(tmp_path, runs)).problems == []
    assert (tmp_path / "flight_recorder" / "rank_0").exists()


@pytest.mark.parametrize(
    ("device", "cluster"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("a new GPU", None)],
)
def test_the_cluster_that_describes_a_gpu(device: str, cluster: str | None) -> None:
    assert command._describing_cluster(device) == cluster


@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_runs_that_fail_at_once_are_problems(part: Part, tmp_path: Path) -> None:
    found = part.answer(Failing(tmp_path, "cuda", 2, (), "h100"))
    assert any("exit code 2" in problem or "not 1" in problem for problem in found.problems)


def test_two_devices_are_needed_for_some(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "cuda", 1)
    assert [part.name for part in PARTS if part.name in ("layouts", "hang") and part.answer(lab).skipped] == [
        "layouts",
        "hang",
    ]


def test_it_goes_on_where_it_was_and_repeats_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    wrong = {"second": ["it is wrong"]}

    def part(name: str) -> Part:
        def answer(lab: Lab) -> Findings:
            ran.append(name)
            if name == "third":
                raise OSError("no space")
            return Findings({"loss": 1.25}, wrong.get(name, []))

        return Part(name, f"does the {name} hold", answer, 1)

    lab, some = Lab(tmp_path, "cuda", 1), [part(name) for name in ("first", "second", "third")]
    assert report.run(lab, some, {"device": "H"}) == 1
    text = (tmp_path / "report.md").read_text()
    assert "- second: it is wrong" in text and "- third: OSError: no space" in text and "| loss | 1.25 |" in text
    wrong.clear()
    assert report.run(lab, some[:2], {"device": "H"}) == 0
    assert ran == ["first", "second", "third", "second"] and "All parts hold." in (tmp_path / "report.md").read_text()
    report.run(lab, some[:1], {"device": "another"})
    assert ran[-1] == "first" and json.loads((tmp_path / "report.json").read_text())["about"] == {"device": "another"}


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(ConfigError, match="give a part of one of: losses, attention"):
        parts.select("speed of light")


@pytest.mark.full
def test_a_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """Training, a hook that disturbs it, and the report."""
    assert main(["--suite", "acceptance", "--report", str(tmp_path), "--case", "not-finite", "model.layers=1"]) == 0
    found = json.loads((tmp_path / "report.json").read_text())["parts"]["not-finite"]
    assert found["outcome"] == "holds" and found["figures"] == {"marked steps": [3]}
