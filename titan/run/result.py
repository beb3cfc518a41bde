"""`result.json` of a run, and whether a process is running in its directory. Free of torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from titan.files import locks, untrusted
from titan.files.former import renamed


def is_finished(run: Path, steps: int = 0) -> bool:
    """Whether the run in a directory has done all its steps, and so many at least."""
    result, _ = read_result(run)
    return bool(result.get("finished")) and int(result["step"]) >= steps


def read_result(run: Path, sciences: Collection[str] = ()) -> tuple[dict[str, Any], str | None]:
    """What `result.json` of a run holds, empty where there is none; and what is wrong with it, in a sentence.

    Args:
        run: its directory.
        sciences: the ids that the run has had, where they are known: another one is another run's.
    """
    try:
        found = _parsed(untrusted.read(run / "result.json"))
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, KeyError) as error:
        lacks = f"it has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        return {}, f"result.json is damaged and not used: {lacks}"
    if sciences and found.get("science_id", "") not in {*sciences, ""}:
        return {}, f"result.json is of another run ({untrusted.shown(found['science_id'])}) and not used"
    return found, None


def _parsed(text: bytes) -> dict[str, Any]:
    """The content of a `result.json`.

    Raises:
        ValueError, KeyError: when its values are of other types.
    """
    found = renamed(untrusted.parse_object(text))
    untrusted.check(found["finished"], bool, "finished")
    untrusted.check(found["step"], int, "step")
    for name, value in found.items():
        untrusted.check(value, _RESULT.get(name.partition("/")[0], Any), name)
    return found


_RESULT: dict[str, Any] = {
    **dict.fromkeys(("tokens", "attempt"), int),
    **dict.fromkeys(("first_loss", "last_loss", "validation_loss", "bits_per_byte", "mfu", "seconds"), float | None),
    **dict.fromkeys(("tokens_per_second", "data_wait", "memory_gib", "checkpoint_stall_seconds"), float | None),
    **dict.fromkeys(("checkpoint", "plot"), str | None),
    "science_id": str,
    "sample": dict[str, str] | None,
}
"""What `result.json` holds, by the types of its values; names go up to a slash."""


def is_locked(run: Path) -> bool:
    """Whether a process of this machine, or of any that shares locks with it, is running in a directory."""
    return locks.is_locked(run / ".lock")
