"""A source that a test makes up, which can fail, dawdle or die while it is read."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan.config.settings import setting
from titan.dataset.documents import Document, Source, SourcePart, content_digest
from titan.dataset.schema import Dataset
from titan.errors import ConfigError


@dataclass
class MadeSource(Source):
    """Documents that a test lists, part by part; it can take its time, and be stopped by a word in them."""

    content: tuple[tuple[Document, ...], ...]
    seconds: float
    masked: bool
    name: str = "made"

    def digest(self, memo: Path | None = None) -> str:
        return content_digest(repr(self.content), self.masked)

    def parts(self) -> list[SourcePart]:
        return [SourcePart(f"part {i}", sum(len(str(d)) for d in part), (i,)) for i, part in enumerate(self.content)]

    def documents(self, part: SourcePart) -> Iterator[Document]:
        for document in self.content[part.location[0]]:
            time.sleep(self.seconds)
            if document == "refuse":
                raise ConfigError(f"{part.name}: no good; mend it.")
            if document == "stall" and multiprocessing.parent_process():
                time.sleep(3600)
            if document == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if document == "break":
                raise OSError(5, "Input/output error")
            yield document


@dataclass(frozen=True, kw_only=True)
class Made(Dataset):
    """A dataset of `MadeSource`."""

    content: tuple[tuple[Document, ...], ...]
    seconds: float = 0.0
    masked: bool = False

    def build(self) -> MadeSource:
        return MadeSource(self.content, self.seconds, self.masked)


def make_documents(parts: int = 6, documents: int = 40, same: int = 29) -> tuple[tuple[str, ...], ...]:
    """Parts of short documents, some of which are equal."""
    numbers = [[(part * documents + i) % (parts * same) for i in range(documents)] for part in range(parts)]
    return tuple(tuple(f"document {n}, which tells of {n * 7} things\n" for n in part) for part in numbers)


def read_files(folder: Path) -> dict[str, bytes]:
    """The content of the files of tokens, offsets and masks of a folder."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix in (".tokens", ".offsets", ".mask")}


@dataclass
class GatedSource(Source):
    """Text in twelve parts, each a unit, of which all but the first two come once there is a file `gate`."""

    gate: str
    name: str = "gated"

    def digest(self, memo: Path | None = None) -> str:
        return content_digest("gated")

    def parts(self) -> list[SourcePart]:
        return [SourcePart(f"part {i}", 4 * 2**20, (i,)) for i in range(12)]

    def documents(self, part: SourcePart) -> Iterator[Document]:
        while part.location[0] > 1 and not Path(self.gate).exists():
            time.sleep(0.05)
        for i in range(12):
            number = part.location[0] * 12 + i
            yield f"line {number}: {number * number} is the square of {number}, said the clerk"


@dataclass(frozen=True, kw_only=True)
class Gated(Dataset):
    """A dataset of `GatedSource`."""

    gate: str = setting("", "the file that is waited for", science=False)

    def build(self) -> GatedSource:
        return GatedSource(self.gate)
