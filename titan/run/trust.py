"""Which settings count that read the environment, open URLs or start programs: those that the user types or typed once.

A run's recorded command line is data: who repeats a run of somebody else has not typed it. So of its overrides those
that can do more than choose numbers count only where the user types them too, or has typed them for an earlier run,
which a file in the user's own state directory says. `titan.run.searched_files` has the same rule for configuration
files. Free of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from titan.errors import ConfigError

PROGRAMS = (
    "cluster.environment",
    "cluster.setup",
    "cluster.python",
    "cluster.image",
    "cluster.modules",
    "cluster.mounts",
    "cluster.srun",
    "cluster.sbatch",
    "hydra",
)
"""Settings that start programs, change what programs do, or name files that may set these."""
DATA = (
    "hydra.run.",
    "hydra.sweep.",
    "hydra.mode",
    "hydra.sweeper.",
    "hydra.launcher.",
    "hydra.output_subdir",
    "hydra.verbose",
    "hydra.job.name",
    "hydra.job.chdir",
    "hydra.job.config.",
)
"""Settings of Hydra that start nothing and import nothing, beside those whose last name is one of `IMPORTS`."""
IMPORTS = ("_target_", "custom_search_space")
"""Names of settings whose values Hydra, or a sweeper, imports."""
PLUGINS = ("hydra.sweeper.", "hydra.launcher.")
"""Settings of what Hydra builds from a mapping with `_target_`."""
SWEPT = "hydra.sweeper.params."
"""What stands before the settings that a sweeper varies."""
_URL = re.compile(r"\b(?!file:)[A-Za-z][A-Za-z0-9+.-]*://|::")
_REFERENCE = re.compile(r"\$\{[\w.]+\}")
_PARENT = re.compile(r"(?<![\w.])\.\.(?![\w.])")

Leaf = tuple[str, Any]
"""A setting without parts, by its full name, and its value."""


@cache
def explain_risk(word: str) -> str | None:
    """Return what a word of a recorded command line would do that the user must have typed; None for others."""
    if word.startswith("-"):  # argparse takes abbreviations too
        return "is an option that names files of settings"
    risks = (_explain_recorded(key, str(value)) for key, value in list_leaves(*_parse(word)))
    return next((risk for risk in risks if risk is not None), None)


def _explain_recorded(key: str, value: str) -> str | None:
    if risk := explain_programs(key, value):
        return risk
    if key == "hydra.mode":
        return "asks for a sweep"
    if find_resolvers(value):
        return "reads the environment"
    if _PARENT.search(value) and "." not in key:
        return "may name a file outside of the folders of settings"
    if "${" in value and not _REFERENCE.fullmatch(value) and not key.startswith("hydra."):
        return "may join a URL"
    return "names a URL" if _URL.search(value) else None


def explain_programs(key: str, value: str) -> str | None:
    """Return how a setting decides which programs run, None for others.

    Args:
        key: its full name.
        value: its text; an interpolation may be a mapping.
    """
    key = key.removeprefix(SWEPT)
    if not key.startswith(PROGRAMS) or (key.startswith(DATA) and key.rpartition(".")[2] not in IMPORTS):
        is_parent = any(name.startswith(f"{key}.") for name in PROGRAMS)
        return "may decide which programs run" if "{" in value and (is_parent or key.startswith(PLUGINS)) else None
    return "decides which programs run"


def find_resolvers(text: str) -> list[str]:
    """Return what stands between the braces of interpolations that call a resolver, such as oc.env:HOME.

    A name of a resolver may itself be interpolated, so that braces are counted.
    """
    spans = (_read_braces(text[match.end() :]) for match in re.finditer(r"\$\{", text))
    return [span for span in spans if ":" in span]


def _read_braces(text: str) -> str:
    """Return a text up to the brace that closes it."""
    depth = 1
    for end, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:end]
    return text


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


@cache
def _parse(word: str) -> tuple[str, Any]:
    """Return the setting of an override as Hydra reads it, and its value; of a word that it rejects, what is written.

    An option has no value.
    """
    if word.startswith("-"):
        return re.split(r"[ =]", word)[0], word
    try:
        override = OverridesParser.create().parse_override(word)
        return str(override.key_or_group), override.value()
    except HydraException:
        key, _, value = word.partition("=")
        return key.strip(" +~"), value


def _parse_key(word: str) -> str:
    return _parse(word)[0]


def list_leaves(key: str, value: Any) -> Iterator[Leaf]:
    """Yield the settings of a value, which may be a mapping; an empty one is a setting without parts."""
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from list_leaves(f"{key}.{name}".lstrip("."), part)


def list_typed(words: Iterable[str]) -> set[str]:
    """Return the names of all settings without parts that overrides set."""
    return {key for word in words for key, _ in list_leaves(*_parse(word))}


def remember_typed(words: Iterable[str]) -> None:
    """Remember words that the user typed, and that may be repeated from a run's record; does nothing without a home."""
    for word in _join_options(words):
        if explain_risk(word) is None:
            continue
        for marker in _find_markers(word):
            with contextlib.suppress(OSError):
                if not marker.is_file():
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
    return explain_risk(word) is not None and not all(marker.is_file() for marker in _find_markers(word))


def was_typed(leaf: Leaf) -> bool:
    """Return whether the user has typed a setting with this value for an earlier run."""
    return _find_marker(leaf).is_file()


def _find_markers(word: str) -> list[Path]:
    """Return the files that say that the user has typed a word, one for each of its settings."""
    return [_find_marker(leaf) for leaf in list_leaves(*_parse(word))]


def _find_marker(leaf: Leaf) -> Path:
    """Return the file that says that the user has typed a setting with this value."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    text = json.dumps(leaf, default=str)
    return Path(home) / "titan" / "typed" / hashlib.sha256(text.encode()).hexdigest()
