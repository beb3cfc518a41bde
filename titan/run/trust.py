"""Which settings of a run's record, or of a file that was not typed, count only where the user has typed them once.

A recorded command line is data: who repeats a run of somebody else has not typed it. What its settings can do follows
from what their texts are, which the schemas declare (`titan.config.text_kinds`): names of code, accounts, addresses and
what is written count only where the user types them too, or has typed them for an earlier run, which a file in the
user's own state directory says. `titan.run.hydra_session` has the same rule for configuration files. Free of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from titan.config.modules import list_trusted_packages
from titan.config.text_kinds import Label, RunFolder, TextKind, list_kinds
from titan.errors import ConfigError
from titan.files.platform import find_state_folder
from titan.run.schema import Recipe
from titan.sweep.schema import LocalLaunch, OptunaSearch, SlurmLaunch, Sweep

HYDRA: Mapping[str, Any] = {
    **dict.fromkeys(("hydra.run", "hydra.sweep", "hydra.output_subdir", "hydra.job.name"), RunFolder),
    **dict.fromkeys(("hydra.job.chdir", "hydra.job.config", "hydra.mode", "hydra.verbose"), Label),
    "hydra.sweeper": OptunaSearch,
    "hydra.launcher": LocalLaunch | SlurmLaunch,
}
"""Types of those settings of Hydra that start nothing; its others are code."""
RISKS: Mapping[TextKind, str] = {
    TextKind.WRITTEN: "decides where files are written",
    TextKind.ADDRESS: "decides where data are sent",
    TextKind.ACCOUNT: "names an account",
    TextKind.OPEN: "may decide which programs run",
    TextKind.CLASS: "decides which code is imported",
    TextKind.CODE: "decides which programs run",
}
"""What a setting does, for the kinds whose every value the user must have typed."""
SWEPT = "hydra.sweeper.params."
"""What stands before the settings that a sweeper varies."""
_URL = re.compile(r"(?<!\bfile)://|::")
_TORCH_OPTIMIZER = re.compile(r"torch\.optim\.\w+")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_VARIABLE_FOLDER = re.compile(r"\$\{oc\.env:\w+(,[\w./-]*)?\}(/[^$]*)?")
_FOLDER_BELOW = re.compile(r"(?s)(?![/~])(?!.*\.\.)([^$]|\$\{(name|now:[^${}]*|hydra[.:]job\.\w+)\})*")
_PARENT = re.compile(r"(?<![\w.])\.\.(?![\w.])")

Leaf = tuple[str, Any]
"""A setting without parts, by its full name, and its value."""


@cache
def _list_risks(word: str) -> tuple[tuple[Leaf, str], ...]:
    """Return the settings in a recorded word that the user must have typed, and what they would do."""
    if word.startswith("-"):  # argparse takes abbreviations too
        return ((_parse(word), "is an option that names files of settings"),)
    risks: list[tuple[Leaf, str]] = []
    for key, value in list_leaves(*_parse(word)):
        if find_resolvers(str(value)):
            risk: str | None = "reads the environment"
        elif key == "hydra.mode":
            risk = "asks for a sweep"
        elif _PARENT.search(str(value)) and "." not in key.removeprefix(SWEPT):
            risk = "may name a file outside of the folders of settings"
        else:  # who repeats a run names the folder
            risk = None if key == "hydra.run.dir" else explain_setting(key, value)
        risks += [] if risk is None else [((key, value), risk)]
    return tuple(risks)


def explain_setting(key: str, value: Any) -> str | None:
    """Return what a setting that was not typed would do that the user must have typed; None for others."""
    key, text = key.removeprefix(SWEPT), str(value)
    kind = find_kind(key)
    if value in (None, "", [], {}) or (kind == TextKind.OPEN and not _holds_text(value)):
        return None
    if kind in RISKS:
        return None if kind == TextKind.CLASS and _TORCH_OPTIMIZER.fullmatch(text) else RISKS[kind]
    if kind == TextKind.RUN_FOLDER:
        return None if _FOLDER_BELOW.fullmatch(text) else RISKS[TextKind.WRITTEN]
    if "${" in text and (kind == TextKind.GROUP or key.startswith("hydra.")):
        return RISKS[TextKind.OPEN]
    if kind == TextKind.READ and is_address(text):
        return "names a URL"
    return "may join a URL" if kind == TextKind.READ and not _is_read_as_written(text) else None


@cache
def find_kind(key: str) -> TextKind:
    """Return what the text of a setting is: an unknown one, as of a user's class, is open, without a dot a group."""
    prefix = next((name for name in ("sweep", *HYDRA) if f"{key}.".startswith(f"{name}.")), "")
    if key.startswith("hydra") and (not prefix or key.endswith("._target_")):
        return TextKind.CODE
    schema = HYDRA.get(prefix, Sweep if prefix else Recipe)
    names = [name for name in key.removeprefix(prefix).split(".") if name]
    return max(list_kinds(schema, names), default=TextKind.OPEN if "." in key else TextKind.GROUP)


def _holds_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_text, value))
    return not isinstance(value, (bool, int, float)) and value is not None


def is_address(text: str) -> bool:
    """Return whether a text names a URL, other than that of a local file."""
    return _URL.search(text) is not None


def _is_read_as_written(text: str) -> bool:
    """Return whether a text stays the name of a file that is read: no interpolation adds what nobody has checked."""
    if "${" not in text or _VARIABLE_FOLDER.fullmatch(text):
        return True
    reference, unchecked = _REFERENCE.fullmatch(text), (TextKind.LABEL, TextKind.GROUP, TextKind.RUN_FOLDER)
    if reference is None or reference[1].startswith((".", "hydra")):
        return False
    return find_kind(reference[1]) not in unchecked


def is_listed(leaf: Leaf, packages: Sequence[str]) -> bool:
    """Return whether a setting names a class of a package that the user lets titan import."""
    return find_kind(leaf[0]) == TextKind.CLASS and str(leaf[1]).startswith(tuple(f"{name}." for name in packages))


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

    Raises:
        ConfigError: with the first word that reads, opens or starts something and was never typed by the user.
    """
    replaced, selected = {_parse(word)[0] for word in typed}, []
    packages = list_packages(typed)
    for word in _join_options(recorded):
        foreign = find_foreign(word, packages)
        if foreign is None:
            selected.append(word)
        elif _parse(word)[0] not in replaced:
            raise ConfigError(
                f"{word}: the run has recorded this setting, which {foreign}, and nothing shows that you "
                "have typed it for a run of yours; type it here if you trust it, or another value."
            )
    return [part for word in selected for part in (word.split(" ", 1) if word.startswith("-") else [word])]


def list_packages(typed: Iterable[str]) -> tuple[str, ...]:
    """Return the packages whose classes a setting may name that was not typed; see `list_trusted_packages`."""
    with contextlib.suppress(HydraException):  # which Hydra reports when it parses the whole line
        return list_trusted_packages([word for word in typed if _parse(word)[0] == "modules"])
    return ()


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


def remember_typed(words: Iterable[str], leaves: Iterable[Leaf] = ()) -> None:
    """Remember words and settings of the user's, which may be repeated from a record; does nothing without a home."""
    for leaf in (*leaves, *(leaf for word in _join_options(words) for leaf, _ in _list_risks(word))):
        marker = _find_marker(leaf)
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


def find_foreign(word: str, packages: Sequence[str] = ()) -> str | None:
    """Return what a recorded word would do that the user must have typed, and has not; None for others."""
    risks = ((risk, leaf) for leaf, risk in _list_risks(word) if not is_listed(leaf, packages))
    return next((risk for risk, leaf in risks if not was_typed(leaf)), None)


def was_typed(leaf: Leaf) -> bool:
    """Return whether the user has typed a setting with this value for an earlier run."""
    return _find_marker(leaf).is_file()


def _find_marker(leaf: Leaf) -> Path:
    """Return the file that says that the user has typed a setting with this value."""
    text = json.dumps(leaf, default=str)
    return find_state_folder() / "typed" / hashlib.sha256(text.encode()).hexdigest()
