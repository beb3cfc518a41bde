"""Published figures beside titan's: `python -m tests.measure.tables [STUDY ...]`, which `make tables` runs.

Exit code 1: a figure of titan is not as published, or out of its bound, or a study's figures are not here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from tests.measure.published_tables import FigureCheck, MissingTableError
from tests.measure.table_gadre import check_gadre
from tests.measure.table_marin import check_marin
from tests.measure.table_regmix import check_regmix
from tests.measure.table_steplaw import check_steplaw
from tests.measure.table_track3 import check_track3

STUDIES: dict[str, Callable[[], Iterator[FigureCheck]]] = {
    "Gadre": check_gadre,
    "StepLaw": check_steplaw,
    "RegMix": check_regmix,
    "track 3": check_track3,
    "marin": check_marin,
}
HEADER = ("study", "what is checked", "published or bound", "titan", "result")


def list_rows(studies: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table; a study whose figures are not here is one row that says so."""
    for study in studies:
        try:
            for c in STUDIES[study]():
                yield c.study, c.what, c.published, c.titan, "ok" if c.passed else "FAILED"
        except MissingTableError as error:
            yield study, str(error), "", "", "NO DATA"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of all studies, or of those named; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(STUDIES)}; none: all")
    studies = parser.parse_args(arguments).studies or list(STUDIES)
    if unknown := set(studies) - STUDIES.keys():
        parser.error(f"no study {', '.join(sorted(unknown))}: choose of {', '.join(STUDIES)}")
    rows = [HEADER, *list_rows(studies)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(any(row[-1] in ("FAILED", "NO DATA") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
