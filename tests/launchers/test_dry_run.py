"""A dry run of Slurm shows the plan of what would be submitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launchers.slurm.script import JobShape
from launchers.slurm.sweep import format_cost
from titan import plan, train
from titan.cluster.schema import Cluster

RUN = ["model=debug", "dataset=synthetic", "checkpoint=off", "compile=off", "cluster.time=60"]
DRY = ["hydra/launcher=slurm", "hydra.launcher.dry_run=true"]
LINE = r"^{} +[\d.]+ s +[\d,]+ +[\d.]+ +\d+ +[\d.e+-]+( +[\d.e-]+ s of \w+)?$"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))


def shown(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert train.main([*given, *RUN, *DRY]) == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_a_run_shows_its_plan_on_the_nodes_of_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ["parallelism=fsdp", "cluster=h100", "cluster.nodes=2"]
    out = shown(capsys, *nodes)
    assert plan.main([*nodes, *RUN]) == 0
    text = capsys.readouterr().out.partition("\nfaster with")[0].rstrip()
    assert "16 x NVIDIA H100" in text and text in out and "#SBATCH" in out
    hours = re.search(r", ([\d.e-]+) device-hours \(", text)
    assert hours is not None and out.endswith(
        f"\n1 trial: {hours[1]} device-hours of training steps predicted; at most 16 by cluster.time, if each job is "
        "started once. Nothing was submitted.\n"
    )


AT_MOST = "at most {} by cluster.time, if each job is started once."


@pytest.mark.full
def test_data_that_are_not_here_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["cluster=h100", "parallelism=fsdp", *RUN, *DRY, "dataset=text", "dataset.path=here.txt"]) == 0
    sentence = (
        "titan: warning: dataset.path=here.txt: is not on this machine; the job fails unless its nodes have it.\n"
    )
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("predicted", "limits", "sentence"),
    [
        pytest.param([], [], "0 trials.", id="none"),
        pytest.param(
            [6.0],
            [None],
            "1 trial: 6 device-hours of training steps predicted; no limit without cluster.time.",
            id="no limit",
        ),
        pytest.param([None], [16.0], f"1 trial: device-hours not predicted; {AT_MOST.format(16)}", id="no prediction"),
        pytest.param(
            [6.0] * 12,
            [16.0] * 12,
            f"12 trials: 72 device-hours of training steps predicted; {AT_MOST.format(192)}",
            id="a sweep",
        ),
        pytest.param(
            [6.0, None],
            [16.0, 16.0],
            f"2 trials: 6 device-hours of training steps predicted for 1 of them; {AT_MOST.format(32)}",
            id="one is not predicted",
        ),
        pytest.param(
            [6.0, 20.0],
            [16.0, 16.0],
            f"2 trials: 26 device-hours of training steps predicted; {AT_MOST.format(32)} 1 trial needs more than "
            "cluster.time allows: raise it, or their jobs are started again.",
            id="longer than the limit",
        ),
    ],
)
def test_the_device_hours_are_those_of_all_jobs(
    predicted: list[float | None], limits: list[float | None], sentence: str
) -> None:
    assert format_cost(predicted, limits) == sentence


def test_a_chain_of_jobs_has_the_time_of_all_of_them() -> None:
    hours = [JobShape(2, 8, 8, Cluster(time="60", chain=chain)).compute_device_hours() for chain in (0, 3)]
    assert hours == [16.0, 48.0]


@pytest.mark.full
def test_a_sweep_shows_a_line_per_trial_and_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "-m", "name=grid", "parallelism=ddp,fsdp", "cluster=h100")
    for trial in ("ddp", "fsdp"):
        assert re.search(LINE.format(f"parallelism={trial}"), out, flags=re.M), trial
    assert re.search(r"^2 trials, [\d.]+ device-hours$", out, flags=re.M)


@pytest.mark.full
def test_unknown_hardware_names_the_figure_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "cluster.hardware.memory_gb_per_second=null"
    out = shown(capsys, "parallelism=fsdp", "cluster=h100", missing)
    (line,) = [line for line in out.splitlines() if line.startswith("no plan:")]
    assert missing in line and "give the figure" in line
    out = shown(capsys, "-m", "name=grid", "parallelism=fsdp", "cluster=h100,cpu")
    assert out.count("no plan:") == 1 and re.search(LINE.format("cluster=h100"), out, flags=re.M)
