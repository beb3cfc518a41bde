"""What a run's directory holds decides what a command does."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers import start
from tests.support.composing import compose_test_run
from tests.support.runs import TINY, begin_run, write_run_checkpoint
from tests.support.tiers import full
from titan.dataset.shards import open_corpus
from titan.errors import ConfigError, exit_code
from titan.files.run_directory import BEGUN, FILES
from titan.report.schema import PAGE
from titan.run import attempts, directory
from titan.run.attempts import Attempt
from titan.run.directory import is_locked, lock_directory, parse_attempts, read_attempts
from titan.run.lineage import prepare_data
from titan.run.run import Run
from titan.sweep import ledger

pytestmark = pytest.mark.usefixtures("laptop")
ROOT = Path(__file__).resolve().parents[2]
EXECUTION = ("parallelism=fsdp", "memory=full", "checkpoint.every=1", "cluster.restarts=1", "debug=deterministic")


@functools.cache
def once_composed(*overrides: str) -> Run:
    return compose_test_run([*TINY, "name=x", *overrides])


def tiny(*overrides: str, name: str = "x") -> Run:
    run = dataclasses.replace(once_composed(*overrides), name=name, directory=str(Path.cwd() / "runs" / name))
    Path(run.directory).mkdir(parents=True, exist_ok=True)
    return run


def lived(run: Run) -> Attempt:
    """The attempt that begins."""
    attempt = begin_run(run)
    assert isinstance(attempt, Attempt)
    return attempt


def finish(run: Run) -> None:
    """What the trainer leaves at the end."""
    result = {"finished": True, "step": run.training.steps}
    (Path(run.directory) / "result.json").write_text(json.dumps(result))


@pytest.mark.full
def test_a_result_without_a_run_is_not_done() -> None:
    run = tiny()
    lived(run)
    result = {"finished": False, "step": 1, "attempt": 1, "ended_by": {"hook": "prune", "reason": "slow"}}
    (Path(run.directory) / "result.json").write_text(json.dumps(result))
    (Path(run.directory) / "run.yaml").unlink()
    assert not directory.is_done(run)


@pytest.mark.full
def test_another_experiment_is_rejected_before_data_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    lived(tiny())
    prepared_runs: list[Run] = []
    monkeypatch.setattr(start, "prepare_data", lambda run, show: prepared_runs.append(run))
    with pytest.raises(ConfigError, match=r"holds another experiment \(optimizer.lr was 0.001, now 1.0\)"):
        start.run_local(tiny("optimizer.lr=1"))
    assert prepared_runs == []


def test_a_run_that_has_a_checkpoint_is_not_withdrawn() -> None:
    run = tiny()
    attempt = lived(run)
    write_run_checkpoint(run, 1)
    attempts.withdraw_attempt(run, attempt)
    assert [document["attempt"] for document in read_attempts(Path(run.directory))] == [1]


@pytest.mark.full
def test_data_are_prepared_before_an_attempt_begins() -> None:
    run, files = tiny(), set()
    data = prepare_data(run)
    assert not any(Path(run.directory).iterdir()), "nothing is recorded yet"
    sys.setprofile(lambda frame, *event: files.add(frame.f_code.co_filename))
    try:
        attempts.begin_attempt(run, data)
    finally:
        sys.setprofile(None)
    assert not [file for file in files if "/dataset/preprocess/" in file or "/dataset/tokenizers/" in file]
    assert any(file.endswith("/run/attempts.py") for file in files)


def test_start() -> None:
    attempt = lived(tiny())
    assert (attempt.number, attempt.kind, attempt.checkpoint, attempt.step, attempt.rows) == (1, "start", None, 0, 0)
    assert attempt.parent is None
    assert open_corpus(attempt.corpora["data"]).train.tokens > 0


@pytest.mark.parametrize(
    ("saved", "override", "kind"),
    [
        full(0, "training.seed=0", "resume", id="no-checkpoint"),
        pytest.param(2, "training.seed=0", "resume", id="last-checkpoint"),
        full(3, "training.steps=5", "continuation", id="continuation"),
        *(full(2, override, "resume", id=override) for override in EXECUTION),
    ],
)
def test_the_second_attempt_begins_at_the_last_checkpoint(saved: int, override: str, kind: str) -> None:
    run = tiny()
    first = lived(run)
    folders = [None, *(write_run_checkpoint(run, step) for step in range(1, saved + 1))]
    if saved == 3:
        finish(run)
    attempt = lived(tiny(override))
    checkpoint = str(folders[saved]) if saved else None
    assert (attempt.number, attempt.kind, attempt.checkpoint, attempt.step) == (2, kind, checkpoint, saved)
    assert (attempt.rows, attempt.run_id) == (saved * run.training.rows, first.run_id)
    assert (attempt.ids.science == first.ids.science) == (kind == "resume")
    assert (attempt.ids.execution != first.ids.execution) == (override in EXECUTION)


def test_finished_run_starts_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny()
    lived(run)
    write_run_checkpoint(run, 3)
    finish(run)
    assert begin_run(tiny()) is None and start.run_local(tiny()) == 0
    assert len(read_attempts(Path(run.directory))) == 1, "nothing is recorded"
    assert "is finished: 3 steps" in capsys.readouterr().out


@pytest.mark.full
def test_continuation_is_resumed_under_its_own_steps() -> None:
    run = tiny()
    lived(run)
    write_run_checkpoint(run, 3)
    finish(run)
    lived(tiny("training.steps=5"))
    assert lived(tiny("training.steps=5")).kind == "resume"
    with pytest.raises(ConfigError, match=r"training.steps=3: .* has 5; give 5 or more"):
        begin_run(tiny())


@pytest.mark.full
def test_finished_run_without_a_checkpoint_can_not_go_on() -> None:
    run = tiny()
    lived(run)
    finish(run)
    with pytest.raises(ConfigError, match="no checkpoint to continue from; choose another name"):
        begin_run(tiny("training.steps=5"))


@pytest.mark.full
@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_fork(what: str) -> None:
    parent = tiny(name="parent")
    lived(parent)
    folder = write_run_checkpoint(parent, 2, science="abcdef")
    path = parent.directory if what == "run" else folder
    attempt = lived(tiny(f"checkpoint.resume={path}", "optimizer.lr=0.5"))
    assert (attempt.number, attempt.kind, attempt.parent, attempt.checkpoint) == (1, "fork", "abcdef@2", str(folder))
    assert (attempt.step, attempt.rows) == (2, 2 * parent.training.rows)


@pytest.mark.full
def test_fork_is_resumed_from_its_own_checkpoint_also_without_the_parent() -> None:
    parent = tiny(name="parent")
    lived(parent)
    folder = write_run_checkpoint(parent, 1, science="abcdef")
    fork = tiny("checkpoint.resume=runs/parent")
    first = lived(fork)
    own = write_run_checkpoint(fork, 2)
    (folder / "weights").unlink()
    attempt = lived(fork)
    assert (attempt.kind, attempt.parent, attempt.ids) == ("resume", "abcdef@1", first.ids)
    assert attempt.checkpoint == str(own)


@pytest.mark.full
def test_fork_is_another_experiment_than_a_fresh_run() -> None:
    parent = tiny(name="parent")
    fresh = lived(parent)
    write_run_checkpoint(parent, 1)
    lived(tiny("checkpoint.resume=runs/parent"))
    with pytest.raises(ConfigError, match=r"parent was 000000000000@1, now null"):
        begin_run(tiny())
    assert lived(tiny("checkpoint.resume=runs/parent", name="y")).ids.science != fresh.ids.science


@pytest.mark.full
def test_refusal_names_every_field_that_differs() -> None:
    run = tiny()
    lived(run)
    with pytest.raises(ConfigError) as refusal:
        begin_run(tiny("optimizer.lr=0.5", "training.seed=3", "parallelism=fsdp"))
    expected = "(optimizer.lr was 0.001, now 0.5; training.seed was 0, now 3)"
    assert expected in str(refusal.value)


@pytest.mark.full
def test_lives_are_recorded_as_documents() -> None:
    first = lived(tiny())
    second = lived(tiny("parallelism=fsdp"))
    directory = Path(tiny().directory)
    documents = list(yaml.safe_load_all((directory / "run.yaml").read_text()))
    assert documents == read_attempts(directory)
    assert [d["attempt"] for d in documents] == [1, 2]
    assert [d["kind"] for d in documents] == ["start", "resume"]
    assert [d["ids"] for d in documents] == [dataclasses.asdict(attempt.ids) for attempt in (first, second)]
    assert [d["choices"]["parallelism"] for d in documents] == ["single", "fsdp"]
    assert [d["layout"]["shard"] for d in documents] == [1, 2]
    assert documents[1]["config"]["optimizer"]["lr"] == 0.001
    assert documents[1]["overrides"][-1] == "parallelism=fsdp"
    assert documents[0]["science"]["data"] == open_corpus(first.corpora["data"]).digest
    environment = json.loads((directory / "env.json").read_text())
    assert environment["device"]["memory_gib"] == 16
    assert (directory / ".hydra/config.yaml").is_file()


def test_life_of_a_dead_process_can_be_locked_again(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from titan.run.directory import lock_directory
with lock_directory(Path({str(tmp_path / "run")!r})):
    print("held", flush=True)
    input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"process {other.pid} on .* is running in it"),
            lock_directory(tmp_path / "run"),
        ):
            pass
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    with lock_directory(tmp_path / "run"):
        assert f"process {os.getpid()} " in (tmp_path / "run/.lock").read_text()


def test_lock_is_released_and_a_directory_left_empty_goes(tmp_path: Path) -> None:
    with pytest.raises(ValueError), lock_directory(tmp_path / "a/b/run"):
        raise ValueError
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with lock_directory(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir(), "what was there stays"
    with lock_directory(tmp_path / "mine/run"):
        (tmp_path / "mine/run/run.yaml").touch()
    assert (tmp_path / "mine/run/run.yaml").exists()


@pytest.mark.parametrize("name", sorted(FILES - {"run.yaml"}))
def test_what_titan_writes_is_no_obstacle(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert read_attempts(tmp_path) == []


# Checkpoints


@pytest.mark.full
def test_damaged_checkpoint_is_passed_over_on_resume() -> None:
    run = tiny()
    lived(run)
    good, bad = write_run_checkpoint(run, 1), write_run_checkpoint(run, 2)
    (bad / "weights").write_bytes(b"w")
    attempt = lived(run)
    assert (attempt.checkpoint, attempt.step) == (str(good), 1)


# Faults of the machine, and what somebody else may leave


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    lock = run / ".lock"
    makers = (lambda: lock.symlink_to(victim), lambda: lock.hardlink_to(victim), lambda: os.mkfifo(lock))
    for make in makers:  # a pipe does not block
        make()
        assert not is_locked(run)
        with pytest.raises(ConfigError, match=r"=\S+: can't be written to \(.*link"), lock_directory(run):
            pass
        lock.unlink()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_named(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = r"=\S+: its file system has no file locks \(flock: .*mount it with file locks \(Lustre"
    with pytest.raises(ConfigError, match=f"hydra.run.dir{said}"), lock_directory(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=f"hydra.sweep.dir{said}"), ledger.lock_sweep(tmp_path):
        pass


def full(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the `after`-th time on that a file is opened to be written or a folder made, the disk is full."""
    count = iter(range(10**6))

    def failing(real: Any, writes: Any) -> Any:
        def work(path: Path, *arguments: Any, **more: Any) -> Any:
            if writes(*arguments, **more) and next(count) >= after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real(path, *arguments, **more)

        return work

    monkeypatch.setattr(Path, "open", failing(Path.open, lambda mode="r", *rest, **more: mode[0] in "wxa"))
    monkeypatch.setattr(Path, "mkdir", failing(Path.mkdir, lambda *rest, **more: True))


@pytest.mark.full
@pytest.mark.parametrize("after", range(4))
def test_a_disk_that_is_full_at_the_first_moment_leaves_nothing(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    attempts.corpora.prepare_corpora(run.dataset)
    Path(run.directory).rmdir()
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"hydra.run.dir=\S+: can't be written .*No space"),
    ):
        full(after, patch)
        with lock_directory(Path(run.directory)):
            begin_run(run)
    assert not Path(run.directory).exists(), "the name can be used again"
    with lock_directory(Path(run.directory)):
        lived(run)


@pytest.mark.full
def test_resuming_on_a_full_disk_is_refused_and_the_run_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    lived(run)
    write_run_checkpoint(run, 1)
    before = {p.name: p.read_bytes() for p in Path(run.directory).iterdir() if p.is_file() and p.name != "env.json"}
    for after in range(3):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"No space left on device\); free some"):
            full(after, patch)
            begin_run(run)
    now = {p.name: p.read_bytes() for p in Path(run.directory).iterdir() if p.is_file() and p.name != "env.json"}
    assert now == before
    assert lived(run).number == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.ENOSPC, "No space left.*free some space"), (errno.EIO, "repair that file"), (errno.EMFILE, "ulimit")],
    ids=["full", "broken", "files"],
)
def test_what_the_machine_lacks_is_a_sentence(code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        raise OSError(code, os.strerror(code), "runs/x/log")

    assert exit_code(body) == 1
    err = capsys.readouterr().err
    assert re.search(f"^titan: runs/x/log: .*{said}.* and give the same command again", err) and err.count("\n") == 1


@pytest.mark.full
def test_a_run_yaml_that_was_cut_anywhere_is_recognised() -> None:
    run = tiny()
    lived(run)
    text = (Path(run.directory) / "run.yaml").read_text()
    assert parse_attempts(text, "x")
    for end in range(len("---\n") + 1, len(text), 37):
        with pytest.raises(ConfigError, match=r"run.yaml can't be read"):
            parse_attempts(text[:end], "x")


CHANGES = [
    pytest.param(lambda d: d.update(life=d.pop("attempt")), "it has no 'attempt'", id="key"),
    pytest.param(lambda d: d["config"]["training"].update(row=1), "it has a setting training.row", id="setting"),
    pytest.param(lambda d: d["science"].update({"training.row": 1}), "it has a setting training.row", id="science"),
]


@pytest.mark.full
@pytest.mark.parametrize(("change", "difference"), CHANGES)
@pytest.mark.parametrize(
    ("code", "commit"),
    [
        pytest.param({"commit": "ab" * 20, "diff": None}, "commit abababababab, or", id="commit"),
        pytest.param({"commit": "ab" * 20, "diff": "x"}, "commit abababababab and the diff in env.json, or", id="diff"),
        pytest.param({"commit": "$(x)", "diff": None}, "the commit that wrote it, or", id="no-hash"),
        pytest.param(None, "the commit that wrote it, or", id="no-env"),
    ],
)
def test_a_run_of_another_commit_names_the_commit_that_reads_it(
    change: Callable[[dict[str, Any]], None], difference: str, code: dict[str, Any] | None, commit: str
) -> None:
    run = tiny()
    lived(run)
    directory = Path(run.directory)
    (document,) = yaml.safe_load_all((directory / "run.yaml").read_text())
    change(document)
    (directory / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    (directory / "env.json").write_text(json.dumps({"code": code}))
    with pytest.raises(ConfigError) as error:
        lived(run)
    assert f"another commit of titan wrote run.yaml ({difference}); read it with {commit}" in str(error.value)


def test_settings_of_a_users_own_class_are_no_other_commits() -> None:
    lived(run := tiny())
    text = (Path(run.directory) / "run.yaml").read_text()
    (document,) = yaml.safe_load_all(text)
    document["config"]["optimizer"]["extra"] = document["science"]["optimizer.extra"] = 1
    with pytest.raises(ConfigError, match=r"it has a setting optimizer\.extra"):
        parse_attempts(yaml.safe_dump(document), "x")
    document["science"]["optimizer"] = "mine.Optimizer"
    assert parse_attempts(yaml.safe_dump(document), "x") == [document]


def test_a_report_in_a_directory_is_neither_foreign_nor_a_run(tmp_path: Path) -> None:
    (tmp_path / PAGE).write_text("")
    assert read_attempts(tmp_path) == [] and PAGE not in BEGUN
