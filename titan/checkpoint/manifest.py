"""The manifest of a checkpoint, which is written last and makes it complete. Free of torch.

    checkpoints/step-120/   __0_0.distcp ...  .metadata  tokenizer.json  manifest.json

A folder without a manifest is an interrupted save. If a file doesn't match its entry in the manifest, the checkpoint is
damaged: it is reported and not used. Before a checkpoint is deleted its manifest is renamed (`retire`).

Retention: processes that are reading a retired checkpoint have `checkpoint.grace` seconds. The last complete one is
always kept. Where `checkpoints`, or a checkpoint in it, is a symbolic link, other files and other runs' checkpoints may
be there: as with copies elsewhere, only files that a manifest of the same run lists are deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, get_type_hints

from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.atomic import sync_path, write_atomic

FORMAT = 2
NAME = "manifest.json"
RETIRED = "retired.json"
"""The manifest's name in a checkpoint that is about to be deleted."""
DAMAGED = "damaged.json"
"""The manifest's name in a checkpoint that was found damaged."""
DIFFERS = "differs.json"
"""The manifest's name in a checkpoint whose replicas differed when it was saved: it is kept for inspection only."""
_CHUNK = 4 * 2**20


@dataclass(frozen=True)
class ManifestFile:
    """A file of a checkpoint: its size in bytes, and the CRC-32 of its content as 8 hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The description of a complete checkpoint.

    Attributes:
        step: number of optimizer updates.
        tokens: number of tokens read.
        data: the data position and fingerprint (`titan.dataset.permutation.build_state`); empty for converted weights.
        science_id: that of the run that saved it.
        run_id: that of the run that saved it.
        layout: the degrees of the layout that saved it.
        model: the model's settings, with its kind (`titan.config.kinds`) under `_target_`.
        tokenizer: a file in the folder or the name of a tokenizer; None if the data have none.
        files: the files by name.
        seq_len: tokens per row; 0 if unknown.
        format: the version of this description.
    """

    step: int
    tokens: int
    data: dict[str, Any]
    science_id: str
    run_id: str
    layout: dict[str, int]
    model: dict[str, Any]
    tokenizer: str | None
    files: dict[str, ManifestFile] = field(default_factory=dict)
    seq_len: int = 0
    format: int = FORMAT


class CorruptCheckpointError(Exception):
    """A checkpoint's content is not what was saved; the message names the file."""


def folder_of(directory: Path, step: int) -> Path:
    """Return the folder of step `step` of the run in `directory`."""
    return directory / "checkpoints" / f"step-{step}"


def write(folder: Path, manifest: Manifest, name: str = NAME) -> None:
    """Write the manifest, which makes the checkpoint complete; call it once all its files are on disk.

    Args:
        name: its file name; `DIFFERS` for a checkpoint that is not to be used.
    """
    for parent in (folder.parent, folder.parent.parent):  # a run's first save makes two folders
        with contextlib.suppress(PermissionError):  # another user's folder
            sync_path(parent)
    write_atomic(folder / name, json.dumps(asdict(manifest), indent=1), sync=True)


def inspect(folder: Path) -> Manifest | None:
    """Return a checkpoint's manifest after checking the sizes of its files; None for an interrupted save.

    Raises:
        CorruptCheckpointError: when the manifest or a file's size is wrong.
    """
    manifest = load(folder)
    if manifest is not None:
        check_sizes(folder, manifest.files)
    return manifest


def load(folder: Path, name: str = NAME) -> Manifest | None:
    """Return a checkpoint's manifest without checking its files; see `inspect`."""
    try:
        text = untrusted.read_regular_file(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{NAME} can't be read ({getattr(error, 'strerror', error)})") from error
    manifest = parse(text)
    if re.fullmatch(r"step-\d+", folder.name) and folder.name != f"step-{manifest.step}":
        raise CorruptCheckpointError(f"{NAME} is of step {manifest.step}")
    return manifest


def select_rank_files(files: Mapping[str, ManifestFile], rank: int, size: int) -> dict[str, ManifestFile]:
    """Return the files that a rank copies: those of the rank that wrote them, modulo `size`; rank 0 has the others."""
    # the names are torch.distributed.checkpoint's
    writers = {name: int(match[1]) for name in files if (match := re.match(r"__(\d+)_", name))}
    return {name: file for name, file in files.items() if writers.get(name, 0) % size == rank}


def check_sizes(folder: Path, files: Mapping[str, ManifestFile]) -> None:
    """Check the sizes of files.

    Raises:
        CorruptCheckpointError: when a file is missing or its size differs; the message names the first.
    """
    for name, file in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CorruptCheckpointError(f"{name} can't be read ({error.strerror})") from error
        if size != file.bytes:
            raise CorruptCheckpointError(f"{name} has {size:,} bytes instead of {file.bytes:,}")


def parse(text: bytes) -> Manifest:
    """Build a manifest from untrusted text."""
    try:
        content = untrusted.parse_object(text)
        if content["format"] != FORMAT:
            raise CorruptCheckpointError(
                f"{NAME} has format {untrusted.describe_value(content['format'])}, and this titan reads {FORMAT}"
            )
        for name, kind in get_type_hints(Manifest).items():
            untrusted.check_type(content[name], dict if name == "files" else kind, name)
        names = [untrusted.check_file_name(name) for name in content["files"]]
        if not names:
            raise ValueError("it lists no files")
        files = {}
        for name in names:
            untrusted.check_type(content["files"][name], dict, name)
            files[name] = ManifestFile(**content["files"][name])
            untrusted.check_type(files[name].bytes, int, f"{name}.bytes")
            untrusted.check_type(files[name].crc32, str, f"{name}.crc32")
        manifest = Manifest(**{**content, "files": files})
        if manifest.data:
            untrusted.check_type(manifest.data.get("rows"), int, "data.rows")
        if min(manifest.step, manifest.tokens, manifest.seq_len, manifest.data.get("rows", 0)) < 0:
            raise ValueError("it has a negative number")
        if manifest.tokenizer is not None and not is_tokenizer(manifest.tokenizer, manifest.files):
            raise ValueError(
                f"its tokenizer is {untrusted.describe_value(manifest.tokenizer)}, which is not a file in its folder"
            )
        return manifest
    except KeyError as error:
        raise CorruptCheckpointError(f"{NAME} is not a manifest (it has no {error})") from error
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"{NAME} is not a manifest ({error})") from error


def is_tokenizer(name: str, files: Container[str]) -> bool:
    """Return whether `name` can be a tokenizer: a file of the folder, titan4k, or OWNER/NAME on Hugging Face's hub."""
    try:
        return name in files or all(untrusted.check_file_name(part) for part in name.split("/", 1))
    except ValueError:
        return False


def check_resumable(manifest: Manifest, path: str) -> None:
    """Raise ConfigError when a checkpoint is converted weights, without an optimizer and a data position."""
    if not manifest.data:
        raise ConfigError(
            f"checkpoint.resume={path}: has weights only; initialise a run from it: checkpoint.weights={path}."
        )


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a complete checkpoint; None if it is incomplete or damaged."""
    try:
        return inspect(folder)
    except CorruptCheckpointError:
        return None


def verify_checksums(
    folder: Path, files: Mapping[str, ManifestFile], advance: Callable[[], None] = lambda: None
) -> None:
    """Verify the checksums of files, and call `advance` after each part that is read.

    Raises:
        CorruptCheckpointError: when a file differs; the message names the first.
    """
    for name, file in files.items():
        try:
            with (folder / name).open("rb") as content:
                actual = checksum_stream(content, advance)
        except OSError as error:
            raise CorruptCheckpointError(f"{name} can't be read ({error.strerror})") from error
        if actual != file:
            raise CorruptCheckpointError(f"{name} has the checksum {actual.crc32} instead of {file.crc32}")


def checksum_file(file: Path) -> ManifestFile:
    """Return size and checksum of a file."""
    with file.open("rb") as content:
        return checksum_stream(content)


def checksum_stream(content: IO[bytes], advance: Callable[[], None] = lambda: None) -> ManifestFile:
    """Return size and checksum of an open file from its current position; call `advance` after each part."""
    crc, size = 0, 0
    while chunk := content.read(_CHUNK):
        crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        advance()
    return ManifestFile(size, f"{crc:08x}")


def retire(folder: Path) -> None:
    """Mark a checkpoint as retired; its files stay for a while for processes that are reading them."""
    (folder / NAME).rename(folder / RETIRED)
    os.utime(folder / RETIRED)  # the time of retirement


def mark_damaged(folder: Path) -> None:
    """Mark a checkpoint as damaged; its files stay for inspection."""
    with contextlib.suppress(OSError):
        (folder / NAME).rename(folder / DAMAGED)


def list_folders(directory: Path) -> list[Path]:
    """Return the folders of all checkpoints of the run in `directory`, complete or not, by step."""
    folders = [f for f in (directory / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name)]
    return sorted(folders, key=lambda f: int(f.name[5:]))


def list_complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints of the run in `directory`, oldest first."""
    return [folder for folder in list_folders(directory) if read(folder)]


_MANIFESTS = (NAME, RETIRED, DAMAGED, DIFFERS)
_SAVED = re.compile(r"__\d+_\d+\.distcp|\.metadata|\..+\.tmp|tokenizer[\w.]*|(manifest|retired|damaged|differs)\.json")
"""The names of the files of a checkpoint."""


def select_kept(
    checkpoints: Sequence[tuple[int, int]], keep: int, keep_tokens: int, at: Collection[int] = ()
) -> set[int]:
    """Return the steps to keep: the last `keep`, the first in each interval of `keep_tokens` tokens, and those of `at`.

    Args:
        checkpoints: (step, tokens read) of each complete checkpoint, by step.
    """
    kept_steps = {step for step, _ in checkpoints[-keep:]} | {step for step, _ in checkpoints if step in at}
    last = 0
    for step, tokens in checkpoints if keep_tokens else ():
        if tokens // keep_tokens > last:
            kept_steps.add(step)
            last = tokens // keep_tokens
    return kept_steps


def prune(
    directory: Path, keep: int, keep_tokens: int, grace: float, run_id: str | None = None, at: Collection[int] = ()
) -> None:
    """Retire and delete checkpoints that are not kept; call it when a new checkpoint is complete.

    Damaged ones are deleted if they are older than all kept ones. Without the run's id nothing behind a symbolic link
    is deleted; the other arguments are settings of `titan.checkpoint.schema.Checkpoint`.
    """
    own_folders = [f for f in list_folders(directory) if not _is_foreign(f, run_id)]
    manifests = {int(f.name[5:]): read(f) for f in own_folders}
    kept_steps = select_kept([(step, m.tokens) for step, m in manifests.items() if m], keep, keep_tokens, at)
    damaged = {
        step for step, m in manifests.items() if m is None and step > min(kept_steps, default=-1)
    }  # for inspection
    for step in manifests.keys() - kept_steps - damaged:
        folder = folder_of(directory, step)
        if (folder / NAME).exists():
            retire(folder)
        elif (folder / DIFFERS).exists():
            remove(folder)  # older than all that are kept
    for folder in own_folders:
        _remove_retired(folder, grace)


def remove_leftovers(directory: Path, grace: float, run_id: str | None = None) -> None:
    """Remove the leftovers of killed saves; call it when no save is running; arguments as those of `prune`."""
    for folder in list_folders(directory):
        if _is_foreign(folder, run_id):
            continue
        if not any((folder / name).exists() for name in _MANIFESTS):
            remove(folder)
        _remove_retired(folder, grace)


def _remove_retired(folder: Path, grace: float) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if time.time() - (folder / RETIRED).stat().st_mtime >= grace:
            remove(folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; behind a symbolic link the files that its manifest lists, and it if it is empty."""
    if not is_linked(folder):
        return shutil.rmtree(folder, ignore_errors=True)
    content = _load_manifest(folder)
    with contextlib.suppress(OSError):
        for name in (*content.files, *_MANIFESTS) if content else ():
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def clear_linked(folder: Path, run_id: str | None) -> None:
    """Remove what an earlier save of the run left in a folder behind a symbolic link, so that it can be saved there.

    Raises:
        FileExistsError: when it has a checkpoint of another run.
    """
    if (content := _load_manifest(folder)) is not None and content.run_id != run_id:
        raise FileExistsError(
            f"{folder} is behind a symbolic link and has a checkpoint of another run; give this run another folder"
        )
    for file in folder.iterdir():
        if _SAVED.fullmatch(file.name):
            file.unlink()


def is_linked(folder: Path) -> bool:
    """Return whether a checkpoint's folder is behind a symbolic link."""
    return os.path.islink(folder) or os.path.islink(folder.parent)  # also where it can't be looked up


def _is_foreign(folder: Path, run_id: str | None) -> bool:
    """Return whether a checkpoint's folder is behind a symbolic link, and not known to be of the run."""
    return is_linked(folder) and ((content := _load_manifest(folder)) is None or content.run_id != run_id)


def _load_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, also of one that is retired or damaged; None where it can't be read."""
    for name in _MANIFESTS:
        with contextlib.suppress(CorruptCheckpointError):
            if (content := load(folder, name)) is not None:
                return content
    return None
