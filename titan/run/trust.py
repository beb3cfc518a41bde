"""Which recorded settings count that read the environment, open URLs or start programs: those that the user once typed.

A run's recorded command line is data: who repeats a run of somebody else has not typed it. So of its overrides those
that can do more than choose numbers count only where the user types them too, or has typed them for an earlier run,
which a file in the user's own state directory says. Free of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from titan.errors import ConfigError

PROGRAMS = (
    "cluster.environment",
    "cluster.setup",
    "cluster.python",
    "cluster.image",
    "cluster.mounts",
    "cluster.srun",
    "cluster.sbatch",
    "hydra.job.env_set",
    "hydra.job.env_copy",
    "hydra.searchpath",
)
"""Settings that start programs, change what programs do, or name files that may set these."""
_RESOLVER = re.compile(r"\$\{[^}]*:")
_URL = re.compile(r"\b(?!file:)[A-Za-z][A-Za-z0-9+.-]*://")


@cache
def explain_risk(word: str) -> str | None:
    """Return what a word of a recorded command line would do that the user must have typed; None for others."""
    if word.startswith("-"):  # argparse takes abbreviations too
        return "is an option that names files of settings"
    key, value = _parse_key(word), word.partition("=")[2]
    if key.startswith(PROGRAMS):
        return "decides which programs run"
    if "{" in value and any(name.startswith(f"{key}.") for name in PROGRAMS):
        return "may decide which programs run"
    if _RESOLVER.search(value):
        return "reads the environment"
    return "names a URL" if _URL.search(value) else None


def select_recorded(recorded: Sequence[str], typed: Iterable[str]) -> list[str]:
    """Return a run's options and overrides, without those that the user must have typed and types anew.

    Those are left out because Hydra merges mappings: recorded names would stay beside typed ones.

    Args:
        recorded: the options and overrides of a run.
        typed: those of this command line.

    Raises:
        ConfigError: with the first word that reads, opens or starts something and was never typed by the user.
    """
    replaced = {_parse_key(word) for word in typed}
    selected = []
    for word in _join_options(recorded):
        if not is_foreign(word):
            selected.append(word)
        elif _parse_key(word) not in replaced:
            raise ConfigError(
                f"{word}: the run has recorded this setting, which {explain_risk(word)}, and you have not typed it for "
                "a run of yours; type it here if you trust it, or another value."
            )
    return [part for word in selected for part in _split_option(word)]


def _parse_key(word: str) -> str:
    """Return an option, or the setting of an override as Hydra reads it; of one that it rejects, what is written."""
    if word.startswith("-"):
        return re.split(r"[ =]", word)[0]
    try:
        return str(OverridesParser.create().parse_override(word).key_or_group)
    except HydraException:
        return word.partition("=")[0].strip(" +~")


def remember_typed(words: Iterable[str]) -> None:
    """Remember words that the user typed, and that may be repeated from a run's record; does nothing without a home."""
    for word in _join_options(words):
        if explain_risk(word) is None or (marker := _find_marker(word)).is_file():
            continue
        with contextlib.suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            marker.touch(mode=0o600)


def _join_options(words: Iterable[str]) -> list[str]:
    """Return a command line's words, each option with its value."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("-") and not re.search(r"[ =]", joined[-1]):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _split_option(word: str) -> list[str]:
    """Return an option and its value, or another word."""
    return word.split(" ", 1) if word.startswith("-") else [word]


def is_foreign(word: str) -> bool:
    """Return whether a recorded word is one that the user must have typed, and has not."""
    return explain_risk(word) is not None and not _find_marker(word).is_file()


def _find_marker(word: str) -> Path:
    """Return the file that says that the user has typed a word."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "titan" / "typed" / hashlib.sha256(word.lstrip("+").encode()).hexdigest()
