"""Errors that end a command with one sentence, and exit codes. Free of torch."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from titan.console import output
from titan.console.text import one_line, safe


class _UserError(Exception):
    """One sentence for the user; names and URLs that it quotes are redacted and escaped."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(safe(sentence))


class ConfigError(_UserError):
    """An invalid setting or input, in one plain sentence for the user: exit code 2, without a traceback."""


class RunError(_UserError):
    """The reason why a run failed, in one plain sentence for the user: exit code 1, without a traceback."""


_EXHAUSTED = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EROFS), "repair that file system, or choose another place"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
}


def machine_error(error: BaseException) -> str | None:
    """Return the sentence about a resource that this machine lacks; None for errors of other kinds, such as bugs."""
    if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; {_EXHAUSTED[error.errno]}, and give the same command again."


EXIT_REQUEUE = 75
"""The exit code of ranks that the scheduler asked to save and end, to be started again (sysexits.h: EX_TEMPFAIL)."""


def exit_code(body: Callable[[], int]) -> int:
    """Return the exit code of `body`; print its error: 2 for ConfigError, 1 for RunError, 130 for Ctrl-C."""
    try:
        return body()
    except ConfigError as error:
        print(f"titan: {one_line(str(error))}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"titan: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except output.Lost as lost:  # the reader of stdout has exited: `... | head`
        if lost.code != output.PIPE:
            print(f"titan: {lost}.", file=sys.stderr)
        return lost.code
    except OSError as error:
        if (sentence := machine_error(error)) is None:
            raise
        print(f"titan: {sentence}", file=sys.stderr)
        return 1
