"""The acceptance suite: what its parts conclude from runs, that it goes on where it was, and its report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.measure import acceptance, device_checks
from tests.measure.acceptance import PARTS, AcceptancePart
from tests.measure.command import main
from tests.measure.lab import Findings, Lab, TrainedRun
from titan.errors import ConfigError

STEPS = [{"step": n, "loss": 8.0 - n / 10, "step_seconds": 0.5, "memory_gib": 2.0} for n in range(1, 13)]


class Told(Lab):
    """A lab whose runs end as a test says."""

    def __init__(self, folder: Path, runs: Mapping[str, Mapping[str, Any]], device: str = "cuda") -> None:
        super().__init__(folder, device, 2)
        object.__setattr__(self, "runs", runs)

    def train(self, name: str, *settings: str, **more: Any) -> TrainedRun:
        how = {"code": 0, "output": "", "steps": STEPS, **self.runs.get(name, {})}  # type: ignore[attr-defined]
        return TrainedRun(self.folder / "runs" / name, how["code"], how["output"], how["steps"])


class Failing(Lab):
    """A lab whose commands end at once, as on a machine where nothing is installed."""

    def run(self, *given: Any, **more: Any) -> tuple[int, str]:
        return 2, "titan: it is not installed; install it.\n"


def changed(factor: float, after: int = 0, name: str = "loss") -> list[dict[str, Any]]:
    return [{**line, name: line[name] * (factor if line["step"] > after else 1)} for line in STEPS]


def slower(factor: float, after: int) -> list[dict[str, Any]]:
    return changed(factor, after, "step_seconds")


class Kernels(Lab):
    """A lab in which each kernel has the same result."""

    def __init__(self, folder: Path, result: Mapping[str, Any], device: str = "cuda") -> None:
        super().__init__(folder, device, 1)
        object.__setattr__(self, "result", result)

    def run(self, *given: Any, **more: Any) -> tuple[int, str]:
        pairs = product(("flash", "cudnn", "math", "flex"), ("fp32", "bf16"))
        lines = [{"kernel": name, "type": word, **self.result} for name, word in pairs]  # type: ignore[attr-defined]
        return 0, "\n".join(map(json.dumps, lines))


HUNG = "no step for 12 s: waiting for rank 1 in the all-gather (fsdp), step 6; rank 1: updating the weights"
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "another-loss": ("losses", {"losses-device": {"steps": changed(1.001)[1:]}}, "differ by 1.0e-03"),
    "a-loss-missing": ("losses", {"losses-device": {"steps": STEPS[1:4]}}, "losses-device has 3 losses, losses-cpu 11"),
    "a-failed-run": ("losses", {"losses-cpu": {"code": 1, "output": "it broke\n"}}, "exit code 1: it broke"),
    "a-layout": ("layouts", {"layouts-tp": {"steps": changed(1.01)}}, "tp: the losses"),
    "a-loss-of-nan": ("losses", {"losses-device": {"steps": changed(math.nan, after=1)[1:]}}, "differ by nan"),
    "saves-change-losses": ("saves", {"saves-async": {"steps": changed(1.0001)}}, "saves-async"),
    "slow-saves": ("saves", {"saves-async": {"steps": slower(1.2, after=6)}}, "a step beside a save takes 0.60 s"),
    "a-resume-changes-losses": ("saves", {"saves-resumed": {"steps": changed(1.0001)[6:]}}, "saves-resumed"),
    "a-save-can-not-be-read": ("saves", {"saves-resumed": {"code": 2, "output": "corrupt", "steps": []}}, "corrupt"),
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
    (question,) = acceptance.select_parts(part)
    assert any(problem in found for found in question.ask(Told(tmp_path, runs)).problems)


@pytest.mark.parametrize(
    ("result", "problems"),
    [
        pytest.param({"error": 0.001}, 0, id="right"),
        pytest.param({"error": 0.01}, 4, id="fp32-wrong"),
        pytest.param({"error": math.nan}, 8, id="nan"),
        pytest.param({"refused": "no kernel image"}, 4, id="refused"),
    ],
)
def test_kernels(result: Mapping[str, Any], problems: int, tmp_path: Path) -> None:
    assert len(acceptance.select_parts("attention")[0].ask(Kernels(tmp_path, result)).problems) == problems


def test_a_gradient_of_nan_is_an_error_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    results = device_checks._run_attention

    def with_nan(name: str, inputs: list[Tensor]) -> list[Tensor]:
        out, *gradients = results("math", inputs)
        return [out, *(gradients if name == "math" else [gradient * math.nan for gradient in gradients])]

    monkeypatch.setattr(device_checks, "_run_attention", with_nan)
    assert math.isnan(device_checks._compare_kernel("flash", torch.float32, torch.device("cpu"))["error"])


def test_what_holds_has_no_problem(tmp_path: Path) -> None:
    marked = [{**line, "not_finite": "the loss"} if line["step"] == 3 else line for line in STEPS]
    runs: dict[str, Any] = {"not-finite": {"steps": marked}, "hang": {"code": 1, "output": HUNG}}
    runs |= {"saves-resumed": {"steps": STEPS[6:]}, "losses-device": {"steps": STEPS[1:]}}
    (tmp_path / "runs/hang/debug/flight_recorder").mkdir(parents=True)
    (tmp_path / "runs/hang/debug/flight_recorder/rank_0").touch()
    for name in ("losses", "not-finite", "layouts", "hang", "saves", "experts"):
        (part,) = acceptance.select_parts(name)
        assert part.ask(Told(tmp_path, runs)).problems == []
    assert (tmp_path / "flight_recorder" / "rank_0").exists()


@pytest.mark.parametrize(
    ("device", "cluster"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("a new GPU", None)],
)
def test_the_cluster_that_describes_a_gpu(device: str, cluster: str | None) -> None:
    assert acceptance.find_cluster(device) == cluster


@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_runs_that_fail_at_once_are_problems(part: AcceptancePart, tmp_path: Path) -> None:
    found = part.ask(Failing(tmp_path, "cuda", 2, (), "h100"))
    assert any("exit code 2" in problem or "not 1" in problem for problem in found.problems)


def test_two_devices_are_needed_for_some(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "cuda", 1)
    assert [part.name for part in PARTS if part.name in ("layouts", "hang") and part.ask(lab).skipped] == [
        "layouts",
        "hang",
    ]


def test_it_goes_on_where_it_was_and_repeats_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    wrong = {"second": ["it is wrong"]}

    def part(name: str) -> AcceptancePart:
        def answer(lab: Lab, findings: Findings) -> None:
            ran.append(name)
            if name == "third":
                raise OSError("no space")
            findings.figures["loss"] = 1.25
            findings.problems += wrong.get(name, [])

        return AcceptancePart(name, f"does the {name} hold", answer)

    lab, some = Lab(tmp_path, "cuda", 1), [part(name) for name in ("first", "second", "third")]
    assert acceptance.run_parts(lab, some, {"device": "H"}) == 1
    text = (tmp_path / "report.md").read_text()
    assert "- second: it is wrong" in text and "- third: OSError: no space" in text and "| loss | 1.25 |" in text
    wrong.clear()
    assert acceptance.run_parts(lab, some[:2], {"device": "H"}) == 0
    assert ran == ["first", "second", "third", "second"] and "All parts hold." in (tmp_path / "report.md").read_text()
    (tmp_path / "runs" / "first-run").mkdir(parents=True)
    acceptance.run_parts(lab, some[:1], {"device": "another"})
    assert ran[-1] == "first" and not (tmp_path / "runs" / "first-run").exists(), "or the old run would be judged"
    about = json.loads((tmp_path / "report.json").read_text())["about"]
    assert about == {"device": "another", "settings": []}
    acceptance.run_parts(replace(lab, overrides=("precision=bf16",)), some[:1], {"device": "another"})
    assert len(ran) == 6, "with other settings it is another question"


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(ConfigError, match="give a part of one of: losses, attention"):
        acceptance.select_parts("speed of light")


@pytest.mark.full
def test_a_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """Training, a hook that disturbs it, and the report."""
    assert main(["suite=acceptance", f"to={tmp_path}", "case=not-finite", "model.layers=1"]) == 0
    found = json.loads((tmp_path / "report.json").read_text())["parts"]["not-finite"]
    assert found["outcome"] == "holds" and found["figures"] == {"marked steps": [3]}
