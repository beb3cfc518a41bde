"""The book of a campaign: whole lines from several writers, torn and damaged ones, other schemas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titan.errors import ConfigError
from titan.evidence.book import FILE, Book

PAIR: dict[str, Any] = {"idea": "x", "stage": "screen", "seed": 1, "baseline_loss": 2.0, "loss": 1.5, "baseline": 0}


def append(book: Book, **values: Any) -> None:
    with book.locked() as append_event:
        append_event("pair", **PAIR | values)


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    book = Book(tmp_path / "new" / "study")
    assert book.read() == ([], 0)
    append(book, seed=3)
    append(book, seed=4, loss=None)
    events, damaged = book.read()
    assert [event["seed"] for event in events] == [3, 4] and damaged == 0
    assert events[1]["schema"] == 1 and events[1]["loss"] is None


def test_a_torn_line_is_left_out_and_the_next_writer_ends_it(tmp_path: Path) -> None:
    book = Book(tmp_path)
    append(book, seed=3)
    append(book, seed=4)
    whole = book.file.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole)):
        book.file.write_bytes(whole[:cut])
        events, damaged = book.read()
        complete = cut == len(whole) - 1  # only the end of the line is missing
        assert [event["seed"] for event in events] == [3, 4][: 1 + complete] and damaged == (not complete)
    book.file.write_bytes(whole[:-9])
    append(book, seed=5)
    events, damaged = book.read()
    assert [event["seed"] for event in events] == [3, 5] and damaged == 1


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("[1, 2]", id="no object"),
        pytest.param(json.dumps({"event": "pair"} | PAIR), id="no schema"),
        pytest.param(json.dumps({"schema": 1, "event": "pair"} | PAIR | {"loss": float("nan")}), id="nan"),
        pytest.param(json.dumps({"schema": 1, "event": "pair"} | PAIR | {"seed": "1"}), id="another type"),
        pytest.param("[" * 5000, id="deep"),
    ],
)
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, line: str) -> None:
    book = Book(tmp_path)
    append(book)
    with book.file.open("a") as file:
        file.write(line + "\n")
    append(book, seed=2)
    events, damaged = book.read()
    assert [event["seed"] for event in events] == [1, 2] and damaged == 1


def test_another_schema_is_rejected(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"schema": 99, "event": "pair"}\n')
    with pytest.raises(ConfigError, match=r"another titan wrote it \(schema 99, not 1\)"):
        Book(tmp_path).read()


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="can't be written"), Book(tmp_path).locked():
        pass


WRITER = """
import sys, time
from pathlib import Path
from titan.evidence.book import Book
folder, own, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
book = Book(folder)
for seed in range(200):
    with book.locked() as append:
        append("pair", idea=own, stage="screen", seed=seed, baseline_loss=2.0, loss=1.0, baseline=0)
    (folder / own).touch()
    while seed == 50 and not (folder / other).exists():
        time.sleep(0.01)
"""


@pytest.mark.full
def test_two_processes_write_at_once(tmp_path: Path) -> None:
    """Each waits after a quarter of its lines until the other has begun: neither writes all before the other."""
    commands = [[sys.executable, "-c", WRITER, str(tmp_path), *names] for names in ("ab", "ba")]
    writers = [subprocess.Popen(command, env=os.environ) for command in commands]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    events, damaged = Book(tmp_path).read()
    order = [event["idea"] for event in events]
    assert damaged == 0 and len(events) == 400
    assert [event["seed"] for event in events if event["idea"] == "a"] == list(range(200))
    assert order not in (sorted(order), sorted(order, reverse=True))
