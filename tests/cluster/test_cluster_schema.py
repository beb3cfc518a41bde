from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from titan.cluster.checks import check_cluster
from titan.cluster.schema import Cluster
from titan.config.settings import build
from titan.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf" / "cluster"


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_choices_hold_only_known_settings_and_say_what_they_are(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# ")
    build(Cluster, yaml.safe_load(text), "cluster")


def test_cpu_is_the_cpu() -> None:
    assert build(Cluster, yaml.safe_load((CONF / "cpu.yaml").read_text())).device == "cpu"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"devices": 0}, "cluster.devices=0: must be at least 1 or auto", id="devices"),
        pytest.param({"devices": "all"}, "cluster.devices=all: expected a number or auto", id="word"),
        pytest.param({"device": "gpu"}, "cluster.device=gpu: choose one of auto, cpu, cuda", id="device"),
        pytest.param({"restarts": -1}, "cluster.restarts=-1: must be at least 0", id="restarts"),
        pytest.param({"timeout": 0}, "cluster.timeout=0: must be at least 1", id="timeout"),
        pytest.param({"step_timeout": 0}, "cluster.step_timeout=0: must be at least 1 or auto", id="step-timeout"),
    ],
)
def test_refusals(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Cluster, given, "cluster")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [({}, 600), ({"timeout": 60}, 60), ({"step_timeout": 90}, 90), ({"step_timeout": "auto"}, 600)],
)
def test_a_steps_timeout_is_the_shorter_one(given: dict[str, object], seconds: float) -> None:
    cluster = build(Cluster, given, "cluster")
    check_cluster(cluster)
    assert cluster.step_seconds == seconds


def test_a_steps_timeout_that_is_the_longer_one_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster.step_timeout=90: longer than cluster.timeout=60, .*give a smaller value"
    ):
        check_cluster(build(Cluster, {"timeout": 60, "step_timeout": 90}, "cluster"))
