"""Parse a command line that Hydra composes: options in any position, `resume=DIR`, and checks.

Hydra ignores some options and overrides silently; these raise ConfigError here, before anything is composed.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Sweep

from titan.config.command import describe_train_option
from titan.errors import ConfigError
from titan.files.run_directory import check_name, describe_runs_below, is_sweep_directory
from titan.run import hydra_private, trust
from titan.run.directory import check_linked_folders, read_attempts
from titan.run.hydra_session import CONF
from titan.run.schema import Recipe
from titan.run.synonyms import advise_on_option

RESUME = "resume="
SHOWING_OPTIONS = {
    "multirun": "-m", "cfg": "--cfg", "info": "--info", "shell_completion": "--shell-completion",
    "hydra_help": "--hydra-help",
}  # fmt: skip
"""Options that ask for something other than one run, by their names in the parsed command line."""
CONFIG_GROUPS = (*Recipe.axes(), "recipe", "sweep")
"""The config groups of a command line."""
COMBINED = ("metrics", "profile")
"""Of these, the groups of which titan's own choices can be combined in a list."""


def parse(words: Sequence[str], recorded: Sequence[str] = ()) -> argparse.Namespace:
    """Return the options and overrides of a command line, with `resume=DIR` replaced by the run's own overrides.

    `typed` are the overrides of the command line itself: those of a resumed run let no package be imported.

    Args:
        recorded: a run's own command line, to which this one is added.
    """
    args = _parse_options(words)
    resumed = [word for word in args.overrides if word.startswith(RESUME)]
    typed = [word for word in args.overrides if not word.startswith(RESUME)]
    if resumed:
        recorded = _read_resumed_arguments(resumed[-1], args)
    recorded = trust.select_recorded(recorded, typed)
    if resumed:
        earlier_args = _parse_options([*recorded, *(word for word in words if not word.startswith(RESUME))])
        args = argparse.Namespace(**vars(earlier_args))
    elif recorded:
        args = _parse_options([*recorded, *words])
    args.resumed, args.typed = bool(resumed), typed
    args.multirun = args.multirun or _find_mode(args.overrides) == "MULTIRUN"
    _check_options(args)
    return args


def reject_shown(args: argparse.Namespace, accepted: Sequence[str] = ()) -> None:
    """Raise ConfigError for an option of titan.train that asks for something other than one run.

    Args:
        accepted: names of options that the command has.
    """
    for name, option in {"help": "--help", "version": "--version", **SHOWING_OPTIONS}.items():
        if getattr(args, name) and name not in accepted:
            is_override = name == "multirun" and _find_mode(args.overrides) == "MULTIRUN"
            raise ConfigError(describe_train_option("hydra.mode=MULTIRUN" if is_override else option))


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for overrides that have no effect."""
    overrides = OverridesParser.create().parse_overrides(list(args.overrides))
    for override in overrides:
        group, value = override.key_or_group, None if override.is_sweep_override() else override.value()
        if group in CONFIG_GROUPS and value in ({}, []):
            raise ConfigError(
                f"{override.input_line}: changes nothing; choose with {group}=CHOICE, or set {group}.SETTING=VALUE."
            )
        choices = value if group in CONFIG_GROUPS and group not in COMBINED and isinstance(value, list) else []
        alternatives = [str(choice) for choice in choices if (CONF / group / f"{choice}.yaml").exists()]
        if len(alternatives) > 1:
            raise ConfigError(
                f"{override.input_line}: {' and '.join(alternatives)} are alternatives, of which one counts; leave the "
                f"others out, or run each with -m {group}={','.join(alternatives)}."
            )
    if args.multirun:
        _check_sweeps(overrides)


def check_sweep_name(name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not one folder under runs/, and for a second directory of the sweep."""
    if not re.fullmatch(r"[\w./+-]+", name):
        raise ConfigError(f"name={name}: a sweep has one name; give one folder's name.")
    check_name(name)
    if directories := [o for o in overrides if o.startswith("hydra.sweep.dir=")]:
        raise ConfigError(f"{directories[0]}: name={name} sets the directory of the sweep already; leave one out.")


def _parse_options(words: Sequence[str]) -> argparse.Namespace:
    parser = hydra_private.build_option_parser()
    parser.error = lambda message: _reject_arguments(message, words)  # type: ignore[method-assign]
    asks_version = "--version" in words  # Hydra would print its version
    args = parser.parse_intermixed_args([word for word in words if word != "--version"])
    args.version = asks_version
    return args


def _reject_arguments(message: str, words: Sequence[str]) -> NoReturn:
    """Raise ConfigError for what argparse rejects: mostly a setting that is written as an option."""
    if not (unknown := re.match(r"(?:unrecognized arguments|ambiguous option): (-\S*)", message)):
        raise ConfigError(f"{message}; see --help.")
    option, equals, value = unknown[1].partition("=")
    if not equals and option in words:  # the next word may be its value
        value = next((word for word in words[words.index(option) + 1 :][:1] if not re.search("^-|=", word)), "")
    raise ConfigError(f"{unknown[1]}: there is no such option; {advise_on_option(option, value)}; see --help.")


def _find_mode(overrides: Sequence[str]) -> str | None:
    return next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("hydra.mode=")), None)


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that Hydra would ignore, or reject in several lines."""
    for option, folder in (("--config-dir", args.config_dir), ("--config-path", args.config_path)):
        if folder and not os.path.isdir(folder):
            raise ConfigError(f"{option} {folder}: there is no such folder; correct the path.")
    if (args.package or args.resolve) and not args.cfg:
        option = "--resolve" if args.resolve else f"--package {args.package}"
        raise ConfigError(f"{option}: takes effect with --cfg only; add --cfg job.")
    if args.multirun and (args.cfg or args.info):
        option = "--cfg" if args.cfg else "--info"
        raise ConfigError(f"{option}: shows one run, and -m asks for several; leave out -m, and give one value each.")
    if args.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun {args.experimental_rerun}: titan writes no such file; give resume=DIR to resume "
            "the run in a directory."
        )
    if args.multirun and _find_mode(args.overrides) == "RUN":
        raise ConfigError("hydra.mode=RUN: -m asks for a sweep; leave one out.")
    for override in args.overrides:
        key = override.partition("=")[0]
        if key.startswith("~") and not key.startswith("~hydra"):
            raise ConfigError(f"{override}: settings can't be removed; write {key[1:]}=VALUE, or leave it out.")


def _check_sweeps(overrides: Sequence[Override]) -> None:
    """Raise ConfigError for what Hydra would sweep otherwise than typed.

    A setting that is given twice, a range among other values, and one with a single value: its step is 1 by default.
    """
    count = Counter(override.key_or_group for override in overrides)
    for override in overrides:
        if count[override.key_or_group] > 1 and override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: {override.key_or_group} is given twice, and only the last would be run; "
                "leave one out."
            )
    for override in overrides:
        value: Any = override.value()
        if isinstance(value, ChoiceSweep) and any(isinstance(choice, Sweep) for choice in value.list):
            raise ConfigError(
                f"{override.input_line}: a range is no value of a list; write each value, as in 1e-3,3e-3."
            )
        if not override.is_range_sweep():
            continue
        values = len(list(override.sweep_iterator()))
        # whether the step was typed: Hydra keeps the value, not whether it is the default
        arguments = re.sub(r".*\brange\(([^)]*)\).*", r"\1", override.input_line or "")
        has_step = arguments.count(",") == 2 or "step" in arguments
        is_single = values == 1 and float in (type(value.start), type(value.stop)) and not has_step
        if values == 0 or is_single:
            problem = "is one value, because its step is 1" if is_single else "has no values"
            raise ConfigError(f"{override.input_line}: {problem}; give range(START,STOP,STEP).")


def _read_resumed_arguments(word: str, args: argparse.Namespace) -> list[str]:
    """Return the command line of the last attempt of the run in `resume=DIR`, with that directory."""
    folder = word.removeprefix(RESUME)
    for prefix in ("name=", "hydra.run.dir="):
        if conflict := next((o for o in args.overrides if o.startswith(prefix)), None):
            raise ConfigError(f"{conflict}: {word} names the run already; leave one out.")
    if args.multirun or _find_mode(args.overrides) == "MULTIRUN":
        raise ConfigError(f"{word}: resumes one run; leave out -m, or repeat the command of the sweep.")
    last = _read_last_attempt(folder, word)
    check_linked_folders(Path(folder), word)
    overrides = [o for o in last["overrides"] if o.partition("=")[0] != "name"]
    names = [f"name={quote_value(str(last['name']))}"] if last.get("name") else []
    return [*last.get("options", ()), *overrides, *names, f"hydra.run.dir={quote_value(folder)}"]


def _read_last_attempt(folder: str, word: str) -> dict[str, Any]:
    directory = Path(folder)
    if folder.strip() and (directory / "run.yaml").is_file() and (attempts := read_attempts(directory)):
        return attempts[-1]
    if directory.parent.name == "checkpoints" and directory.is_dir():
        raise ConfigError(f"{word}: is a checkpoint; a new run starts from it with checkpoint.{word} name=NAME.")
    runs = describe_runs_below(folder) if folder.strip() else None
    advice = " (the command of the sweep resumes all)" if runs and is_sweep_directory(directory) else ""
    below = describe_runs_below("runs")
    way_out = f"runs/ {below}" if below else "give the directory of one, such as runs/NAME"
    raise ConfigError(f"{word}: {runs or f'there is no run; {way_out}'}{advice}.")


def quote_value(text: str) -> str:
    """Return a text quoted as the value of an override."""
    if re.fullmatch(r"[\w./+-]+", text, re.ASCII):
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text).replace("${", r"\${")
    return f"'{escaped}'"
