"""CSV tables: names of columns, units, and what is rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.errors import ConfigError
from titan.scaling.table import parse_number, read_csv

GOOD = "N,D,loss\n10M,1B,3.5\n20M,1B,3.3\n"


def write(folder: Path, text: str) -> Path:
    file = folder / "runs.csv"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "head", ["N,D,loss", "params,tokens,loss", "Parameters, training tokens ,val-loss", "n_params,n_tokens,Final Loss"]
)
def test_columns_have_several_names(head: str, tmp_path: Path) -> None:
    table = read_csv(write(tmp_path, f"{head}\n10M,1.5B,3.5\n2e7,2_000_000_000,3.3\n\n"))
    assert table.n.tolist() == [1e7, 2e7] and table.d.tolist() == [1.5e9, 2e9] and table.loss.tolist() == [3.5, 3.3]
    assert table.name == ("line 2", "line 3") and table.notes[0].startswith("columns: N from ")


@pytest.mark.parametrize(("count_all", "n"), [(False, 5e6), (True, 1e7)], ids=["without", "with"])
def test_n_is_without_embeddings_and_both_are_kept(count_all: bool, n: float, tmp_path: Path) -> None:
    table = read_csv(write(tmp_path, "params,params_no_embed,tokens,loss\n10M,5M,1B,3.5\n"), count_all)
    assert table.n[0] == n and table.n[0] + table.other_n[0] == 1.5e7
    assert table.counted == ("with embeddings" if count_all else "without embeddings")
    assert ("the law uses N without embeddings" in table.notes[0]) == (not count_all)


def test_data_and_tokenizer_make_a_corpus(tmp_path: Path) -> None:
    rows = "N,D,loss,dataset,tokenizer,recipe,seed\n10M,1B,3.5,c4,bpe,muon,3\n10M,1B,3.5,c4,neox,muon,3\n"
    table = read_csv(write(tmp_path, rows))
    assert table.corpora == ("c4 (bpe)", "c4 (neox)") and table.variants == ("muon",) and table.seed == ("3", "3")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("", "is empty; its first line names the columns", id="empty"),
        pytest.param("N,D,loss\n", "has no rows", id="no-rows"),
        pytest.param("N,loss\n10M,3\n", "has no column D (or tokens", id="no-column"),
        pytest.param("N;D;loss\n10M;1B;3\n", "has no column N", id="semicolons"),
        pytest.param("N,params,D,loss\n10M,10M,1B,3\n", "columns N and params mean the same", id="twice"),
        pytest.param(GOOD + "30M,1B,-3.1\n", "line 4: loss=-3.1 must be a positive number", id="negative"),
        pytest.param(GOOD + "30M,1B,nan\n", "line 4: loss=nan is no number", id="nan"),
        pytest.param(GOOD + "30M,1B,inf\n", "line 4: loss=inf is no number", id="infinite"),
        pytest.param(GOOD + "30M,1B,1e999\n", "must be a positive number", id="overflow"),
        pytest.param(GOOD + "30M,1B,1e-320\n", "line 4: loss=1e-320 must be a positive number", id="underflow"),
        pytest.param(GOOD + "30M,1B,3,21\n", "line 4: has 4 values for 3 columns", id="unquoted-decimal-comma"),
        pytest.param(GOOD + "30M,1B,3.1\n" * 100_000, "has 100,002 rows; give one per run, and at most", id="rows"),
        pytest.param(GOOD + "30M,1B\n", "line 4: loss=empty is no number", id="short-row"),
        pytest.param(GOOD + "30M,1B,3k\n", "loss=3k is no number", id="loss-unit"),
        pytest.param(GOOD + '30M,"1,5B",3.1\n', "D=1,5B is no number", id="decimal-comma"),
        pytest.param("N,D,loss\n10,1B,3\n20,1B,3\n", "N=10 in line 2 is in another unit", id="millions"),
        pytest.param(GOOD + "30M,1.5,3.1\n", "D=1.5 in line 4 is in another unit", id="mixed-units"),
        pytest.param(GOOD + "30M,30000T,3.1\n", "the units are mixed", id="mixed-factors"),
        pytest.param(GOOD + "30M,1B,22.2\n", "loss=22.2 in line 4 is above chance", id="perplexity"),
    ],
)
def test_bad_tables_are_rejected_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_csv(write(tmp_path, text))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"N,D\xff\xfe")
    for name in ("none.csv", "x.csv", ""):
        with pytest.raises(ConfigError, match="can't be read"):
            read_csv(tmp_path / name)


@given(st.floats(1e-3, 1e15), st.sampled_from(["", "k", "M", "B", "T"]))
def test_numbers_with_units(value: float, unit: str) -> None:
    factor = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit]
    assert np.isclose(parse_number(f"{value!r} {unit}") or 0, value * factor)


@pytest.mark.parametrize("text", ["", "B", "1.5.2", "1,5", "12,34", "--1", "1e", "0x10", "1.5Q"])
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) is None


def test_names_have_no_control_characters(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("variant,N,D,loss\n\x1b[31mred,10M,100M,5.7\n")
    assert not any("\x1b" in name for name in read_csv(str(tmp_path / "runs.csv")).variants)
