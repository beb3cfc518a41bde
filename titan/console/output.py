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
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from titan.console.text import sanitize_lines

CLOSED_ERRNOS = {errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENXIO, errno.ESTALE}
"""The reader has exited, the terminal has hung up, the disk or a quota is full, a shared folder is gone."""
SIGPIPE_CODE = 141
"""The exit code of a program that SIGPIPE ends (128 + 13), as shells show it."""


INTERRUPTED = "titan: interrupted\n"


class OutputClosedError(Exception):
    """stdout, a command's only product, can no longer be written; `code` is the exit code."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout can't be written ({error.strerror})")
        self.code = SIGPIPE_CODE if error.errno == errno.EPIPE else 1


class _OutputStream(io.FileIO):
    """A file descriptor whose write errors are ignored, or else raised once as `OutputClosedError`."""

    def __init__(self, descriptor: int, keep_going: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.keep_going = keep_going

    def write(self, data: Any) -> int:
        """Write what can be written; the rest counts as written."""
        try:
            written = super().write(data)
        except OSError as error:
            if error.errno not in CLOSED_ERRNOS:
                raise
            if not self.keep_going:
                self.keep_going = True
                raise OutputClosedError(error) from error
            written = None
        return len(data) if written is None else written  # None too where another program has made it non-blocking


def run(main: Callable[[], int], *, keep_going: bool = True) -> NoReturn:
    """Be a command: call `main` and exit with its code."""
    protect_streams(keep_going)
    code = main()
    try:
        sys.stdout.flush()
    except OutputClosedError as error:
        code = code or error.code
    sys.exit(code)


def protect_streams(keep_going: bool = True) -> None:
    """Give this process a working stdout and stderr, even if its parent has closed them.

    Args:
        keep_going: ignore errors in writing to stdout, as to stderr; else raise `OutputClosedError`.
    """
    sys.stdout = _open_stream(sys.stdout, 1, keep_going)
    sys.stderr = _open_stream(sys.stderr, 2, True)
    sys.excepthook = print_exception


def ignore_write_errors() -> None:
    """Ignore errors in writing to stdout from now on: it is not the product."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _OutputStream):
        raw.keep_going = True


_REDIRECTION = threading.RLock()
_terminal = 2
"""The descriptor of stderr as it was before `redirect_output`."""


def is_redirected() -> bool:
    """Return whether output goes to a file of `redirect_output`."""
    return _terminal != 2


@contextlib.contextmanager
def redirect_output(file: Path) -> Iterator[None]:
    """Append all that this process, and each that it starts, prints while the block runs to a file.

    Of several threads one after the other does so: the descriptors are the process's.
    """
    global _terminal
    with _REDIRECTION:
        streams, terminal, saved = (sys.stdout, sys.stderr), _terminal, list[int]()
        for descriptor, stream in enumerate(streams, 1):
            _open_null(descriptor)
            if stream is not None:
                stream.flush()
            saved.append(os.dup(descriptor))
        try:
            with file.open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            _terminal = terminal if is_redirected() else saved[1]
            sys.stdout, sys.stderr = (_open_stream(stream, i, True) for i, stream in enumerate(streams, 1))
            yield
        finally:
            sys.stdout.flush()
            (sys.stdout, sys.stderr), _terminal = streams, terminal
            for descriptor, copy in enumerate(saved, 1):
                os.dup2(copy, descriptor)
                os.close(copy)


def write_stderr(text: str) -> None:
    """Write a text to stderr in a signal handler, which may have interrupted a print, also while it is redirected."""
    with contextlib.suppress(OSError):
        os.write(_terminal, text.encode())


def _open_stream(original: Any, descriptor: int, keep_going: bool) -> io.TextIOWrapper:
    """Return a stream like `original`; one that was closed when the process started (None) writes to /dev/null."""
    if original is None:
        _open_null(descriptor)
    else:
        with contextlib.suppress(OSError):
            original.flush()
    is_line_buffered = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(_OutputStream(descriptor, keep_going)),
        encoding=getattr(original, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=is_line_buffered,
        write_through=getattr(original, "write_through", False),
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


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an exception on stderr, as Python does, but without secrets; at Ctrl-C exit at once."""
    if issubclass(kind, KeyboardInterrupt):
        write_stderr(INTERRUPTED)
        os._exit(130)
    print(sanitize_lines("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
