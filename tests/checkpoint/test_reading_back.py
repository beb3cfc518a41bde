"""What is read of a checkpoint at a resume: how often, by whom, and what a file's writer may have been."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.dataset.test_tokenizer import byte_level_json
from tests.support.made_weights import LLAMA, build_tensors, write_complete, write_native
from tests.support.made_weights import make_manifest as said
from tests.support.ranks import run_ranks
from tests.support.runs import begin_run, compose_tiny_run, train_run
from tests.support.tiers import full
from titan.checkpoint import manifest, restore, save
from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.manifest import CorruptCheckpointError
from titan.checkpoint.reader import CheckpointReader, UnknownContentError
from titan.dataset.tokenizers.load import load_tokenizer
from titan.errors import ConfigError, RunError
from titan.training.trainer import Trainer
from titan.weights import tokenizer_files
from titan.weights.formats import open_weights
from titan.weights.load import load_weights


class TestMetadata:
    @pytest.mark.full
    def test_name_no_path(self, tmp_path: Path) -> None:
        train_run(compose_tiny_run(tmp_path))
        (folder,) = manifest.list_complete(tmp_path)
        assert b"pathlib" not in (folder / ".metadata").read_bytes()

    @pytest.mark.parametrize(
        ("module", "name", "known"),
        [("pathlib", "PosixPath", True), ("pathlib._local", "PosixPath", True), ("pathlib._local", "Path", False)],
    )
    def test_of_any_python_are_read_and_nothing_else(self, module: str, name: str, known: bool, tmp_path: Path) -> None:
        content = pickle.dumps(Metadata({}, storage_data={}, storage_meta=StorageMeta(Path("/x"))), protocol=4)
        for old, new in (("pathlib", module), ("PosixPath", name)):
            text, other = (b"\x8c" + bytes([len(word)]) + word.encode() for word in (old, new))
            assert content.count(text) == 1
            content = content.replace(text, other)
        (tmp_path / ".metadata").write_bytes(content)
        if known:
            assert CheckpointReader(tmp_path).read_metadata().state_dict_metadata == {}
        else:
            with pytest.raises(UnknownContentError, match=r"names pathlib._local.Path"):
                CheckpointReader(tmp_path).read_metadata()

    def test_are_searched_once_for_all_files(self, tmp_path: Path) -> None:
        """Thousands of ranks write millions of parts into thousands of files."""
        searches = 0

        class Positions(dict[MetadataIndex, _StorageInfo]):
            def items(self) -> Any:
                nonlocal searches
                searches += 1
                return super().items()

        content = io.BytesIO()
        torch.save(torch.zeros(2), content)
        files = [f"__{rank}_0.distcp" for rank in range(4)]
        chunks = [ChunkStorageMetadata(torch.Size([2 * rank]), torch.Size([2])) for rank in range(4)]
        tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8]), chunks)
        reader, length = CheckpointReader(tmp_path), len(content.getvalue())
        infos = {MetadataIndex("w", c.offsets): _StorageInfo(f, 0, length) for f, c in zip(files, chunks, strict=True)}
        reader._metadata = Metadata({"w": tensor}, storage_data=Positions(infos))
        for file in files:
            (tmp_path / file).write_bytes(content.getvalue())
        seen: list[None] = []
        reader.check_tensors(files, lambda: seen.append(None))
        assert (len(seen), searches) == (4, 1)
        chunks[3].sizes = torch.Size([1])
        with pytest.raises(CorruptCheckpointError, match=r"__3_0\.distcp has no w where \.metadata says"):
            reader.check_tensors(files, lambda: None)

    @pytest.mark.parametrize("layout", ["single", full("fsdp2")])
    def test_each_rank_parses_them_once_to_verify_and_to_restore(
        self, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsed = CheckpointReader._parse_file
        count: list[Path] = []

        def counted(reader: Any) -> Metadata:
            count.append(reader.path)
            return parsed(reader)

        run = compose_tiny_run(tmp_path, layout=layout)
        train_run(run)
        monkeypatch.setattr(CheckpointReader, "_parse_file", counted)
        seen = train_run(compose_tiny_run(tmp_path, "training.steps=4", layout=layout), lambda trainer: count)
        assert [len(rank.extra) for rank in seen] == [1] * run.layout.devices


def test_metadata_without_the_files_of_its_tensors_are_rejected(tmp_path: Path) -> None:
    write_native(tmp_path, LLAMA)
    saved = pickle.loads((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(saved.state_dict_metadata, storage_data={}), protocol=4))
    with pytest.raises(UnknownContentError, match=r"a part of model\.\S+ is in no file"):
        CheckpointReader(tmp_path).read_metadata()
    listed = manifest.load(tmp_path)
    assert listed is not None
    with (tmp_path / ".metadata").open("rb") as content:
        manifest.write(tmp_path, replace(listed, files=listed.files | {".metadata": manifest.checksum_stream(content)}))
    with pytest.raises(ConfigError, match=r"\.metadata can't be used: .* is in no file; give another checkpoint"):
        open_weights(tmp_path)


class Saved:
    """The metadata of a checkpoint of these tensors."""

    folder = Path("there")

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.state_dict_metadata = {n: type("Tensor", (), {"size": torch.Size(s)})() for n, s in shapes.items()}

    def read_metadata(self) -> Saved:
        return self


@pytest.mark.full
@pytest.mark.parametrize(
    ("there", "parts", "differs"),
    [
        pytest.param({"a": (2,), "b": (3,)}, [{"a": (2,)}, {"b": (3,)}], None, id="parts"),
        pytest.param({"a": (2,)}, [{"a": (2,)}, {"a": (2,)}], None, id="copies"),
        pytest.param(
            {"a": (2,)}, [{"a": (2,)}, {"b": (3,)}], r"has no b, this run has b in the shape \S+;", id="extra"
        ),
        pytest.param({"a": (2,), "b": (3,)}, [{"a": (2,)}, {}], r"has b in .*this run has no b;", id="missing"),
        pytest.param({"a": (2,), "b": (1,)}, [{"a": (2,)}, {"b": (3,)}], r"has b in .*1.*has b in .*3", id="shape"),
        pytest.param({"a": (2,), "b": (1,)}, [{"c": (2,)}, {"d": (3,)}], r"no a, and 3 more differ", id="all"),
    ],
)
def test_ranks_compare_what_they_hold_with_what_was_saved(there: Any, parts: Any, differs: str | None) -> None:
    def compared(rank: int, size: int) -> str | None:
        state = {name: torch.empty(shape) for name, shape in parts[rank].items()}
        try:
            restore._compare_tensors(state, Saved(there), Coordinator(rank, size))  # type: ignore[arg-type]
        except ConfigError as refusal:
            return str(refusal)
        return None

    first, second = run_ranks(compared, 2)
    assert first == second
    if differs is None:
        assert first is None
    else:
        assert re.search(differs, str(first)), first


def copying(tokenizer: str | None) -> Callable[[Path], save.TokenizerFiles]:
    return partial(tokenizer_files.copy_files, tokenizer)


@pytest.mark.full
def test_one_rank_that_can_not_read_the_metadata_ends_all(tmp_path: Path) -> None:
    train_run(compose_tiny_run(tmp_path, layout="fsdp2"))

    def broken(trainer: Trainer) -> None:
        if trainer.world.rank_info.rank == 1:
            CheckpointReader.read_metadata = _fails  # type: ignore[assignment,method-assign]  # in a rank's process

    for rank in train_run(compose_tiny_run(tmp_path, "training.steps=4", layout="fsdp2"), broken):
        assert "can't be read: rank 1: UnknownContentError: its metadata are none; remove it" in str(rank.failure)


def _fails(reader: CheckpointReader) -> Metadata:
    raise UnknownContentError("its metadata are none")


def test_what_no_file_is_to_blame_for_is_a_failure_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_native(tmp_path, LLAMA)
    weights: Any = open_weights(tmp_path)

    def read(*where: Any) -> Any:
        raise OSError(5, "Input/output error", "disk")

    monkeypatch.setattr(weights, "read", read)
    with pytest.raises(RunError, match=r"^checkpoint.weights=\S+: can't be read: Input/output error: disk; fix this"):
        load_weights(build_tensors(LLAMA), weights, no_dist=True)


@pytest.mark.parametrize("config", [None, {"eos_token": "<s>", "bos_token": None}], ids=["alone", "config"])
def test_a_checkpoints_tokenizer_is_the_datas(config: dict[str, Any] | None, tmp_path: Path) -> None:
    there = byte_level_json(tmp_path, config)
    (source,) = tmp_path.glob("*.json") if config is None else tmp_path.glob("tokenizer.json")
    files, name = save._create_folder(tmp_path / "checkpoints/step-1", copying(str(source)))
    copy = load_tokenizer(str(tmp_path / "checkpoints/step-1" / str(name)))
    assert (copy.fingerprint, copy.eos, copy.bos) == (there.fingerprint, there.eos, there.bos)
    manifest.verify_checksums(tmp_path / "checkpoints/step-1", files)
    assert files.keys() == {file.name for file in (tmp_path / "checkpoints/step-1").iterdir()}


@pytest.mark.parametrize("name", [None, "titan4k"])
def test_a_tokenizer_without_a_file_is_told_by_its_name(name: str | None, tmp_path: Path) -> None:
    assert save._create_folder(tmp_path / "checkpoints/step-1", copying(name)) == ({}, name)


def test_a_manifest_comes_once_the_folders_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    folder = manifest.folder_of(tmp_path / "run", 1)

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, (folder / manifest.NAME).exists()))

    byte_level_json(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    files, _ = save._create_folder(folder, copying(str(tmp_path / "tokenizer.json")))
    assert synced == [(name, False) for name in files]
    synced.clear()
    write_complete(folder, said(1), {"weights": b"w"})
    assert synced == [
        ("checkpoints", False),
        ("run", False),
        (f".manifest.json.{os.getpid()}.tmp", False),
        ("step-1", True),
    ]


def test_a_fork_of_weights_alone_is_refused(tmp_path: Path) -> None:
    fork = compose_tiny_run(tmp_path / "fork", f"checkpoint.resume={tmp_path}/parent", "training.steps=5")
    write_complete(tmp_path / "parent", said(0, data={}), {"weights": b"w"})
    with pytest.raises(
        ConfigError, match=r"parent: has weights only; initialise a run from it: checkpoint.weights=\S+parent\."
    ):
        begin_run(fork)
