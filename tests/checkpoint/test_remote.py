"""Checkpoints that are copied elsewhere: to a folder by fsspec, and to an S3 server on this machine (moto's)."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from tests.support.made_weights import write_checkpoint
from tests.support.runs import (
    are_identical,
    begin_run,
    compose_tiny_run,
    read_learned_values,
    read_step_records,
    train_run,
)
from tests.support.tiers import full
from titan.checkpoint import manager, manifest, select
from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.remote import Remote
from titan.checkpoint.schema import Checkpoint
from titan.errors import ConfigError
from titan.run.directory import read_attempts
from titan.training import checkpointing

ALONE = Coordinator(0, 1)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """An S3 server for this session's tests."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket of its own on the server."""
    given = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    for name, value in {**given, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    name = "titan-" + "".join(c for c in tmp_path.name.lower() if c.isalnum())[:40] + str(os.getpid())
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/runs"


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Somewhere that fsspec can write to."""
    return str(request.getfixturevalue("bucket")) if request.param == "s3" else f"file://{tmp_path}/elsewhere"


def copied(url: str, directory: Path, step: int, **how: Any) -> Path:
    """A checkpoint of the run in `directory`, copied to `url`."""
    folder = write_checkpoint(directory, step)
    said = manifest.read(folder)
    assert said is not None
    manager.make_copy_hook(Checkpoint(**{"grace": 0.0, "keep": 9, **how}), url, str(directory), ALONE)(folder, said)
    return folder


def names(url: str) -> set[str]:
    """All files at a URL."""
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    return {str(path).partition(root.strip("/"))[2].strip("/") for path in fs.find(root)}


def test_what_is_copied_counts_and_comes_back(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copied(url, run, 2)
    folder = copied(url, run, 4)
    assert names(f"{url}/run") == {
        "index.json", *(f"step-{s}/{n}" for s in (2, 4) for n in ("a.distcp", ".metadata", "manifest.json"))
    }  # fmt: skip
    there = Remote(f"{url}/run")
    assert there.list_steps() == {2: 200, 4: 400}
    expected = manifest.read(folder)
    shutil.rmtree(run)
    found, notes = select.find_latest(run, url)
    assert found is not None
    assert (found.manifest, notes) == (expected, ())
    back = manager.fetch_checkpoint(there, 4, run, ALONE)
    assert manifest.read(back) == expected
    manifest.verify_checksums(back, expected.files)  # type: ignore[union-attr]


def test_copies_of_another_run_are_not_overwritten(url: str, tmp_path: Path) -> None:
    folder = copied(url, tmp_path / "run", 2)
    about = manifest.read(folder)
    assert about is not None
    with pytest.raises(OSError, match="has checkpoints of another run of the same name"):
        Remote(f"{url}/run").begin_upload(dataclasses.replace(about, run_id="another", step=3))
    assert Remote(f"{url}/run").list_steps() == {2: 200}


@pytest.mark.full
def test_those_that_are_not_kept_go(url: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        copied(url, tmp_path / "run", step, keep=1, grace=3600.0)
    assert Remote(f"{url}/run").list_steps() == {3: 300}
    assert "step-1/a.distcp" in names(f"{url}/run"), "who reads it has time to"
    copied(url, tmp_path / "run", 4, keep=1, keep_tokens=300)
    assert Remote(f"{url}/run").list_steps() == {3: 300, 4: 400}
    assert {name.partition("/")[0] for name in names(f"{url}/run")} == {"index.json", "step-3", "step-4"}


def test_a_manifest_is_written_last_so_that_half_a_copy_does_not_count(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(url, tmp_path / "run", 2)
    put = Remote.write_file

    def failing(self: Remote, name: str, content: bytes) -> None:
        if name.endswith(manifest.NAME):
            raise OSError(5, "Input/output error")
        put(self, name, content)

    monkeypatch.setattr(Remote, "write_file", failing)
    with pytest.raises(Exception, match="Input/output error"):
        copied(url, tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run")
    found, _ = select.find_latest(tmp_path / "run", url)
    assert found is not None
    assert found.manifest.step == 2


def test_a_file_that_came_otherwise_than_it_was_saved_is_damage(url: str, tmp_path: Path) -> None:
    copied(url, tmp_path / "run", 2)
    there = Remote(f"{url}/run")
    there.write_file("step-2/a.distcp", b"123456780")
    with pytest.raises(Exception, match=r"step-2/a.distcp has another checksum than when it was saved"):
        manager.fetch_checkpoint(there, 2, tmp_path / "other", ALONE)
    assert manifest.list_complete(tmp_path / "other") == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        pytest.param("nope://x/y", "Protocol not known: nope", id="protocol"),
        pytest.param("file:///nowhere/at/all", "there is no checkpoint; give the URL", id="nothing"),
        pytest.param("file:///nowhere/step-3", "no checkpoint can be read there .*manifest.json is missing", id="step"),
    ],
)
def test_a_url_without_a_checkpoint_is_refused(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint.resume={path}: .*{said}"):
        select.load_named(path)


class TestRuns:
    SETTINGS = ("checkpoint.every=2", "checkpoint.grace=0", "checkpoint.keep=2")

    @pytest.mark.full
    @pytest.mark.parametrize("layout", ["single", "fsdp2"])
    def test_a_run_whose_directory_is_gone_goes_on_from_the_copy(
        self, layout: str, bucket: str, tmp_path: Path
    ) -> None:
        whole = compose_tiny_run(tmp_path / "whole", "training.steps=8", layout=layout)
        last = train_run(whole)[0].last
        path = f"checkpoint.path={bucket}"
        first = compose_tiny_run(
            tmp_path / "run", *self.SETTINGS, "training.steps=5", path, "checkpoint=async", layout=layout
        )
        train_run(first)
        assert Remote(f"{bucket}/run").list_steps().keys() == {4, 5}
        shutil.rmtree(tmp_path / "run")
        again = compose_tiny_run(tmp_path / "run", *self.SETTINGS, "training.steps=8", path, layout=layout)
        seen = train_run(again)[0]
        assert are_identical(seen.last, last)
        assert read_learned_values(again) == read_learned_values(whole)[5:]
        assert [document["attempt"] for document in read_attempts(tmp_path / "run")] == [1, 2]
        assert Remote(f"{bucket}/run").list_steps().keys() == {6, 8}

    @pytest.mark.full
    def test_a_fork_of_a_copy(self, bucket: str, tmp_path: Path) -> None:
        parent = compose_tiny_run(tmp_path / "parent", f"checkpoint.path={bucket}")
        last = train_run(parent)[0].last
        shutil.rmtree(tmp_path / "parent")
        fork = compose_tiny_run(
            tmp_path / "fork", f"checkpoint.resume={bucket}/parent", "training.steps=5", layout="fsdp2"
        )
        assert are_identical(train_run(fork)[0].first, last)
        assert [(line["step"], line["rows"][0]) for line in read_step_records(fork)] == [(4, 24), (5, 32)]

    @pytest.mark.full
    def test_a_copy_that_fails_is_told_and_the_run_goes_on(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        upload = Remote.upload_files

        def failing(self: Remote, folder: Path, files: Any, *more: Any) -> None:
            if folder.name == "step-2":
                raise OSError(5, "Input/output error")
            upload(self, folder, files, *more)

        monkeypatch.setattr(Remote, "upload_files", failing)
        path = f"checkpoint.path={tmp_path}/elsewhere"
        run = compose_tiny_run(tmp_path / "run", *self.SETTINGS, path, "training.steps=4", layout="fsdp2")
        assert train_run(run)[0].code == 0
        said = capfd.readouterr().out
        assert (
            f"step 2: the checkpoint is complete, but: the copy to {tmp_path}/elsewhere/run: rank 0: Input/output"
            in said
        )
        assert [f.name for f in manifest.list_complete(tmp_path / "run")] == ["step-2", "step-4"]
        assert Remote(f"{tmp_path}/elsewhere/run").list_steps().keys() == {4}

    @pytest.mark.parametrize("times", [full(2), 3])
    @pytest.mark.full
    def test_the_last_copy_is_tried_again_and_has_to_succeed(
        self, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpointing.time, "sleep", lambda seconds: None)
        upload, tried = Remote.upload_files, []

        def failing(self: Remote, folder: Path, files: Any, *more: Any) -> None:
            tried.append(folder)
            if len(tried) <= times:
                raise OSError(5, "Input/output error")
            upload(self, folder, files, *more)

        monkeypatch.setattr(Remote, "upload_files", failing)
        run = compose_tiny_run(tmp_path / "run", f"checkpoint.path={tmp_path}/elsewhere", layout="fsdp2")
        seen = train_run(run)
        if times < 3:
            assert [rank.code for rank in seen] == [0, 0]
            assert Remote(f"{tmp_path}/elsewhere/run").list_steps().keys() == {3}
        else:
            assert all("of step 3, is complete in" in str(r.failure) and "Input/output" in str(r.failure) for r in seen)


@pytest.mark.full
def test_a_run_that_comes_back_from_its_copies_with_nothing_left_to_do_ends_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its metrics did not come back: there is no loss to tell and no curve to draw."""
    settings = [f"checkpoint.path={tmp_path}/elsewhere", "metrics.plot=true"]
    last = train_run(compose_tiny_run(tmp_path / "run", *settings))[0].last
    shutil.rmtree(tmp_path / "run")
    seen = train_run(compose_tiny_run(tmp_path / "run", *settings))[0]
    assert seen.code == 0
    assert are_identical(seen.last, last)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["finished"], result["step"], result["last_loss"], result["plot"]) == (True, 3, None, None)
    assert "Done after step 3 of 3." in capfd.readouterr().out
    assert [f.name for f in manifest.list_complete(tmp_path / "run")] == ["step-3"]


VICTIM = "../../../victim"
BEFORE = {"format": 1, "run_id": None, "steps": {}, "retired": {}, "begun": {}}
TAMPERED: dict[str, Any] = {
    "begun-outside": {"begun": {"777": [VICTIM]}},
    "begun-absolute": {"begun": {"777": ["/etc/passwd"]}},
    "begun-null": {"begun": None},
    "begun-names-null": {"begun": {"777": None}},
    "begun-no-step": {"begun": {"../..": ["victim"]}},
    "steps-no-step": {"steps": {"-1": 5}},
    "steps-null": {"steps": None},
    "tokens-text": {"steps": {"1": "many"}},
    "retired-null": {"retired": {"1": None}},
    "run-a-list": {"run_id": [1]},
}


@pytest.mark.parametrize("values", TAMPERED.values(), ids=TAMPERED)
def test_an_index_that_was_tampered_with_removes_nothing_elsewhere(values: dict[str, Any], tmp_path: Path) -> None:
    victim, there = tmp_path / "victim", tmp_path / "elsewhere/run"
    (there / "step-777").mkdir(parents=True)
    victim.write_text("precious")
    (there / "index.json").write_text(json.dumps(BEFORE | values))
    with pytest.raises(
        CoordinationError, match=r"index.json is not an index \(.*\); remove it, and the next save recreates it"
    ):
        copied(str(tmp_path / "elsewhere"), tmp_path / "run", 1)
    assert victim.read_text() == "precious"


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    victim, there = tmp_path / "victims/a.distcp", tmp_path / "elsewhere/run"
    victim.parent.mkdir()
    victim.write_text("precious")
    copied(str(tmp_path / "elsewhere"), tmp_path / "run", 1)
    (there / "step-777").symlink_to(victim.parent)
    index = json.loads((there / "index.json").read_text())
    (there / "index.json").write_text(json.dumps(index | {"begun": {"777": ["a.distcp"]}}))
    copied(str(tmp_path / "elsewhere"), tmp_path / "run", 2)
    assert victim.read_text() == "precious"


def test_a_file_comes_back_in_the_place_of_a_link(tmp_path: Path) -> None:
    victim, url = tmp_path / "victim", str(tmp_path / "elsewhere")
    folder = copied(url, tmp_path / "run", 1)
    victim.write_text("precious")
    (folder / "a.distcp").unlink()
    (folder / "a.distcp").symlink_to(victim)
    manager.fetch_checkpoint(Remote(f"{url}/run"), 1, tmp_path / "run", ALONE)
    assert (victim.read_text(), (folder / "a.distcp").is_symlink()) == ("precious", False)


DOWN = [
    full("ftp://127.0.0.1:{}/x"),
    full("sftp://127.0.0.1:{}/x"),
    full("webhdfs://127.0.0.1:{}/x"),
    "http://127.0.0.1:{}/x",
]


@pytest.mark.parametrize("url", DOWN, ids=lambda url: url.partition(":")[0])
def test_a_host_that_is_down_is_told_in_a_sentence(url: str, tmp_path: Path) -> None:
    with socket.socket() as closed:  # a port where nobody listens
        closed.bind(("127.0.0.1", 0))
        place = url.format(closed.getsockname()[1])
        run = compose_tiny_run(tmp_path / "run", f"checkpoint.path={place}")
        with pytest.raises(
            ConfigError, match=r"^checkpoint.path=\S+: can't be (read|used) \(.*\)(, and there is no|;)"
        ):
            begin_run(run)
        write_checkpoint(tmp_path / "old", 1)
        if "sftp" not in url or find_spec("paramiko"):
            found, notes = select.find_latest(tmp_path / "old", place)
            assert found is not None
            assert re.search(r"^checkpoint.path=\S+ can't be read \(.*\)$", notes[0])
