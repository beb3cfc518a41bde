"""Which steps are profiled, and settings that are rejected."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from titan.cluster import operation_kinds as kinds
from titan.config.settings import build
from titan.errors import ConfigError
from titan.profile import summary
from titan.profile.schema import Profile
from titan.profile.summary import Summary

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


DAMAGED: dict[str, dict[str, Any]] = {
    "it is of 1 steps of 0 s": {"seconds": 0.0}, "it is of 1 steps of nan s": {"seconds": math.nan},
    "it is of 0 steps of 1 s": {"steps": []}, "memory.x is 'y'": {"memory": {"x": "y"}},
    "predicted is 3": {"predicted": 3},
}  # fmt: skip


@pytest.mark.parametrize("words", DAMAGED)
def test_a_summary_that_is_damaged_is_rejected(words: str, tmp_path: Path) -> None:
    content = {"rank": 0, "steps": [1], "seconds": 1.0, "parts": {}, "hidden": {}, **DAMAGED[words]}
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step-1-rank-0.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"step-1-rank-0.json: is no summary of a profile \({words}.*; remove it"):
        summary.read(tmp_path, None)


def test_ranks_without_work_of_their_own_are_compared() -> None:
    ranks = [Summary(rank, [1], 1.0, {kinds.IDLE: 1.0 - rank}, {}) for rank in (0, 0, 1)]
    assert "no rank is slow" in summary.compare_ranks(ranks)[-1]
