"""Remote checkpoints: complete checkpoints of a run's directory are copied to a URL.

Any file system of fsspec works. Object stores have neither renames nor cheap listings, so none are used: files are
written under their final names, the manifest last, and then `index.json`, which lists the steps.

    URL/NAME/   index.json  run.yaml  step-120/manifest.json  step-120/__0_0.distcp  ...

`titan.checkpoint.manager` divides the files among the ranks.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from titan.checkpoint import manifest
from titan.checkpoint.manifest import CorruptCheckpointError, Manifest, ManifestFile
from titan.checkpoint.schema import Checkpoint
from titan.config.optional import import_fsspec
from titan.config.settings import format_setting
from titan.console.text import is_url
from titan.errors import ConfigError
from titan.files.atomic import sync_path, write_atomic
from titan.files.untrusted import check_file_name, check_type, describe_value, parse_object

T = TypeVar("T")
INDEX = "index.json"
_CHUNK = 8 * 2**20


class Remote:
    """The checkpoints of one run at a URL."""

    def __init__(self, url: str, setting: str = "checkpoint.path") -> None:
        """Take a URL or a folder's path; nothing is read yet."""
        self.url = url.rstrip("/")
        try:
            from fsspec import get_filesystem_class
            from fsspec.utils import get_protocol

            for part in self.url.split("::"):
                get_filesystem_class(get_protocol(part))
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{format_setting(setting, url)}: can't be used ({error}); correct it, or install the missing package."
            ) from error

    @cached_property
    def _fs_and_root(self) -> tuple[Any, str]:
        """The file system and the path in it; created at first use, because some file systems connect at once."""
        core = import_fsspec("checkpoint.path").core
        fs_and_root: tuple[Any, str] = core.url_to_fs(self.url, use_listings_cache=False)
        return fs_and_root

    @property
    def fs(self) -> Any:
        """The file system; use it within `_call`."""
        return self._fs_and_root[0]

    @property
    def root(self) -> str:
        """The path in the file system; use it within `_call`."""
        return self._fs_and_root[1]

    def list_steps(self) -> dict[int, int]:
        """Return {step: tokens} of the remote checkpoints."""
        return {int(step): int(tokens) for step, tokens in self._read_index()["steps"].items()}

    def read_run_id(self) -> str | None:
        """Return the id of the run that wrote the checkpoints; None if there are none."""
        run_id = self._read_index().get("run_id")
        return None if run_id is None else str(run_id)

    def _read_index(self) -> dict[str, Any]:
        content = self.read(INDEX)
        if content is None:
            return {"run_id": None, "steps": {}, "retired": {}, "begun": {}}
        try:
            return _check_index(parse_object(content))
        except (ValueError, KeyError) as error:
            message = f"{self.url}/{INDEX} is not an index ({str(error) or type(error).__name__})"
            raise CorruptCheckpointError(f"{message}; remove it, and the next save recreates it") from error

    def read_manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint."""
        content = self.read(f"step-{step}/{manifest.NAME}")
        if content is None:
            raise CorruptCheckpointError(f"{self.url}/step-{step}/{manifest.NAME} is missing")
        return manifest.parse(content)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file beside the index, atomically (object stores always write atomically)."""
        path = f"{self.root}/{name}"
        if self._call(lambda: "file" in self.fs.protocol):
            write_atomic(Path(path), content)
        else:
            self._call(lambda: self.fs.pipe_file(path, content))

    def upload_files(
        self, folder: Path, files: Mapping[str, ManifestFile], advance: Callable[[], None] = lambda: None
    ) -> None:
        """Upload files of the checkpoint in `folder`, and call `advance` after each part of one."""
        from fsspec.callbacks import Callback

        parts = Callback(hooks={"advance": lambda *size, **info: advance()})
        self._call(lambda: self.fs.makedirs(f"{self.root}/{folder.name}", exist_ok=True))
        for name in files:
            remote_path = f"{self.root}/{folder.name}/{name}"
            self._call(lambda: self.fs.put_file(str(folder / name), remote_path, callback=parts))  # noqa: B023
            advance()

    def begin_upload(self, checkpoint_manifest: Manifest) -> None:
        """Record the files of an upload in the index before it starts, so that those of a killed one can be removed.

        Raises:
            OSError: when the URL has another run's checkpoints.
        """
        self._call(lambda: self.fs.makedirs(self.root, exist_ok=True))
        index = self._read_index()
        if index.get("run_id") not in (None, checkpoint_manifest.run_id):
            raise OSError(f"{self.url} has checkpoints of another run of the same name; give another checkpoint.path")
        index["run_id"] = checkpoint_manifest.run_id
        unfinished = index["begun"] | {str(checkpoint_manifest.step): sorted(checkpoint_manifest.files)}
        self._write_index(index, begun=unfinished)

    def publish(self, folder: Path, checkpoint_manifest: Manifest, settings: Checkpoint) -> dict[int, list[str]]:
        """Add an uploaded checkpoint to the index, and retire those that are not kept.

        Returns:
            The steps to `remove_files`, and then to report as `record_removal`, with their files: those retired for
                `settings.grace`
            seconds, and incomplete uploads.
        """
        self.write_file(f"{folder.name}/{manifest.NAME}", (folder / manifest.NAME).read_bytes())
        index, current_time = self._read_index(), time.time()
        step_tokens = {int(step): tokens for step, tokens in index["steps"].items()} | {
            checkpoint_manifest.step: checkpoint_manifest.tokens
        }
        kept_steps = manifest.select_kept(
            sorted(pair for pair in step_tokens.items() if pair[0] <= checkpoint_manifest.step),
            settings.keep,
            settings.keep_tokens,
            settings.at,
        )
        retired = {int(step): since for step, since in index["retired"].items() if int(step) not in kept_steps}
        retired |= dict.fromkeys(step_tokens.keys() - kept_steps, current_time)
        unfinished = {int(step): names for step, names in index["begun"].items() if int(step) not in kept_steps}
        kept = {step: step_tokens[step] for step in kept_steps}
        self._write_index(index, steps=kept, retired=retired, begun=unfinished)
        expired = [step for step, since in retired.items() if current_time - since >= settings.grace]
        return {step: self._list_files(step) for step in expired} | unfinished

    def _list_files(self, step: int) -> list[str]:
        """Return the names of a checkpoint's files; none if its manifest is gone."""
        try:
            return sorted(self.read_manifest(step).files)
        except CorruptCheckpointError:
            return []

    def forget_step(self, step: int) -> None:
        """Remove a damaged checkpoint from the index; its files are deleted when the next one is complete."""
        index = self._read_index()
        remaining = {s: tokens for s, tokens in index["steps"].items() if int(s) != step}
        self._write_index(index, steps=remaining, begun=index["begun"] | {str(step): self._list_files(step)})

    def record_removal(self, steps: Collection[int]) -> None:
        """Record that the files of retired checkpoints are deleted."""
        index = self._read_index()
        retired, unfinished = ({s: v for s, v in index[k].items() if int(s) not in steps} for k in ("retired", "begun"))
        self._write_index(index, retired=retired, begun=unfinished)

    def remove_files(self, step_files: Iterable[tuple[int, Collection[str]]]) -> None:
        """Delete the existing files of retired checkpoints, their manifests last."""
        is_local = self._call(lambda: "file" in self.fs.protocol)
        for step, names in step_files:
            if is_local and os.path.islink(f"{self.root}/step-{step}"):  # its target may be anywhere
                continue
            for path in (f"{self.root}/step-{step}/{check_file_name(name)}" for name in (*names, manifest.NAME)):
                with suppress(FileNotFoundError):
                    self._call(lambda path=path: self.fs.rm_file(path))  # type: ignore[misc]

    def fetch_files(
        self, step: int, folder: Path, files: Mapping[str, ManifestFile], advance: Callable[[], None] = lambda: None
    ) -> None:
        """Fetch files of a checkpoint into `folder` and verify their checksums; call `advance` after each part."""
        for name, expected in files.items():
            check_file_name(name)
            actual = self._call(partial(self._copy_file, f"{self.root}/step-{step}/{name}", folder / name, advance))
            if actual != expected:
                raise CorruptCheckpointError(
                    f"{self.url}/step-{step}/{name} has another checksum than when it was saved"
                )

    def _copy_file(self, source: str, target: Path, advance: Callable[[], None]) -> ManifestFile:
        target.unlink(missing_ok=True)  # it may be a link
        with self.fs.open(source, "rb") as source_file, target.open("xb") as target_file:
            for piece in iter(lambda: source_file.read(_CHUNK), b""):
                target_file.write(piece)
                advance()
        sync_path(target)
        with target.open("rb") as content:
            return manifest.checksum_stream(content, advance)

    def _write_index(self, index: Mapping[str, Any], **changes: Mapping[Any, Any]) -> None:
        content = {**index, **changes}
        names = ("run_id", "steps", "retired", "begun")
        self.write_file(INDEX, json.dumps({"format": 1, **{name: content.get(name) for name in names}}).encode())

    def read(self, name: str) -> bytes | None:
        """Return a small file beside the index; None if it is missing."""
        try:
            content: bytes = self._call(lambda: self.fs.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None
        return content

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work` and turn errors of the protocol's package into OSError."""
        try:
            return work()
        except (OSError, CorruptCheckpointError):
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _check_index(index: dict[str, Any]) -> dict[str, Any]:
    """Check an index: the files that it lists get deleted, so it must not name any others."""
    content = {"run_id": index.get("run_id"), "begun": index.get("begun", {})}
    content |= {key: index[key] for key in ("steps", "retired")}
    for key, kind in _INDEX_TYPES.items():
        check_type(content[key], kind, key)
    for step in (*content["steps"], *content["retired"], *content["begun"]):
        if not re.fullmatch("[0-9]{1,18}", step):
            raise ValueError(f"it names the step {describe_value(step)}")
    for name in (name for names in content["begun"].values() for name in names):
        check_file_name(name)
    return content


_INDEX_TYPES: dict[str, Any] = {
    "run_id": str | None,
    "steps": dict[str, int],
    "retired": dict[str, float],
    "begun": dict[str, list[str]],
}


def open_remote(path: str, directory: str) -> Remote:
    """Return the remote checkpoints of the run in `directory`: below `path` as the run is below the last folder `runs`.

    A run outside of such a folder has the name of its directory.
    """
    parts = Path(directory).parts
    last = len(parts) - 1 - parts[::-1].index("runs") if "runs" in parts[:-1] else len(parts) - 2
    base = path.rstrip("/") if is_url(path) else str(Path(path).expanduser().absolute())
    return Remote("/".join((base, *parts[last + 1 :])))
