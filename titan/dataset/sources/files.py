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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from titan.config.optional import import_fsspec, import_optional
from titan.console.numbers import format_bytes, format_plural
from titan.console.text import format_error, is_url, redact
from titan.dataset.documents import Skip, SourcePart, content_digest
from titan.dataset.preprocess.writer import compute_checksum
from titan.errors import ConfigError
from titan.files.atomic import write_atomic

MAX_DOCUMENT_BYTES = 128 * 1024 * 1024
"""The maximum bytes of a line or document: a few compressed bytes may expand to more than the memory."""
PART_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_FRAME_CHUNK = 256  # their decompressed content is in memory: 4 bytes of zstd may become 128 KiB
_MEMO_BYTES = 1024 * 1024
_COMPRESSED = (".gz", ".zst")
_CHECKSUM_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "checksum", "sha256")
_TIME_KEYS = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")


class BadDocumentError(Exception):
    """A document or file that can't be used: `reason` in a word or two, `sentence` for the error message."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(reason, sentence)
        self.reason, self.sentence = reason, sentence


def reject_or_skip(on_error: str, location: str, error: BadDocumentError) -> Skip:
    """Apply `dataset.on_error` to a bad document: return a Skip, or raise.

    Raises:
        ConfigError: unless bad documents are skipped.
    """
    if on_error == "skip":
        return Skip(error.reason, location)
    raise ConfigError(f"{location}: {error.sentence}") from error


def build_too_long_error(position: int, kind: str, effect: str) -> BadDocumentError:
    """Return the error of a line or document that is too long; `effect` says what skipping does."""
    way_out = "split it, or give dataset.on_error=skip"
    sentence = f"the {kind} at byte {position} has more than {MAX_DOCUMENT_BYTES:,} bytes; {way_out}"
    return BadDocumentError("too long", f"{sentence} {effect}.")


@dataclass(frozen=True)
class SourceFile:
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
    def is_compressed(self) -> bool:
        """Whether it is compressed, by its name."""
        return get_suffix(self.path, full=True).endswith(_COMPRESSED)

    def open(self) -> BinaryIO:
        """Open the file and decompress it; seekable unless compressed."""
        raw = self.open_raw()
        if not self.is_compressed:
            return raw
        unpack = _decompress_gzip if self.path.lower().endswith(".gz") else _decompress_zstd
        return cast(BinaryIO, io.BufferedReader(_DecompressedStream(self.path, raw, unpack(raw)), _CHUNK))

    def open_raw(self) -> BinaryIO:
        """Open the file as it is stored."""
        with convert_read_errors(self.path):
            if self.mark is None:
                return open(self.path, "rb")
            file = _open_filesystem(self.path)[0].open(self.path, "rb")
            if file.seekable():
                return cast(BinaryIO, io.BufferedReader(file, _CHUNK))
            chunks = iter(lambda: file.read(_CHUNK), b"")
            return cast(BinaryIO, io.BufferedReader(_DecompressedStream(self.path, file, chunks), _CHUNK))


@contextlib.contextmanager
def convert_read_errors(path: str) -> Iterator[None]:
    """Turn errors of the system and the network into a ConfigError."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package == "titan" or (package == "builtins" and not isinstance(error, (OSError, EOFError))):
            raise  # the rest are errors of a file system's package
        reason = getattr(error, "strerror", None) or format_error(error) or type(error).__name__
        raise ConfigError(f"{path}: can't be read ({reason}); make it readable, or choose other files.") from error


def get_suffix(path: str, full: bool = False) -> str:
    """Return a file name's suffix in lower case: .jsonl for x.jsonl.gz, or with `full` .jsonl.gz."""
    name = PurePosixPath(path.lower())
    if name.suffix not in _COMPRESSED:
        return name.suffix
    return PurePosixPath(name.stem).suffix + (name.suffix if full else "")


def split_file(file: SourceFile, step: int = 1) -> list[SourcePart]:
    """Split a file into parts of PART_BYTES, rounded to a multiple of `step`; a compressed file is one part.

    A part's place is (file, first byte, last byte), with None for the end of the file.
    """
    size = max(PART_BYTES // step, 1) * step
    if file.is_compressed or file.size <= size:
        return [SourcePart(file.path, file.size, (file, 0, None))]
    starts = range(0, file.size, size)
    ends = [*starts[1:], None]
    return [
        SourcePart(f"{file.path} from byte {start}", min(size, file.size - start), (file, start, end))
        for start, end in zip(starts, ends, strict=True)
    ]


def find_span(file: BinaryIO, start: int, end: int | None, separator: bytes) -> tuple[int, int | None] | None:
    """Return the byte range of the documents of a part near bytes `start` and `end` (None: the end of the file).

    `separator` ends a document; the range includes the last one's. Returns None when the part has no documents.
    """
    first = find_separator_end(file, start, separator) if start else 0
    last = None if end is None else find_separator_end(file, end, separator)
    if first is None or first == last:
        return None
    file.seek(first)
    return first, last


def find_separator_end(file: BinaryIO, position: int, separator: bytes) -> int | None:
    """Return the end of the first separator from byte `position` on; None when there is none.

    Separators that overlap the one before ("aa" in "aaa") are skipped: whether they count depends on earlier text.
    """
    length, last, base = len(separator), -len(separator), max(position - len(separator) + 1, 0)
    file.seek(base)
    buffer = b""
    while chunk := file.read(64 * 1024):
        buffer += chunk
        index = buffer.find(separator)
        while index >= 0:
            separator_start = base + index
            if separator_start >= position and separator_start - last >= length:
                return separator_start + length
            last, index = separator_start, buffer.find(separator, index + 1)
        overlap = min(length - 1, len(buffer))
        base, buffer = base + len(buffer) - overlap, buffer[len(buffer) - overlap :]
    return None


def find_files(path: str, suffixes: Sequence[str], *, any_other: bool = False) -> tuple[SourceFile, ...]:
    """Return the non-empty files of `path`, sorted: a file, a folder, a glob, or a URL of these.

    In a folder: the files with one of the `suffixes`, compressed or not; if there are none and `any_other`, all files
    that aren't hidden.
    """
    matches = _list_files(path, suffixes, any_other)
    if not matches:
        raise ConfigError(f"dataset.path={path}: no file matches; give a file, a glob, or a folder of *{suffixes[0]}.")
    nonempty = tuple(file for file in matches if file.size)
    if not nonempty:
        subject = "the file is" if len(matches) == 1 else f"all {len(matches)} files are"
        raise ConfigError(f"dataset.path={path}: {subject} empty ({matches[0].path}); name files with text in them.")
    return nonempty


def describe_selection(path: Any, parts: Iterable[SourcePart]) -> dict[str, str]:
    """Return which files are read, and which of those that `path` names are left out: count, suffix and bytes.

    Args:
        path: as in `find_files`; of anything else, as of a source of one's own, only what is read is known.
        parts: of the source; of those of one that reads no files, nothing is said.
    """
    locations = [part.location[0] for part in parts if part.location]
    read = {file.path: file for file in locations if isinstance(file, SourceFile)}
    named = dict[str, SourceFile]()
    with contextlib.suppress(ConfigError):
        named = {file.path: file for file in _list_files(path, (), True)} if read and isinstance(path, str) else {}
    others = [file for file in named.values() if file.size and file.path not in read]
    rows = {"reads": read.values(), "leaves out": others if read.keys() <= named.keys() else []}
    return {name: _count_suffixes(files) for name, files in rows.items() if files}


def _count_suffixes(files: Iterable[SourceFile]) -> str:
    """Return for instance "17 files of .py, 148 kB; 1 file of .txt, 2.0 MB"."""
    by_suffix = defaultdict[str, list[int]](list)
    for file in files:
        by_suffix[get_suffix(file.path, full=True) or "no suffix"].append(file.size)
    largest = sorted(by_suffix.items(), key=lambda item: -sum(item[1]))
    rest = [size for _, sizes in largest[8:] for size in sizes]
    shown = [*largest[:8], *([("other suffixes", rest)] if rest else [])]
    return "; ".join(f"{format_plural(len(s), 'file')} of {suffix}, {format_bytes(sum(s))}" for suffix, s in shown)


def build_local_file(path: Path) -> SourceFile:
    """A file of this machine."""
    return SourceFile(str(path), path.stat().st_size)


def walk_files(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Return all regular files below `root`, sorted, without files and folders for whose name `skip` is true."""
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not skip(name)]
        paths += [Path(folder, name) for name in names if not skip(name)]
    return sorted(file for file in paths if file.is_file())


def is_hidden(name: str) -> bool:
    """Return whether the name of a file or folder begins with a dot."""
    return name.startswith(".")


def compute_digests(files: Sequence[SourceFile], memo: Path | None) -> list[str]:
    """Return the digest of each file's content, in hexadecimal; files are hashed in parallel."""
    with ThreadPoolExecutor(max(1, min(4, len(files), os.cpu_count() or 1))) as threads:
        return list(threads.map(lambda file: file.mark or compute_file_digest(Path(file.path), memo).hex(), files))


def _list_files(path: str, suffixes: Sequence[str], any_other: bool) -> list[SourceFile]:
    path = path.removeprefix("file://")
    return _find_remote(path, suffixes, any_other) if is_url(path) else _find_local(path, suffixes, any_other)


def _find_local(path: str, suffixes: Sequence[str], any_other: bool) -> list[SourceFile]:
    location = Path(path).expanduser()
    if location.is_file():
        paths = [location]
    elif location.is_dir():
        all_paths = walk_files(location, is_hidden)
        paths = [f for f in all_paths if get_suffix(f.name) in suffixes] or (all_paths if any_other else [])
    elif glob.has_magic(path):
        paths = sorted(f for f in map(Path, glob.glob(str(location), recursive=True)) if f.is_file())
    elif os.path.exists(location):
        raise ConfigError(f"dataset.path={path}: is not a regular file; name a file or a folder.")
    else:
        raise ConfigError(f"dataset.path={path}: there is no such file or folder; correct the path.")
    return [build_local_file(file) for file in paths]


def _find_remote(path: str, suffixes: Sequence[str], any_other: bool) -> list[SourceFile]:
    try:
        filesystem, remote_path = _open_filesystem(path)
        infos = _list_remote(filesystem, path, remote_path, suffixes, any_other)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # each file system raises errors of its own
        reason = f"{type(error).__name__}: {format_error(error)}"
        raise ConfigError(
            f"dataset.path={path}: can't be read ({reason}); correct the URL, or log in to its server."
        ) from error
    return [_build_remote_file(filesystem, info) for info in sorted(infos, key=lambda info: str(info["name"]))]


def _list_remote(
    filesystem: Any, path: str, remote_path: str, suffixes: Sequence[str], any_other: bool
) -> list[dict[str, Any]]:
    """Return the file system's info of each file of `path`."""
    is_web = path.startswith(("http://", "https://"))  # a question mark is not a wildcard in them
    if "*" in remote_path or (not is_web and glob.has_magic(remote_path)):
        matches = filesystem.glob(remote_path, detail=True).values()
        return [info for info in matches if info["type"] == "file"]
    if not filesystem.exists(remote_path):
        raise ConfigError(
            f"dataset.path={path}: there is no such file or folder, or its server gives no answer; correct the URL."
        )
    if not remote_path.endswith("/") and filesystem.isfile(remote_path):
        return [filesystem.info(remote_path)]
    all_infos = [info for info in filesystem.find(remote_path, detail=True).values() if info["type"] == "file"]
    return [info for info in all_infos if get_suffix(info["name"]) in suffixes] or (all_infos if any_other else [])


def _open_filesystem(path: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    fsspec = import_fsspec(f"dataset.path={path}")
    try:
        filesystem, remote_path = fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise ConfigError(
            f"dataset.path={path}: needs another package: {format_error(error)}; install it with pip."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"dataset.path={path}: {format_error(error)}; give a path, or a URL such as s3://..."
        ) from error
    return filesystem, remote_path


def _build_remote_file(filesystem: Any, info: dict[str, Any]) -> SourceFile:
    size = info.get("size")
    checksum = next((str(info[key]) for key in _CHECKSUM_KEYS if info.get(key)), None)
    modified = next((str(info[key]) for key in _TIME_KEYS if info.get(key)), None)
    name = str(info["name"])
    url = filesystem.ukey(name) if redact(name) == name else redact(name)  # a new password doesn't change the digest
    key = checksum or modified or url
    mark = content_digest(size, key)
    return SourceFile(filesystem.unstrip_protocol(info["name"]), 1 if size is None else size, mark)


class _DecompressedStream(io.RawIOBase):
    """A stream of chunks of bytes; errors of decompression are raised as `BadDocumentError`."""

    def __init__(self, path: str, raw: Any, chunks: Iterator[bytes]) -> None:
        self._path, self._raw, self._chunks = path, raw, chunks
        self._buffer, self._bytes_read = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._buffer:
            self._buffer = memoryview(self._read_chunk())
        size = min(len(buffer), len(self._buffer))
        buffer[:size] = self._buffer[:size]
        self._buffer = self._buffer[size:]
        self._bytes_read += size
        return size

    def close(self) -> None:
        super().close()
        self._raw.close()

    def _read_chunk(self) -> bytes:
        way_out = "fetch it again, or give dataset.on_error=skip to use the content before it."
        try:
            return next(self._chunks, b"")
        except EOFError as error:
            problem = f"ends too early (truncated download?) after {self._bytes_read} bytes of content"
            raise BadDocumentError("broken file", f"{problem}; {way_out}") from error
        except (gzip.BadGzipFile, zlib.error, _CorruptStreamError) as error:
            problem = f"is broken after {self._bytes_read} bytes of content ({format_error(error)})"
            raise BadDocumentError("broken file", f"{problem}; {way_out}") from error


class _CorruptStreamError(Exception):
    pass


def _decompress_gzip(raw: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as file:
        while piece := file.read1(_CHUNK):  # read() would discard content before an error
            yield piece


def _decompress_zstd(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all frames of a file; the library's reader doesn't detect a truncated last frame."""
    zstandard = import_optional("zstandard", str(getattr(raw, "name", "*.zst")))
    unpacker, frame, data = zstandard.ZstdDecompressor(max_window_size=2**31), None, b""
    while data or (data := raw.read(_FRAME_CHUNK)):
        frame = frame or unpacker.decompressobj()
        try:
            piece = frame.decompress(data)
        except zstandard.ZstdError as error:
            raise _CorruptStreamError(error) from error
        data = frame.unused_data
        frame = None if frame.eof else frame
        if piece:
            yield piece
    if frame:
        raise EOFError


def compute_file_digest(path: Path, memo: Path | None) -> bytes:
    """Return BLAKE2b of a file's content; for large files cached in `memo` by path, size and modification time."""
    with convert_read_errors(str(path)):
        status = path.stat()
    # A file changed just now could change again within the clock's resolution and keep its size: not cached.
    if memo is None or status.st_size < _MEMO_BYTES or time.time_ns() - status.st_mtime_ns < 2 * 10**9:
        return _hash_file(path)
    key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    entry = memo / blake2b(os.fsencode(key), digest_size=20).hexdigest()
    if entry.is_file() and len(cached := entry.read_bytes()) == 32:
        return cached
    digest = _hash_file(path)
    with contextlib.suppress(OSError):  # a cache that can't be written can still be read
        memo.mkdir(parents=True, exist_ok=True)
        write_atomic(entry, digest)
    return digest


def _hash_file(path: Path) -> bytes:
    with convert_read_errors(str(path)):
        return bytes.fromhex(compute_checksum(path)[1])
