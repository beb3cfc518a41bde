"""Planted bit flips, and checks of clean replicas: `python -m tests.measure.bit_flip_table [flips|clean] [CHECKS]`.

`flips` plants one bit after another in tiny runs and prints whether the next save, or an audit within N steps, found it
and named the right rank. `clean` trains without faults, compares the replicas after every step, and audits every step.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.bit_flips import FLIPS, Flip, check_clean, find_flip, is_found


def _run_quietly(work: Callable[[Path], Any]) -> Any:
    """Call `work` with an empty directory, without the terminal's output."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return work(Path(folder))


def _show_flips(flips: Sequence[Flip]) -> int:
    found = 0
    print(f"{'planted':<70} {'at':>3} {'found':>6}  named    right")
    for flip in flips:
        finding = _run_quietly(partial(find_flip, flip))
        found += is_found(flip, finding)
        named = " ".join(map(str, finding.named))
        row = f"{flip.title:<70} {flip.step:>3} {finding.step or '-':>6}  {named:<8} {is_found(flip, finding)}"
        print(row, flush=True)
    print(f"{found} of {len(flips)} found in time, with the right ranks")
    return int(found < len(flips))


def _show_clean(checks: int) -> int:
    shares = {"ddp2": 0.5, "tp2": 0.2, "fsdp2": 0.15, "hsdp4": 0.07, "ep4": 0.08}
    total = alarms = 0
    for layout, share in shares.items():
        start_time = time.monotonic()
        done, wrong = _run_quietly(partial(check_clean, layout, round(checks * share)))
        total, alarms = total + done, alarms + wrong
        print(f"{layout:<10} {done:>6} checks, {wrong} alarms, {time.monotonic() - start_time:.0f} s", flush=True)
    print(f"{total} checks of clean replicas, {alarms} alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    words = sys.argv[1:] or ["flips"]
    sys.exit(_show_flips(FLIPS) if words[0] == "flips" else _show_clean(int(words[1]) if words[1:] else 10_000))
