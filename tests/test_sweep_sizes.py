"""READMEs of experiments say how many runs their sweep has."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.test_docs import EXPERIMENTS

SWEEPS = [sweep for page in EXPERIMENTS for sweep in sorted((page.parent / "conf" / "sweep").glob("*.yaml"))]


def count_runs(sweep: Path) -> int:
    """Return the number of combinations of a sweep's axes."""
    axes = yaml.safe_load(sweep.read_text())["hydra"]["sweeper"]["params"]
    parse = OverridesParser.create().parse_override
    overrides = [parse(f"{key}={values}") for key, values in axes.items()]
    return math.prod(len(list(o.sweep_iterator())) for o in overrides if o.is_sweep_override())


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.stem)
def test_the_number_of_runs_is_stated(sweep: Path) -> None:
    text = " ".join((sweep.parents[2] / "README.md").read_text().split())
    stated = re.findall(rf"`sweep={sweep.stem}` has (\d+) runs", text)
    assert stated == [str(count_runs(sweep))]
