"""Errors that end a command with one sentence, and exit codes. Free of torch."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from titan.console import output
from titan.console.text import one_line, safe


class _UserError(Exception):
    """A sentence for the user; whatever names and URLs it quotes, it holds no secret and stays one line."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(safe(sentence))


class ConfigError(_UserError):
    """What can't work, in one plain sentence for the user: the program ends with exit code 2, without a traceback."""


class RunError(_UserError):
    """What made a run fail, in one plain sentence for the user: exit code 1, without a traceback."""


_EXHAUSTED = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EROFS), "mend that file system, or choose another place"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
}


def machine_error(error: BaseException) -> str | None:
    """What this machine lacks, in a sentence for the user; None for an error of another kind, such as one of ours."""
    if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; {_EXHAUSTED[error.errno]}, and give the same command again."


EXIT_REQUEUE = 75
"""Exit code of ranks that were told by the scheduler to save and end, to be started again (sysexits.h: EX_TEMPFAIL)."""


def exit_code(body: Callable[[], int]) -> int:
    """What `body` returns; else, once its sentence is said, 2 for a refusal, 1 for a failure, 130 for Ctrl-C."""
    try:
        return body()
    except ConfigError as refusal:
        print(f"titan: {one_line(str(refusal))}", file=sys.stderr)
        return 2
    except RunError as failure:
        print(f"titan: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except output.Lost as lost:  # whoever read has seen enough: `... | head`
        if lost.code != output.PIPE:
            print(f"titan: {lost}.", file=sys.stderr)
        return lost.code
    except OSError as error:
        if (words := machine_error(error)) is None:
            raise
        print(f"titan: {words}", file=sys.stderr)
        return 1
