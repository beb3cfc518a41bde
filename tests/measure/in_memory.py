"""What simulated ranks share: a store and a node's folder, each a dictionary in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class DictStore:
    """Stands for torch's store."""

    def __init__(self) -> None:
        """Start empty."""
        self.content: dict[str, bytes] = {}

    def clone(self) -> DictStore:
        """Return the connection of another rank."""
        return self

    def set_timeout(self, timeout: Any) -> None:
        """Nothing waits."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.content[key] = value

    def get(self, key: str) -> bytes:
        """Return a value."""
        return self.content[key]

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether it was there."""
        return self.content.pop(key, None) is not None


class DictFolder:
    """Stands for a `titan.debug.states.Folder` in a node's memory.

    Attributes:
        path: where it would be.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.files: dict[str, bytes] = {}
        self.path = Path("/nowhere")

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file."""
        self.files[name] = content

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None where there is none."""
        return self.files.get(name)

    def list_names(self) -> list[str]:
        """Return the names of the files."""
        return list(self.files)

    def remove(self) -> None:
        """Remove all files."""
        self.files.clear()
