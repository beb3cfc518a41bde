"""A source of text that every machine has: some files of the running Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from titan.config.settings import MISSING, setting
from titan.dataset.documents import Source
from titan.dataset.schema import Dataset


@dataclass(frozen=True, kw_only=True)
class LibraryText(Dataset):
    """Files of the standard library, as text."""

    files: str = setting(MISSING, "a glob below the library's folder, such as encodings/*.py")

    def build(self) -> Source:
        """Return the documents of the files."""
        from titan.dataset.sources.local import build_text_source

        return build_text_source(str(Path(sysconfig.get_path("stdlib"), self.files)), None, self.on_error)
