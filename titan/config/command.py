"""What all commands have in common: parse the command line, call the body, return the exit code; and their `--help`.

A command is a module with a `Command`, a body, `main` and `cli`:

    COMMAND = Command("titan.status", "Show ...", {"runs/first": "a run"}, Settings)
    main, cli = COMMAND.bind(_show_status)

The body gets the parsed command line. Files that it writes are named by `to=`: see `titan.config.output_files`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Generic, NoReturn, TypeVar

from titan.config.arguments import (
    describe_settings,
    find_operand,
    list_keys,
    parse_arguments,
    split_operands,
)
from titan.console import output
from titan.console.requirements import VERSION
from titan.errors import ConfigError, ReasonReceiver, UnknownSettingError, exit_code, ignore_reason
from titan.files.environment import prepare_environment

T = TypeVar("T")
EXIT_CODES = "0 done, 1 failed, 2 rejected (the message says what to change), 130 interrupted."
TRAIN_OPTIONS = (
    "-m", "--multirun", "-c", "--cfg", "-i", "--info", "-p", "--package", "--resolve", "-r", "--run", "-sc",
    "--shell-completion", "--hydra-help",
)  # fmt: skip
"""Options of titan.train that ask for something other than one run."""
COMMENT_COLUMN = 80
"""The last column where the comment of an example may begin on the example's own line."""


@dataclass(frozen=True)
class CommandLine(Generic[T]):
    """A parsed command line."""

    settings: T  # the command's own
    overrides: list[str] = field(default_factory=list)  # the other words, for titan.train's settings
    words: list[str] = field(default_factory=list)  # all words, as typed
    report: ReasonReceiver = ignore_reason  # takes the error of the rank that failed first


@dataclass(frozen=True)
class Command(Generic[T]):
    """A command: what it accepts, and its help."""

    name: str  # of the module that is run, such as titan.status
    summary: str  # one sentence
    examples: Mapping[str, str]  # the words of example command lines, and what each does
    settings: type[T]  # a frozen dataclass that declares its first words and keys
    overrides: str = ""  # a sentence on what other words are; empty: they are rejected
    notes: str = ""  # text below the settings
    exit_codes: str = EXIT_CODES  # their meanings
    options: tuple[str, ...] = ()  # those of `TRAIN_OPTIONS` that it accepts
    removed: Mapping[str, str] = field(default_factory=dict)  # what to do instead of a setting that it had
    uses_torch: bool = False  # also in the processes that it starts
    keep_going: bool = True  # where stdout can't be written: False where that is its only product

    def bind(self, body: Callable[[CommandLine[T]], int]) -> tuple[Callable[..., int], Callable[[], NoReturn]]:
        """Return the command's `main` and console script.

        `main` carries out a command line, by default that of this process: it prints what --help and --version ask for,
        else calls `body`, and returns the exit code.
        """

        def main(argv: Sequence[str] | None = None) -> int:
            words = list(sys.argv[1:] if argv is None else argv)
            if self.uses_torch:
                prepare_environment(os.environ)
            return exit_code(lambda: self._run_body(body, words))

        return main, lambda: output.run(main, keep_going=self.keep_going)

    def parse(self, words: Sequence[str]) -> CommandLine[T]:
        """Return a parsed command line."""
        operands, rest = split_operands(self.settings, words)
        keys, overrides, assignments = list_keys(self.settings), list[str](), list[str]()
        groups = {key.path[0] for key in keys.values() if len(key.path) > 1}
        for word in rest:
            name, equals, _ = word.partition("=")
            if name in TRAIN_OPTIONS and name not in self.options:
                raise ConfigError(describe_train_option(word))
            if name in self.removed:
                raise ConfigError(f"{word}: was removed; leave it out, and {self.removed[name]}.")
            is_own = name in keys or (equals and name.partition(".")[0] in groups)
            (assignments if is_own or not self.overrides else overrides).append(word)
        return CommandLine(parse_arguments(self.settings, [*operands, *assignments]), overrides, list(words))

    def format_help(self) -> str:
        """Return what `--help` prints."""
        notes = "\n\n".join(filter(None, (self.overrides, self.notes)))
        operand = find_operand(self.settings)
        keys = [f"{name}=VALUE" for name, key in list_keys(self.settings).items() if key.is_required]
        usage = [*([operand.usage] if operand else []), *keys, "[KEY=VALUE ...]"]
        usage += ["[OVERRIDE ...]"] if self.overrides else []
        settings = describe_settings(self.settings)
        return format_help(self.name, usage, self.summary, self.examples, settings, notes, self.exit_codes)

    def _run_body(self, body: Callable[[CommandLine[T]], int], words: list[str]) -> int:
        if requested := {"-h", "--help", "--version"} & set(words):
            print(describe_version() if requested == {"--version"} else self.format_help())
            return 0
        try:
            return body(self.parse(words))
        except UnknownSettingError as error:
            # the command's nearest key, unless titan.train's is nearer
            names = {key.rpartition(".")[2]: key for key in list_keys(self.settings)}
            cutoff = 0.8 if error.hint.endswith(f".{error.key}'?") else 0.6
            matches = [] if "." in error.key else difflib.get_close_matches(error.key, names, n=1, cutoff=cutoff)
            hint = f"; did you mean {names[matches[0]]!r}?" if matches else error.hint
            raise ConfigError(
                f"{error.typed}: there is no such setting{hint} See --help and python -m titan.train --cfg job."
            ) from error


def describe_train_option(option: str) -> str:
    """Return the sentence that rejects an option of titan.train in another command."""
    return f"{option}: is an option of titan.train; leave it out."


def format_help(
    name: str,
    usage: Sequence[str],
    summary: str,
    examples: Mapping[str, str],
    settings_text: str,
    notes: str,
    exit_codes: str = EXIT_CODES,
) -> str:
    """Return the text of a command's `--help`, with the same sections in the same order for all commands.

    Args:
        usage: the kinds of words, in order; for the others see `Command`.
    """
    lines = {f"  python -m {name} {words}".rstrip(): comment for words, comment in examples.items()}
    width = max((len(line) for line in lines if len(line) < COMMENT_COLUMN), default=0)
    comments = (  # behind the example where there is room, else below it
        f"{line:<{width}}   {comment}" if len(line) <= width else f"{line}\n{'':<{width}}   {comment}"
        for line, comment in lines.items()
    )
    sections = [
        summary,
        f"Usage: python -m {name} {' '.join(usage)}",
        "\n".join(["Examples:", *comments]),
        f"Settings:\n{settings_text.rstrip()}",
        notes.strip(),
        f"Exit codes: {exit_codes}",
    ]
    return "\n\n".join(filter(None, sections))


def describe_version() -> str:
    """Return what `--version` prints: the versions of titan and of torch, without importing torch."""
    try:
        return f"titan {VERSION} (torch {metadata.version('torch')})"
    except metadata.PackageNotFoundError:
        return f"titan {VERSION} (without torch)"
