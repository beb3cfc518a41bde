"""The process of one rank: it starts from a file, dies with its parent, and writes its error for it. Free of torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from titan.cluster.rank_info import RankInfo
from titan.console import output
from titan.console.text import safe_lines
from titan.errors import ConfigError, RunError, machine_error

Body = Callable[[Any, RankInfo, Callable[[BaseException], int]], int]
"""What a rank does: with its payload, its place, and what it may tell of an error before it puts things in order."""


def run_rank(file: str, body: Body) -> int:
    """Run `body` with what the parent left in `file`; tell the parent of an error.

    Returns:
        The rank's exit code.
    """
    payload, rank_info, parent, errors = pickle.loads(Path(file).read_bytes())
    die_with(parent)
    tell = partial(_write_error, Path(errors), rank_info.rank)
    try:
        return body(payload, rank_info, tell)
    except KeyboardInterrupt:
        return 130
    except output.Lost as lost:
        return lost.code
    except BaseException as error:
        return tell(error)


def _write_error(file: Path, rank: int, error: BaseException) -> int:
    """Leave word of an error, once, with its time: the earliest of all ranks is the cause; returns the exit code."""
    lacking = machine_error(error)
    plain, code = (
        bool(lacking) or isinstance(error, (ConfigError, RunError)),
        2 if isinstance(error, ConfigError) else 1,
    )
    if file.exists():
        return code
    text = (lacking or str(error)) if plain else safe_lines("".join(traceback.format_exception(error)))
    if rank > 0:
        print(text, file=sys.stderr)  # to this rank's own log
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"rank": rank, "time": time.time(), "text": text, "code": code, "plain": plain}))
    temporary.rename(file)
    return code


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however it ends (Linux, prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


def run(body: Body, *, keep_going: bool = True) -> NoReturn:
    """Be the rank that the command line's file describes, and end; `keep_going` as in `titan.console.output`."""
    output.best_effort(keep_going)
    leave(run_rank(sys.argv[1], body))


def leave(code: int) -> NoReturn:
    """End this process at once: threads and destructors of a broken process group must not delay it."""
    with contextlib.suppress(OSError, output.Lost):  # a full disk has no room for the rest of a log
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
