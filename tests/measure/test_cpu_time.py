"""CPU time of tests and shared fixtures, with that of what they start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
from tests.measure import cpu_time
from tests.measure.cpu_time import add_options as pytest_addoption
from tests.measure.cpu_time import register as pytest_configure

cpu_time.measure_slowness = lambda: 1.0
"""
BURNING = """
import subprocess, sys, time
import pytest

def burn(seconds):
    while time.process_time() < seconds:
        pass

@pytest.fixture(scope="module")
def shared():
    burn(time.process_time() + 0.3)

def test_burns(): burn(time.process_time() + 0.3)
def test_sleeps(): time.sleep(0.3)
def test_starts_one_that_burns():
    code = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
def test_shares(shared): pass
"""


@pytest.mark.full
def test_what_takes_more_cpu_time_than_allowed_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_burning.py").write_text(BURNING)
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--rootdir", ".", "--slowest", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--cpu-limit", "0.2", "."],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    failed = [line.split(":: ")[-1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    names = ("::test_burns:", "::test_starts_one_that_burns:", "::shared (fixture):")
    assert done.returncode == 1 and "4 passed" in done.stdout, done.stdout + done.stderr
    assert len(failed) == len(names) and all(any(name in line for line in failed) for name in names), done.stdout
    assert "CPU time: 1 s in 5 tests and shared fixtures" in done.stdout
