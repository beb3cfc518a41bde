"""What makes a checkpoint complete: a manifest that is written last. Free of torch.

    checkpoints/step-120/   __0_0.distcp ...  .metadata  manifest.json

A folder without a manifest, or whose files are not those that the manifest names, does not count.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan.settings import Refusal

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself.

    Attributes:
        step: optimizer updates done.
        data: the data's position and identity (`titan.dataset.order.state`).
        science_id: of the run that saved it.
        layout: the degrees under which it was saved.
        files: size in bytes of each file, by name.
    """

    step: int
    data: dict[str, Any]
    science_id: str
    layout: dict[str, int]
    files: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT


def folder_of(directory: Path, step: int) -> Path:
    """Where the run in `directory` saves step `step`."""
    return directory / "checkpoints" / f"step-{step}"


def write(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint in `folder` count; call it once all its files are written."""
    files = {f.name: f.stat().st_size for f in sorted(folder.iterdir()) if f.name != NAME}
    temporary = folder / f".{NAME}"
    with temporary.open("w") as out:
        json.dump({**asdict(manifest), "files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(folder / NAME)


def read(folder: Path) -> Manifest | None:
    """The manifest of a complete checkpoint; None where it is incomplete or damaged."""
    try:
        manifest = Manifest(**json.loads((folder / NAME).read_text()))
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    except (OSError, ValueError, TypeError):
        return None
    return manifest if sizes == manifest.files and manifest.format == FORMAT else None


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints of the run in `directory`, oldest first."""
    folders = [f for f in (directory / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name)]
    return [f for f in sorted(folders, key=lambda f: int(f.name[5:])) if read(f)]


def find(path: str) -> Path:
    """The checkpoint that `checkpoint.resume=path` means: a checkpoint's folder, or the last one of a run.

    Raises:
        Refusal: when there is none.
    """
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise Refusal(f"checkpoint.resume={path}: there is no such directory; correct the path.")
    if read(folder):
        return folder
    found = complete(folder)
    if not found:
        raise Refusal(f"checkpoint.resume={path}: holds no complete checkpoint; give a run's or a checkpoint's folder.")
    return found[-1]
