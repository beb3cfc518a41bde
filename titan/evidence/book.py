"""A campaign's book: an append-only file of events, one JSON object a line, which processes may write at once.

Each event has the number of the schema and the time. It is written whole, under a lock of the file, and flushed to the
disk. A kill in the middle of a write leaves a line without an end: readers leave it out and say so; the next writer
ends it, and what it held is done again by the command that is repeated. Nothing is ever changed or removed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan.errors import ConfigError
from titan.files import locks, untrusted
from titan.files.platform import sync_file

SCHEMA = 1
"""Increased when an event changes its meaning."""
FILE = "campaign.jsonl"
Append = Callable[..., None]


class Book:
    """The book in a campaign's folder.

    Attributes:
        file: its path; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._offset, self._events, self._damaged = 0, list[dict[str, Any]](), 0  # of the complete lines so far

    def read(self) -> tuple[list[dict[str, Any]], int]:
        """Return the events in order, and the number of lines that are torn or damaged.

        Raises:
            ConfigError: when the file can't be read, or another titan wrote it.
        """
        if not self.file.exists():
            return [], 0
        try:
            with untrusted.open_regular_file(self.file) as file:
                file.seek(self._offset)
                complete, end, torn = file.read().rpartition(b"\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.file}: can't be read ({error}); repair it, or choose another name.") from None
        events, damaged = self._parse_lines(complete)
        self._offset += len(complete + end)
        self._events, self._damaged = self._events + events, self._damaged + damaged
        events, damaged = self._parse_lines(torn)
        return self._events + events, self._damaged + damaged

    def _parse_lines(self, text: bytes) -> tuple[list[dict[str, Any]], int]:
        """Return the events of some lines, and how many lines are torn or damaged."""
        events, damaged = list[dict[str, Any]](), 0
        for line in filter(str.strip, text.decode(errors="replace").split("\n")):
            try:
                event = untrusted.parse_object(line)
                untrusted.check_type(event.get("schema"), int, "schema")
                if event["schema"] != SCHEMA:
                    raise ConfigError(
                        f"{self.file}: another titan wrote it (schema {event['schema']}, not {SCHEMA}); use that one, "
                        "or choose another name."
                    )
                check_event(event)
                events.append(event)
            except ValueError:
                damaged += 1
        return events, damaged

    @contextmanager
    def locked(self) -> Iterator[Append]:
        """Lock the book for a reader that decides what to append; other processes wait.

        The function that appends takes an event's kind, see `titan.evidence.campaign`, and its values: plain data whose
        numbers are finite.

        Raises:
            ConfigError: when the folder can't be written or locked.
        """
        with locks.hold_file(self.file, str(self.file), "choose another name or repair it") as descriptor:

            def append(event: str, **values: Any) -> None:
                line = {"schema": SCHEMA, "time": round(time.time(), 3), "event": event, **values}
                locks.append_lines(descriptor, line, allow_nan=False)
                sync_file(descriptor)

            yield append


def check_event(event: Mapping[str, Any]) -> None:
    """Raise ValueError for an object that is no event."""
    untrusted.check_type(event.get("event"), str, "event")
    for name, value_type in _TYPES.get(event["event"], {}).items():
        untrusted.check_type(event.get(name), value_type, name)
    if not all(math.isfinite(value) for value in event.values() if isinstance(value, (int, float))):
        raise ValueError("a number is not finite")


_TYPES: Mapping[str, Mapping[str, Any]] = {
    "opened": {
        "baseline": str | list[str], "baseline_id": str, "metric": str, "budget": float, "margin": float, "pairs": int,
        "slope": float | None,
    },
    "idea": {
        "idea": str, "changes": str | list[str], "hypothesis": str | None, "baseline": int, "result_id": str,
        "pairs": int,
    },
    "extended": {"idea": str, "pairs": int},
    "withdrawn": {"idea": str, "reason": str | None},
    "resumed": {"idea": str},
    "seeds": {"idea": str, "stage": str, "seeds": list[int], "baseline": int},
    "pair": {
        "idea": str, "stage": str, "seed": int, "baseline_loss": float | None, "loss": float | None, "baseline": int,
    },
}  # fmt: skip
"""The values of events by kind."""
