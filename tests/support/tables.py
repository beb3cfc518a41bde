"""Published figures beside titan's: `python -m tests.support.tables`, which `make tables` runs.

Exit code 1: a figure of titan is not as published, or out of its bound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from tests.support.published_tables import FigureCheck, MissingTableError
from tests.support.table_gadre import check_gadre
from tests.support.table_marin import check_marin
from tests.support.table_regmix import check_regmix
from tests.support.table_steplaw import check_steplaw
from tests.support.table_track3 import check_track3

STUDIES: dict[str, Callable[[], Iterator[FigureCheck]]] = {
    "Gadre": check_gadre,
    "StepLaw": check_steplaw,
    "RegMix": check_regmix,
    "track 3": check_track3,
    "marin": check_marin,
}
HEADER = ("study", "what is checked", "published or bound", "titan", "result")


def list_rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table; a study whose figures are not here is one row that says so."""
    for study, check in STUDIES.items():
        try:
            for c in check():
                yield c.study, c.what, c.published, c.titan, "ok" if c.passed else "FAILED"
        except MissingTableError as error:
            yield study, str(error), "", "", "NO DATA"


def main() -> int:
    """Print the table; return the exit code."""
    rows = [HEADER, *list_rows()]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(any(row[-1] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
