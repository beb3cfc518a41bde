"""The wheel carries conf/ and the built-in tokenizer, and runs from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is unpacked, as an installer does."""
    out = tmp_path_factory.mktemp("wheel")
    build = f"from hatchling.build import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = out.glob("titan-*.whl")
    zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


def python(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_it_is_the_wheel_that_runs(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, "-c", "import titan.run.compose; print(titan.run.hydra_session.CONF)")
    assert done.stdout.strip() == str(site / "titan" / "conf")


@pytest.mark.full
def test_train(site: Path, tmp_path: Path) -> None:
    small = ["model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=32", "training.steps=2"]
    quiet = ["evaluation.tokens=0", "metrics.sample_tokens=4", "metrics.plot=false", "name=x"]
    done = python(site, tmp_path, "-m", "titan.train", *small, *quiet, "training.global_batch=256")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "x" / "result.json").is_file()
    assert "the trained model (prompt | continuation)" in done.stdout


def test_console_script_is_declared(site: Path) -> None:
    (entry_points,) = site.glob("titan-*.dist-info/entry_points.txt")
    for command in ("train", "prepare", "data", "generate", "status", "convert", "compare", "replay"):
        assert f"titan-{command} = titan.{command}:cli" in entry_points.read_text()
    assert "titan-profile = titan.profile.__main__:cli" in entry_points.read_text()


@pytest.mark.full
def test_a_script_composes_with_the_api(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, "-c", "from titan import api; print(api.compose('model=debug').model.layers)")
    assert done.stdout == "6\n", done.stderr


def test_pages_have_their_templates_and_styles(site: Path, tmp_path: Path) -> None:
    files = "('page.css', 'page.js', 'page.html.jinja', 'plan.css', 'law.css')"
    read = f"from titan.report.render.document import read_file; print(*(len(read_file(file)) for file in {files}))"
    done = python(site, tmp_path, "-c", read)
    assert done.returncode == 0 and all(int(size) > 200 for size in done.stdout.split()), done.stderr
