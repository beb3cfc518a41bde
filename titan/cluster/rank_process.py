"""The process of one rank: it starts from a file, ends with its parent, and reports its error. Free of torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from titan.cluster import rank_error
from titan.cluster.rank_info import RankInfo
from titan.console import output
from titan.files.platform import die_with_parent

RankBody = Callable[[Any, RankInfo, Callable[[BaseException], int]], int]
"""What a rank does, given its payload, its rank info and a function that reports an error before any cleanup."""


def run_rank(file: str, body: RankBody) -> int:
    """Run `body` with what the parent wrote into `file`, and report its error to the parent.

    Returns:
        The rank's exit code.
    """
    payload, rank_info, parent, errors = pickle.loads(Path(file).read_bytes())
    die_with_parent(parent)
    report = partial(report_error, Path(errors), rank_info.rank, show=rank_info.rank > 0)
    return run_body(lambda: body(payload, rank_info, report), report)


def run_body(body: Callable[[], int], report: Callable[[BaseException], int]) -> int:
    """Run the body of a rank, however it was started.

    Returns:
        The exit code: the body's own, 130 for Ctrl-C, else that of `report`.
    """
    try:
        return body()
    except KeyboardInterrupt:
        return 130
    except output.OutputClosedError as error_lost:
        return error_lost.code
    except BaseException as error:
        return report(error)


def report_error(file: Path, rank: int, error: BaseException, *, show: bool = True) -> int:
    """Write a rank's error into `file`, once: a later error of the same rank follows from the first.

    Args:
        file: where the launcher reads it.
        show: whether to print it as well, to the rank's own log.

    Returns:
        The exit code.
    """
    rank_failure = rank_error.describe_error(error, rank)
    if not file.exists():
        if show:
            print(f"titan: {rank_failure.text}", file=sys.stderr)
        rank_error.write(file, rank_failure)
    return rank_failure.code


def run_from_file(body: RankBody, *, keep_going: bool = True) -> NoReturn:
    """Be the rank that the file on the command line describes, and exit; `keep_going` as in `titan.console.output`."""
    output.protect_streams(keep_going)
    exit_now(run_rank(sys.argv[1], body))


def exit_now(code: int) -> NoReturn:
    """End this process at once: threads and destructors of a broken process group must not delay it."""
    with contextlib.suppress(OSError, output.OutputClosedError):  # a full disk has no room for the rest of a log
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
