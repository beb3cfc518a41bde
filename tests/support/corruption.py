"""Ways to damage what a run saved, and what comes of each.

A run of six steps was stopped after its fourth, with checkpoints of steps 2 and 4. Then something is damaged, and the
same command is given again: what does the user read, from which step does it go on, and has any code run that a file
brought along?
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from tests.checkpoint.test_manager import stop_at
from tests.support.composing import compose_test_run
from tests.support.ranks import RankFailedError
from tests.support.runs import TINY, Tensors, are_identical, read_learned_values, train_run
from titan.checkpoint import manifest
from titan.dataset.tokenizers import train as train_tokenizer
from titan.errors import ConfigError
from titan.run.run import Run
from titan.training import checkpointing
from titan.training.trainer import Trainer

DATA, METADATA, MANIFEST = "__0_0.distcp", ".metadata", manifest.NAME
WORDS = "one fish two fish red fish blue fish\nthe quick brown fox jumps over the lazy dog again and again\n"


@dataclass(frozen=True)
class DamageScene:
    """A run's place: its directory, a copy of its checkpoints elsewhere, and where a trap would leave its mark."""

    folder: Path

    @property
    def directory(self) -> Path:
        return self.folder / "run"

    @property
    def last(self) -> Path:
        """The last checkpoint."""
        return manifest.folder_of(self.directory, 4)

    @property
    def previous(self) -> Path:
        """The one before it."""
        return manifest.folder_of(self.directory, 2)

    @property
    def remote(self) -> Path:
        return self.folder / "remote" / "run"

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    def compose_run(self, *overrides: str) -> Run:
        """The command that is given twice."""
        text, vocabulary = self.folder.parent / "text.txt", self.folder.parent / "own.tiktoken"
        data = ("dataset=text", f"dataset.path={text}", f"dataset.tokenizer={vocabulary}")
        common = (setting for setting in TINY if not setting.startswith("dataset"))
        return compose_test_run([*common, *data, *SETTINGS, f"hydra.run.dir={self.directory}", *overrides])


URL, FOLDER = "file://", ""
SETTINGS = (
    "model.vocab=300", "training.steps=6", "checkpoint.every=2",
    "checkpoint.keep=9", "metrics.sample_tokens=0", "optimizer=adamw",
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """A way to damage a run.

    Attributes:
        name: for the table and for pytest.
        do: the damage.
        message_pattern: a pattern of what the user reads; empty where nothing is to be said.
        used: the step from which the run goes on; None where it does not.
        overrides: settings of the second command.
        remote: how the place of the checkpoints' copies is written; None where there are none.
        during: what happens while the second command trains, on each rank.
        code: the exit code of the second command; -1 where it was killed.
        root: only root can do it.
    """

    name: str
    do: Callable[[DamageScene], Any]
    message_pattern: str
    used: int | None = 2
    overrides: tuple[str, ...] = ()
    remote: str | None = None
    during: Callable[[Trainer], Any] | None = None
    code: int = 0
    root: bool = False

    @property
    def id(self) -> str:
        """A name without blanks."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower())


@dataclass(frozen=True)
class DamageResult:
    """What came of a damage: the exit code, what was read, the step it went on from, whether it ended as it should."""

    code: int
    output: str
    start_step: int | None
    same: bool
    ran_code: bool


@dataclass
class OriginalRun:
    """The run before the damage, made once; and what it becomes where nothing is damaged."""

    folder: Path
    last: Tensors
    lines: list[tuple[Any, ...]]

    def copy_scene(self, name: str, copied: bool) -> DamageScene:
        """A copy of it."""
        folder = self.folder / name
        shutil.copytree(self.folder / ("remote" if copied else "plain"), folder)
        return DamageScene(folder)


def make_original_run(folder: Path) -> OriginalRun:
    """Train the runs that are to be damaged, and one that is not."""
    (folder / "text.txt").write_text(WORDS * 300)
    train_tokenizer.main([str(folder / "text.txt"), f"to={folder}/own.tiktoken", "ranks=260"])
    for name in ("plain", "remote"):
        scene = DamageScene(folder / name)
        train_run(scene.compose_run(*_build_remote_settings(scene, FOLDER if name == "remote" else None)), stop_at(3))
    undamaged = DamageScene(folder / "whole")
    return OriginalRun(folder, train_run(undamaged.compose_run())[0].last, read_learned_values(undamaged.compose_run()))


def _build_remote_settings(scene: DamageScene, remote: str | None) -> tuple[str, ...]:
    return () if remote is None else (f"checkpoint.path={remote}{scene.folder / 'remote'}",)


def apply_damage(damage: Damage, origin: OriginalRun) -> DamageResult:
    """Damage a copy of the run, and give the command again."""
    scene = origin.copy_scene(damage.id, damage.remote is not None)
    damage.do(scene)
    output = io.TextIOWrapper((scene.folder / "said").open("wb", buffering=0), write_through=True)
    code, ended = 0, False
    with redirect_stdout(output):
        try:
            run = scene.compose_run(*_build_remote_settings(scene, damage.remote), *damage.overrides)
            result = train_run(run, damage.during)[0]
            code = 0 if result.failure is None else 1
            output.write(result.failure or "")
            ended = code == 0 and are_identical(result.last, origin.last) and read_learned_values(run) == origin.lines
        except ConfigError as refusal:
            code, _ = 2, output.write(str(refusal))
        except RankFailedError as failed:
            text = str(failed)
            code = 2 if "titan.errors.ConfigError: " in text else -1
            output.write(text.rpartition("titan.errors.ConfigError: ")[2])
    words = (scene.folder / "said").read_text()
    return DamageResult(code, words, _read_start_step(scene), ended, scene.mark.exists())


def _read_start_step(scene: DamageScene) -> int | None:
    """From which step the second attempt began; None when there was none."""
    try:
        documents = [d for d in yaml.safe_load_all((scene.directory / "run.yaml").read_text()) if d]
        document = documents[-1]
        return int(document["from_step"]) if document["attempt"] > 1 else None
    except (OSError, TypeError, KeyError, yaml.YAMLError):
        return None


def flip_bit(file: Path, at: int | None = None) -> None:
    """Change one bit of a file, by default in its middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(bytes(content))


def cut_file(file: Path) -> None:
    """Take the second half of a file away."""
    os.truncate(file, file.stat().st_size // 2)


def append_bytes(file: Path) -> None:
    with file.open("ab") as out:
        out.write(b"more")


def replace_by_directory(file: Path) -> None:
    """Put a directory in a file's place."""
    file.unlink()
    file.mkdir()


def replace_by_loop(file: Path) -> None:
    """Put a link that leads to itself in a file's place: it can't be opened, by nobody."""
    file.unlink()
    file.symlink_to(file)


def replace_by_unreadable(file: Path) -> None:
    """Put a file in its place that gives an error when it is read, as a failing disk does (Linux)."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def swap_files(first: Path, second: Path) -> None:
    """Let two files have each other's content."""
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def edit_manifest(folder: Path, **values: Any) -> None:
    """Change what a manifest says."""
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def update_checksums(folder: Path) -> None:
    """Let a manifest say of its files what they are now: as somebody would who means harm."""
    files = {}
    for file in (f for f in folder.iterdir() if f.name != MANIFEST):
        with file.open("rb") as content:
            files[file.name] = vars(manifest.checksum_stream(content))
    edit_manifest(folder, files=files)


def find_tokenizer(folder: Path) -> Path:
    """The tokenizer's file of a checkpoint."""
    return folder / str(json.loads((folder / MANIFEST).read_text())["tokenizer"])


class Trap:
    """Pickles to something that does harm when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def make_shell_trap(scene: DamageScene) -> Trap:
    """A trap that leaves its mark through a shell."""
    return Trap(os.system, f"touch {scene.mark}")


def make_open_trap(scene: DamageScene) -> Trap:
    """A trap that leaves its mark with no more than a built-in function."""
    return Trap(open, str(scene.mark), "w")


def make_load_trap(scene: DamageScene) -> Trap:
    """A trap that has torch load another file, which holds the trap proper."""
    hidden = scene.last / "hidden"
    torch.save(make_shell_trap(scene), hidden)
    return Trap(_load, str(hidden))


def plant_trap(kind: Callable[[DamageScene], Trap], name: str = METADATA) -> Callable[[DamageScene], None]:
    """Put a trap in a file's place, and correct the manifest."""

    def plant(scene: DamageScene) -> None:
        (scene.last / name).write_bytes(pickle.dumps(kind(scene)))
        update_checksums(scene.last)

    return plant


def plant_torch_trap(scene: DamageScene) -> None:
    """The data file is what `torch.save` made of a trap, over and over: wherever it is read, it is there."""
    buffer, file = io.BytesIO(), scene.last / DATA
    torch.save(make_shell_trap(scene), buffer)
    metadata = pickle.loads((scene.last / METADATA).read_bytes())
    trap_bytes = buffer.getvalue()
    for index, storage_info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(storage_info, offset=0, length=len(trap_bytes))
    file.write_bytes(trap_bytes)
    (scene.last / METADATA).write_bytes(pickle.dumps(metadata))
    update_checksums(scene.last)


LIES: dict[str, Callable[[Any, Any], Any]] = {
    "an offset beyond the file": lambda info, other: replace(info, offset=2**40),
    "an offset in a tensor": lambda info, other: replace(info, offset=info.offset + 8),
    "a length that is too short": lambda info, other: replace(info, length=info.length // 2),
    "a length of zero": lambda info, other: replace(info, length=0),
    "the position of another tensor": lambda info, other: other,
}
"""What metadata may say of the position of the largest tensor; `other` is that of the smallest."""


def change_positions(change: Callable[[Any, Any], Any]) -> Callable[[DamageScene, Any], None]:
    def change_largest(scene: DamageScene, metadata: Any) -> None:
        indices = sorted(metadata.storage_data, key=lambda index: metadata.storage_data[index].length)
        other, info = (metadata.storage_data[index] for index in (indices[0], indices[-1]))
        metadata.storage_data[indices[-1]] = change(info, other)

    return change_largest


def change_metadata(change: Callable[[DamageScene, Any], Any]) -> Callable[[DamageScene], None]:
    """Change the metadata, and correct the manifest."""

    def change_and_reseal(scene: DamageScene) -> None:
        file = scene.last / METADATA
        metadata = pickle.loads(file.read_bytes())
        change(scene, metadata)
        file.write_bytes(pickle.dumps(metadata))
        update_checksums(scene.last)

    return change_and_reseal


def describe_as_bytes(scene: DamageScene, metadata: Any) -> None:
    """Say of a tensor that it is an object: torch's own reader would unpickle it without limits."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata[next(iter(metadata.state_dict_metadata))] = BytesStorageMetadata()


def lead_outside(scene: DamageScene, metadata: Any) -> None:
    """Say of all tensors that they are in the checkpoint before."""
    for index, storage_info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(storage_info, relative_path=f"../step-2/{DATA}")


def hide_trap(scene: DamageScene, metadata: Any) -> None:
    """Hide a trap where the metadata may hold anything."""
    metadata.planner_data = {"harmless": [make_shell_trap(scene)]}


def limit_file_size(bytes_: int) -> Callable[[Trainer], None]:
    """No file may grow beyond so many bytes while steps 5 and 6 are done: what a full disk does."""
    import resource

    def set_limit(trainer: Trainer) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))
        skip_save_delays()

    return set_limit


def kill_before_manifest(trainer: Trainer) -> None:
    """The rank dies when all files of a checkpoint are there, and only its manifest is missing."""
    manifest.write = lambda *args: os._exit(9)  # type: ignore[assignment]


def _load(file: str) -> Any:
    return torch.load(file, weights_only=False)


def drop_privileges(trainer: Trainer) -> None:
    """Be a user who may write nowhere, once training has begun."""
    update = trainer._update

    def update_without_privileges(bad: torch.Tensor) -> None:
        os.seteuid(65534)
        update(bad)

    trainer._update = update_without_privileges  # type: ignore[method-assign]
    skip_save_delays()


def skip_save_delays() -> None:
    """Try the last save again at once."""
    checkpointing.time = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)  # type: ignore[assignment]


def damage_both(harm: Callable[[Path], Any]) -> Callable[[DamageScene], None]:
    """The same harm to both checkpoints."""
    return lambda scene: [harm(scene.last), harm(scene.previous)][0]


def replace_by_file(folder: Path) -> None:
    """Put a file in a folder's place."""
    shutil.rmtree(folder)
    folder.write_text("")


SIZE = "has [0-9,]+ bytes instead of [0-9,]+"
CHECKSUM = "has the checksum [0-9a-f]{8} instead of [0-9a-f]{8}"


def _match_damage(reason: str, step: int = 4) -> str:
    return f"checkpoint step-{step} is damaged and not used: {reason}"


def _harm_last(name: str, harm: Callable[[Path], Any]) -> Callable[[DamageScene], Any]:
    """Harm a file of the last checkpoint."""
    return lambda scene: harm(scene.last / name)


def _write(content: bytes) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(content)


def copy_previous(file: Path) -> None:
    """Put the checkpoint before's file in a file's place."""
    shutil.copy(file.parent.parent / "step-2" / file.name, file)


def _list_file_damages() -> Iterator[Damage]:
    """What happens to single files."""
    harms: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
        ("cut in half", cut_file, SIZE), ("with one bit flipped", flip_bit, CHECKSUM),
        ("deleted", Path.unlink, "can't be read .No such"), ("empty", _write(b""), "has 0 bytes"),
        ("longer", append_bytes, SIZE), ("a directory", replace_by_directory, SIZE),
        ("of another checkpoint", copy_previous, f"({CHECKSUM}|{SIZE})"),
    )  # fmt: skip
    for title, name in (("data", DATA), ("metadata", METADATA)):
        for how, harm, reason in harms:
            yield Damage(f"{title} {how}", _harm_last(name, harm), _match_damage(f"{re.escape(name)} {reason}"))
    unopened = _match_damage(f"{DATA} can't be read .Too many")
    yield Damage("data that can not be opened", _harm_last(DATA, replace_by_loop), unopened)
    swap = lambda s: swap_files(s.last / DATA, s.last / METADATA)
    yield Damage("data and metadata swapped", swap, _match_damage(rf"\S+ {SIZE}"))
    flipped, deleted = _match_damage(rf"\S+ {CHECKSUM}"), _match_damage(".* can't be read .No such file")
    yield Damage("tokenizer with one bit flipped", lambda s: flip_bit(find_tokenizer(s.last)), flipped)
    yield Damage("tokenizer deleted", lambda s: find_tokenizer(s.last).unlink(), deleted)


def _list_manifest_damages() -> Iterator[Damage]:
    """What happens to a manifest."""
    yield Damage("manifest deleted", _harm_last(MANIFEST, Path.unlink), "attempt 2, resume from step 2")
    none = f"{MANIFEST} is not a manifest"
    harms: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
        ("cut in half", cut_file, none), ("empty", _write(b""), none), ("not UTF-8", _write(b"\xff\xfe{}"), none),
        ("a directory", replace_by_directory, f"{MANIFEST} can't be read .Is a"),
        ("on a failing disk", replace_by_unreadable, f"{MANIFEST} can't be read .Input"),
        ("of another checkpoint", copy_previous, f"{MANIFEST} is of step 2"),
    )  # fmt: skip
    for how, harm, reason in harms:
        yield Damage(f"manifest {how}", _harm_last(MANIFEST, harm), _match_damage(reason))
    outside = f"{none} .it names '../step-2/manifest.json', which is not a file in its folder"
    edits: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("manifest of other types", {"step": "four", "files": []}, none),
        ("manifest of another format", {"format": 7}, f"{MANIFEST} has format 7, and this titan reads"),
        ("manifest that names files outside", {"files": {"../step-2/manifest.json": {"bytes": 1, "crc32": "0" * 8}}},
         outside),
        ("manifest without data", {"data": None}, ".* .data is None, where a mapping"),
        ("checkpoint of another run", {"run_id": "other"}, ".* is of another run"),
    )  # fmt: skip
    for name, values, reason in edits:
        yield Damage(name, lambda s, v=values: edit_manifest(s.last, **v), _match_damage(reason))
    list_metadata_only = lambda s: {METADATA: vars(manifest.checksum_file(s.last / METADATA))}
    unlisted = _match_damage(".* does not list __0")
    yield Damage(
        "manifest that lists no tensors", lambda s: edit_manifest(s.last, files=list_metadata_only(s)), unlisted
    )


def _list_folder_damages() -> Iterator[Damage]:
    """What happens to folders."""
    gone, previous = "there is no checkpoint any more of a run that had got to step 4", "attempt 2, resume from step 2"
    is_file = "checkpoints in it is a file instead of the folder of checkpoints; "
    both = "step-4 is damaged .*; checkpoint step-2 is damaged .*; and there is no other. Bring back a copy of one, or"
    flip_both, cut_both = damage_both(lambda f: flip_bit(f / DATA)), damage_both(lambda f: cut_file(f / MANIFEST))
    yield Damage("checkpoint removed", lambda s: shutil.rmtree(s.last), previous)
    yield Damage("checkpoint a file", lambda s: replace_by_file(s.last), previous)
    yield Damage("all checkpoints removed", remove_all, gone, 0)
    yield Damage("all checkpoints a file", lambda s: replace_by_file(s.last.parent), is_file, None, code=2)
    yield Damage("both checkpoints damaged", flip_both, both, None, code=2)
    yield Damage("both manifests cut", cut_both, "and there is no other", None, code=2)


def remove_all(scene: DamageScene) -> None:
    """Remove all checkpoints of the run's directory."""
    shutil.rmtree(scene.last.parent)


def _list_trap_damages() -> Iterator[Damage]:
    """What somebody may put in a checkpoint who wants code to be run."""

    def named(name: str) -> str:
        return _match_damage(f"it names {name}, which doesn't occur in checkpoints")

    shell, objects = named("posix.system"), named("torch.distributed.checkpoint.metadata.BytesStorageMetadata")
    for suffix, overrides in (("", ()), (" unverified", ("checkpoint.verify=false",))):
        yield Damage(f"metadata run a shell{suffix}", plant_trap(make_shell_trap), shell, overrides=overrides)
        yield Damage(
            f"metadata open a file{suffix}", plant_trap(make_open_trap), named(r"io.open"), overrides=overrides
        )
    loaded = named(r"(__main__|tests.support.corruption)._load")
    yield Damage("metadata load another file", plant_trap(make_load_trap), loaded)
    yield Damage("metadata hide a shell", change_metadata(hide_trap), shell)
    yield Damage("metadata of objects", change_metadata(describe_as_bytes), objects)
    yield Damage("metadata that lead outside", change_metadata(lead_outside), _match_damage("it leads to '../step-2/"))
    elsewhere = _match_damage(rf"{DATA} has no \S+ where {METADATA} says")
    yield Damage("data run a shell", plant_torch_trap, elsewhere)
    yield Damage("data a pickle", plant_trap(make_shell_trap, DATA), elsewhere)
    for title, change in LIES.items():
        yield Damage(f"metadata with {title}", change_metadata(change_positions(change)), elsewhere)


def _list_remote_damages() -> Iterator[Damage]:
    """What happens to the copies elsewhere."""

    def harm_copy(name: str, harm: Callable[[Path], Any]) -> Callable[[DamageScene], Any]:
        return lambda scene: (remove_all(scene), harm(scene.remote / name))

    whole, unread = "attempt 2, resume from step 4", "checkpoint.path=.* can't be read .*index.json is not an index"
    flipped = _match_damage(rf"\S*step-4/{DATA} has another checksum than when it was saved")
    missing = f"checkpoint step-4 elsewhere is damaged and not used: .*step-4/{MANIFEST} is missing"
    nothing = "checkpoint.path=.*: can't be read .*, and there is no checkpoint in .*; make it readable"
    flip_copy = harm_copy(f"step-4/{DATA}", flip_bit)
    delete_copy = harm_copy(f"step-4/{MANIFEST}", Path.unlink)
    cut, flip = _match_damage(f"{DATA} {SIZE}"), _match_damage(f"{DATA} {CHECKSUM}")
    yield Damage("here all removed, copies whole", remove_all, whole, 4, remote=URL)
    yield Damage("here the last damaged, copies whole", _harm_last(DATA, cut_file), cut, 4, remote=URL)
    yield Damage("here the last flipped, copies whole", _harm_last(DATA, flip_bit), flip, 4, remote=URL)
    yield Damage("here all removed, copied data flipped", flip_copy, flipped, remote=URL)
    yield Damage("here all removed, data in a folder of copies flipped", flip_copy, flipped, remote=FOLDER)
    yield Damage("here all removed, copied manifest deleted", delete_copy, missing, remote=URL)
    for title, content in (("empty", b""), ("garbage", b"[\xff")):
        spoil = lambda s, c=content: (s.remote / "index.json").write_bytes(c)
        yield Damage(f"copies' index {title}", spoil, unread, 4, remote=URL, code=1)
    yield Damage("copies removed", lambda s: shutil.rmtree(s.remote), whole, 4, remote=URL)
    spoil_index = harm_copy("index.json", _write(b"[]"))
    yield Damage("here all removed, copies' index garbage", spoil_index, nothing, None, remote=URL, code=2)


def _list_other_damages() -> Iterator[Damage]:
    """What happens to other files of a run, and while it saves."""
    attempts = "hydra.run.dir=.*run.yaml can't be read .*; repair it, or choose another name"
    for title, harm in (
        ("cut in half", cut_file),
        ("not YAML", lambda f: f.write_text("a: [")),
        ("text", lambda f: f.write_text("x")),
    ):
        yield Damage(f"run.yaml {title}", lambda s, h=harm: h(s.directory / "run.yaml"), attempts, None, code=2)
    yield Damage("metrics.jsonl cut", lambda s: append_bytes(s.directory / "metrics.jsonl"), "resume from step 4", 4)
    yield Damage("result.json garbage", lambda s: cut_file(s.directory / "result.json"), "resume from step 4", 4)
    full = "the last checkpoint, of step 6, could not be saved in 3 attempts; fix the error above"
    yield Damage("a disk that is full", lambda s: None, full, 4, during=limit_file_size(20_000), code=1)
    yield Damage("a directory that is read-only", lambda s: None, full, 4, during=drop_privileges, code=1, root=True)
    yield Damage(
        "killed before the manifest", lambda s: None, "resume from step 4", 4, during=kill_before_manifest, code=-1
    )


def list_damages() -> list[Damage]:
    """All of them."""
    lists = (_list_file_damages, _list_manifest_damages, _list_folder_damages, _list_trap_damages,
             _list_remote_damages, _list_other_damages)  # fmt: skip
    return [damage for list_some in lists for damage in list_some()]
