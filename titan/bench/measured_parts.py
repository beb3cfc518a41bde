"""Parts of a calibration that are measured already: in a file beside its target, until the calibration is complete.

A calibration takes minutes, and a rank may fail in the last one. The same command then continues with the part that is
missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.files import untrusted
from titan.files.atomic import write_json

Figures = dict[str, float]


class MeasuredParts:
    """The figures of each measured part by its name.

    Attributes:
        file: keeps them.
        parts: the figures by part, in the order of measuring.
    """

    def __init__(self, target: Path, subject: Mapping[str, Any]) -> None:
        """Read what an earlier calibration has measured.

        Args:
            target: the file that the calibration writes at its end.
            subject: what is measured, by what: parts of another machine or another version of torch are not used.
        """
        self.file = target.with_name(f".{target.name}.part")
        self._keeps = not os.path.exists(target) or os.path.isfile(target)  # beside a device nothing is written
        self._subject = dict(subject)
        self.parts = self._read_parts()

    def add(self, name: str, figures: Figures) -> None:
        """Keep the figures of a part; a file that can't be written is no reason to stop measuring."""
        self.parts[name] = figures
        if not self._keeps:
            return
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, {"subject": self._subject, "parts": self.parts})

    def remove(self) -> None:
        """Remove the file: the calibration is complete."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def _read_parts(self) -> dict[str, Figures]:
        """Return the parts of the file; empty where there is none, or it is of something else."""
        try:
            content = untrusted.parse_object(untrusted.read_regular_file(self.file).decode())
            untrusted.check_type(content.get("parts"), dict[str, dict[str, float]], "parts")
        except (OSError, ValueError):
            return {}
        return dict(content["parts"]) if content.get("subject") == self._subject else {}
