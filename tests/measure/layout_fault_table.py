"""Plant published faults (`tests.support.layout_faults`) in ranks, and see what `titan.replay against=` names.

`python -m tests.measure.layout_fault_table [TEXT...]` compares each fault whose name holds one of the texts, or all,
over each of its layouts with one device, and prints a table: what was expected, what was named, and whether that is
right. `--clean` compares pairs without a fault instead, which must not be named: layouts, precisions, compiled or not,
experts pinned or not. It fails below 90 % right answers, or with a false alarm.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.layout_faults import FAULTS
from tests.support.planted_layout_faults import (
    Bench,
    LayoutFaultOutcome,
    judge_clean_pair,
    judge_fault,
    list_clean_pairs,
    name_pair,
)

NEEDED = 0.9
"""The share of right answers below which the table fails."""


def format_row(outcome: LayoutFaultOutcome) -> str:
    """The outcome as a line of the table."""
    cells = (outcome.name, outcome.layout, outcome.expected, outcome.named, "yes" if outcome.is_right else "NO")
    return f"| {' | '.join(cells)} | {outcome.seconds:.1f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 1 where too little is right."""
    parser = argparse.ArgumentParser(description="published faults, planted")
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--clean", action="store_true", help="pairs without a fault")
    parser.add_argument("--first", type=int, default=0, help="leave out pairs before this one")
    args = parser.parse_args(argv)
    faults = [f for f in FAULTS if not args.texts or any(text in f.name for text in args.texts)]
    pairs = [p for p in list_clean_pairs() if not args.texts or any(text in name_pair(p) for text in args.texts)]
    outcomes = []
    print("| fault | layout | expected | named | right | s |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        clean = (judge_clean_pair(bench, number, *pair) for number, pair in enumerate(pairs[args.first :]))
        planted = (judge_fault(bench, fault, layout) for fault in faults[args.first :] for layout in fault.layouts)
        for outcome in clean if args.clean else planted:
            print(format_row(outcome), flush=True)
            outcomes.append(outcome)
    right = sum(outcome.is_right for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} right")
    return int(right < (len(outcomes) if args.clean else NEEDED * len(outcomes)))


if __name__ == "__main__":
    sys.exit(main())
