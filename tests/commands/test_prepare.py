"""`python -m titan.prepare`: what it shows, what it refuses, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launchers.command import run_command
from tests.support.tiers import full
from titan import prepare
from titan.dataset.preprocess import prepare as preparation
from titan.errors import RunError

pytestmark = pytest.mark.usefixtures("without_progress")  # whole outputs are compared here


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A data set of its own."""
    lines = [json.dumps({"text": f"document {i % 15}, which tells of {i % 15 * 7} things"}) for i in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, '{"text": " "}']))
    return ["dataset=jsonl", f"dataset.path={tmp_path / 'x.jsonl'}", f"dataset.cache={tmp_path / 'cache'}"]


def rows(screen: str) -> dict[str, str]:
    lines = [line.strip().partition("  ") for line in screen.splitlines() if line.startswith("  ")]
    return {name: value.strip() for name, _, value in lines}


def test_it_prepares_and_reports(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(arguments) == 0
    screen = capsys.readouterr()
    found = rows(screen.out)
    size = (tmp_path / "x.jsonl").stat().st_size
    assert screen.out.startswith("data:\n") and screen.err == ""
    assert found["source"] == f"jsonl: 1 part, {size} bytes"
    assert found["reads"] == f"1 file of .jsonl, {size} bytes" and "leaves out" not in found
    assert found["shards"] == "1, 0 of them done"
    assert found["documents"] == "20, 5 of them duplicates"
    assert found["skipped"] == f"1 empty, first: {tmp_path / 'x.jsonl'}, line 21"
    (folder,) = (tmp_path / "cache" / "datasets").iterdir()
    assert found["folder"] == str(folder)
    assert (folder / "manifest.json").is_file()


@pytest.mark.full
def test_a_second_time_there_is_nothing_to_do(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(arguments) == 0
    first = rows(capsys.readouterr().out)
    assert prepare.main(["verify=true", *arguments]) == 0
    assert rows(capsys.readouterr().out) == first | {"shards": "1, complete"}


@pytest.mark.full
def test_a_dry_run_writes_nothing(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main([*arguments, "dry_run=true"]) == 0
    assert set(rows(capsys.readouterr().out)) == {"source", "reads", "shards", "tokenizer", "folder"}
    assert not (tmp_path / "cache" / "datasets").exists()


@pytest.mark.full
def test_damage_is_said_and_mended(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(arguments) == 0
    (file,) = (tmp_path / "cache" / "datasets").glob("*/train-00000.tokens")
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    assert prepare.main([*arguments, "verify=true"]) == 0
    assert (
        "train-00000.tokens has another checksum than when it was written; shard 0 of 1 is rebuilt"
        in capsys.readouterr().err
    )
    assert file.read_bytes() == content


@pytest.mark.full
def test_a_model_too_large_for_this_machine_is_fine(arguments: list[str]) -> None:
    large = ["model=llama8b", "parallelism=fsdp", "cluster.memory_gib=1", "training.seq_len=8192"]
    assert run_command([*large, *arguments], lambda run: 0) == 2
    assert prepare.main([*large, *arguments]) == 0


@pytest.mark.full
def test_every_corpus_is_prepared(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan.dataset.schema import Jsonl

    monkeypatch.setattr(Jsonl, "corpora", lambda self: {"first": self, "second": self})
    assert prepare.main(arguments) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line[0] != " "] == [
        "first:", "prepared:", "second:", "prepared:"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        pytest.param(
            ["--fast"],
            "titan: --fast: there is no such option; settings have no dashes: AXIS.SETTING=...; see --help.",
            id="unknown-flag",
        ),
        pytest.param(["-m"], "titan: -m: is an option of titan.train; leave it out.", id="sweep"),
        full(["dataset.worker=2"], "did you mean 'dataset.workers'?", id="unknown-setting"),
        pytest.param(["dataset.workers=0"], "titan: dataset.workers=0: must be at least 1 or auto.", id="no-workers"),
        full(["dataset.tokenizer=gone.json"], "there is no such tokenizer or file", id="no-tokenizer"),
        full(["dataset.field=body"], "no key 'body' (its keys: text)", id="no-field"),
    ],
)
def test_refusals(arguments: list[str], more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main([*arguments, *more]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.startswith("titan: ") and err.count("\n") == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(RunError("a process was killed."), 1, id="failure"),
        pytest.param(KeyboardInterrupt(), 130, id="interrupted"),
    ],
)
def test_exit_codes(arguments: list[str], error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(preparation, "run_shard_jobs", fail)
    assert prepare.main(arguments) == code


def test_help_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("verify=false", "dry_run=false", "python -m titan.prepare dataset=", "Exit codes")
    )


@pytest.mark.full
def test_what_is_prepared_already_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(["dataset=prepared", "dataset.path=s3://bucket/x"]) == 0
    assert capsys.readouterr().out == "data: already prepared, in s3://bucket/x\n"


@pytest.mark.full
def test_misplaced_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    mixture = ["dataset=mixture", "+dataset@dataset.sources.a=stdlib", "dataset.weights={a: 1}", "dataset.epochs=1"]
    assert prepare.main(mixture) == 2
    assert "dataset.sources.NAME.epochs" in capsys.readouterr().err


@pytest.mark.full
def test_files_that_are_left_out_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("some text\n" * 200)
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "x"}')
    words = ["dataset=text", f"dataset.path={tmp_path / 'in'}", f"dataset.cache={tmp_path / 'cache'}"]
    for more in (["dry_run=true"], [], []):  # the last one finds all prepared
        assert prepare.main([*words, *more]) == 0
        screen = capsys.readouterr()
        assert (screen.out + screen.err).count("1 file of .jsonl, 13 bytes") == 1
