"""One save by all ranks, in the order and the words of torch.distributed.checkpoint.

1. every rank: `create_local_plan`, which it sends to rank 0;
2. rank 0: create the folder; `create_global_plan`, of which it sends each rank its part;
3. every rank: `finish_plan`; `write_data`, with checksums; it sends rank 0 the positions of its items and its files;
4. rank 0: `write_metadata`, and the manifest, which makes the checkpoint complete.

`titan.checkpoint.save_planner` makes the plans, `titan.checkpoint.writer` writes the files, and
`titan.checkpoint.coordinator` sends the messages; they don't call each other.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from titan.checkpoint import manifest, retention
from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.manifest import CorruptCheckpointError, Manifest, ManifestFile
from titan.checkpoint.save_planner import CachingSavePlanner, ItemMask, LocalPlan, WriteSummary
from titan.checkpoint.writer import CheckpointWriter

TokenizerFiles = tuple[dict[str, ManifestFile], str | None]
"""A tokenizer's files in a folder by name, and the tokenizer's name there."""
RankFiles = tuple[WriteSummary, dict[str, ManifestFile]]
"""What a rank has written, and its files by name."""


class CheckpointSave:
    """One save, on one rank."""

    def __init__(
        self,
        folder: Path,
        checkpoint_manifest: Manifest,
        planner: CachingSavePlanner,
        wait_for_state: Callable[[], Mapping[str, Tensor]],
        copy_tokenizer: Callable[[Path], TokenizerFiles],
        manifest_name: str = manifest.NAME,
    ) -> None:
        """Create the save; nothing is written yet.

        Args:
            checkpoint_manifest: its manifest, without files and tokenizer.
            wait_for_state: returns the tensors to write, once they can be read.
            manifest_name: the manifest's file name; another one than the usual makes no complete checkpoint.
        """
        self.manifest_name = manifest_name
        self.folder, self.manifest, self.planner = folder, checkpoint_manifest, planner
        self.wait_for_state, self.copy_tokenizer = wait_for_state, copy_tokenizer
        self.writer = CheckpointWriter(folder)

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
            tokenizer, total_bytes = coordinator.gather(
                partial(self._write_rank_files, plan), self._complete_checkpoint
            )
        except CoordinationError as error:
            if error.is_corrupt:
                self._remove_rank_files()
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
        """On rank 0: write the metadata and the manifest.

        Returns:
            The tokenizer's name in the folder, and the total size of all files.

        Raises:
            CorruptCheckpointError: when rank 0 does not see a file that another rank has written.
        """
        summaries = [summary for summary, _ in ranks]
        self.writer.write_metadata(*self.planner.merge_summaries(summaries))
        listings = [self.manifest.files, *(files for _, files in ranks), self.writer.files]
        self.manifest = replace(
            self.manifest, files={name: file for listing in listings for name, file in listing.items()}
        )
        _check_visible(self.folder, self.manifest)
        manifest.write(self.folder, self.manifest, self.manifest_name)
        return self.manifest.tokenizer, sum(file.bytes for file in self.manifest.files.values())

    def _remove_rank_files(self) -> None:
        """Remove this rank's files from a folder that rank 0 does not see."""
        for name in self.writer.files:
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it still has other ranks' files, or is removed already
            self.folder.rmdir()


def _create_folder(
    folder: Path, copy_tokenizer: Callable[[Path], TokenizerFiles], run_id: str | None = None
) -> TokenizerFiles:
    """Create a checkpoint's folder with the tokenizer's files.

    Returns:
        Those files, and the tokenizer's name there.

    Raises:
        FileExistsError: when the folder is behind a symbolic link, and has a checkpoint of another run than `run_id`.
    """
    if folder.is_dir() and retention.is_linked(folder):
        retention.clear_linked(folder, run_id)
    elif folder.is_dir():
        shutil.rmtree(folder)  # from a killed save, or corrupt
    else:
        folder.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return copy_tokenizer(folder)


def _check_visible(folder: Path, checkpoint_manifest: Manifest) -> None:
    try:
        manifest.check_sizes(folder, checkpoint_manifest.files)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error}: all ranks must see the run's directory, {folder.parent.parent}"
        ) from error
