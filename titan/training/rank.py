"""One rank that `launchers.supervisor` started: `python -m titan.training.rank FILE`."""

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

from titan.cluster.rank_info import Place
from titan.config.settings import Failure, Refusal, fault
from titan.console import output
from titan.console.text import safe_lines

Body = Callable[[Any, Place, Callable[[BaseException], int]], int]
"""What a rank does: with its payload, its place, and what it may tell of an error before it puts things in order."""


def main(file: str, body: Body) -> int:
    """Run `body` with what the parent left in `file`; tell the parent of an error.

    Returns:
        The rank's exit code.
    """
    payload, place, parent, errors = pickle.loads(Path(file).read_bytes())
    die_with(parent)
    tell = partial(_tell, Path(errors), place.rank)
    try:
        return body(payload, place, tell)
    except KeyboardInterrupt:
        return 130
    except output.Lost as lost:
        return lost.code
    except BaseException as error:
        return tell(error)


def _tell(file: Path, rank: int, error: BaseException) -> int:
    """Leave word of an error, once, with its time: the earliest of all ranks is the cause; returns the exit code."""
    lacking = fault(error)
    plain, code = bool(lacking) or isinstance(error, (Refusal, Failure)), 2 if isinstance(error, Refusal) else 1
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


def work(payload: Any, place: Place, tell: Callable[[BaseException], int]) -> int:
    """Train: the payload is the run and its life."""
    from titan.training.worker import work as train

    run, life = payload
    return train(run, life, place, failed=tell)


def run(body: Body, *, keep_going: bool = True) -> NoReturn:
    """Be the rank that the command line's file describes, and end; `keep_going` as in `titan.console.output`."""
    output.best_effort(keep_going)
    leave(main(sys.argv[1], body))


def leave(code: int) -> NoReturn:
    """End this process at once: threads and destructors of a broken process group must not delay it."""
    with contextlib.suppress(OSError, output.Lost):  # a full disk has no room for the rest of a log
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(work)
