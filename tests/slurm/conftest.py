"""A Slurm for the tests in this folder: each pytest worker that runs one of them starts a cluster of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.slurm_cluster import Slurm, list_missing


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for Slurm's sockets, unlike those that pytest gives."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def slurm_folder() -> Iterator[Path]:
    """A folder for a cluster of a test's own; without Slurm the test is skipped."""
    skip_without_slurm()
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def one_slurm() -> Iterator[Slurm]:
    """A cluster of four nodes, started at first use; `slurm` is what tests take."""
    skip_without_slurm()
    with short_folder() as folder:
        slurm = Slurm.start(folder, nodes=4)
        try:
            yield slurm
        finally:
            slurm.stop()


def skip_without_slurm() -> None:
    """Skip the test where Slurm is not installed."""
    if absent := list_missing():
        pytest.skip(f"no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client munge")


@pytest.fixture
def slurm(one_slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The cluster, idle before and after the test, and this process set up to be its client."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name, value in one_slurm.env.items():
        monkeypatch.setenv(name, value)
    yield one_slurm
    one_slurm.clear()
