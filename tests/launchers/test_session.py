"""The session of a sweep: its exit code, what it removes, and that each command has its own session."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.session import SweepSession
from titan.errors import ConfigError
from titan.sweep.ledger import LEDGER


def test_the_exit_code_is_the_first_that_is_not_0() -> None:
    assert [SweepSession(codes=codes).find_exit_code() for codes in ([0, 0], [0, 2, 1], [130])] == [0, 2, 130]
    with pytest.raises(ConfigError, match="-m: the sweep has no trials"):
        SweepSession().find_exit_code()
    with pytest.raises(ConfigError, match="this launcher is not titan's"):
        SweepSession()(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codes", "is_dry_run", "has_ledger", "removed"),
    [
        pytest.param([], False, False, True, id="rejected"),
        pytest.param([0], True, False, True, id="dry-run"),
        pytest.param([0], False, False, False, id="ran"),
        pytest.param([], False, True, False, id="begun"),
    ],
)
def test_folders_of_no_trial_are_removed(
    codes: list[int], is_dry_run: bool, has_ledger: bool, removed: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "s"
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").touch()
    if has_ledger:
        (folder / LEDGER).touch()
    SweepSession(codes=codes, is_dry_run=is_dry_run, new_folders=[folder, folder.parent]).remove_unused()
    assert (folder / "multirun.yaml").exists() == (not removed)
    assert (tmp_path / "runs").exists() == (not removed)
