"""`python -m titan.compare`: what it shows, what it writes and where, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import shown_report
from tests.support.made_runs import Story, StoryAttempt, make_run
from titan import compare
from titan.report import comparison
from titan.report.findings import Comparison


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with folders to compare; findings are made ones."""
    for name in ("runs/grid", "runs/other", "lr=0.1", "out"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "compare", lambda directories, **options: shown_report.make_mixed())
    return tmp_path


def test_a_table_and_a_page_in_the_first_directory(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["runs/grid", "runs/other"]) == 0
    screen = capsys.readouterr()
    assert screen.err == "" and screen.out.startswith("layouts\n") and "out of memory on rank 3" in screen.out
    assert screen.out.endswith("\nwritten: runs/grid/compare.html\n") and "\x1b" not in screen.out
    page = (place / "runs" / "grid" / "compare.html").read_text(encoding="utf-8")
    assert "python -m titan.compare runs/grid runs/other</p>" in page
    assert not list((place / "runs" / "other").iterdir())


def test_runs_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"runs/single-{seed}", Story(seed=seed), "parallelism=single")
        make_run(tmp_path / f"runs/fsdp-{seed}", Story(seed=seed, seconds=0.2), "parallelism=fsdp")
    make_run(tmp_path / "runs/open", Story(seed=2, attempts=(StoryAttempt(0, 10),)), "parallelism=fsdp")
    assert compare.main([f"{tmp_path}/runs", "baseline=parallelism=single", f"to={tmp_path}/x.csv"]) == 0
    screen = capsys.readouterr().out
    assert "parallelism=fsdp learns the same as the baseline." in " ".join(screen.split())
    assert "1 stopped at 25%" in screen and f"({tmp_path}/runs/open): stopped: " in " ".join(screen.split())
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert sorted((row["setting/parallelism"], row["seed"], row["state"]) for row in rows) == [
        ("fsdp", "0", "finished"), ("fsdp", "1", "finished"), ("fsdp", "2", "stopped"),
        ("single", "0", "finished"), ("single", "1", "finished"),
    ]  # fmt: skip


NAMES = "[out/a.html,out/a.md,out/a.csv,out/a.json]"


@pytest.mark.parametrize(("to", "files"), [("to=[]", 0), ("to=out/x.csv", 1), (f"to={NAMES}", 4)])
def test_other_files(to: str, files: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["runs/grid", to]) == 0
    assert len(list(place.rglob("*.*"))) == files + 1  # lr=0.1 has a point, too
    assert capsys.readouterr().out.count("written") == files
    if files == 4:
        assert (place / "out" / "a.html").read_text().startswith("<!doctype html>")
        assert (place / "out" / "a.md").read_text().startswith("# layouts\n")
        assert len(list(csv.DictReader((place / "out" / "a.csv").open()))) == 14
        assert len(json.loads((place / "out" / "a.json").read_text())["variants"]) == 6


def test_options_reach_the_comparison(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compared(directories: Sequence[str], **options: Any) -> Comparison:
        asked.extend([list(directories), options])
        return shown_report.make_two_variants()

    monkeypatch.setattr(comparison, "compare", compared)
    given = ["runs/grid", "lr=0.1", "baseline=parallelism=ddp,lr=1e-3", "margin=0.05", "target=3", "to=[]"]
    assert compare.main(given) == 0
    assert asked == [["runs/grid", "lr=0.1"], {"baseline": "parallelism=ddp,lr=1e-3", "margin": 0.05, "target": 3.0}]


REFUSED = [
    pytest.param([], "DIR is missing: directories of runs or sweeps", id="nothing"),
    pytest.param(["margin=1"], "DIR is missing", id="only-settings"),
    pytest.param(["runs/gird"], "runs/gird: there is no such directory; correct the path.", id="directory"),
    pytest.param(["runs/grid", "lr=0.2"], "lr=0.2: there is no such setting", id="neither"),
    pytest.param(["margin=1", "runs/grid"], "DIR is missing", id="not-first"),
    pytest.param(["runs/lr=0.2"], "runs/lr=0.2: there is no such directory", id="directory-with-a-sign"),
    pytest.param(["runs/grid", "margn=1"], "there is no such setting; did you mean 'margin'?", id="setting"),
    pytest.param(["runs/grid", "--fast"], "--fast: not understood", id="flag"),
    pytest.param(["runs/grid", "margin=-1"], "margin=-1: must be above 0", id="margin"),
    pytest.param(["runs/grid", "margin=small"], "margin=small: must be a number", id="no-number"),
    pytest.param(["runs/grid", "to=a.pdf"], "to=a.pdf: unknown file format; use one of .html", id="ending"),
    pytest.param(["runs/grid", "to=[out/a.md,report]"], "to=report: unknown file format", id="no-ending"),
    pytest.param(["runs/grid", "to=no/a.md"], "to=no/a.md: there is no directory no; give another", id="no-folder"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_refusals(given: list[str], sentence: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(given) == 2
    screen = capsys.readouterr()
    assert screen.out == "" and screen.err.startswith("titan: ") and sentence in screen.err
    assert not list(place.rglob("*.md"))


def test_a_directory_of_others_gets_no_page(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs" / "grid" / "compare.html").mkdir()
    assert compare.main(["runs/grid"]) == 0
    assert (
        "runs/grid/compare.html: can't be written (Is a directory); give another file with to="
        in capsys.readouterr().out
    )


def test_a_file_that_was_asked_for_must_be_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "out" / "full.csv").symlink_to("/dev/full")
    assert compare.main(["runs/grid", "to=out/full.csv"]) == 1
    assert "to=out/full.csv: can't be written (No space left on device)." in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["nowhere", flag]) == 0
    screen = capsys.readouterr().out
    assert all(f"  {name}=" in screen for name in ("baseline", "margin", "target", "to"))


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        pytest.param({}, True, id="terminal"),
        pytest.param({"NO_COLOR": "1"}, False, id="no-color"),
        pytest.param({"TERM": "dumb"}, False, id="dumb"),
    ],
)
def test_colours(
    environment: dict[str, str],
    told: bool,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert compare.main(["runs/grid", "to=[]"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) == told


PROGRAM = """\
import sys
from tests.support import shown_report as shown
from titan import compare
from titan.report import comparison
comparison.compare = lambda directories, **options: shown.make_two_variants()
code = compare.main(["runs/grid", "to=[x.html,x.csv,x.json,x.md]"])
sys.exit(code or ('torch' in sys.modules and 'torch is loaded'))
"""


@pytest.mark.full
def test_torch_is_not_loaded(place: Path) -> None:
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=place, env=path, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.endswith("written: x.md\n")
