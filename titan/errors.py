"""Errors that end a command with one sentence, and exit codes. Free of torch."""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from titan.console import output
from titan.console.text import format_message, sanitize_line


class _UserError(Exception):
    """One sentence for the user; names and URLs that it quotes are redacted and escaped."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(sanitize_line(sentence))


class ConfigError(_UserError):
    """An invalid setting or input, in one plain sentence for the user: exit code 2, without a traceback."""


class UnknownSettingError(ConfigError):
    """A word of the command line assigns a setting that titan.train has not; other commands may have one like it.

    Attributes:
        typed: the word.
        key: the setting's name in it.
        hint: the end of the first sentence, with the nearest of titan.train's settings.
    """

    def __init__(self, sentence: str, typed: str = "", key: str = "", hint: str = ".") -> None:
        super().__init__(sentence)  # alone in `args`, so that the error can be pickled
        self.typed, self.key, self.hint = typed, key, hint


class RunError(_UserError):
    """The reason why a run failed, in one plain sentence for the user: exit code 1, without a traceback."""


class DifferingRanksError(RunError):
    """A rank computes, or has, something else than the ranks that must have the same.

    Attributes:
        rank: the first of those that are wrong.
        node: the names of their nodes under Slurm, as it takes them: "n1,n2"; empty where they are not known.
    """

    def __init__(self, sentence: str, rank: int = 0, node: str = "") -> None:
        super().__init__(sentence)
        self.rank, self.node = rank, node


_EXHAUSTED = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EROFS), "repair that file system, or choose another place"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
}


def describe_machine_error(error: BaseException) -> str | None:
    """Return the sentence about a resource that this machine lacks; None for errors of other kinds, such as bugs."""
    if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
        return None
    prefix = f"{error.filename}: " if error.filename else ""
    return f"{prefix}{error.strerror}; {_EXHAUSTED[error.errno]}, and give the same command again."


def describe_compiler_error(error: BaseException) -> str | None:
    """Return the sentence about a compiler that torch.compile started and that failed; None for other errors.

    Frames of such an error are in files that Inductor has generated, and its message has the whole command.
    """
    kinds = {cls.__name__ for cls in type(error).__mro__ if cls.__module__.startswith("torch.")}
    if "BackendCompilerFailed" not in kinds and not type(error).__module__.startswith("torch._inductor"):
        return None
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    output = others[others.index("Output:") + 1 :] if "Output:" in others else []
    reason = ", ".join(line[:LONGEST_REASON] for line in [first, *output[:1]])
    return f"torch.compile failed: {reason}; repair the compiler, or give compile=off."


LONGEST_REASON = 300
"""Characters of a line of a compiler's message in a sentence."""


def find_own_code_error(error: BaseException, packages: Sequence[str] | None = None) -> str | None:
    """Return where a user's own code raised an error, and the error.

    Such as "mine/lion.py:12 in step (TypeError: ...)"; None where no such code was running.

    Args:
        packages: the user's; None: all that is neither titan's nor installed.
    """
    package = Path(__file__).resolve().parent
    excluded_folders = {package, package.parent / "launchers", *map(Path, sysconfig.get_paths().values())}
    walked_frames = (
        (f, n)
        for f, n in traceback.walk_tb(error.__traceback__)
        if packages is None or str(f.f_globals.get("__name__")).partition(".")[0] in packages
    )
    frames = traceback.StackSummary.extract(walked_frames)
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>"))
    for frame in reversed(frames):
        file = Path(frame.filename)
        if file.is_file() and excluded_folders.isdisjoint(file.resolve().parents):
            description = f"{type(error).__name__}: {format_message(str(error))}".rstrip(": ")
            function = f" in {frame.name}" if frame.name.isidentifier() else ""
            return f"{os.path.relpath(file)}:{frame.lineno}{function} ({description})"
    return None


EXIT_REQUEUE = 75
"""The exit code of ranks that the scheduler asked to save and end, to be started again (sysexits.h: EX_TEMPFAIL)."""


ReasonReceiver = Callable[[str], object]
"""Takes the reason why a run failed, in one line, once it is printed; and nothing, when an attempt begins."""


def ignore_reason(reason: str) -> None:
    """Do nothing: a `ReasonReceiver` of callers that need no more than the exit code."""


def exit_code(body: Callable[[], int], report: ReasonReceiver = ignore_reason) -> int:
    """Return the exit code of `body`; print its error: 2 for ConfigError, 1 for RunError, 130 for Ctrl-C.

    Args:
        report: called with the error that `body` raises; also with one that is raised from here, since it is a bug.
    """
    try:
        return body()
    except KeyboardInterrupt:
        output.write_stderr(output.INTERRUPTED)
        return 130
    except output.OutputClosedError as lost:  # the reader of stdout has exited: `... | head`
        if lost.code != output.SIGPIPE_CODE:
            print(f"titan: {lost}.", file=sys.stderr)
        return lost.code
    except Exception as error:
        if (user_error := describe_user_error(error)) is None:
            report(f"{type(error).__name__}: {sanitize_line(str(error))}".rstrip(": "))
            raise
        code, sentence = user_error
        print(f"titan: {format_message(sentence) if isinstance(error, ConfigError) else sentence}", file=sys.stderr)
        report(sentence)
        return code


def describe_user_error(error: Exception) -> tuple[int, str] | None:
    """Return the exit code and the sentence of an error on which users can act; None for a bug."""
    if isinstance(error, (ConfigError, RunError)):
        return 2 if isinstance(error, ConfigError) else 1, str(error)
    if (sentence := describe_machine_error(error)) is not None:
        return 1, sentence
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return 2, f"{sanitize_line(str(error.filename))}: there is no such file or directory ({error.strerror})."
    if (sentence := describe_compiler_error(error)) is not None:
        return 1, sentence
    if (location := find_own_code_error(error)) is not None:
        return 2, f"your code failed: {sanitize_line(location)}; correct it."
    return None
