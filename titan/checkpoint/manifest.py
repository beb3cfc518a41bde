"""What makes a checkpoint complete: a manifest that is written last. Free of torch.

    checkpoints/step-120/   __0_0.distcp ...  .metadata  tokenizer.json  manifest.json

A folder without a manifest is a save that did not end. One whose files are not those that its manifest names is
damaged: it is named, and does not count. One that is about to be deleted has its manifest renamed (`retire`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, get_type_hints

from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.atomic import sync_folder, write_atomic

FORMAT = 2
NAME = "manifest.json"
RETIRED = "retired.json"
"""What a manifest is called once its checkpoint has ceased to count."""
BROKEN = "damaged.json"
"""What a manifest is called whose checkpoint was found not to hold what it should."""
_CHUNK = 4 * 2**20


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its size in bytes, and the CRC-32 of its content as 8 hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself.

    Attributes:
        step: optimizer updates done.
        tokens: tokens read.
        data: the data's position and identity (`titan.dataset.permutation.state`).
        science_id, run_id: of the run that saved it.
        layout: the degrees under which it was saved.
        model: the model's settings, with its kind (`titan.config.kinds`) under `_target_`.
        tokenizer: a file in the folder or the name of a built-in tokenizer; None when the data have none.
        files: the files by name.
        seq_len: tokens of a row; 0 where that is not known.
    """

    step: int
    tokens: int
    data: dict[str, Any]
    science_id: str
    run_id: str
    layout: dict[str, int]
    model: dict[str, Any]
    tokenizer: str | None
    files: dict[str, File] = field(default_factory=dict)
    seq_len: int = 0
    format: int = FORMAT


class Damaged(Exception):
    """A checkpoint that does not hold what it should; the message says of which file."""


def folder_of(directory: Path, step: int) -> Path:
    """Where the run in `directory` saves step `step`."""
    return directory / "checkpoints" / f"step-{step}"


def write(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint in `folder` count; call it once all its files are on disk."""
    for above in (folder.parent, folder.parent.parent):  # a run's first save makes two folders
        with contextlib.suppress(PermissionError):  # another user's folder
            sync_folder(above)
    write_atomic(folder / NAME, json.dumps(asdict(manifest), indent=1), sync=True)


def inspect(folder: Path, name: str = NAME) -> Manifest | None:
    """The manifest of a checkpoint whose files have the sizes that they should have; None where a save did not end.

    Args:
        folder: the checkpoint's.
        name: what the manifest is called.

    Raises:
        Damaged: naming the file.
    """
    manifest = load(folder, name)
    if manifest is not None:
        sizes(folder, manifest.files)
    return manifest


def load(folder: Path, name: str = NAME) -> Manifest | None:
    """As `inspect`, without a look at the files."""
    try:
        text = untrusted.read(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Damaged(f"{NAME} can't be read ({error.strerror})") from error
    except ValueError as error:
        raise Damaged(f"{NAME} can't be read ({error})") from error
    manifest = parse(text)
    if re.fullmatch(r"step-\d+", folder.name) and folder.name != f"step-{manifest.step}":
        raise Damaged(f"{NAME} is of step {manifest.step}")
    return manifest


def share(files: Mapping[str, File], rank: int, size: int) -> dict[str, File]:
    """The files that a rank is to copy: those that it wrote itself, where as many ranks saved; rank 0 the rest too."""
    return {name: file for name, file in files.items() if _writer(name) % size == rank}


def _writer(name: str) -> int:
    """The rank that wrote a file, by its name as torch.distributed.checkpoint makes it."""
    found = re.match(r"__(\d+)_", name)
    return int(found[1]) if found else 0


def sizes(folder: Path, files: Mapping[str, File]) -> None:
    """Compare the sizes of files with those that they should have.

    Raises:
        Damaged: naming the first file that is missing or differs.
    """
    for name, file in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name} can't be read ({error.strerror})") from error
        if size != file.bytes:
            raise Damaged(f"{name} has {size:,} bytes where {file.bytes:,} are due")


def parse(text: bytes) -> Manifest:
    """A manifest from its text.

    Raises:
        Damaged: when it is none, or of another format.
    """
    try:
        content = untrusted.parse_object(text)
        if content["format"] != FORMAT:
            raise Damaged(f"{NAME} is of format {untrusted.shown(content['format'])}, and this titan reads {FORMAT}")
        return _checked(content)
    except KeyError as error:
        raise Damaged(f"{NAME} is no manifest (it has no {error})") from error
    except (ValueError, TypeError) as error:
        raise Damaged(f"{NAME} is no manifest ({error})") from error


def _checked(content: dict[str, Any]) -> Manifest:
    """A manifest of these values.

    Raises:
        ValueError, TypeError: when they are of other types, or name files outside of the folder.
    """
    for name, kind in get_type_hints(Manifest).items():
        if name in content:  # older ones lack some
            untrusted.check(content[name], dict if name == "files" else kind, name)
    names = [untrusted.file_name(name) for name in content["files"]]
    if not names:
        raise ValueError("it lists no files")
    found = Manifest(**{**content, "files": {name: _file(name, content["files"][name]) for name in names}})
    if found.data:  # converted weights have none
        untrusted.check(found.data.get("rows"), int, "data.rows")
    if min(found.step, found.tokens, found.seq_len, found.data.get("rows", 0)) < 0:
        raise ValueError("it has a number below 0")
    if found.tokenizer is not None and not is_tokenizer(found.tokenizer, found.files):
        raise ValueError(f"its tokenizer is {untrusted.shown(found.tokenizer)}, which is no file of its own folder")
    return found


def _file(name: str, content: object) -> File:
    untrusted.check(content, dict, name)
    file = File(**content)  # type: ignore[arg-type]
    untrusted.check(file.bytes, int, f"{name}.bytes")
    untrusted.check(file.crc32, str, f"{name}.crc32")
    return file


def is_tokenizer(name: str, files: Container[str]) -> bool:
    """Whether it names a tokenizer: a file of the folder, titan4k, or OWNER/NAME on Hugging Face's hub."""
    try:
        return name in files or all(untrusted.file_name(part) for part in name.split("/", 1))
    except ValueError:
        return False


def check_resumable(manifest: Manifest, path: str, setting: str = "checkpoint.resume") -> None:
    """Refuse to go on from weights alone: a converted checkpoint has neither optimizer nor position in the data.

    Raises:
        ConfigError: when it is one.
    """
    if not manifest.data:
        raise ConfigError(f"{setting}={path}: holds weights only; start from it with checkpoint.weights={path}.")


def read(folder: Path) -> Manifest | None:
    """The manifest of a complete checkpoint; None where it is incomplete or damaged."""
    try:
        return inspect(folder)
    except Damaged:
        return None


def verify(folder: Path, files: Mapping[str, File]) -> None:
    """Compare the content of files with their checksums.

    Raises:
        Damaged: naming the first file that differs.
    """
    for name, file in files.items():
        try:
            with (folder / name).open("rb") as content:
                found = checksum(content)
        except OSError as error:
            raise Damaged(f"{name} can't be read ({error.strerror})") from error
        if found != file:
            raise Damaged(f"{name} has the checksum {found.crc32} where {file.crc32} is due")


def checksum_of(file: Path) -> File:
    """Size and checksum of a file."""
    with file.open("rb") as content:
        return checksum(content)


def checksum(content: IO[bytes]) -> File:
    """Size and checksum of what is left in an open file."""
    crc, size = 0, 0
    while piece := content.read(_CHUNK):
        crc, size = zlib.crc32(piece, crc), size + len(piece)
    return File(size, f"{crc:08x}")


def retire(folder: Path) -> None:
    """Let a checkpoint cease to count; its files stay for those that read them."""
    (folder / NAME).rename(folder / RETIRED)
    os.utime(folder / RETIRED)  # when it was


def set_aside(folder: Path) -> None:
    """Let a damaged checkpoint count no more; its files stay, to be looked at."""
    with contextlib.suppress(OSError):
        (folder / NAME).rename(folder / BROKEN)


def steps(directory: Path) -> list[Path]:
    """The folders of the checkpoints of the run in `directory`, complete or not, by their steps."""
    folders = [f for f in (directory / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name)]
    return sorted(folders, key=lambda f: int(f.name[5:]))


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints of the run in `directory`, oldest first."""
    return [folder for folder in steps(directory) if read(folder)]
