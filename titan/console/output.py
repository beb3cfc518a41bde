"""The output streams of a command: errors in writing to them end no work, and tracebacks hold no secrets.

Each command's console script calls `run`. The reader of stdout may exit (`... | head -1`), a terminal may hang up, a
disk may be full: with `keep_going` further output is dropped, and the command continues to its own end and exit code.
A command whose output is its only product exits instead, as other programs do that SIGPIPE ends.
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

from titan.console.text import safe_lines

LOST = {errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENXIO, errno.ESTALE}
"""The reader has exited, the terminal has hung up, the disk or a quota is full, a shared folder is gone."""
PIPE = 141
"""The exit code of a program that SIGPIPE ends (128 + 13), as shells show it."""


class Lost(Exception):
    """stdout, a command's only product, can no longer be written; `code` is the exit code."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout can't be written ({error.strerror})")
        self.code = PIPE if error.errno == errno.EPIPE else 1


class _Stream(io.FileIO):
    """A file descriptor whose write errors are ignored, or else raised once as `Lost`."""

    def __init__(self, descriptor: int, keep_going: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.keep_going = keep_going

    def write(self, data: Any) -> int:
        """Write what can be written; the rest counts as written."""
        try:
            written = super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            if not self.keep_going:
                self.keep_going = True
                raise Lost(error) from error
            written = None
        return len(data) if written is None else written  # None too where another program has made it non-blocking


def run(main: Callable[[], int], *, keep_going: bool = True) -> NoReturn:
    """Be a command: call `main` and exit with its code."""
    best_effort(keep_going)
    code = main()
    try:
        sys.stdout.flush()
    except Lost as lost:
        code = code or lost.code
    sys.exit(code)


def best_effort(keep_going: bool = True) -> None:
    """Give this process a working stdout and stderr, even if its parent has closed them.

    Args:
        keep_going: ignore errors in writing to stdout, as to stderr; else raise `Lost`.
    """
    sys.stdout = _stream(sys.stdout, 1, keep_going)
    sys.stderr = _stream(sys.stderr, 2, True)
    sys.excepthook = _print_exception


def ignore_write_errors() -> None:
    """Ignore errors in writing to stdout from now on: it is not the product."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stream):
        raw.keep_going = True


def write_stderr(text: str) -> None:
    """Write a text to stderr in a signal handler, which may have interrupted a print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _stream(before: Any, descriptor: int, keep_going: bool) -> io.TextIOWrapper:
    """Return a stream like `before`; one that was closed when the process started (None) writes to /dev/null."""
    if before is None:
        _open_null(descriptor)
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


def _open_null(descriptor: int) -> None:
    """Open /dev/null on a closed descriptor, so that no file that is opened later gets the printed output."""
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    os.set_inheritable(descriptor, True)


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an exception on stderr, as Python does, but without secrets."""
    print(safe_lines("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
