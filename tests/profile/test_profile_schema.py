"""Which steps are profiled, and settings that are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from titan.config.settings import build
from titan.errors import ConfigError
from titan.profile.schema import Profile

CONF = Path(__file__).parents[2] / "conf" / "profile"


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        pytest.param({}, [], id="off"),
        pytest.param({"active": 2, "wait": 3}, [3], id="once"),
        pytest.param({"active": 2, "wait": 0, "warmup": 0, "repeat": 2}, [0, 2], id="without-a-pause"),
        pytest.param({"active": 1, "wait": 1, "repeat": 0, "every": 5}, [1, 6, 11, 16], id="until-the-end"),
    ],
)
def test_profiles_start_at(given: dict[str, Any], starts: list[int]) -> None:
    profile = Profile(**given)
    assert [number for number in range(20) if profile.starts(number)] == starts


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_choices(file: Path) -> None:
    profile = build(Profile, yaml.safe_load(file.read_text()), "profile")
    profile.check(1)
    assert bool(profile.active) == (file.stem != "off")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"active": 3, "every": 2}, r"profile\.every=2: .*give at least 4, or 0", id="every"),
        pytest.param({"ranks": (0, 4)}, r"profile\.ranks=\[0, 4\]: .*no rank 4.*below 4, or \[\] for all", id="rank"),
    ],
)
def test_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profile(**given).check(4)
