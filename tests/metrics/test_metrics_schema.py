from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from titan.config.settings import build
from titan.errors import ConfigError
from titan.metrics.schema import Metrics, MLflow, Trackio

CONF = Path(__file__).parents[2] / "conf" / "metrics"


@pytest.mark.parametrize(
    ("choice", "changed"),
    [
        ("default", {}),
        ("tensorboard", {"tensorboard": True}),
        ("wandb", {"wandb": True}),
        ("mlflow", {"trackers": {"mlflow": MLflow()}}),
        ("trackio", {"trackers": {"trackio": Trackio()}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_choices(choice: str, changed: dict[str, Any]) -> None:
    text = (CONF / f"{choice}.yaml").read_text()
    assert text.startswith("# ")
    assert build(Metrics, yaml.safe_load(text), "metrics") == Metrics(**changed)


@pytest.mark.parametrize(
    "given",
    [{"console_every": 0}, {"sample_tokens": -1}, {"wandb_mode": "disabled"}],
    ids=str,
)
def test_refusals(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"^metrics\.{next(iter(given))}="):
        build(Metrics, given, "metrics")
