"""What ranks that wait for rank 0's address ask of a shared file system: `python -m tests.support.meeting_load`.

The wait is the launcher's own, on a clock that does not wait. It is compared with one that, ten times a second, lists
a folder with a file for each rank and opens a file in it.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from launchers import rendezvous

RANKS = (64, 1024, 16384)
SECONDS = 30.0
"""How long after the others rank 0 says where it is."""
BEFORE_LOOKS = 10
"""Looks a second of the wait that it is compared with: a listing and an open each."""


@dataclass
class WaitCost:
    """A wait's operations.

    Attributes:
        opens, listings: how often files were opened and folders listed.
        seconds: how long it took; `late`: of that, after the address was there.
    """

    opens: int = 0
    listings: int = 0
    seconds: float = 0.0
    late: float = 0.0


def simulate_wait(seconds: float = SECONDS) -> WaitCost:
    """One rank's wait, where the address comes after some seconds."""
    cost = WaitCost()

    class AddressFile:
        parent = Path()

        def read_text(self) -> str:
            cost.opens += 1
            return "node1 29500\n" if cost.seconds >= seconds else ""

    def sleep(pause: float) -> None:
        cost.seconds += pause

    def list_folder(*folder: Any) -> list[str]:
        cost.listings += 1
        return []

    with ExitStack() as patches:
        patches.enter_context(patch.object(time, "sleep", sleep))
        patches.enter_context(patch.object(time, "monotonic", lambda: cost.seconds))
        patches.enter_context(patch.object(os, "listdir", list_folder))
        assert rendezvous._wait_for_address(AddressFile()) == ("node1", "29500")  # type: ignore[arg-type]
    cost.late = cost.seconds - seconds
    return cost


def main() -> None:
    """Print a table."""
    cost = simulate_wait()
    print(f"Operations a second on the shared folder while all ranks wait {SECONDS:.0f} s for rank 0's address;")
    print("in brackets those of one rank, and entries that it has listed to it in a second.")
    print("| ranks | before: opens, listings | entries | after: opens, listings |")
    print("|---|---|---|---|")
    for ranks in RANKS:
        opens = cost.opens / cost.seconds
        old_load = f"{BEFORE_LOOKS * ranks:,} + {BEFORE_LOOKS * ranks:,} ({BEFORE_LOOKS} + {BEFORE_LOOKS})"
        new_load = f"{opens * ranks:,.0f} + {cost.listings} ({opens:.2f} + {cost.listings})"
        print(f"| {ranks:,} | {old_load} | {BEFORE_LOOKS * ranks * ranks:,} ({BEFORE_LOOKS * ranks:,}) | {new_load} |")


if __name__ == "__main__":
    main()
