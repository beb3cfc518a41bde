"""Preparation: cached by content, divided by content, shared by processes, complete or not there at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made_source import Made, make_documents, read_files
from tests.support.processes import LIMIT, wait_until
from tests.support.tiers import full
from titan.dataset.documents import Skip, Turn
from titan.dataset.preprocess import plan as plans
from titan.dataset.preprocess import prepare as module
from titan.dataset.preprocess import shard_job as units
from titan.dataset.preprocess.plan import ensure_plan, find_cache_folder
from titan.dataset.preprocess.prepare import prepare, survey_dataset
from titan.dataset.preprocess.shard_job import write_shard
from titan.dataset.schema import Jsonl, Stdlib, Synthetic, Text
from titan.dataset.shards import Corpus, Split, open_corpus
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError, RunError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    """200 short documents as JSON Lines, of which some are equal."""
    lines = [json.dumps({"text": f"document {i % 150}, which tells of {i % 150 * 7} things\n"}) for i in range(200)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    return tmp_path / "x.jsonl"


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part a unit."""
    monkeypatch.setattr(plans, "MIN_SHARD_BYTES", 1000)


def dataset(file: Path, **changes: object) -> Jsonl:
    return Jsonl(**{"path": str(file), "cache": str(file.parent / "cache"), "validation": 0.2} | changes)  # type: ignore[arg-type]


def made(place: Path, **changes: object) -> Made:
    """240 documents in six parts."""
    usual = {"content": make_documents(), "cache": str(place / "cache"), "validation": 0.2, "workers": 1}
    return Made(**usual | changes)  # type: ignore[arg-type]


def texts(split: Split) -> list[str]:
    """The documents of a split as text, without the token that ends each."""
    tokenizer, out = load_tokenizer("titan4k"), []
    for shard in split.shards:
        offsets = np.fromfile(shard.path.with_suffix(".offsets"), "<u8").astype(int)
        for document in np.split(split.read(shard.start, shard.tokens), offsets[1:]):
            assert document[-1] == tokenizer.eos
            out.append(tokenizer.decode(document[:-1].tolist()))
    return out


def both(corpus: Corpus) -> list[str]:
    return sorted(texts(corpus.train) + texts(corpus.validation))


def manifest(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "manifest.json").read_text())
    return content


def leftovers(folder: Path) -> list[str]:
    return [f.name for f in folder.iterdir() if f.name.startswith(".") or f.suffix == ".claim"]


def test_documents_are_divided_shuffled_and_complete(corpus_file: Path) -> None:
    corpus = open_corpus(prepare(dataset(corpus_file)))
    train, validation = texts(corpus.train), texts(corpus.validation)
    expected = [json.loads(line)["text"] for line in corpus_file.read_text().splitlines()]
    assert sorted(train + validation) == sorted(expected)
    assert not set(train) & set(validation)
    assert 15 < len(validation) < 70
    assert train != [document for document in expected if document in set(train)]
    assert (corpus.documents, corpus.bytes) == (200, sum(len(t.encode()) for t in expected))
    assert corpus.bytes == int(corpus.token_bytes[corpus.train.read(0, corpus.train.tokens)].sum()) + int(
        corpus.token_bytes[corpus.validation.read(0, corpus.validation.tokens)].sum()
    )
    assert (corpus.vocab_size, corpus.max_token) == (4096, 4095)
    fingerprint = load_tokenizer("titan4k").fingerprint
    assert corpus.tokenizer == {"name": "titan4k", "fingerprint": fingerprint, "file": ""}
    assert leftovers(corpus.folder) == []


def test_the_side_of_a_document_does_not_depend_on_the_corpus(corpus_file: Path, tmp_path: Path) -> None:
    whole = open_corpus(prepare(dataset(corpus_file)))
    half = tmp_path / "half.jsonl"
    half.write_text("\n".join(corpus_file.read_text().splitlines()[:75]))
    part = open_corpus(prepare(dataset(half)))
    assert set(texts(part.validation)) < set(texts(whole.validation))
    assert set(texts(part.train)) < set(texts(whole.train))


@pytest.mark.full
def test_units_divide_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_corpus(prepare(made(tmp_path)))
    monkeypatch.setattr(plans, "MIN_SHARD_BYTES", 1000)
    parts = open_corpus(prepare(made(tmp_path, cache=str(tmp_path / "other"))))
    assert (len(whole.train.shards), len(parts.train.shards)) == (1, 6)
    assert both(parts) == both(whole)
    assert sorted(texts(parts.validation)) == sorted(texts(whole.validation))


def test_a_hit_does_not_tokenise_again(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(dataset(corpus_file))
    monkeypatch.setattr(units, "write_shard", lambda *_: pytest.fail("made again"))
    monkeypatch.setattr(plans, "write_plan", lambda *_: pytest.fail("planned again"))
    assert prepare(dataset(corpus_file)) == folder
    assert prepare(dataset(corpus_file), verify=True) == folder
    moved = corpus_file.rename(corpus_file.with_name("moved.jsonl"))
    assert prepare(dataset(moved, prefetch=9, workers=3)) == folder


@pytest.mark.full
def test_what_changes_the_content_changes_the_digest(corpus_file: Path, tmp_path: Path) -> None:
    from titan.dataset.tokenizers.load import write_ranks

    write_ranks(tmp_path / "bytes.tiktoken", [bytes([byte]) for byte in range(256)])
    found = {prepare(dataset(corpus_file)), prepare(dataset(corpus_file, validation=0.3))}
    found.add(prepare(dataset(corpus_file, tokenizer=str(tmp_path / "bytes.tiktoken"))))
    found.add(prepare(dataset(corpus_file, on_error="skip")))
    corpus_file.write_text(corpus_file.read_text().replace("document 7,", "document x,"))
    found.add(prepare(dataset(corpus_file)))
    assert len(found) == len({open_corpus(folder).digest for folder in found}) == 5
    assert all(open_corpus(folder).digest.startswith(folder.name.rpartition("-")[2]) for folder in found)


CORPORA = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12)


@given(words=CORPORA, validation=st.sampled_from([0.0, 1e-9, 0.3]))
@pytest.mark.full
def test_small_corpora_are_divided_when_they_can(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], validation: float
) -> None:
    folder = tmp_path_factory.mktemp("small")
    (folder / "x.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in words))
    corpus = open_corpus(prepare(dataset(folder / "x.jsonl", validation=validation)))
    train, held_out = texts(corpus.train), texts(corpus.validation)
    assert sorted(train + held_out) == sorted(words)
    assert not set(train) & set(held_out)
    if validation == 1e-9:
        assert len(set(held_out)) == (1 if len(set(words)) > 1 else 0)
    if validation == 0:
        assert not held_out


@pytest.mark.full
def test_a_single_text_file_gives_both_parts(tmp_path: Path) -> None:
    content = "".join(f"line {i} of a story that goes on\n" for i in range(30_000))
    (tmp_path / "story.txt").write_text(content)
    corpus = open_corpus(prepare(Text(path=str(tmp_path / "story.txt"), cache=str(tmp_path / "cache"))))
    assert 0 < corpus.validation.tokens < 0.05 * corpus.train.tokens
    assert sum(len(text) for split in (corpus.train, corpus.validation) for text in texts(split)) == len(content)


def test_synthetic(tmp_path: Path) -> None:
    settings = {"tokens": 20_000, "vocab": 300, "cache": str(tmp_path)}
    corpus = open_corpus(prepare(Synthetic(**settings)))  # type: ignore[arg-type]
    assert corpus.train.tokens + corpus.validation.tokens == corpus.bytes == 20_000
    assert corpus.max_token < corpus.vocab_size == 300
    assert corpus.token_bytes.tolist() == [1] * 300
    assert corpus.tokenizer == {"name": "none", "fingerprint": "none", "file": ""}
    assert corpus.validation.tokens > 0
    assert prepare(Synthetic(**settings)) == corpus.folder  # type: ignore[arg-type]
    assert prepare(Synthetic(**settings, seed=1)) != corpus.folder  # type: ignore[arg-type]


def test_masks_mark_what_counts(tmp_path: Path) -> None:
    dialogue = (Turn("What is it? ", trained=False), Turn("A test."))
    folder = prepare(made(tmp_path, content=((dialogue, "All of this counts."),), masked=True, validation=0))
    tokens, mask = np.fromfile(folder / "train-00000.tokens", "<u2"), np.fromfile(folder / "train-00000.mask", np.uint8)
    offsets, tokenizer = np.fromfile(folder / "train-00000.offsets", "<u8").astype(int), load_tokenizer("titan4k")
    counted = [
        t[m == 1].tolist() for t, m in zip(np.split(tokens, offsets[1:]), np.split(mask, offsets[1:]), strict=True)
    ]
    assert tokens.size == mask.size
    assert sorted(map(tokenizer.decode, counted)) == ["A test.<|end_of_text|>", "All of this counts.<|end_of_text|>"]
    assert manifest(folder)["masked"] is True
    assert set(json.loads((folder / "unit-00000.json").read_text())["files"]) == {
        f.name for f in folder.glob("train-*")
    }


def test_the_report_counts(tmp_path: Path, small_units: None) -> None:
    content = (
        *make_documents(3),
        (Skip("empty", "line 7"), Skip("empty", "line 9"), "x" * 990),
        (Skip("broken file", "f"), "y"),
    )
    folder = prepare(made(tmp_path, content=content))
    corpus, found = open_corpus(folder), manifest(folder)["report"]
    documents = [d for part in content for d in part if isinstance(d, str)]
    assert isinstance(found, dict)
    assert found["documents"] == corpus.documents == 122
    assert found["duplicates"] == 122 - len(set(documents)) > 0
    assert found["bytes"] == corpus.bytes == sum(map(len, documents))
    assert found["tokens"] == corpus.train.tokens + corpus.validation.tokens
    assert found["bytes_per_token"] == pytest.approx(found["bytes"] / found["tokens"], abs=1e-3)
    assert found["held_out"] == {"documents": corpus.validation.documents, "tokens": corpus.validation.tokens}
    assert found["skipped"] == {"empty": [2, "line 7"], "broken file": [1, "f"]}
    assert sum(n for unit in manifest(folder)["units"] for _, n in unit.values()) == 122  # type: ignore[attr-defined]


def test_a_plan_is_there_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_units: None) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(units, "write_shard", lambda *_: pytest.fail("tokenised"))
        folder = ensure_plan(made(tmp_path))
    content = json.loads((folder / "plan.json").read_text())
    assert sorted(f.name for f in folder.iterdir()) == ["plan.json", "token_bytes.npy"]
    assert content["units"] == [[i, i + 1, sum(map(len, part))] for i, part in enumerate(make_documents())]
    assert (content["format"], content["dtype"], content["masked"]) == (2, "uint16", False)
    assert prepare(made(tmp_path)) == folder
    assert all(manifest(folder)[key] == content[key] for key in content if key != "units")


def test_a_survey_does_nothing(tmp_path: Path, small_units: None) -> None:
    found = survey_dataset(made(tmp_path))
    assert (found.parts, found.shards, found.finished, found.complete) == (6, 6, 0, False)
    assert not (tmp_path / "cache" / "datasets").exists()
    prepare(made(tmp_path))
    assert (survey_dataset(made(tmp_path)).finished, survey_dataset(made(tmp_path)).complete) == (6, True)


@pytest.mark.full
def test_any_number_of_processes_writes_the_same(tmp_path: Path, small_units: None) -> None:
    one = read_files(prepare(made(tmp_path)))
    folder = prepare(made(tmp_path, cache=str(tmp_path / "other"), workers=2))
    assert read_files(folder) == one
    assert leftovers(folder) == []
    assert multiprocessing.active_children() == []


def test_two_jobs_at_once_share_the_work(tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two machines would: neither knows of the other but by the folder."""
    makes, lines, found = list[int](), list[str](), list[Path]()

    def make(job: units.ShardJob, encoder: object, unit: int, tell: units.OnProgress) -> None:
        makes.append(unit)
        write_shard(job, encoder, unit, tell)  # type: ignore[arg-type]

    monkeypatch.setattr(units, "write_shard", make)
    slow = made(tmp_path, seconds=0.005)
    jobs = [threading.Thread(target=lambda: found.append(prepare(slow, lines.append))) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(found) == 2 and found[0] == found[1]
    assert sorted(makes) == list(range(6))
    assert read_files(found[0]) == read_files(prepare(made(tmp_path, cache=str(tmp_path / "other"))))
    assert leftovers(found[0]) == []


@pytest.mark.full
def test_who_waits_for_others_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, lines = made(tmp_path), list[str]()
    claim = units.lock_file(ensure_plan(slow), 0)
    claim.write_text(json.dumps({"machine": "another", "host": "node7", "pid": 5}))

    def wait(seconds: float) -> None:
        if any("waiting" in line for line in lines):
            claim.unlink(missing_ok=True)

    monkeypatch.setattr(module, "WAIT_SECONDS", 0)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=wait, monotonic=time.monotonic))
    prepare(slow, lines.append)
    assert "preparing made: waiting for 1 shard that other processes prepare, such as process 5 on node7" in lines


def test_progress_is_told_in_lines(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0, 1000, 0.3).tolist())
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # no one else's clock
    monkeypatch.setattr("titan.dataset.preprocess.encode.GROUP_DOCUMENTS", 10)
    lines: list[str] = []
    prepare(dataset(corpus_file), lines.append)
    assert 5 < len(lines) <= 20
    assert all("MB/s" in line and "tokens/s" in line and "left" in line and "\n" not in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_refusal_reaches_the_user_and_others(tmp_path: Path, small_units: None, processes: int) -> None:
    broken = made(tmp_path, content=(*make_documents(2), ("x", "refuse")), workers=processes)
    with pytest.raises(ConfigError, match=r"^part 2: no good; mend it\.$"):
        prepare(broken)
    folder = ensure_plan(broken)
    assert json.loads((folder / "failed.json").read_text()) == {"error": "part 2: no good; mend it."}
    assert not (folder / "manifest.json").exists()
    assert leftovers(folder) in ([], [".hashes"])
    assert multiprocessing.active_children() == []


def test_a_source_that_breaks_is_no_fault_of_the_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="part 1: can't be read"):
        prepare(made(tmp_path, content=(*make_documents(1), ("break",))))


@pytest.mark.full
def test_a_process_that_dies_is_a_failure(tmp_path: Path, small_units: None) -> None:
    with pytest.raises(RunError, match=r"SIGKILL.*out of memory.*dataset\.workers"):
        prepare(made(tmp_path, content=(*make_documents(3), ("die",)), workers=2))
    assert multiprocessing.active_children() == []


UNGUARDED = """
import sys
from tests.support.made_source import Made, make_documents
from titan import errors
from titan.dataset.preprocess import plan, prepare

plan.MIN_SHARD_BYTES = 1000
source = Made(content=make_documents(99, 99), cache=sys.argv[1], workers=2)
sys.exit(errors.exit_code(lambda: prepare.prepare(source) and 0))
"""


@pytest.mark.full
def test_a_process_that_dies_at_once_is_a_failure(tmp_path: Path) -> None:
    """Also when there was more to send to it than a pipe holds."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "cache")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert done.returncode == 1
    assert 'must do so under `if __name__ == "__main__":`' in done.stderr


def test_what_failed_is_forgotten_when_it_goes_on(corpus_file: Path) -> None:
    folder = ensure_plan(dataset(corpus_file))
    (folder / "failed.json").write_text("{}")
    prepare(dataset(corpus_file))
    assert not (folder / "failed.json").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.made_source import Made, make_documents
from titan.dataset.preprocess import plan, prepare, shard_job, writer

def killing(function, calls):
    left = [calls]
    def wrapped(*arguments, **more):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return wrapped

plan.MIN_SHARD_BYTES = 1000
where, name = {place}
setattr(where, name, killing(getattr(where, name), {calls}))
prepare.prepare(Made(content=make_documents(), cache=sys.argv[1], validation=0.2, workers=1))
"""


@pytest.mark.parametrize(
    ("place", "calls", "made_by_then"),
    [
        pytest.param("writer.HashedFile, 'write'", 7, 1, id="while-writing"),
        full("Path, 'replace'", 2, 0, id="between-renames"),
        full("shard_job, 'write_json'", 2, 2, id="before-a-receipt"),
        full("prepare, 'write_json'", 0, 6, id="before-the-manifest"),
        full("plan, 'write_json'", 0, 0, id="before-the-plan"),
    ],
)
def test_a_killed_preparation_goes_on(
    tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch, place: str, calls: int, made_by_then: int
) -> None:
    script = KILLED.replace("{place}", place).replace("{calls}", str(calls))
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "cache" / "datasets").iterdir()
    assert not (folder / "manifest.json").exists()
    done, makes = len(list(folder.glob("unit-*.json"))), list[int]()
    assert done == made_by_then
    monkeypatch.setattr(units, "write_shard", lambda *a: (makes.append(a[2]), write_shard(*a)))
    assert prepare(made(tmp_path)) == folder
    assert makes == list(range(done, 6))
    assert leftovers(folder) == []
    assert read_files(folder) == read_files(prepare(made(tmp_path, cache=str(tmp_path / "other"))))


SLOW = """
import multiprocessing, sys
from tests.support.made_source import Made
from titan import errors
from titan.dataset.preprocess import plan, prepare

def show(line):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)

def body():
    prepare.prepare(Made(content=(("stall", "x" * 999),) * 2, cache=sys.argv[1], workers=2), show)
    return 0

if __name__ == "__main__":
    plan.MIN_SHARD_BYTES = 1000
    sys.exit(errors.exit_code(body))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        full(signal.SIGTERM, 130, id="sigterm"),
        full(signal.SIGKILL, -signal.SIGKILL, id="sigkill"),
    ],
)
def test_nothing_outlives_a_preparation(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, str(tmp_path / "slow.py"), str(tmp_path / "cache")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as job:
        try:
            assert job.stdout is not None
            children = [int(pid) for pid in job.stdout.readline().split()]
            job.send_signal(number)
            assert job.wait(LIMIT) == code
        finally:
            job.kill()
    assert len(children) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the children to end")
    (folder,) = (tmp_path / "cache" / "datasets").iterdir()
    assert number is signal.SIGKILL or set(leftovers(folder)) <= {".hashes"}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("corruption", "verify", "told", "again"),
    [
        pytest.param(
            lambda f: (f / "train-00002.tokens").unlink(), False, "tokens is missing; shard 2 of 6", 1, id="gone"
        ),
        pytest.param(lambda f: _cut(f / "train-00002.tokens"), False, " instead of ", 1, id="cut"),
        pytest.param(lambda f: _cut(f / "validation-00002.offsets"), False, " instead of ", 1, id="offsets-cut"),
        pytest.param(
            lambda f: _flip(f / "train-00002.tokens"),
            True,
            "has another checksum than when it was written",
            1,
            id="flipped",
        ),
        pytest.param(lambda f: (f / "unit-00002.json").unlink(), False, "json is missing", 1, id="receipt-gone"),
        pytest.param(lambda f: _cut(f / "unit-00002.json"), False, "json is missing or corrupt", 1, id="receipt-cut"),
        pytest.param(lambda f: _cut(f / "manifest.json"), False, "manifest.json is corrupt", 6, id="manifest-cut"),
        pytest.param(lambda f: _cut(f / "plan.json"), False, "", 0, id="plan-cut"),
        pytest.param(lambda f: (f / "token_bytes.npy").unlink(), False, "", 0, id="token-bytes-gone"),
    ],
)
def test_what_is_damaged_is_made_again(
    tmp_path: Path, small_units: None, corruption: Callable[[Path], None], verify: bool, told: str, again: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = prepare(made(tmp_path))
    before, report, lines, makes = read_files(folder), manifest(folder)["report"], list[str](), list[int]()
    corruption(folder)
    monkeypatch.setattr(units, "write_shard", lambda *a: (makes.append(a[2]), write_shard(*a)))
    assert prepare(made(tmp_path), lines.append, verify=verify) == folder
    assert read_files(folder) == before
    assert any(told in line for line in lines) or not told
    assert len(makes) == again
    assert manifest(folder)["report"]["duplicates"] == report["duplicates"]  # type: ignore[index]
    assert leftovers(folder) == []


def test_a_flipped_bit_is_found_only_by_looking(tmp_path: Path) -> None:
    folder = prepare(made(tmp_path))
    _flip(folder / "train-00000.tokens")
    damaged = read_files(folder)
    prepare(made(tmp_path))
    assert read_files(folder) == damaged


@pytest.mark.parametrize("receipt", [pytest.param(True, id="by-receipt"), pytest.param(False, id="by-manifest")])
def test_what_comes_out_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: bool) -> None:
    from titan.dataset.preprocess.encode import Encoder

    folder = prepare(made(tmp_path))
    (folder / "train-00000.tokens").unlink()
    if not receipt:
        (folder / "unit-00000.json").unlink()
    framed = Encoder._add_bos_eos
    monkeypatch.setattr(Encoder, "_add_bos_eos", lambda *a: [tokens[1:] for tokens in framed(*a)])
    with pytest.raises(ConfigError, match=r"differs from its former content.*delete that folder"):
        prepare(made(tmp_path))


@pytest.mark.full
def test_a_full_disk_is_a_sentence_and_work_goes_on(tmp_path: Path, small_units: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = made(
        tmp_path,
        content=(*make_documents(1), tuple(f"{i} is a number" for i in range(3000)), *make_documents(1, same=40)),
    )
    ensure_plan(big)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(ConfigError, match=r"can't be used \(File too large.*dataset\.cache=FOLDER"):
            prepare(big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder = ensure_plan(big)
    assert [f.name for f in sorted(folder.glob("unit-*"))] == ["unit-00000.json"]
    assert not list(folder.glob("*-00001.*")) and not list(folder.glob(".unit*"))
    prepare(big)
    assert read_files(folder) == read_files(prepare(made(tmp_path, content=big.content, cache=str(tmp_path / "other"))))


def test_files_that_change_meanwhile_are_refused(corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: object) -> None:
        write_shard(*arguments)  # type: ignore[arg-type]
        corpus_file.write_text(corpus_file.read_text() + '\n{"text": "more"}')

    monkeypatch.setattr(units, "write_shard", late)
    with pytest.raises(ConfigError, match="changed"):
        prepare(dataset(corpus_file))
    assert list((corpus_file.parent / "cache" / "datasets").iterdir()) == []


def test_what_gives_no_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the source has no tokens"):
        prepare(made(tmp_path, content=((Skip("empty", "here"),),)))
    assert not (tmp_path / "cache" / "datasets").exists()


def test_ids_that_the_vocabulary_lacks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.dataset.sources.local import MarkovSource

    monkeypatch.setattr(MarkovSource, "documents", lambda *_: iter([np.array([3, 300])]))
    with pytest.raises(ConfigError, match=r"ids from 3 to 300.*vocab_size is 256"):
        prepare(Synthetic(tokens=2000, cache=str(tmp_path)))


def test_a_cache_that_can_not_be_written_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"dataset\.cache=FOLDER"):
        prepare(dataset(corpus_file, cache=str(tmp_path / "file")))


def test_the_cache_is_where_the_settings_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("TITAN_CACHE", raising=False)
    assert find_cache_folder(Stdlib()) == Path("/home/someone/.cache/titan")
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path))
    assert find_cache_folder(Stdlib()) == tmp_path
    assert find_cache_folder(Stdlib(cache="~/data")) == Path("/home/someone/data")
