"""`python -m titan.calibrate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titan import calibrate, plan
from titan.bench import calibration


def test_what_is_measured_can_be_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "REPEATS", 1)
    monkeypatch.setattr(calibration, "ROWS", {"cpu": (1, 2, 128, 32)})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    file = tmp_path / "mine" / "cluster" / "here.yaml"
    assert calibrate.main([f"to={file}"]) == 0
    assert "link_gb_per_second" in file.read_text()
    given = ["--config-dir", str(tmp_path / "mine"), "cluster=here", "model=debug", "dataset=synthetic"]
    assert plan.main([*given, "parallelism=ddp"]) == 0
    assert "tokens/s per device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["to=here.txt"], "give a name that ends in .yaml", id="format"),
        pytest.param([], "to is missing", id="nothing"),
        pytest.param(["to=x.yaml", "ranks=0"], "ranks=0", id="ranks"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_matmuls_with_a_start_up_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(work: tuple[int, int, int], _: object) -> float:
        m, n, k = work
        return 2 * m * n * (k + 64) / 1e12

    monkeypatch.setattr(calibration, "_matmul", lambda m, n, k, *_: (m, n, k))
    monkeypatch.setattr(calibration, "_best", times)
    rate, prologue = calibration.matmul_figures(torch.device("cpu"), torch.float32)
    assert prologue == 64 and rate == pytest.approx(1e12)
