"""A Slurm controller that does not answer is a user's error, before anything is submitted."""

from __future__ import annotations

import pytest

from launchers.slurm import state, sweep
from titan.cluster import devices
from titan.cluster.gpus import GpuSearch
from titan.errors import ConfigError, RunError


def test_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*command: str) -> str:
        raise RunError(f"{command[0]}: Unable to contact slurm controller (connect failure)")

    monkeypatch.setattr(state, "run_command", unreachable)
    with pytest.raises(ConfigError, match=r"hydra/launcher=slurm: no Slurm controller answers .*; run this on a login"):
        sweep._check_controller()


def test_without_any_gpu_the_first_advice_is_not_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        devices, "find_gpus", lambda probe: GpuSearch([], [], "it is for the CPU only", "install torch")
    )
    with pytest.raises(
        ConfigError, match=r"only; send it to GPU nodes with hydra/launcher=slurm, .* or install torch\."
    ):
        devices.detect_machine("cuda")
