"""One save by all ranks, in the order and the words of torch.distributed.checkpoint.

1. every rank: `create_local_plan`, which it sends to rank 0;
2. rank 0: create the folder; `create_global_plan`, of which it sends each rank its part;
3. every rank: `finish_plan`; `write_data`, with checksums; it sends rank 0 the positions of its items and its files;
4. rank 0: `write_metadata`, and the manifest, which makes the checkpoint complete.

`titan.checkpoint.save_planner` makes the plans, and `titan.checkpoint.coordinator` sends the messages.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.manifest import NAME, CorruptCheckpointError, Manifest, ManifestFile
from titan.checkpoint.metadata_file import encode_metadata
from titan.checkpoint.save_planner import Assignment, CachingSavePlanner, ItemMask, LocalPlan, Positions, WriteSummary
from titan.files.platform import sync_file


class CheckpointWriter(FileSystemWriter):
    """Writes this rank's files into a folder; `files` has their sizes and checksums."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, which is created if it is missing."""
        super().__init__(folder)
        self.fs: Any = ChecksumFileSystem()

    def write_metadata(self, assignment: Assignment, positions: Positions) -> None:
        """Write the metadata of the whole checkpoint.

        The temporary file is not `titan.files.atomic`'s, because its content has to be counted as well.
        """
        path = Path(self._get_metadata_path())
        temporary = path.with_name(f"{path.name}.tmp")
        meta = StorageMeta(save_id=self.save_id)  # a path in it would have another class in other Python versions
        with self.fs.create_stream(temporary, "wb") as stream:
            for piece in encode_metadata(assignment, positions, meta):
                stream.write(piece)
            stream.flush()
            sync_file(stream.fileno())
        temporary.rename(path)
        self.fs.files[path.name] = self.fs.files.pop(temporary.name)

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
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; see torch's `FileSystemBase`."""
        with super().create_stream(path, mode) as raw:
            stream = ChecksumStream(raw, self.advance)
            yield stream
        self.files[Path(path).name] = ManifestFile(stream.size, f"{stream.crc:08x}")


class ChecksumStream:
    """A file opened for sequential writing, with its size and checksum."""

    def __init__(self, raw: Any, advance: Callable[[], None] = lambda: None) -> None:
        self.raw, self.advance, self.size, self.crc = raw, advance, 0, 0

    def __getattr__(self, name: str) -> Any:
        """Return what else the file has."""
        return getattr(self.raw, name)

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


TokenizerFiles = tuple[dict[str, ManifestFile], str | None]
"""A tokenizer's files in a folder by name, and the tokenizer's name there."""
RankFiles = tuple[WriteSummary, dict[str, ManifestFile]]
"""What a rank has written, and its files by name."""


@dataclass
class CheckpointSave:
    """One save, on one rank.

    `manifest` has neither files nor tokenizer yet. `wait_for_state` returns the tensors to write, once they can be
    read. Another file name of the manifest than the usual makes no complete checkpoint.
    """

    folder: Path
    manifest: Manifest
    planner: CachingSavePlanner
    wait_for_state: Callable[[], Mapping[str, Tensor]]
    copy_tokenizer: Callable[[Path], TokenizerFiles]
    manifest_name: str = NAME

    def __post_init__(self) -> None:
        self.writer = CheckpointWriter(self.folder)

    def run(self, coordinator: Coordinator) -> tuple[Manifest, int]:
        """Save, all ranks together.

        Returns:
            The manifest, with all files on rank 0 and the rank's own on other ranks; the total size of all files.

        Raises:
            CoordinationError: on all ranks, when it failed on any.
        """
        self.writer.fs.advance = coordinator.activity.record_save_progress
        item_mask = coordinator.scatter(
            lambda: self.planner.create_local_plan(self.wait_for_state()), self._plan_in_new_folder
        )
        plan = self.planner.finish_plan(item_mask)
        try:
            tokenizer, total_bytes = coordinator.gather(lambda: self._write_rank_files(plan), self._complete_checkpoint)
        except CoordinationError as error:
            if error.is_corrupt:  # rank 0 does not see the folder
                for name in self.writer.files:
                    (self.folder / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it still has other ranks' files, or is removed already
                    self.folder.rmdir()
            raise
        if coordinator.rank == 0:
            return self.manifest, total_bytes
        return replace(self.manifest, files=self.writer.files, tokenizer=tokenizer), total_bytes

    def _plan_in_new_folder(self, local_plans: Sequence[LocalPlan]) -> list[ItemMask]:
        """On rank 0: create the folder, and return each rank's part of the global plan."""
        files, tokenizer = _create_folder(self.folder, self.copy_tokenizer, self.manifest.run_id)
        self.manifest = replace(self.manifest, files=files, tokenizer=tokenizer)
        return self.planner.create_global_plan(local_plans)

    def _write_rank_files(self, plan: SavePlan) -> RankFiles:
        future = self.writer.write_data(self.writer.prepare_local_plan(plan), self.planner.resolver)
        future.wait()
        return self.planner.finish_write(future.value()), self.writer.files

    def _complete_checkpoint(self, ranks: Sequence[RankFiles]) -> tuple[str | None, int]:
        """On rank 0: write the metadata and the manifest; return the tokenizer's name, and the size of all files."""
        self.writer.write_metadata(*self.planner.merge_summaries([summary for summary, _ in ranks]))
        listings = [self.manifest.files, *(files for _, files in ranks), self.writer.files]
        all_files = {name: file for listing in listings for name, file in listing.items()}
        self.manifest = replace(self.manifest, files=all_files)
        try:
            manifest.check_sizes(self.folder, all_files)
        except CorruptCheckpointError as error:
            directory = self.folder.parent.parent
            raise CorruptCheckpointError(f"{error}: all ranks must see the run's directory, {directory}") from error
        manifest.write(self.folder, self.manifest, self.manifest_name)
        return self.manifest.tokenizer, sum(file.bytes for file in self.manifest.files.values())


def _create_folder(
    folder: Path, copy_tokenizer: Callable[[Path], TokenizerFiles], run_id: str | None = None
) -> TokenizerFiles:
    """Create a checkpoint's folder with the tokenizer's files."""
    if folder.is_dir() and manifest.is_linked(folder):
        manifest.clear_linked(folder, run_id)
    elif folder.is_dir():
        shutil.rmtree(folder)  # from a killed save, or corrupt
    else:
        folder.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return copy_tokenizer(folder)
