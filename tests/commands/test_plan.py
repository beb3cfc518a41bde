"""`python -m titan.plan`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from titan import plan

RUN = ["model=llama1b", "dataset=synthetic", "checkpoint=off", "parallelism=fsdp", "cluster=h100", "compile=block"]


def test_one_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*RUN, "cluster.price=2.5", f"to={file}"]) == 0
    out = capsys.readouterr().out
    for text in (
        "8 x NVIDIA H100",
        "weights",
        "matmuls",
        "tokens/s per device",
        "MFU",
        "device-hours",
        "cost",
        "faster with",
    ):
        assert text in out
    assert len(out.splitlines()) <= 40
    found = json.loads(file.read_text())
    for name in ("step_seconds", "tokens_per_second_per_device", "memory_gib", "device_hours", "cost"):
        assert found[name]["low"] < found[name]["value"] < found[name]["high"], name
    for name in ("step_seconds", "memory_gib"):
        assert sum(found["parts"][name].values()) == pytest.approx(found[name]["value"])


def test_a_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*RUN, "training.global_batch=65536", "plan.search=true", "plan.keep=3", f"to={file}"]) == 0
    out = capsys.readouterr().out
    assert "the fastest that fit" in out and "front" in out
    assert len(json.loads(file.read_text())["search"]["best"]) == 3


def test_a_grid_is_planned_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan.main(["-m", *RUN[:3], *RUN[4:], "parallelism=ddp,fsdp", "name=grid"]) == 0
    out = capsys.readouterr().out
    assert "parallelism=ddp" in out and "parallelism=fsdp" in out and "2 trials" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["plan.serach=true"], "there is no such setting", id="setting"),
        pytest.param(["to=plan.txt"], "give a file whose name ends in .json", id="format"),
        pytest.param([*RUN, "parallelism.tensor=3"], "parallelism", id="layout"),
        pytest.param([*RUN, "cluster.hardware.memory_gb_per_second=null"], "operations needs it", id="figure"),
        pytest.param([*RUN[:3], "parallelism=single", "model=debug"], "titan.calibrate", id="this-machine"),
        pytest.param(["--cfg", "job"], "are for titan.train", id="cfg"),
    ],
)  # fmt: skip
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_planning_imports_no_torch() -> None:
    program = (
        "import sys; from titan import plan; code = plan.main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, *RUN], capture_output=True).returncode == 0
