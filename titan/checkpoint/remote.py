"""Checkpoints elsewhere: a run's directory is the local tier, and what counts there is copied to a URL.

Any file system that fsspec knows can take them. Object stores have neither renames nor cheap listings, so none are
used: files are written under their names, a manifest last, and then `index.json`, which says which steps there are.

    URL/NAME/   index.json  run.yaml  step-120/manifest.json  step-120/__0_0.distcp  ...

Each rank copies the files that it finds in its share of the manifest; fetching divides them the same way.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from titan.checkpoint import manifest, retention
from titan.checkpoint.manifest import Damaged, File, Manifest
from titan.checkpoint.schema import Checkpoint
from titan.errors import ConfigError
from titan.files.atomic import sync_path, write_atomic
from titan.files.untrusted import check, file_name, parse_object, shown

T = TypeVar("T")
INDEX = "index.json"
_CHUNK = 8 * 2**20


class Remote:
    """The checkpoints of one run at a URL."""

    def __init__(self, url: str, setting: str = "checkpoint.path") -> None:
        """Take the URL, or a folder's path; nothing is read yet.

        Raises:
            ConfigError: when there is no such protocol, or its package is missing.
        """
        self.url = url.rstrip("/")
        try:
            from fsspec import get_filesystem_class
            from fsspec.utils import get_protocol

            for part in self.url.split("::"):
                get_filesystem_class(get_protocol(part))
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{setting}={url}: can't be used ({error}); correct it, or install what it needs."
            ) from error

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, and what it calls the place. Some connect at once, so it is made when first used."""
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(self.url, use_listings_cache=False)
        return found

    @property
    def fs(self) -> Any:
        """The file system; whoever takes it does so within `_try`."""
        return self._place[0]

    @property
    def root(self) -> str:
        """What the file system calls the place; as `fs`."""
        return self._place[1]

    def index(self) -> dict[int, int]:
        """Step and tokens of the checkpoints that there are; empty where there are none."""
        return {int(step): int(tokens) for step, tokens in self._index()["steps"].items()}

    def run_id(self) -> str | None:
        """Whose checkpoints these are; None where there are none."""
        found = self._index().get("run_id")
        return None if found is None else str(found)

    def _index(self) -> dict[str, Any]:
        content = self.read(INDEX)
        if content is None:
            return {"run_id": None, "steps": {}, "retired": {}, "begun": {}}
        try:
            return _checked(parse_object(content))
        except (ValueError, KeyError) as error:
            why = f"{self.url}/{INDEX} is no index ({str(error) or type(error).__name__})"
            raise Damaged(f"{why}; remove it, and the next save makes it anew") from error

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            Damaged: when it is not there, or none.
        """
        content = self.read(f"step-{step}/{manifest.NAME}")
        if content is None:
            raise Damaged(f"{self.url}/step-{step}/{manifest.NAME} is missing")
        return manifest.parse(content)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file beside the index; at once, also on a file system where that is not the rule."""
        path = f"{self.root}/{name}"
        if self._try(lambda: "file" in self.fs.protocol):
            write_atomic(Path(path), content)
        else:
            self._try(lambda: self.fs.pipe_file(path, content))

    def upload(self, folder: Path, files: Mapping[str, File]) -> None:
        """Copy files of the checkpoint in `folder`."""
        self._try(lambda: self.fs.makedirs(f"{self.root}/{folder.name}", exist_ok=True))
        for name in files:
            self._try(lambda name=name: self.fs.put_file(str(folder / name), f"{self.root}/{folder.name}/{name}"))  # type: ignore[misc]

    def begin(self, about: Manifest) -> None:
        """Call it before `upload`, so that the files of a copy that is killed can be found and removed later.

        Raises:
            OSError: when the place has another run's checkpoints.
        """
        self._try(lambda: self.fs.makedirs(self.root, exist_ok=True))
        index = self._index()
        if index.get("run_id") not in (None, about.run_id):
            raise OSError(f"{self.url} has copies of another run of the same name; give another checkpoint.path")
        index["run_id"] = about.run_id
        begun = index["begun"] | {str(about.step): sorted(about.files)}
        self._write(index, index["steps"], index["retired"], begun)

    def publish(self, folder: Path, about: Manifest, how: Checkpoint) -> dict[int, list[str]]:
        """Let a checkpoint count, all of whose files are there, and those that are not kept count no more.

        Returns:
            Steps to be removed and then to be `removed`, with their files: those that have ceased to count
            `how.grace` seconds ago, and copies that were never complete.
        """
        self.put(f"{folder.name}/{manifest.NAME}", (folder / manifest.NAME).read_bytes())
        index, now = self._index(), time.time()
        there = {int(step): tokens for step, tokens in index["steps"].items()} | {about.step: about.tokens}
        stay = retention.kept(sorted(p for p in there.items() if p[0] <= about.step), how.keep, how.keep_tokens)
        retired = {int(step): since for step, since in index["retired"].items() if int(step) not in stay}
        retired |= dict.fromkeys(there.keys() - stay, now)
        begun = {int(step): names for step, names in index["begun"].items() if int(step) not in stay}
        self._write(index, {s: there[s] for s in stay}, retired, begun)
        late = [step for step, since in retired.items() if now - since >= how.grace]
        return {step: self._files(step) for step in late} | begun

    def _files(self, step: int) -> list[str]:
        """The names of a checkpoint's files; none where it has no manifest any more."""
        try:
            return sorted(self.manifest(step).files)
        except Damaged:
            return []

    def forget(self, step: int) -> None:
        """Let a damaged checkpoint count no more; its files go when the next one is complete."""
        index = self._index()
        left = {s: tokens for s, tokens in index["steps"].items() if int(s) != step}
        self._write(index, left, index["retired"], index["begun"] | {str(step): self._files(step)})

    def removed(self, steps: Collection[int]) -> None:
        """Take note that the files of checkpoints that do not count are gone."""
        index = self._index()
        retired, begun = ({s: v for s, v in index[k].items() if int(s) not in steps} for k in ("retired", "begun"))
        self._write(index, index["steps"], retired, begun)

    def remove(self, gone: Iterable[tuple[int, Collection[str]]]) -> None:
        """Delete files of checkpoints that do not count, as far as they are there; a manifest goes last."""
        here = self._try(lambda: "file" in self.fs.protocol)
        for step, names in gone:
            if here and os.path.islink(f"{self.root}/step-{step}"):  # it leads elsewhere
                continue
            for path in (f"{self.root}/step-{step}/{file_name(name)}" for name in (*names, manifest.NAME)):
                with suppress(FileNotFoundError):
                    self._try(lambda path=path: self.fs.rm_file(path))  # type: ignore[misc]

    def fetch(self, step: int, folder: Path, files: Mapping[str, File]) -> None:
        """Bring files of a checkpoint into `folder`, and compare their checksums.

        Raises:
            Damaged: naming the file that is not what it should be.
        """
        for name, due in files.items():
            file_name(name)
            found = self._try(lambda name=name: self._copy(f"{self.root}/step-{step}/{name}", folder / name))  # type: ignore[misc]
            if found != due:
                raise Damaged(f"{self.url}/step-{step}/{name} is not what was saved ({found.bytes:,} bytes)")

    def _copy(self, source: str, target: Path) -> File:
        target.unlink(missing_ok=True)  # a link would lead elsewhere
        with self.fs.open(source, "rb") as there, target.open("xb") as here:
            for piece in iter(lambda: there.read(_CHUNK), b""):
                here.write(piece)
        sync_path(target)
        with target.open("rb") as content:
            return manifest.checksum(content)

    def _write(
        self,
        index: Mapping[str, Any],
        steps: Mapping[Any, int],
        retired: Mapping[Any, float],
        begun: Mapping[Any, list[str]],
    ) -> None:
        content = {"format": 1, "run_id": index.get("run_id"), "steps": steps, "retired": retired, "begun": begun}
        self.put(INDEX, json.dumps(content).encode())

    def read(self, name: str) -> bytes | None:
        """A small file beside the index; None where there is none."""
        try:
            content: bytes = self._try(lambda: self.fs.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None
        return content

    def _try(self, work: Callable[[], T]) -> T:
        """Do something, and make whatever the protocol's own package raises an OSError."""
        try:
            return work()
        except (OSError, Damaged):
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _checked(index: dict[str, Any]) -> dict[str, Any]:
    """An index whose values are such as `Remote` writes: what it names is removed, so it may name no other files.

    Raises:
        ValueError, KeyError: when they are not.
    """
    found = {"run_id": index.get("run_id"), "begun": index.get("begun", {})}
    found |= {key: index[key] for key in ("steps", "retired")}
    for key, kind in _INDEX.items():
        check(found[key], kind, key)
    for step in (*found["steps"], *found["retired"], *found["begun"]):
        if not re.fullmatch("[0-9]{1,18}", step):
            raise ValueError(f"it names the step {shown(step)}")
    for name in (name for names in found["begun"].values() for name in names):
        file_name(name)
    return found


_INDEX: dict[str, Any] = {
    "run_id": str | None,
    "steps": dict[str, int],
    "retired": dict[str, float],
    "begun": dict[str, list[str]],
}


def of(path: str, directory: str, setting: str = "checkpoint.path") -> Remote:
    """The checkpoints of the run in `directory` under `checkpoint.path`: below it as below the last folder `runs`.

    A run that is in no such folder goes by its directory's own name.
    """
    parts = Path(directory).parts
    last = len(parts) - 1 - parts[::-1].index("runs") if "runs" in parts[:-1] else len(parts) - 2
    place = path.rstrip("/") if is_url(path) else str(Path(path).expanduser().absolute())
    return Remote("/".join((place, *parts[last + 1 :])), setting)


def is_url(path: str) -> bool:
    """Whether a path is one of another file system."""
    return "://" in path
