"""Files of a corpus: find them by path or URL, identify them by content, open and decompress them, divide them.

Local files are identified by a hash of their content; files at a URL by their file system's checksum or ETag, else by
size and modification time, so that nothing is read twice over the network. URLs are opened by fsspec, which takes its
settings from the environment (FSSPEC_S3_ANON=true for public buckets).
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
"""The maximum bytes of a line or document: a few compressed bytes may expand to more than the memory."""
PART_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_FRAME_CHUNK = 256  # their decompressed content is in memory: 4 bytes of zstd may become 128 KiB
_MEMO_BYTES = 1024 * 1024
_COMPRESSED = (".gz", ".zst")
_MARKS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "checksum", "sha256")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")


class BadDocument(Exception):
    """A document or file that can't be used: `reason` in a word or two, `sentence` for the error message."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(reason, sentence)
        self.reason, self.sentence = reason, sentence


def reject_or_skip(on_error: str, where: str, bad: BadDocument) -> Skip:
    """Apply `dataset.on_error` to a bad document: return a Skip, or raise.

    Raises:
        ConfigError: unless bad documents are skipped.
    """
    if on_error == "skip":
        return Skip(bad.reason, where)
    raise ConfigError(f"{where}: {bad.sentence}") from bad


def too_long(place: int, what: str, rest: str) -> BadDocument:
    """Return the error of a line or document that is too long; `rest` says what skipping does."""
    sentence = f"the {what} at byte {place} has more than {LONGEST:,} bytes; split it, or give dataset.on_error=skip"
    return BadDocument("too long", f"{sentence} {rest}.")


@dataclass(frozen=True)
class File:
    """A local file, or one at a URL.

    Attributes:
        path: its path or URL.
        size: its stored size in bytes; 1 when unknown.
        mark: for a URL, a digest of what identifies the content; None for a local file.
    """

    path: str
    size: int
    mark: str | None = None

    @property
    def compressed(self) -> bool:
        """Whether it is compressed, by its name."""
        return suffix(self.path, whole=True).endswith(_COMPRESSED)

    def open(self) -> BinaryIO:
        """Open the file and decompress it; seekable unless compressed.

        Raises:
            ConfigError: when it can't be opened.
        """
        raw = self.raw()
        if not self.compressed:
            return raw
        unpack = _gunzip if self.path.lower().endswith(".gz") else _unzstd
        return cast(BinaryIO, io.BufferedReader(_Unpacked(self.path, raw, unpack(raw)), _CHUNK))

    def raw(self) -> BinaryIO:
        """Open the file as it is stored."""
        with readable(self.path):
            if self.mark is None:
                return open(self.path, "rb")
            file = _filesystem(self.path)[0].open(self.path, "rb")
            if file.seekable():
                return cast(BinaryIO, io.BufferedReader(file, _CHUNK))
            return cast(BinaryIO, io.BufferedReader(_Unpacked(self.path, file, _pieces(file)), _CHUNK))


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn errors of the system and the network into a ConfigError."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package == "titan" or (package == "builtins" and not isinstance(error, (OSError, EOFError))):
            raise  # the rest are errors of a file system's package
        reason = getattr(error, "strerror", None) or as_line(error) or type(error).__name__
        raise ConfigError(f"{path}: can't be read ({reason}); make it readable, or choose other files.") from error


def suffix(path: str, whole: bool = False) -> str:
    """Return a file name's suffix in lower case: .jsonl for x.jsonl.gz, or with `whole` .jsonl.gz."""
    name = PurePosixPath(path.lower())
    if name.suffix not in _COMPRESSED:
        return name.suffix
    return PurePosixPath(name.stem).suffix + (name.suffix if whole else "")


def parts(file: File, step: int = 1) -> list[Part]:
    """Split a file into parts of PART_BYTES, rounded to a multiple of `step`; a compressed file is one part.

    A part's place is (file, first byte, last byte), with None for the end of the file.
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
    """Return the byte range of the documents of a part near bytes `start` and `end` (None: the end of the file).

    `separator` ends a document; the range includes the last one's. Returns None when the part has no documents.
    """
    first = cut(file, start, separator) if start else 0
    last = None if end is None else cut(file, end, separator)
    if first is None or first == last:
        return None
    file.seek(first)
    return first, last


def cut(file: BinaryIO, place: int, separator: bytes) -> int | None:
    """Return the end of the first separator from byte `place` on; None when there is none.

    Separators that overlap the one before ("aa" in "aaa") are skipped: whether they count depends on earlier text.
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
    """Return the non-empty files of `path`, sorted: a file, a folder, a glob, or a URL of these.

    In a folder: the files with one of the `suffixes`, compressed or not; if there are none and `any_other`, all files
    that aren't hidden.

    Raises:
        ConfigError: when there are no such files, or only empty ones.
    """
    path = path.removeprefix("file://")
    found = _find_remote(path, suffixes, any_other) if "://" in path else _find_local(path, suffixes, any_other)
    if not found:
        raise ConfigError(f"dataset.path={path}: no file matches; give a file, a glob, or a folder of *{suffixes[0]}.")
    full = tuple(file for file in found if file.size)
    if not full:
        what = "the file is" if len(found) == 1 else f"all {len(found)} files are"
        raise ConfigError(f"dataset.path={path}: {what} empty ({found[0].path}); name files with text in them.")
    return full


def local(path: Path) -> File:
    """A file of this machine."""
    return File(str(path), path.stat().st_size)


def walk(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Return all regular files below `root`, sorted, without files and folders for whose name `skip` is true."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not skip(name)]
        found += [Path(folder, name) for name in names if not skip(name)]
    return sorted(file for file in found if file.is_file())


def is_hidden(name: str) -> bool:
    """Return whether the name of a file or folder begins with a dot."""
    return name.startswith(".")


def digests(files: Sequence[File], memo: Path | None) -> list[str]:
    """Return the digest of each file's content, in hexadecimal; files are hashed in parallel."""
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
            f"dataset.path={path}: can't be read ({reason}); correct the URL, or log in to its server."
        ) from error
    return [_remote(files, info) for info in sorted(found, key=lambda info: str(info["name"]))]


def _listed(files: Any, path: str, place: str, suffixes: Sequence[str], any_other: bool) -> list[dict[str, Any]]:
    """Return the file system's info of each file of `path`."""
    web = path.startswith(("http://", "https://"))  # a question mark is not a wildcard in them
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
    """Return the file system of a URL, and the path in it."""
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
    named = files.ukey(name) if redact(name) == name else redact(name)  # a new password doesn't change the digest
    key = known or changed or named
    mark = content_digest(size, key)
    return File(files.unstrip_protocol(info["name"]), 1 if size is None else size, mark)


class _Unpacked(io.RawIOBase):
    """A stream of chunks of bytes; errors of decompression are raised as `BadDocument`."""

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
        way_out = "fetch it again, or give dataset.on_error=skip to use the content before it."
        try:
            return next(self._pieces, b"")
        except EOFError as error:
            what = f"ends too early (truncated download?) after {self._given} bytes of content"
            raise BadDocument("broken file", f"{what}; {way_out}") from error
        except (gzip.BadGzipFile, zlib.error, _Broken) as error:
            what = f"is broken after {self._given} bytes of content ({as_line(error)})"
            raise BadDocument("broken file", f"{what}; {way_out}") from error


class _Broken(Exception):
    pass


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_CHUNK):
        yield piece


def _gunzip(raw: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as file:
        while piece := file.read1(_CHUNK):  # read() would discard content before an error
            yield piece


def _unzstd(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all frames of a file; the library's reader doesn't detect a truncated last frame."""
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
    """Return BLAKE2b of a file's content; for large files cached in `memo` by path, size and modification time."""
    with readable(str(path)):
        status = path.stat()
    # A file changed just now could change again within the clock's resolution and keep its size: not cached.
    if memo is None or status.st_size < _MEMO_BYTES or time.time_ns() - status.st_mtime_ns < 2 * 10**9:
        return _read_digest(path)
    key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    entry = memo / blake2b(os.fsencode(key), digest_size=20).hexdigest()
    if entry.is_file() and len(known := entry.read_bytes()) == 32:
        return known
    digest = _read_digest(path)
    with contextlib.suppress(OSError):  # a cache that can't be written can still be read
        memo.mkdir(parents=True, exist_ok=True)
        write_atomic(entry, digest)
    return digest


def _read_digest(path: Path) -> bytes:
    digest = blake2b(digest_size=32)
    with readable(str(path)), open(path, "rb") as file:
        while chunk := file.read(8 * _CHUNK):
            digest.update(chunk)
    return digest.digest()
