"""Hydra's and OmegaConf's errors as one sentence for the user."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan.config.settings import suggest_nearest
from titan.errors import ConfigError, UnknownSettingError
from titan.files.run_directory import RUN
from titan.run import command_line, hydra_session, synonyms
from titan.run.hydra_session import ExtraConfigs, compose_config, open_hydra
from titan.run.schema import Recipe
from titan.run.synonyms import OPTIONAL_GROUPS, describe_unknown_choice

HYDRA_HINTS = {
    "Could not append to config.": "there is such a setting already; write it without the +",
    "Multiple values for": "the axis has a choice already; write it without the +",
    "force-add of config groups": "the axis has a choice already; write it without the ++",
    "Ambiguous value for argument": "one value is expected; {}add -m to run each",
    "Override ": "there is no such axis; see --help",
}
"""What replaces Hydra's messages, by how they begin."""
MISSING_FOLDER = r"(?s).* is not available\."
"""Hydra's warning of a folder to search that isn't there, which is an error here."""


@contextmanager
def translate_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf, while the block runs, into a ConfigError of one sentence."""
    paths, matches = None, [override for override in overrides if override.startswith("hydra.searchpath=")]
    with suppress(HydraException):  # Hydra will report it
        paths = OverridesParser.create().parse_override(matches[-1]).value() if matches else None
    ExtraConfigs.search_folders = tuple(map(str, paths)) if isinstance(paths, list) else ()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", MISSING_FOLDER, UserWarning)
            try:
                yield
            finally:
                ExtraConfigs.search_folders = ()
    except (HydraException, OmegaConfBaseException, UserWarning) as error:
        if isinstance(error, UserWarning) and not re.fullmatch(MISSING_FOLDER, str(error)):
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:  # a ConfigError that Hydra has wrapped
            raise cause from None  # with `error` as its cause, the chain would be a circle
        if unknown := re.match(r"Could not override '([^']+)'", _join_lines(str(error))):
            raise _build_setting_error(unknown[1], overrides) from error
        raise ConfigError(_describe_error(error, overrides)) from error


def _describe_error(error: BaseException, overrides: Sequence[str]) -> str:
    """Return the sentence for an error that is not about the name of a setting."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).partition("/")
        if group not in Recipe.axes():
            group, _, option = str(error.missing_cfg_file).rpartition("/")
        advice = synonyms.describe_launcher(option) if group == "hydra/launcher" else None
        return advice or describe_unknown_choice(group, option, error.options)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not understood; {_advise_on_syntax(str(error.override), overrides)}."
    if isinstance(error, MissingConfigException):
        group, _, choice = str(error.missing_cfg_file).partition("/")
        if group == "hooks":
            return synonyms.describe_unknown_hook(choice)
        if choice and group in command_line.CONFIG_GROUPS:  # of a list
            return f"{group}={choice}: there is no such choice; see --help."
        return f"--config-name {error.missing_cfg_file}: there is no such configuration; leave it out."
    if isinstance(error, UserWarning):
        path = str(error).partition("path=")[2].removesuffix(" is not available.")
        advice = "correct the path, or create it"
        advice = advice if path.startswith("/") else "write [file:///FOLDER], with an absolute path"
        return f"hydra.searchpath=[{path}]: there is no such folder; {advice}."
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        reason = " ".join(str(error).split("full_key")[0].split()).rstrip(".")
        return f"{_find_typed_override(str(error.full_key), overrides)}: {reason}; correct what stands in the braces."
    text = _join_lines(str(error))
    if text.startswith("BasicSweeper does not support sweep type"):
        advice = "takes a sweeper that samples, such as hydra/sweeper=optuna; or give values, as in 1e-3,3e-3"
        return f"{next((o for o in overrides if 'interval(' in o), 'interval')}: {advice}."
    for beginning, advice in HYDRA_HINTS.items():
        if text.startswith(beginning):
            # the override that the message quotes, or else one that names what it names
            quoted = [o for o in overrides if o in text or re.search(rf"\b{re.escape(_parse_key(o))}\b", text)]
            typed = max(quoted, key=len, default=text.rstrip("."))
            key = _parse_key(typed)
            lists = key not in command_line.CONFIG_GROUPS or key in command_line.COMBINED
            advice = advice.format(f"write [{typed.partition('=')[2]}] for a list, or " * lists)
            if number := re.search(r"=(\d{1,3}(?:,\d{3})+)$", typed):  # 0,001 and 1,000
                advice = f"write {number[1].replace(',', '.' if number[1].startswith('0') else '')}"
            return f"{typed}: {advice}."
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else None
    text = text.removeprefix("Error merging override ")
    if cause is None:
        return text.rstrip(".") + "."
    return f"{text}: {' '.join(str(cause).split('full_key')[0].split()).rstrip('.')}; give another value."


def _find_typed_override(key: str, overrides: Sequence[str]) -> str:
    return next((o for o in overrides if _parse_key(o) == key), key)


def _build_setting_error(key: str, overrides: Sequence[str]) -> ConfigError:
    """Return the error for a setting or a group that there is not."""
    typed = _find_typed_override(key, overrides)
    if key in OPTIONAL_GROUPS:  # its folder is there only when there are any
        return ConfigError(describe_unknown_choice(key, typed.partition("=")[2], ()))
    if advice := synonyms.describe_launcher_setting(key, typed) or hydra_session.advise_key(key, typed):
        return ConfigError(advice)
    keys = _list_keys(overrides)
    if "@" in key:  # a group at a package, which no defaults list has
        group, _, package = key.partition("@")
        words = f"{group}={typed.partition('=')[2]}" if package == group else f"+{typed} to add it"
        return ConfigError(f"{typed}: the defaults have no such group; write {words}.")
    if synonym_error := synonyms.build_error(typed, key, frozenset(keys)):
        return synonym_error
    nested = [name for name in keys if name.endswith(f".{key}")]
    axes = {_parse_key(override).partition(".")[0] for override in overrides}  # those that the user thinks of
    hint = suggest_nearest(key, Recipe.axes()) if "." not in key and not nested else "."
    if hint == ".":
        hint = suggest_nearest(key, [name for name in nested if name.partition(".")[0] in axes] or keys)
    sentence = f"{typed}: there is no such setting{hint} See --help and --cfg job."
    return UnknownSettingError(sentence, typed, key, hint)


def _list_keys(overrides: Sequence[str]) -> list[str]:
    """Return every key that an override may have, for the choices on this command line."""
    parse = OverridesParser.create().parse_override
    groups = (*Recipe.axes(), "hydra/sweeper", "hydra/launcher")
    choices = [o for o in overrides if _parse_key(o) in groups and not parse(o).is_sweep_override()]
    try:
        with open_hydra():
            cfg = compose_config(choices)
    except (HydraException, OmegaConfBaseException, ConfigError):
        return list(Recipe.axes())
    content = OmegaConf.to_container(cfg, resolve=False)
    names = list_names({k: v for k, v in content.items() if k != "hydra"})  # type: ignore[union-attr]
    parts = {part: content["hydra"][part] for part in ("launcher", "sweeper")}  # type: ignore[call-overload, index]
    return [*names, *list_names(parts, "hydra."), "hydra.run.dir", "hydra.sweep.dir", "hydra/launcher"]


def _advise_on_syntax(word: str, words: Sequence[str]) -> str:
    """Return what to write in place of a word that is no override, one of the words of the command line."""
    if pair := re.fullmatch(r"([a-z_.]+)(?:==|:=?)([\w.+-]+)", word):
        return f"write {pair[1]}={pair[2]}"
    for spaced in re.finditer(r"([\w.@/]+)(?: +=|= +)=? *([^\s=]+)", " ".join(words)):
        if word in spaced[0] or spaced[0] in word:
            return f"write {spaced[1]}={spaced[2]}, without spaces"
    if typeset := re.search("[\u2012-\u2015\u2212\u2018-\u201f]", word):
        return f"{typeset[0]} is a character of printed text; write the plain one"
    if word in Recipe.axes():
        return f"write AXIS=CHOICE, such as {word}=NAME; --cfg job -p {word} shows its settings"
    if advice := synonyms.ADVICE.get(word):
        return advice
    if word.endswith((".yaml", ".yml")) and "=" not in word:
        return synonyms.FILE_ADVICE
    if os.path.isfile(os.path.join(word, RUN)):
        return f"it is a run: give it as the first word of a command for runs, or as resume={word}"
    if os.path.isfile(word):
        return f"data of a file are dataset=text dataset.path={word}"
    if re.fullmatch(r"[a-z_]+(\.\w+)+", word):
        return f"write {word}=VALUE"
    if "=~" in word:
        return "write $HOME in place of ~"
    return "write AXIS=CHOICE or AXIS.SETTING=VALUE, [a,b] for a list, and quote special characters"


def _join_lines(text: str) -> str:
    """Return Hydra's message in one line, without the key that it repeats."""
    return " ".join(text.partition("full_key:")[0].split())


def _parse_key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def list_names(content: dict[Any, Any], path: str = "") -> list[str]:
    """Return the dotted names of all settings in a composed configuration."""
    names = []
    for key, value in content.items():
        names.append(path + str(key))
        if isinstance(value, dict):
            names += list_names(value, f"{path}{key}.")
    return names
