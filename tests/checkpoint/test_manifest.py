"""What makes a checkpoint complete, and which one an attempt begins from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made_weights import FILES, make_manifest, write_checkpoint
from titan.checkpoint import manifest, save, select
from titan.checkpoint.manifest import CorruptCheckpointError
from titan.errors import ConfigError


def change(folder: Path, **values: Any) -> None:
    file = folder / manifest.NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1)
    read = manifest.read(folder)
    assert read is not None
    assert {**vars(read), "files": {}} == vars(make_manifest(1))
    assert read.files["a.distcp"] == manifest.ManifestFile(9, "cbf43926")  # CRC-32's published check value
    assert read.files[".metadata"].bytes == 10
    assert not list(folder.glob(".manifest*")), "nothing temporary is left"


FILE = {"bytes": 1, "crc32": "0"}
NAMES = [
    ("nothing", ""), ("dot", "."), ("dots", ".."), ("absolute", "/etc/x"), ("below", "a/b"), ("backslash", "a\\b"),
    ("line", "a\nb"), ("zero", "a\0b"), ("chain", "x::y"), ("long", "a" * 256),
]  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("data-null", {"data": None}, "data is None, where a mapping is due"),
    ("step-null", {"step": None}, "step is None, where a whole number is due"),
    ("step-true", {"step": True}, "step is True"),
    ("step-text", {"step": "ten"}, "step is 'ten'"),
    ("step-below-0", {"tokens": -1}, "it has a negative number"),
    ("layout-of-texts", {"layout": {"shard": "2"}}, "layout.shard is '2', where a whole number is due"),
    ("model-a-list", {"model": [1]}, "model is a list, where a mapping is due"),
    ("no-files", {"files": {}}, "it lists no files"),
    ("files-null", {"files": None}, "files is None"),
    ("file-null", {"files": {"a": None}}, "a is None, where a mapping is due"),
    ("file-size-a-text", {"files": {"a": FILE | {"bytes": "1"}}}, "a.bytes is '1'"),
    *((f"file-named-{kind}", {"files": {name: FILE}}, "it names .* not a file in its folder") for kind, name in NAMES),
    ("tokenizer-outside", {"tokenizer": "../../x.json"}, "its tokenizer is '../../x.json'"),
    ("tokenizer-absolute", {"tokenizer": "/etc/passwd"}, "its tokenizer is '/etc/passwd'"),
]  # fmt: skip
HARMS = [
    pytest.param(
        lambda f: (f / manifest.NAME).write_text("{"), "manifest.json is not a manifest", id="half-a-manifest"
    ),
    pytest.param(lambda f: (f / manifest.NAME).write_text("[]"), "manifest.json is not a manifest", id="no-mapping"),
    pytest.param(
        lambda f: (f / manifest.NAME).write_bytes(b""), "manifest.json is not a manifest", id="empty-manifest"
    ),
    pytest.param(lambda f: change(f, unknown=1), "manifest.json is not a manifest .*unknown", id="unknown-key"),
    pytest.param(
        lambda f: change(f, files={"../x": {"bytes": 1, "crc32": ""}}), "not a file in its folder", id="outside"
    ),
    *(
        pytest.param(lambda f, v=values: change(f, **v), f"is not a manifest .{said}", id=name)
        for name, values, said in WRONG
    ),
    pytest.param(lambda f: (f / manifest.NAME).write_text("[" * 100_000), "nested too deeply", id="deep"),
    pytest.param(lambda f: change(f, format=9), "has format 9, and this titan reads 2", id="later-format"),
    pytest.param(lambda f: (f / "a.distcp").unlink(), "a.distcp can't be read .No such file", id="missing-file"),
    pytest.param(
        lambda f: (f / "a.distcp").write_bytes(b"12345678"), "a.distcp has 8 bytes instead of 9", id="truncated-file"
    ),
    pytest.param(lambda f: (f / ".metadata").write_bytes(b""), ".metadata has 0 bytes", id="empty-metadata"),
]


@pytest.mark.parametrize(("harm", "said"), HARMS)
def test_a_damaged_checkpoint_is_named_and_does_not_count(harm: Any, said: str, tmp_path: Path) -> None:
    good, bad = write_checkpoint(tmp_path, 9), write_checkpoint(tmp_path, 10)
    assert manifest.list_complete(tmp_path) == [good, bad]
    harm(bad)
    with pytest.raises(CorruptCheckpointError, match=said):
        manifest.inspect(bad)
    assert manifest.list_complete(tmp_path) == [good]
    found, (note,) = select.find_latest(tmp_path)
    assert found is not None
    assert (found.path, found.manifest.step) == (str(good), 9)
    assert note.startswith("checkpoint step-10 is damaged and not used: ")
    with pytest.raises(ConfigError, match=f"checkpoint.resume=.*step-10: the checkpoint is damaged: .*{said}"):
        select.load_named(str(bad))
    assert select.load_named(str(tmp_path)).path == str(good)


@pytest.mark.parametrize(
    "undo",
    [lambda f: (f / manifest.NAME).unlink(), manifest.retire, manifest.mark_damaged, shutil.rmtree],
    ids=["save-not-ended", "retired", "set-aside", "gone"],
)
def test_what_does_not_count_is_passed_over(undo: Any, tmp_path: Path) -> None:
    good, other = write_checkpoint(tmp_path, 9), write_checkpoint(tmp_path, 10)
    undo(other)
    assert manifest.list_complete(tmp_path) == [good]
    notes = ("checkpoint step-10 was found damaged, and is not used",) if undo is manifest.mark_damaged else ()
    assert select.find_latest(tmp_path)[1] == notes
    with pytest.raises(ConfigError, match=r"holds no complete checkpoint|no such directory"):
        select.load_named(str(other))


def test_checkpoints_are_in_the_order_of_steps_and_strange_folders_do_not_count(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path, step) for step in (2, 10, 100)]
    (tmp_path / "checkpoints/step-7.tmp").mkdir()
    (tmp_path / "checkpoints/step-").mkdir()
    assert manifest.list_complete(tmp_path) == folders
    assert manifest.list_complete(tmp_path / "nowhere") == []
    assert select.find_latest(tmp_path / "nowhere") == (None, ())


def test_a_flipped_bit_is_found_by_the_checksum_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1)
    read = manifest.read(folder)
    assert read is not None
    manifest.verify_checksums(folder, read.files)
    (folder / "a.distcp").write_bytes(b"123456780")
    assert manifest.read(folder) is not None, "of the right size"
    with pytest.raises(CorruptCheckpointError, match=r"a.distcp has the checksum .* instead of cbf43926"):
        manifest.verify_checksums(folder, read.files)


class TestRetention:
    @given(
        steps=st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted),
        keep=st.integers(1, 5),
        keep_tokens=st.sampled_from([0, 1, 7, 100, 250]),
        at=st.sets(st.integers(1, 60), max_size=60),
    )
    def test_the_last_ones_stay_and_the_first_of_each_stretch(
        self, steps: list[int], keep: int, keep_tokens: int, at: set[int]
    ) -> None:
        there: list[tuple[int, int]] = []
        for step in steps:  # as they are saved, one after the other
            there.append((step, step * 10))
            stay = manifest.select_kept(there, keep, keep_tokens, at)
            there = [pair for pair in there if pair[0] in stay]
        last = set(steps[-keep:])
        firsts = {}
        for step in steps if keep_tokens else ():
            firsts.setdefault(step * 10 // keep_tokens, step)
        firsts.pop(0, None)
        assert {step for step, _ in there} == last | set(firsts.values()) | (at & set(steps))

    def test_what_goes_ceases_to_count_first_and_its_files_go_after_the_grace(self, tmp_path: Path) -> None:
        folders = [write_checkpoint(tmp_path, step) for step in (1, 2, 3)]
        manifest.prune(tmp_path, keep=1, keep_tokens=0, grace=3600)
        assert manifest.list_complete(tmp_path) == folders[2:]
        assert all((folders[0] / name).read_bytes() == content for name, content in FILES.items())
        manifest.prune(tmp_path, keep=1, keep_tokens=0, grace=0)
        assert list((tmp_path / "checkpoints").iterdir()) == folders[2:]

    def test_the_last_complete_one_stays(self, tmp_path: Path) -> None:
        _, second, third = (write_checkpoint(tmp_path, step) for step in (1, 2, 3))
        (third / "a.distcp").unlink()
        manifest.prune(tmp_path, keep=1, keep_tokens=0, grace=0)
        assert manifest.list_complete(tmp_path) == [second]
        assert (third / manifest.NAME).exists(), "a damaged one that is newer stays, to be looked into"

    @pytest.mark.parametrize(("keep", "left"), [(2, [2, 3, 4]), (1, [4])])
    def test_damaged_ones_go_once_they_are_older_than_all_that_stay(
        self, keep: int, left: list[int], tmp_path: Path
    ) -> None:
        folders = [write_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
        for folder in (folders[0], folders[2]):
            (folder / "a.distcp").unlink()
        manifest.prune(tmp_path, keep=keep, keep_tokens=0, grace=0)
        assert [int(folder.name[5:]) for folder in manifest.list_folders(tmp_path)] == left

    def test_a_sweep_takes_what_killed_saves_left_and_nothing_else(self, tmp_path: Path) -> None:
        _, retired, broken, half = (write_checkpoint(tmp_path, step) for step in (1, 2, 3, 4))
        manifest.retire(retired)
        manifest.mark_damaged(broken)
        (half / manifest.NAME).unlink()
        manifest.remove_leftovers(tmp_path, grace=3600)
        assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2", "step-3"]
        manifest.remove_leftovers(tmp_path, grace=0)
        assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-3"]

    def test_behind_a_link_only_files_of_the_run_go(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        folders = [write_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
        (run / "checkpoints").symlink_to(tmp_path / "checkpoints")
        content = manifest.load(folders[0])
        assert content is not None
        (folders[0] / "notes").write_text("of somebody")
        manifest.write(folders[1], replace(manifest.load(folders[1]) or content, run_id="other"))
        (folders[2] / manifest.NAME).unlink()
        manifest.prune(run, keep=1, keep_tokens=0, grace=0, run_id=content.run_id)
        manifest.remove_leftovers(run, grace=0, run_id=content.run_id)
        assert [file.name for file in folders[0].iterdir()] == ["notes"]
        assert all({*FILES} <= {file.name for file in folder.iterdir()} for folder in folders[1:])

    def test_a_save_replaces_only_files_of_the_run_behind_a_link(self, tmp_path: Path) -> None:
        there, run_id = write_checkpoint(tmp_path, 1), make_manifest(1).run_id
        (there / "notes").touch()
        (there / "__0_0.distcp").touch()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "checkpoints")
        folder = tmp_path / "run" / "checkpoints" / "step-1"
        with pytest.raises(
            FileExistsError, match="step-1 is behind a symbolic link and has a checkpoint of another run;"
        ):
            save._create_folder(folder, lambda folder: ({}, None), "other")
        assert manifest.inspect(there)
        save._create_folder(folder, lambda folder: ({}, None), run_id)
        assert {file.name for file in there.iterdir()} == {"notes", "a.distcp"}
