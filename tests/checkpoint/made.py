"""Checkpoints made by hand, for tests of what finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan.checkpoint import manifest
from titan.checkpoint.manifest import File, Manifest

FILES = {"a.distcp": b"123456789", ".metadata": b"m" * 10}


def about(step: int = 1, **fields: Any) -> Manifest:
    """What a checkpoint says of itself, but for its files."""
    given = {
        "tokens": 100 * step,
        "data": {"rows": step},
        "science_id": "id",
        "run_id": "run",
        "layout": {"shard": 2},
        "model": {},
        "tokenizer": None,
    }
    return Manifest(step, **(given | fields))


def complete(folder: Path, said: Manifest, files: dict[str, bytes] | None = None) -> Path:
    """A folder with `files` (`FILES`), which a manifest makes a complete checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, File] = {}
    for name, content in (FILES if files is None else files).items():
        (folder / name).write_bytes(content)
        with (folder / name).open("rb") as file:
            found[name] = manifest.checksum(file)
    manifest.write(folder, Manifest(**{**vars(said), "files": found}))
    return folder


def checkpoint(directory: Path, step: int, **fields: Any) -> Path:
    """A complete checkpoint of the run in `directory`, of files that hold nothing."""
    return complete(manifest.folder_of(directory, step), about(step, **fields))
