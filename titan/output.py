"""The console of a command: what can't be written there ends no work, and no secret is in a traceback.

`run` is what each command's console script does. Whoever reads stdout may leave (`... | head -1`), a terminal may hang
up, a disk may be full: with `keep_going` what is written then is dropped, and the command goes on to its own end and
exit code. A command whose output is its only product ends instead, as other programs do that SIGPIPE ends.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from titan.safe import safe_lines

LOST = {errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENXIO, errno.ESTALE}
"""The reader has gone, the terminal has hung up, the disk, a quota or a file is full, a shared folder is gone."""
PIPE = 141
"""Exit code of a program that SIGPIPE ends (128 + 13), as shells show it."""


class Lost(Exception):
    """stdout, a command's only product, can't be written any more; `code` is the exit code."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout can't be written ({error.strerror})")
        self.code = PIPE if error.errno == errno.EPIPE else 1


class _Stream(io.FileIO):
    """A file descriptor whose losses are passed over, or else told once by `Lost`."""

    def __init__(self, descriptor: int, keep_going: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.keep_going = keep_going

    def write(self, data: Any) -> int:
        """Write what can be written; what can't counts as written."""
        try:
            written = super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            if not self.keep_going:
                self.keep_going = True
                raise Lost(error) from error
            written = None
        return len(data) if written is None else written  # None too where another program lets writes not wait


def run(main: Callable[[], int], *, keep_going: bool = True) -> NoReturn:
    """Be a command: call `main` and end with its exit code."""
    best_effort(keep_going)
    code = main()
    try:
        sys.stdout.flush()
    except Lost as lost:
        code = code or lost.code
    sys.exit(code)


def best_effort(keep_going: bool = True) -> None:
    """Give this process a stdout and a stderr that are there, whatever its parent has done with them.

    Args:
        keep_going: whether a stdout that can't be written is passed over; else it is `Lost`. stderr always is.
    """
    sys.stdout = _stream(sys.stdout, 1, keep_going)
    sys.stderr = _stream(sys.stderr, 2, True)
    sys.excepthook = _tell


def go_on() -> None:
    """From now on pass over a stdout that can't be written: it is not the product."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stream):
        raw.keep_going = True


def note(text: str) -> None:
    """Put a text on stderr from within the handler of a signal, where a print may be under way."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _stream(before: Any, descriptor: int, keep_going: bool) -> io.TextIOWrapper:
    """A stream like `before`; one that was closed when the process began (None) leads nowhere."""
    if before is None:
        _lead_nowhere(descriptor)
    else:
        with contextlib.suppress(OSError):
            before.flush()
    line = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(descriptor, keep_going)),
        encoding=getattr(before, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=line,
        write_through=getattr(before, "write_through", False),
    )


def _lead_nowhere(descriptor: int) -> None:
    """Take a closed descriptor, so that no file that is opened later gets it, and with it what is printed."""
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Put an error of our own on stderr, as Python would, but without secrets."""
    print(safe_lines("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
