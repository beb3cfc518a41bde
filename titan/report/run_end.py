"""How the last attempt of an unfinished run ended, by the files that it left. Free of torch and numpy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from titan.run.directory import describe_hook_end
from titan.sweep.ledger import State


def classify_end(directory: Path, document: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[State, str] | None:
    """Return the state of an unfinished run that no process is running, and the reason.

    Args:
        document: of its last attempt, in run.yaml.
        result: the content of result.json.

    Returns:
        None where neither a result nor a message of the launcher says so.
    """
    if result.get("attempt") == document["attempt"] and result.get("finished") is False:
        if hook := describe_hook_end(result):
            return "stopped", f"ended at step {result.get('step')} by {hook}"
        return "stopped", f"stopped by a signal at step {result.get('step')}; the same command resumes it"
    if message := _read_launcher_message(directory / "log" / "launcher.log", str(document.get("began") or "")):
        return "failed", message
    return None


def _read_launcher_message(log: Path, attempt_start: str) -> str | None:
    """Return the launcher's last message since the attempt began; the first and last line of a traceback."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    starts = [
        i
        for i, line in enumerate(lines)
        if (_parse_timestamp(line.partition(" ")[0]) or 0) >= (_parse_timestamp(attempt_start) or 0)
    ]
    starts = [i for i in starts if _parse_timestamp(lines[i].partition(" ")[0]) is not None]
    if not starts:
        return None
    first_line, *later_lines = [line for line in lines[starts[-1] :] if line.strip()]
    return " ".join([first_line.partition(" ")[2], *later_lines[-1:]])


def _parse_timestamp(text: str) -> float | None:
    """Return a date in ISO format in seconds since 1970; None where it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def parse_start_time(document: Mapping[str, Any]) -> float | None:
    """Return when an attempt began, in seconds since 1970; None where its document has no date."""
    return _parse_timestamp(str(document.get("began") or ""))
