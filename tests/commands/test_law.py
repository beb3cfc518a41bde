"""`python -m titan.law`: what it prints and writes, of tables and of runs, and what it rejects."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.made_runs import Story, StoryAttempt, make_run
from tests.support.made_tables import chinchilla, make_table, thrifty
from tests.support.tiers import full
from titan import law
from titan.report.law_runs import read_runs
from titan.report.render import law_report

FEW = "replicates=100"
RunLaw = Callable[..., tuple[str, str]]


@pytest.fixture
def run_law(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLaw:
    """Return what fits a law in a folder of its own, and returns stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        assert law.main([*words, FEW]) == code
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    return run


@pytest.fixture
def table(run_law: RunLaw, tmp_path: Path) -> Path:
    """A folder with a table of two variants, of which b needs 0.8 of a's tokens."""
    runs = make_table((chinchilla, thrifty(0.8)), seed_sd=0.003)
    rows = zip(runs.variant, runs.n, runs.d, runs.loss, strict=True)
    (tmp_path / "runs.csv").write_text(
        "variant,N,D,loss\n" + "".join(f"{v},{n:.0f},{d:.0f},{loss:.4f}\n" for v, n, d, loss in rows)
    )
    return tmp_path


@pytest.mark.full
def test_a_table_gives_a_law_a_prediction_and_a_page(table: Path, run_law: RunLaw) -> None:
    shown, _ = run_law("runs.csv", "target=160M,3.2B")
    lines = shown.splitlines()
    assert "columns: N from 'N', D from 'D', loss from 'loss', variant from 'variant'." in lines
    assert "38 runs on 38 rungs: N 10M to 160M, D 50M to 51.2B; 2 runs not fitted" in lines
    assert "variants share E, a and b: not rejected at 0.05 by the likelihood-ratio test (F(3, 28)" in shown
    assert "L = E + A N^-a + B D^-b: floor E 1.7" in shown and "2 of 2 held-out rungs inside" in shown
    assert "b reaches a's loss with 0.8" in shown or "b reaches a's loss with 0.7" in shown
    assert lines[-1] == "written: law.html"
    page = (table / "law.html").read_text()
    assert "<script" not in page and page.count('class="band') == 2 * 2 * 5 and "default-src 'none'" in page
    assert page.count('class="true"') == 2 * 2 and "Profile of the floor" in page and "law.html" not in page


def test_variants_in_other_proportions_are_compared_by_compute(tmp_path: Path, run_law: RunLaw) -> None:
    """By FLOPs where the table has them: those of b are 10 per parameter and token here, those of a 5."""
    rows = [
        (name, n, ratio * n, factor * ratio * n * n, 1.7 + 1.5 * (ahead * factor * ratio * n * n / 1e18) ** -0.15)
        for name, ratio, factor, ahead in (("a", 20, 5, 1), ("<b>", 60, 10, 3))
        for n in (1e7, 3e7, 1e8, 3e8)
    ]
    (tmp_path / "runs.csv").write_text(
        "variant,N,D,flops,loss\n" + "".join(f"{v},{n},{d},{flops},{loss:.6f}\n" for v, n, d, flops, loss in rows)
    )
    shown, _ = run_law("runs.csv", "to=[law.html,law.json,law.csv]")
    assert "compared by compute: FLOPs of a divided by those of the variant with the same loss" in shown
    assert "(the lowest that both reach): factor 3.0" in shown
    assert "(the lowest of all, beyond the rungs of one): factor 3.0" in shown
    (corpus,) = json.loads((tmp_path / "law.json").read_text())["corpora"]
    assert [f["factor"] for f in corpus["factors"]["<b>"]] == pytest.approx([3, 3], rel=0.01) and corpus["laws"] == []
    rows = list(csv.DictReader(io.StringIO((tmp_path / "law.csv").read_text())))
    assert len(rows) == 8 and {row["plain"] for row in rows} == {""}
    page = (tmp_path / "law.html").read_text()
    assert "Variants are compared by compute, without a law." in page and "&lt;b&gt; against a" in page
    (tmp_path / "runs.csv").write_text("variant,N,D,flops,loss\na,1e7,2e8,3,2.5\n")
    assert "flops=3 in line 2 is less than one per parameter and token" in run_law("runs.csv", code=2)[1]


FIGURE = re.compile(r"(?<![\w.<>])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:(?=[kMBT]\b)\w| ?%)?")
SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 0.01}


def list_leaves(value: Any) -> list[float]:
    """All numbers of a JSON value."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
    return own + [number for part in parts for number in list_leaves(part)]


def is_shown(figure: str, numbers: Sequence[float]) -> bool:
    """Whether a figure on the screen is one of some numbers, rounded as the screen rounds."""
    unit = figure[-1] if figure[-1] in "kMBT%" else ""
    text = figure.rstrip("kMBT% ")
    scale, mantissa, exponent = SCALES[unit], *[*text.split("e"), "0"][:2]
    digits = len(mantissa.partition(".")[2])
    tolerance = 0.51 * 10.0 ** (int(exponent) - digits) * scale
    return any(abs(number - float(text) * scale) <= tolerance for number in numbers)


def find_missing_figures(shown: str, content: Any) -> list[str]:
    """The lines of the screen with a figure that the JSON lacks; constants of the text are known."""
    numbers = [*list_leaves(content), 0.05, 0.9, 0.0, 1.0, 30.0]
    numbers += [float(corpus["runs"] + corpus["not_fitted"]) for corpus in content["corpora"]]
    numbers += [float(len(corpus["rungs"])) for corpus in content["corpora"]]
    numbers += [float(sum(rung["is_fitted"] for rung in corpus["rungs"])) for corpus in content["corpora"]]
    for corpus in content["corpora"]:
        for rung in corpus["rungs"]:
            if rung["loss"] and not rung["is_fitted"]:  # by how much the plain law misses a loss, in percent
                numbers.append(rung["loss"] / rung["plain"] - 1)
    return [
        f"{figure}: {line}"
        for line in shown.splitlines()
        for figure in FIGURE.findall(re.sub(r"sd \d+|\(seeds and.*?\)", "", line))
        if not is_shown(figure, numbers)
    ]


@pytest.mark.parametrize(
    "words", [["target=160M,3.2B"], full(["holdout=100M", "baseline=b"])], ids=["target", "holdout"]
)
def test_json_has_every_figure_of_the_screen(words: list[str], table: Path, run_law: RunLaw) -> None:
    shown = run_law("runs.csv", *words, "to=[a.json,a.csv]")[0].partition("\nwritten")[0]
    content = json.loads((table / "a.json").read_text())
    assert content["format"] == law_report.FORMAT and len(FIGURE.findall(shown)) > 60
    assert find_missing_figures(shown, content) == []
    for path in ("noise", "floor", "terms", "bend", "size_exponent"):
        cut = json.loads((table / "a.json").read_text())
        cut["corpora"][0]["laws"][0].pop(path)
        assert find_missing_figures(shown, cut), f"figures of {path} are looked for"


@pytest.mark.full
def test_csv_has_a_row_per_rung_and_documented_columns(table: Path, run_law: RunLaw) -> None:
    run_law("runs.csv", "target=160M,3.2B", "to=a.csv")
    rows = list(csv.DictReader(io.StringIO((table / "a.csv").read_text())))
    assert tuple(rows[0]) == law_report.COLUMNS and len(rows) == 40
    documented = (Path(__file__).parents[2] / "docs/laws.md").read_text()
    assert [name for name in law_report.RUNG_COLUMNS if f"`{name}`" not in documented] == []
    targets = [row for row in rows if row["is_fitted"] == "false"]
    assert [(row["variant"], row["is_inside"]) for row in targets] == [("a", "true"), ("b", "true")]
    assert all(float(row["predicted_low"]) < float(row["loss"]) < float(row["predicted_high"]) for row in targets)
    with_speedup = [row for row in rows if row["flops"]]
    assert len(with_speedup) == 20 and {row["variant"] for row in with_speedup} == {"b"}
    assert all(float(row["flops_low"]) <= float(row["flops"]) <= float(row["flops_high"]) for row in with_speedup)


def test_names_in_a_table_are_escaped(table: Path, run_law: RunLaw) -> None:
    text = (table / "runs.csv").read_text().replace("b,", "<script>\x1b[31m,")
    (table / "runs.csv").write_text(text)
    out, _ = run_law("runs.csv", "to=[law.html,a.csv]")
    page = (table / "law.html").read_text()
    assert not any("\x1b" in shown for shown in (out, page, (table / "a.csv").read_text()))
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.csv"], "none.csv: there is no such file; correct"),
        (["runs.csv", "."], "runs.csv: is a file; give one CSV file alone"),
        (["."], "contains no run"),
        (["runs.csv", "target=1B"], "target=1B: give parameters and tokens, as in target=1.4B,28B"),
        (["runs.csv", "target=1,2"], "target=1,2: is no number of parameters or tokens"),
        (["runs.csv", "target=40B,800B"], "times the compute of the largest rung"),
        (["runs.csv", "holdout=few"], "holdout=few: is no number"),
        (["runs.csv", "holdout=1M"], "holdout=1M: no run has fewer parameters"),
        (["runs.csv", "holdout=1B"], "holdout=1B: no run has more parameters"),
        (["runs.csv", "baseline=c"], "baseline=c: there is no such variant; there are a, b"),
        (["runs.csv", "to=x.pdf"], "unknown file format"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_rejected(words: list[str], sentence: str, table: Path, run_law: RunLaw) -> None:
    out, error = run_law(*words, code=2)
    assert sentence in error and error.count("\n") == 1 and "L =" not in out


@pytest.mark.full
def test_corpora_have_laws_of_their_own(table: Path, run_law: RunLaw) -> None:
    lines = (table / "runs.csv").read_text().splitlines()
    rows = [f"{row},{'c4' if row.startswith('a') else 'pile'}" for row in lines[1:]]
    (table / "runs.csv").write_text("\n".join([f"{lines[0]},corpus", *rows]))
    shown, _ = run_law("runs.csv", "to=[]")
    assert "2 corpora, each with a separate law" in shown and "corpus c4\n" in shown and "reaches" not in shown


SIZES = ((32, 1), (64, 1), (64, 2), (96, 2))


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made runs: sizes, lengths, a learning rate by a rule, one unfinished run and one on other data."""
    folder = tmp_path_factory.mktemp("ladder")
    for k, (dim, layers) in enumerate(SIZES):
        for steps in (20, 40, 80):
            level = float(chinchilla(np.array(2e7 * 2**k), np.array(2e9 * steps * 2**k)))
            overrides = (f"model.dim={dim}", f"model.layers={layers}", f"optimizer.lr={0.01 / dim}")
            make_run(folder / f"run-{k}-{steps}", Story(steps=steps, level=level, spread=0.0), *overrides)
    make_run(folder / "open", Story(attempts=(StoryAttempt(0, 10),)), "model.dim=32")
    make_run(folder / "trunk", Story(steps=16), "model.dim=32", "schedule.decay=0")
    return folder


def test_runs_are_a_table(ladder: Path) -> None:
    table = read_runs([str(ladder)])
    assert len(table) == 12 and len(set(table.n)) == 4 and table.corpora == ("",) and table.variants == ("",)
    assert (table.n < table.other_n).all() and table.counted == "without embeddings"
    assert len(table.flops) == len(table.hours) == 12 and (table.flops > 0).all()
    assert any(note.startswith("left out: open: stopped") for note in table.notes)
    assert "left out: trunk: its learning rate stays constant, and others decay" in table.notes
    assert any("optimizer.lr: a function of size and length" in note for note in table.notes)
    assert any("final evaluation, in nats" in note for note in table.notes)
    final = json.loads((ladder / "run-0-20" / "result.json").read_text())["validation_loss"]
    assert table.loss[table.name.index("run-0-20")] == pytest.approx(final)


@pytest.mark.full
def test_runs_of_other_data_and_settings_are_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a", Story(), "optimizer.lr=0.001")
    make_run(tmp_path / "b", Story(seed=1), "optimizer.lr=0.003")
    make_run(tmp_path / "c", Story(seed=1, digest="f" * 16), "optimizer.lr=0.003")
    table = read_runs([str(tmp_path)])
    assert table.variants == ("lr=0.001", "lr=0.003") and len(table.corpora) == 2


@pytest.mark.full
def test_variants_are_named_by_what_is_no_rule_of_size(tmp_path: Path) -> None:
    """A recipe's own rate at each size, and a setting of the model that each of its shapes has in two values."""
    for dim in (32, 64):
        for optimizer, rate in (("adamw", 0.032), ("muon", 0.32)):
            overrides = f"model.dim={dim}", f"optimizer={optimizer}", f"optimizer.lr={rate / dim}"
            make_run(tmp_path / f"{dim}-{optimizer}", Story(), *overrides)
            make_run(tmp_path / f"{dim}-{optimizer}-cap", Story(), *overrides, "model.logit_cap=30")
    table = read_runs([str(tmp_path)])
    assert len(table) == 8 and sorted(table.variants) == sorted(
        f"optimizer={optimizer} logit_cap={cap}" for optimizer in ("adamw", "muon") for cap in ("null", "30.0")
    )


@pytest.mark.full
def test_settings_that_each_shape_of_a_model_has_name_no_variant(tmp_path: Path) -> None:
    make_run(tmp_path / "a", Story(), "model.dim=32", "model.tied=true")
    make_run(tmp_path / "b", Story(), "model.dim=64", "model.tied=false")
    table = read_runs([str(tmp_path)])
    assert table.variants == ("",) and any("model.tied: a function of size" in note for note in table.notes)


@pytest.mark.full
def test_a_law_of_runs(ladder: Path, run_law: RunLaw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "titan").mkdir()
    (tmp_path / "titan/predictions.jsonl").write_text('{"digest": "a", "level": 0.9, "inside": true}\n')
    shown, _ = run_law(str(ladder))
    assert "your predictions so far: 1 of 1 inside 90 %" in shown
    assert "12 runs on 12 rungs" in shown and f"written: {ladder}/law.html" in shown
