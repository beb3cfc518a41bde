"""Ways to damage what a run saved, and what comes of each: `python -m tests.support.corruption [TEXT]`.

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
import sys
import tempfile
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
from tests.support.composing import composed
from tests.support.ranks import RankFailed
from tests.support.runs import TINY, Tensors, learned, same, train
from titan.checkpoint import manifest
from titan.dataset.tokenizers import train as train_tokenizer
from titan.errors import ConfigError
from titan.run.run import Run
from titan.training import checkpointing
from titan.training.trainer import Trainer

DATA, METADATA, MANIFEST = "__0_0.distcp", ".metadata", manifest.NAME
WORDS = "one fish two fish red fish blue fish\nthe quick brown fox jumps over the lazy dog again and again\n"


@dataclass(frozen=True)
class Scene:
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
    def before(self) -> Path:
        """The one before it."""
        return manifest.folder_of(self.directory, 2)

    @property
    def remote(self) -> Path:
        return self.folder / "remote" / "run"

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    def run(self, *more: str) -> Run:
        """The command that is given twice."""
        text, vocabulary = self.folder.parent / "text.txt", self.folder.parent / "own.tiktoken"
        data = ("dataset=text", f"dataset.path={text}", f"dataset.tokenizer={vocabulary}")
        common = (setting for setting in TINY if not setting.startswith("dataset"))
        return composed([*common, *data, *SETTINGS, f"hydra.run.dir={self.directory}", *more])


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
        said: a pattern of what the user reads; empty where nothing is to be said.
        used: the step from which the run goes on; None where it does not.
        more: settings of the second command.
        remote: how the place of the checkpoints' copies is written; None where there are none.
        during: what happens while the second command trains, on each rank.
        code: the exit code of the second command; -1 where it was killed.
        root: only root can do it.
    """

    name: str
    do: Callable[[Scene], Any]
    said: str
    used: int | None = 2
    more: tuple[str, ...] = ()
    remote: str | None = None
    during: Callable[[Trainer], Any] | None = None
    code: int = 0
    root: bool = False

    @property
    def id(self) -> str:
        """A name without blanks."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower())

    @property
    def lost(self) -> str:
        """For the table: what is done again."""
        if self.used is None:
            return "it does not go on" + (" by itself" if self.code == 2 else "")
        lost = {4: "nothing", 2: "two steps, done again", 0: "all steps, done again"}[self.used]
        return lost if self.code == 0 else f"{lost}; exit code {self.code}"


@dataclass(frozen=True)
class Found:
    """What came of a damage: the exit code, what was read, the step it went on from, whether it ended as it should."""

    code: int
    said: str
    began: int | None
    same: bool
    ran_code: bool

    def sentence(self, pattern: str) -> str:
        """What of it the pattern means: its whole line."""
        found = re.search(f"[^\n]*({pattern})[^\n]*", self.said) if pattern else None
        return re.sub(r"^(note|\d+) +", "", found[0].strip()) if found else ""


@dataclass
class Made:
    """The run before the damage, made once; and what it becomes where nothing is damaged."""

    folder: Path
    last: Tensors
    lines: list[tuple[Any, ...]]

    def scene(self, name: str, copied: bool) -> Scene:
        """A copy of it."""
        folder = self.folder / name
        shutil.copytree(self.folder / ("remote" if copied else "plain"), folder)
        return Scene(folder)


def made(folder: Path) -> Made:
    """Train the runs that are to be damaged, and one that is not."""
    (folder / "text.txt").write_text(WORDS * 300)
    train_tokenizer.main([str(folder / "text.txt"), f"to={folder}/own.tiktoken", "ranks=260"])
    for name in ("plain", "remote"):
        scene = Scene(folder / name)
        train(scene.run(*_copied(scene, FOLDER if name == "remote" else None)), stop_at(3))
    whole = Scene(folder / "whole")
    return Made(folder, train(whole.run())[0].last, learned(whole.run()))


def _copied(scene: Scene, remote: str | None) -> tuple[str, ...]:
    return () if remote is None else (f"checkpoint.path={remote}{scene.folder / 'remote'}",)


def outcome(damage: Damage, origin: Made) -> Found:
    """Damage a copy of the run, and give the command again."""
    scene = origin.scene(damage.id, damage.remote is not None)
    damage.do(scene)
    said = io.TextIOWrapper((scene.folder / "said").open("wb", buffering=0), write_through=True)
    code, ended = 0, False
    with redirect_stdout(said):
        try:
            run = scene.run(*_copied(scene, damage.remote), *damage.more)
            seen = train(run, damage.during)[0]
            code = 0 if seen.failure is None else 1
            said.write(seen.failure or "")
            ended = code == 0 and same(seen.last, origin.last) and learned(run) == origin.lines
        except ConfigError as refusal:
            code, _ = 2, said.write(str(refusal))
        except RankFailed as failed:
            text = str(failed)
            code = 2 if "titan.errors.ConfigError: " in text else -1
            said.write(text.rpartition("titan.errors.ConfigError: ")[2])
    words = (scene.folder / "said").read_text()
    return Found(code, words, _began(scene), ended, scene.mark.exists())


def _began(scene: Scene) -> int | None:
    """From which step the second attempt began; None when there was none."""
    try:
        documents = [d for d in yaml.safe_load_all((scene.directory / "run.yaml").read_text()) if d]
        document = documents[-1]
        return int(document["from_step"]) if document["attempt"] > 1 else None
    except (OSError, TypeError, KeyError, yaml.YAMLError):
        return None


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def cut(file: Path) -> None:
    """Take the second half of a file away."""
    os.truncate(file, file.stat().st_size // 2)


def append(file: Path) -> None:
    with file.open("ab") as out:
        out.write(b"more")


def directory(file: Path) -> None:
    """Put a directory in a file's place."""
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    """Put a link that leads to itself in a file's place: it can't be opened, by nobody."""
    file.unlink()
    file.symlink_to(file)


def broken(file: Path) -> None:
    """Put a file in its place that gives an error when it is read, as a failing disk does (Linux)."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def swap(one: Path, other: Path) -> None:
    """Let two files have each other's content."""
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def say(folder: Path, **values: Any) -> None:
    """Change what a manifest says."""
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def reseal(folder: Path) -> None:
    """Let a manifest say of its files what they are now: as somebody would who means harm."""
    files = {}
    for file in (f for f in folder.iterdir() if f.name != MANIFEST):
        with file.open("rb") as content:
            files[file.name] = vars(manifest.checksum_stream(content))
    say(folder, files=files)


def tokenizer(folder: Path) -> Path:
    """The tokenizer's file of a checkpoint."""
    return folder / str(json.loads((folder / MANIFEST).read_text())["tokenizer"])


class Trap:
    """Pickles to something that does harm when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


def system(scene: Scene) -> Trap:
    """A trap that leaves its mark through a shell."""
    return Trap(os.system, f"touch {scene.mark}")


def opened(scene: Scene) -> Trap:
    """A trap that leaves its mark with no more than a built-in function."""
    return Trap(open, str(scene.mark), "w")


def loaded(scene: Scene) -> Trap:
    """A trap that has torch load another file, which holds the trap proper."""
    hidden = scene.last / "hidden"
    torch.save(system(scene), hidden)
    return Trap(_load, str(hidden))


def trap(kind: Callable[[Scene], Trap], name: str = METADATA) -> Callable[[Scene], None]:
    """Put a trap in a file's place, and correct the manifest."""

    def do(scene: Scene) -> None:
        (scene.last / name).write_bytes(pickle.dumps(kind(scene)))
        reseal(scene.last)

    return do


def torch_trap(scene: Scene) -> None:
    """The data file is what `torch.save` made of a trap, over and over: wherever it is read, it is there."""
    made_, file = io.BytesIO(), scene.last / DATA
    torch.save(system(scene), made_)
    metadata = pickle.loads((scene.last / METADATA).read_bytes())
    whole = made_.getvalue()
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, offset=0, length=len(whole))
    file.write_bytes(whole)
    (scene.last / METADATA).write_bytes(pickle.dumps(metadata))
    reseal(scene.last)


def described(change: Callable[[Scene, Any], Any]) -> Callable[[Scene], None]:
    """Change the metadata, and correct the manifest."""

    def do(scene: Scene) -> None:
        file = scene.last / METADATA
        metadata = pickle.loads(file.read_bytes())
        change(scene, metadata)
        file.write_bytes(pickle.dumps(metadata))
        reseal(scene.last)

    return do


def as_bytes(scene: Scene, metadata: Any) -> None:
    """Say of a tensor that it is an object: torch's own reader would unpickle it without limits."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata[next(iter(metadata.state_dict_metadata))] = BytesStorageMetadata()


def outside(scene: Scene, metadata: Any) -> None:
    """Say of all tensors that they are in the checkpoint before."""
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, relative_path=f"../step-2/{DATA}")


def nested(scene: Scene, metadata: Any) -> None:
    """Hide a trap where the metadata may hold anything."""
    metadata.planner_data = {"harmless": [system(scene)]}


def limited(bytes_: int) -> Callable[[Trainer], None]:
    """No file may grow beyond so many bytes while steps 5 and 6 are done: what a full disk does."""
    import resource

    def during(trainer: Trainer) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))
        impatient()

    return during


def killed(trainer: Trainer) -> None:
    """The rank dies when all files of a checkpoint are there, and only its manifest is missing."""
    manifest.write = lambda folder, about: os._exit(9)  # type: ignore[assignment]


def _load(file: str) -> Any:
    return torch.load(file, weights_only=False)


def powerless(trainer: Trainer) -> None:
    """Be a user who may write nowhere, once training has begun."""
    update = trainer._update

    def later(bad: torch.Tensor) -> None:
        os.seteuid(65534)
        update(bad)

    trainer._update = later  # type: ignore[method-assign]
    impatient()


def impatient() -> None:
    """Try the last save again at once."""
    checkpointing.time = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)  # type: ignore[assignment]


def both(harm: Callable[[Path], Any]) -> Callable[[Scene], None]:
    """The same harm to both checkpoints."""
    return lambda scene: [harm(scene.last), harm(scene.before)][0]


def replaced(folder: Path) -> None:
    """Put a file in a folder's place."""
    shutil.rmtree(folder)
    folder.write_text("")


SIZE = "has [0-9,]+ bytes instead of [0-9,]+"
CHECKSUM = "has the checksum [0-9a-f]{8} instead of [0-9a-f]{8}"


def _said(what: str, step: int = 4) -> str:
    return f"checkpoint step-{step} is damaged and not used: {what}"


def _files() -> Iterator[Damage]:
    """What happens to single files."""
    for name, title in ((DATA, "data"), (METADATA, "metadata")):
        named = re.escape(name)
        yield Damage(f"{title} cut in half", lambda s, n=name: cut(s.last / n), _said(f"{named} {SIZE}"))
        yield Damage(f"{title} with one bit flipped", lambda s, n=name: flip(s.last / n), _said(f"{named} {CHECKSUM}"))
        yield Damage(
            f"{title} deleted", lambda s, n=name: (s.last / n).unlink(), _said(f"{named} can't be read .No such")
        )
        yield Damage(f"{title} empty", lambda s, n=name: (s.last / n).write_bytes(b""), _said(f"{named} has 0 bytes"))
        yield Damage(f"{title} longer", lambda s, n=name: append(s.last / n), _said(f"{named} {SIZE}"))
        yield Damage(f"{title} a directory", lambda s, n=name: directory(s.last / n), _said(f"{named} {SIZE}"))
        yield Damage(
            f"{title} of another checkpoint",
            lambda s, n=name: (s.last / n).write_bytes((s.before / n).read_bytes()),
            _said(f"{named} ({CHECKSUM}|{SIZE})"),
        )
    yield Damage("data that can not be opened", lambda s: loop(s.last / DATA), _said(f"{DATA} can't be read .Too many"))
    yield Damage("data and metadata swapped", lambda s: swap(s.last / DATA, s.last / METADATA), _said(rf"\S+ {SIZE}"))
    yield Damage("tokenizer with one bit flipped", lambda s: flip(tokenizer(s.last)), _said(rf"\S+ {CHECKSUM}"))
    yield Damage("tokenizer deleted", lambda s: tokenizer(s.last).unlink(), _said(".* can't be read .No such file"))


def _manifests() -> Iterator[Damage]:
    """What happens to a manifest."""
    none = _said(f"{MANIFEST} is not a manifest")
    yield Damage("manifest deleted", lambda s: (s.last / MANIFEST).unlink(), "attempt 2, resume from step 2")
    yield Damage("manifest cut in half", lambda s: cut(s.last / MANIFEST), none)
    yield Damage("manifest empty", lambda s: (s.last / MANIFEST).write_bytes(b""), none)
    yield Damage("manifest not UTF-8", lambda s: (s.last / MANIFEST).write_bytes(b"\xff\xfe{}"), none)
    yield Damage("manifest of other types", lambda s: say(s.last, step="four", files=[]), none)
    yield Damage(
        "manifest a directory", lambda s: directory(s.last / MANIFEST), _said(f"{MANIFEST} can't be read .Is a")
    )
    yield Damage(
        "manifest on a failing disk", lambda s: broken(s.last / MANIFEST), _said(f"{MANIFEST} can't be read .Input")
    )
    yield Damage(
        "manifest of another checkpoint",
        lambda s: shutil.copy(s.before / MANIFEST, s.last / MANIFEST),
        _said(f"{MANIFEST} is of step 2"),
    )
    yield Damage(
        "manifest of another format",
        lambda s: say(s.last, format=7),
        _said(f"{MANIFEST} has format 7, and this titan reads"),
    )
    yield Damage(
        "manifest that names files outside",
        lambda s: say(s.last, files={"../step-2/manifest.json": {"bytes": 1, "crc32": "0" * 8}}),
        _said(f"{MANIFEST} is not a manifest .it names '../step-2/manifest.json', which is not a file in its folder"),
    )
    yield Damage("manifest without data", lambda s: say(s.last, data=None), _said(".* .data is None, where a mapping"))
    other = lambda s: {METADATA: vars(manifest.checksum_file(s.last / METADATA))}
    yield Damage("manifest that lists no tensors", lambda s: say(s.last, files=other(s)), _said(".* does not list __0"))
    yield Damage("checkpoint of another run", lambda s: say(s.last, run_id="other"), _said(".* is of another run"))


def _folders() -> Iterator[Damage]:
    """What happens to folders."""
    none = "there is no checkpoint any more of a run that had got to step 4"
    yield Damage("checkpoint removed", lambda s: shutil.rmtree(s.last), "attempt 2, resume from step 2")
    yield Damage("checkpoint a file", lambda s: replaced(s.last), "attempt 2, resume from step 2")
    yield Damage("all checkpoints removed", lambda s: shutil.rmtree(s.last.parent), none, 0)
    yield Damage(
        "all checkpoints a file",
        lambda s: replaced(s.last.parent),
        "checkpoints in it is a file instead of the folder of checkpoints; ",
        None,
        code=2,
    )
    yield Damage(
        "both checkpoints damaged",
        both(lambda folder: flip(folder / DATA)),
        "step-4 is damaged .*; checkpoint step-2 is damaged .*; and there is no other. Bring back a copy of one, or",
        None,
        code=2,
    )
    yield Damage(
        "both manifests cut", both(lambda folder: cut(folder / MANIFEST)), "and there is no other", None, code=2
    )


def _traps() -> Iterator[Damage]:
    """What somebody may put in a checkpoint who wants code to be run."""
    names = "it names {}, which doesn't occur in checkpoints"
    for more in ((), ("checkpoint.verify=false",)):
        how = " unverified" if more else ""
        yield Damage(f"metadata run a shell{how}", trap(system), _said(names.format("posix.system")), more=more)
        yield Damage(f"metadata open a file{how}", trap(opened), _said(names.format(r"io.open")), more=more)
    yield Damage(
        "metadata load another file", trap(loaded), _said(names.format(r"(__main__|tests.support.corruption)._load"))
    )
    yield Damage("metadata hide a shell", described(nested), _said(names.format("posix.system")))
    objects = _said(names.format("torch.distributed.checkpoint.metadata.BytesStorageMetadata"))
    yield Damage("metadata of objects", described(as_bytes), objects)
    yield Damage("metadata that lead outside", described(outside), _said("it leads to '../step-2/"))
    refused = "the checkpoint .*step-4 can't be read: .*; remove"
    yield Damage("data run a shell", torch_trap, refused, None, code=1)
    yield Damage("data a pickle", trap(system, DATA), refused, None, code=1)


def _remotes() -> Iterator[Damage]:
    """What happens to the copies elsewhere."""
    gone = lambda scene: shutil.rmtree(scene.last.parent)
    yield Damage("here all removed, copies whole", gone, "attempt 2, resume from step 4", 4, remote=URL)
    yield Damage(
        "here the last damaged, copies whole", lambda s: cut(s.last / DATA), _said(f"{DATA} {SIZE}"), 4, remote=URL
    )
    yield Damage(
        "here the last flipped, copies whole",
        lambda s: flip(s.last / DATA),
        _said(f"{DATA} {CHECKSUM}"),
        4,
        remote=URL,
    )
    yield Damage(
        "here all removed, copied data flipped",
        lambda s: (gone(s), flip(s.remote / "step-4" / DATA)),
        _said(f".*step-4/{DATA} has another checksum than when it was saved"),
        remote=URL,
    )
    yield Damage(
        "here all removed, data in a folder of copies flipped",
        lambda s: (gone(s), flip(s.remote / "step-4" / DATA)),
        _said(rf"\S*step-4/{DATA} has another checksum than when it was saved"),
        remote=FOLDER,
    )
    yield Damage(
        "here all removed, copied manifest deleted",
        lambda s: (gone(s), (s.remote / "step-4" / MANIFEST).unlink()),
        f"checkpoint step-4 elsewhere is damaged and not used: .*step-4/{MANIFEST} is missing",
        remote=URL,
    )
    unread = "checkpoint.path=.* can't be read .*index.json is not an index"
    for title, harm in (("empty", lambda f: f.write_bytes(b"")), ("garbage", lambda f: f.write_bytes(b"[\xff"))):
        yield Damage(
            f"copies' index {title}", lambda s, h=harm: h(s.remote / "index.json"), unread, 4, remote=URL, code=1
        )
    yield Damage("copies removed", lambda s: shutil.rmtree(s.remote), "attempt 2, resume from step 4", 4, remote=URL)
    yield Damage(
        "here all removed, copies' index garbage",
        lambda s: (gone(s), (s.remote / "index.json").write_bytes(b"[]")),
        "checkpoint.path=.*: can't be read .*, and there is no checkpoint in .*; make it readable",
        None,
        remote=URL,
        code=2,
    )


def _others() -> Iterator[Damage]:
    """What happens to other files of a run, and while it saves."""
    attempts = "hydra.run.dir=.*run.yaml can't be read .*; repair it, or choose another name"
    for title, harm in (
        ("cut in half", cut),
        ("not YAML", lambda f: f.write_text("a: [")),
        ("text", lambda f: f.write_text("x")),
    ):
        yield Damage(f"run.yaml {title}", lambda s, h=harm: h(s.directory / "run.yaml"), attempts, None, code=2)
    yield Damage("metrics.jsonl cut", lambda s: append(s.directory / "metrics.jsonl"), "resume from step 4", 4)
    yield Damage("result.json garbage", lambda s: cut(s.directory / "result.json"), "resume from step 4", 4)
    full = "the last checkpoint, of step 6, could not be saved in 3 attempts; fix the error above"
    yield Damage("a disk that is full", lambda s: None, full, 4, during=limited(20_000), code=1)
    yield Damage("a directory that is read-only", lambda s: None, full, 4, during=powerless, code=1, root=True)
    yield Damage("killed before the manifest", lambda s: None, "resume from step 4", 4, during=killed, code=-1)


def table() -> list[Damage]:
    """All of them."""
    return [*_files(), *_manifests(), *_folders(), *_traps(), *_remotes(), *_others()]


def main(text: str = "") -> int:
    """Try each whose name holds a text and print what came of it; 1 where that is not what it should be."""
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        origin = made(folder)
        print("| damage | what the user reads | lost | code run |\n| --- | --- | --- | --- |")
        for damage in (d for d in table() if text in d.name):
            found = outcome(damage, origin)
            words = found.sentence(damage.said).replace(f"{folder}/{damage.id}/", "") or found.said[-200:]
            good = found.code == damage.code and (damage.used is None or found.began == damage.used)
            good = good and found.same == (damage.code == 0)
            read = bool(re.search(damage.said, found.said))
            failed += [] if good and read and not found.ran_code else [damage.name]
            print(f"| {damage.name} | {words} | {damage.lost} | {'YES' if found.ran_code else 'no'} |", flush=True)
    print(f"{len(failed)} not as they should be{': ' if failed else ''}{', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
