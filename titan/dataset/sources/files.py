"""Files of a corpus: found by a path or URL, told by their content, opened whether compressed or not, cut into parts.

A file of this machine is told by a hash of its bytes; one of another machine by what its file system says of it (its
checksum or ETag, else size and time of change), so that nothing is read twice over the network. The file system of a
URL is fsspec's, which takes its settings from the environment (FSSPEC_S3_ANON=true for public buckets).
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from titan.config.optional import optional_package
from titan.console.text import as_line, redact
from titan.dataset.documents import Part, Skip, content_digest
from titan.errors import ConfigError
from titan.files.atomic import write_atomic

LONGEST = 128 * 1024 * 1024
"""Bytes of a line or document: a few compressed ones may swell to more than there is memory."""
PART_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_FRAME_CHUNK = 256  # what they swell to is held in memory: 4 bytes of zstd may become 128 KiB
_MEMO_BYTES = 1024 * 1024
_COMPRESSED = (".gz", ".zst")
_MARKS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "checksum", "sha256")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")


class Bad(Exception):
    """A document or file that can't be used: `reason` in a word or two, `sentence` what is wrong and what to do."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(reason, sentence)
        self.reason, self.sentence = reason, sentence


def refuse_or_skip(on_error: str, where: str, bad: Bad) -> Skip:
    """What `dataset.on_error` wants of what is `bad`.

    Raises:
        ConfigError: unless it is to be skipped.
    """
    if on_error == "skip":
        return Skip(bad.reason, where)
    raise ConfigError(f"{where}: {bad.sentence}") from bad


def too_long(place: int, what: str, rest: str) -> Bad:
    """A line or document that is too long to be held in memory, with what skipping it leaves."""
    sentence = f"the {what} at byte {place} has more than {LONGEST:,} bytes; divide it, or give dataset.on_error=skip"
    return Bad("too long", f"{sentence} {rest}.")


@dataclass(frozen=True)
class File:
    """A file of this machine or, by its URL, of another.

    Attributes:
        path: its path or URL.
        size: its bytes as it lies there; 1 when unknown.
        mark: of a URL, what its file system tells the content by; None for a file of this machine.
    """

    path: str
    size: int
    mark: str | None = None

    @property
    def compressed(self) -> bool:
        """Whether its name says so."""
        return suffix(self.path, whole=True).endswith(_COMPRESSED)

    def open(self) -> BinaryIO:
        """Its bytes, decompressed; seekable unless compressed.

        Raises:
            ConfigError: when it can't be opened.
        """
        raw = self.raw()
        if not self.compressed:
            return raw
        unpack = _gunzip if self.path.lower().endswith(".gz") else _unzstd
        return cast(BinaryIO, io.BufferedReader(_Unpacked(self.path, raw, unpack(raw)), _CHUNK))

    def raw(self) -> BinaryIO:
        """Its bytes as they lie there."""
        with readable(self.path):
            if self.mark is None:
                return open(self.path, "rb")
            file = _filesystem(self.path)[0].open(self.path, "rb")
            if file.seekable():
                return cast(BinaryIO, io.BufferedReader(file, _CHUNK))
            return cast(BinaryIO, io.BufferedReader(_Unpacked(self.path, file, _pieces(file)), _CHUNK))


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn what the system or the network says into a refusal."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package == "titan" or (package == "builtins" and not isinstance(error, (OSError, EOFError))):
            raise  # the rest are errors of a file system's own; some let pass that a connection ended
        reason = getattr(error, "strerror", None) or as_line(error) or type(error).__name__
        raise ConfigError(f"{path}: can't be read ({reason}); make it readable, or name other files.") from error


def suffix(path: str, whole: bool = False) -> str:
    """The end of a file's name, in lower case: .jsonl of x.jsonl.gz, or with `whole` .jsonl.gz."""
    name = PurePosixPath(path.lower())
    if name.suffix not in _COMPRESSED:
        return name.suffix
    return PurePosixPath(name.stem).suffix + (name.suffix if whole else "")


def parts(file: File, step: int = 1) -> list[Part]:
    """A file in parts of PART_BYTES, a multiple of `step`; what is compressed is read from its beginning, in one.

    A part's place is the file, the byte it begins at and the byte it ends at, None for the end of the file.
    """
    size = max(PART_BYTES // step, 1) * step
    if file.compressed or file.size <= size:
        return [Part(file.path, file.size, (file, 0, None))]
    starts = range(0, file.size, size)
    ends = [*starts[1:], None]
    return [
        Part(f"{file.path} from byte {start}", min(size, file.size - start), (file, start, end))
        for start, end in zip(starts, ends, strict=True)
    ]


def span(file: BinaryIO, start: int, end: int | None, separator: bytes) -> tuple[int, int | None] | None:
    """Where the documents of a part begin and end that starts and ends near bytes `start` and `end`, None: the end.

    `separator` ends a document; the one that ends the last of the part is counted in. None when the part has none.
    """
    first = cut(file, start, separator) if start else 0
    last = None if end is None else cut(file, end, separator)
    if first is None or first == last:
        return None
    file.seek(first)
    return first, last


def cut(file: BinaryIO, place: int, separator: bytes) -> int | None:
    """Where the first separator from byte `place` on ends; None when there is none.

    Passed over are separators that overlap one before ("aa" in "aaa"), for whether they count depends on all of that.
    """
    length, last, base = len(separator), -len(separator), max(place - len(separator) + 1, 0)
    file.seek(base)
    held = b""
    while chunk := file.read(64 * 1024):
        held += chunk
        at = held.find(separator)
        while at >= 0:
            found = base + at
            if found >= place and found - last >= length:
                return found + length
            last, at = found, held.find(separator, at + 1)
        kept = min(length - 1, len(held))
        base, held = base + len(held) - kept, held[len(held) - kept :]
    return None


def find(path: str, suffixes: Sequence[str], *, any_other: bool = False) -> tuple[File, ...]:
    """The files that `path` names, sorted, without empty ones: of a file, a folder, a glob, or a URL of these.

    In a folder those with one of the `suffixes`, compressed or not; when there are none and `any_other`, all that
    aren't hidden.

    Raises:
        ConfigError: when nothing is there, or nothing but empty files.
    """
    path = path.removeprefix("file://")
    found = _find_remote(path, suffixes, any_other) if "://" in path else _find_local(path, suffixes, any_other)
    if not found:
        raise ConfigError(
            f"dataset.path={path}: no file there matches; name a file, a glob, or a folder of *{suffixes[0]}."
        )
    full = tuple(file for file in found if file.size)
    if not full:
        what = "the file is" if len(found) == 1 else f"all {len(found)} files are"
        raise ConfigError(f"dataset.path={path}: {what} empty ({found[0].path}); name files with text in them.")
    return full


def local(path: Path) -> File:
    """A file of this machine."""
    return File(str(path), path.stat().st_size)


def walk(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """All regular files below `root`, sorted, without files and folders whose name `skip` tells to leave out."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not skip(name)]
        found += [Path(folder, name) for name in names if not skip(name)]
    return sorted(file for file in found if file.is_file())


def is_hidden(name: str) -> bool:
    """Whether a file's or folder's name begins with a full stop."""
    return name.startswith(".")


def digests(files: Sequence[File], memo: Path | None) -> list[str]:
    """What tells the content of each file, in hexadecimal: several are hashed side by side."""
    with ThreadPoolExecutor(max(1, min(4, len(files), os.cpu_count() or 1))) as threads:
        return list(threads.map(lambda file: _digest(file, memo), files))


def _digest(file: File, memo: Path | None) -> str:
    return file_digest(Path(file.path), memo).hex() if file.mark is None else file.mark


def _find_local(path: str, suffixes: Sequence[str], any_other: bool) -> list[File]:
    place = Path(path).expanduser()
    if place.is_file():
        found = [place]
    elif place.is_dir():
        every = walk(place, is_hidden)
        found = [f for f in every if suffix(f.name) in suffixes] or (every if any_other else [])
    elif glob.has_magic(path):
        found = sorted(f for f in map(Path, glob.glob(str(place), recursive=True)) if f.is_file())
    else:
        raise ConfigError(f"dataset.path={path}: there is no such file or folder; correct the path.")
    return [local(file) for file in found]


def _find_remote(path: str, suffixes: Sequence[str], any_other: bool) -> list[File]:
    try:
        files, place = _filesystem(path)
        found = _listed(files, path, place, suffixes, any_other)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # each file system raises errors of its own
        reason = f"{type(error).__name__}: {as_line(error)}"
        raise ConfigError(
            f"dataset.path={path}: can't be read ({reason}); correct the URL, or log in there."
        ) from error
    return [_remote(files, info) for info in sorted(found, key=lambda info: str(info["name"]))]


def _listed(files: Any, path: str, place: str, suffixes: Sequence[str], any_other: bool) -> list[dict[str, Any]]:
    """What a file system knows of each file that `path` names."""
    web = path.startswith(("http://", "https://"))  # where a question mark is no wildcard
    if "*" in place or (not web and glob.has_magic(place)):
        found = files.glob(place, detail=True).values()
        return [info for info in found if info["type"] == "file"]
    if not files.exists(place):
        raise ConfigError(f"dataset.path={path}: there is no such file or folder; correct the URL.")
    if not place.endswith("/") and files.isfile(place):
        return [files.info(place)]
    every = [info for info in files.find(place, detail=True).values() if info["type"] == "file"]
    return [info for info in every if suffix(info["name"]) in suffixes] or (every if any_other else [])


def _filesystem(path: str) -> tuple[Any, str]:
    """The file system of a URL, and what it calls the place there."""
    fsspec = optional_package("fsspec.core", f"dataset.path={path}")
    try:
        files, place = fsspec.url_to_fs(path)
    except ImportError as error:
        raise ConfigError(
            f"dataset.path={path}: needs another package: {as_line(error)}; install it with pip."
        ) from error
    except ValueError as error:
        raise ConfigError(f"dataset.path={path}: {as_line(error)}; give a path, or a URL such as s3://...") from error
    return files, place


def _remote(files: Any, info: dict[str, Any]) -> File:
    size = info.get("size")
    known = next((str(info[key]) for key in _MARKS if info.get(key)), None)
    changed = next((str(info[key]) for key in _TIMES if info.get(key)), None)
    name = str(info["name"])
    named = files.ukey(name) if redact(name) == name else redact(name)  # a new password makes no other file
    key = known or changed or named
    mark = content_digest(size, key)
    return File(files.unstrip_protocol(info["name"]), 1 if size is None else size, mark)


class _Unpacked(io.RawIOBase):
    """A stream of pieces of bytes; what breaks in it is raised as `Bad`."""

    def __init__(self, path: str, raw: Any, pieces: Iterator[bytes]) -> None:
        self._path, self._raw, self._pieces = path, raw, pieces
        self._held, self._given = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._held:
            self._held = memoryview(self._next())
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        self._given += size
        return size

    def close(self) -> None:
        super().close()
        self._raw.close()

    def _next(self) -> bytes:
        way_out = "fetch it again, or give dataset.on_error=skip to use what comes before."
        try:
            return next(self._pieces, b"")
        except EOFError as error:
            what = f"ends too early (truncated download?) after {self._given} bytes of content"
            raise Bad("broken file", f"{what}; {way_out}") from error
        except (gzip.BadGzipFile, zlib.error, _Broken) as error:
            what = f"is broken after {self._given} bytes of content ({as_line(error)})"
            raise Bad("broken file", f"{what}; {way_out}") from error


class _Broken(Exception):
    pass


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_CHUNK):
        yield piece


def _gunzip(raw: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as file:
        while piece := file.read1(_CHUNK):  # not read, which forgets what it had when it fails
            yield piece


def _unzstd(raw: BinaryIO) -> Iterator[bytes]:
    """The content of all frames of a file; the library's own reader doesn't tell when the last one is cut short."""
    zstandard = optional_package("zstandard", str(getattr(raw, "name", "*.zst")))
    unpacker, frame, data = zstandard.ZstdDecompressor(max_window_size=2**31), None, b""
    while data or (data := raw.read(_FRAME_CHUNK)):
        frame = frame or unpacker.decompressobj()
        try:
            piece = frame.decompress(data)
        except zstandard.ZstdError as error:
            raise _Broken(error) from error
        data = frame.unused_data
        frame = None if frame.eof else frame
        if piece:
            yield piece
    if frame:
        raise EOFError


def file_digest(path: Path, memo: Path | None) -> bytes:
    """BLAKE2b of a file's content. That of a big file is remembered in `memo`, by path, size and time of change."""
    with readable(str(path)):
        status = path.stat()
    # A file changed a moment ago could change again within the clock's tick and keep its size: not remembered.
    if memo is None or status.st_size < _MEMO_BYTES or time.time_ns() - status.st_mtime_ns < 2 * 10**9:
        return _read_digest(path)
    key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    entry = memo / blake2b(os.fsencode(key), digest_size=20).hexdigest()
    if entry.is_file() and len(known := entry.read_bytes()) == 32:
        return known
    digest = _read_digest(path)
    with contextlib.suppress(OSError):  # a cache that can't be written still serves what it has
        memo.mkdir(parents=True, exist_ok=True)
        write_atomic(entry, digest)
    return digest


def _read_digest(path: Path) -> bytes:
    digest = blake2b(digest_size=32)
    with readable(str(path)), open(path, "rb") as file:
        while chunk := file.read(8 * _CHUNK):
            digest.update(chunk)
    return digest.digest()
