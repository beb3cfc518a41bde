"""One rank that `launchers.local` started: `python -m titan.rank FILE`."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from launchers.place import Place
from titan.settings import Failure, Refusal


def main(file: str, body: Callable[[Any, Place], int]) -> int:
    """Run `body(payload, place)` with what the parent left in `file`; tell the parent of an error.

    Returns:
        The rank's exit code.
    """
    payload, place, parent, errors = pickle.loads(Path(file).read_bytes())
    die_with(parent)
    try:
        return body(payload, place)
    except Refusal as refusal:
        return _tell(Path(errors), place.rank, str(refusal), 2, plain=True)
    except Failure as failure:
        return _tell(Path(errors), place.rank, str(failure), 1, plain=True)
    except KeyboardInterrupt:
        return 130
    except BaseException:
        return _tell(Path(errors), place.rank, traceback.format_exc(), 1, plain=False)


def _tell(file: Path, rank: int, text: str, code: int, plain: bool) -> int:
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


def work(payload: Any, place: Place) -> int:
    """Train: the payload is the run and its life."""
    from titan.worker import work as train

    run, life = payload
    return train(run, life, place)


def run(body: Callable[[Any, Place], int]) -> NoReturn:
    """Be the rank that the command line's file describes, and end."""
    code = main(sys.argv[1], body)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group must not delay the end


if __name__ == "__main__":
    run(work)
