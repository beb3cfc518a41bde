"""Prove shrunk runs with published faults: `python -m tests.measure.proof_fault_table [TEXT...]`.

It proves each fault whose name holds one of the texts, or all, over each of its layouts, and prints the first check
that fails. It fails where fewer than 90 % of the faults are found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.support.layout_faults import FAULTS, LayoutFault
from tests.support.proof_faults import find_failure

NEEDED = 0.9
"""The share of faults below which the table fails."""


def judge_fault(fault: LayoutFault, layout: str) -> bool:
    """Print a row of the table; return whether the fault is found."""
    start, failure = time.monotonic(), find_failure(fault, layout)
    verdict = "yes" if failure else "NO"
    print(f"| {fault.name} | {layout} | {failure or '-'} | {verdict} | {time.monotonic() - start:.0f} |", flush=True)
    return bool(failure)


def main(texts: Sequence[str]) -> int:
    """Print the table; return 1 where too few are found."""
    print("| fault | layout | first check that fails | found | s |\n| --- | --- | --- | --- | --- |")
    faults = [fault for fault in FAULTS if not texts or any(text in fault.name for text in texts)]
    found = [judge_fault(fault, layout) for fault in faults for layout in fault.layouts]
    print(f"found: {sum(found)} of {len(found)}", file=sys.stderr)
    return 0 if sum(found) >= NEEDED * len(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
