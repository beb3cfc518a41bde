"""Write a checkpoint's files with torch.distributed.checkpoint, computing sizes and checksums while writing."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from titan.checkpoint.assignment import Assignment
from titan.checkpoint.manifest import ManifestFile
from titan.checkpoint.metadata_file import Positions, encode_metadata
from titan.files.platform import sync_file

Name = str | os.PathLike[str]


class CheckpointWriter(FileSystemWriter):
    """Writes this rank's files into a folder; `files` has their sizes and checksums."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, which is created if it is missing."""
        super().__init__(folder)
        self.fs: Any = ChecksumFileSystem()

    def storage_meta(self) -> StorageMeta:
        """Return the save's id only: a path in `.metadata` would have another class in other Python versions."""
        return StorageMeta(save_id=self.save_id)

    def write_metadata(self, assignment: Assignment, positions: Positions) -> None:
        """Write the metadata of the whole checkpoint.

        The temporary file is not `titan.files.atomic`'s, because its content has to be counted as well.

        Args:
            assignment: what all ranks wrote.
            positions: where they wrote it.
        """
        path = Path(self._get_metadata_path())
        temporary = path.with_name(f"{path.name}.tmp")
        with self.fs.create_stream(temporary, "wb") as stream:
            for piece in encode_metadata(assignment, positions, self.storage_meta()):
                stream.write(piece)
            stream.flush()
            sync_file(stream.fileno())
        self.fs.rename(temporary, path)

    @property
    def files(self) -> dict[str, ManifestFile]:
        """Size and checksum of each written file, by name."""
        return dict(self.fs.files)


class ChecksumFileSystem(FileSystem):
    """A file system that records size and checksum of written files.

    Attributes:
        files: the written files by their names.
        advance: called whenever something is written.
    """

    def __init__(self) -> None:
        self.files: dict[str, ManifestFile] = {}
        self.advance: Callable[[], None] = lambda: None

    @contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[Any]:
        """Open a file; see torch's `FileSystemBase`."""
        with super().create_stream(path, mode) as raw:
            stream = ChecksumStream(raw, self.advance)
            yield stream
        self.files[Path(path).name] = ManifestFile(stream.size, f"{stream.crc:08x}")

    def rename(self, path: Name, new_path: Name) -> None:
        """Rename a file."""
        super().rename(path, new_path)
        if Path(path).name in self.files:
            self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class ChecksumStream(io.IOBase):
    """A file opened for sequential writing, with its size and checksum."""

    def __init__(self, raw: Any, advance: Callable[[], None] = lambda: None) -> None:
        self.raw, self.advance, self.size, self.crc = raw, advance, 0, 0

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):  # on a nearly full disk a write may be partial
            written += self.raw.write(view[written:]) or 0
        self.size, self.crc = self.size + len(view), zlib.crc32(view, self.crc)
        self.advance()
        return len(view)

    def tell(self) -> int:
        """Return the size so far."""
        return self.size

    def fileno(self) -> int:
        """Return the number of the file."""
        return int(self.raw.fileno())

    def flush(self) -> None:
        """Flush the file unless it is closed."""
        if not self.raw.closed:
            self.raw.flush()

    def close(self) -> None:
        """Close the file."""
        self.raw.close()
        super().close()
