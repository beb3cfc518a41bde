"""How far every layout is from one device, a line each; docs/trust.md has the worst, and docs/experts.md.

`python -m tests.measure.layout_table` measures dense models, and `... layout_table experts [TEXT...]` those with
experts, on the layouts whose names contain the texts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.support.matrix import EXACT, LayoutCase, TrainedLayout, compare_layouts, list_cases, train_case
from tests.support.matrix_experts import OneDevice, measure_case
from tests.support.matrix_experts import list_cases as list_expert_cases
from tests.support.ranks import RankFailedError

COLUMNS = ("gradients", "weights", "loss", "norm", "validation")


def print_table(
    cases: Iterable[LayoutCase], columns: Sequence[str], measure: Callable[[LayoutCase, Path], dict[str, float]]
) -> int:
    """Measure cases and print a line of each; return 1 where one does not hold what laws 1 to 3 promise."""
    print(f"| {' | '.join(('layout', *columns))} |\n|{' --- |' * (len(columns) + 1)}")
    failed = []
    for case in cases:
        try:
            with tempfile.TemporaryDirectory() as folder:
                differences = measure(case, Path(folder))
        except RankFailedError as failure:
            print(f"{case.id}: {failure}", file=sys.stderr)
            failed.append(case.id)
            continue
        figures = " | ".join(f"{differences[k]:.0e}" for k in columns)
        print(f"| {case.name}{' (tied)' if case.tied else ''} | {figures} |", flush=True)
        is_same = differences["same start"] and differences["same rows"]
        failed += [] if is_same and max(differences[k] for k in columns) <= EXACT else [case.id]
    print(f"{len(failed)} beyond the bound{': ' if failed else ''}{', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


def measure_layouts() -> int:
    """Measure every case and print a table."""
    references: dict[tuple[str, ...], TrainedLayout] = {}
    with tempfile.TemporaryDirectory() as folder:

        def measure(case: LayoutCase, case_folder: Path) -> dict[str, float]:
            if case.science not in references:
                run_folder = Path(folder) / str(len(references))
                run_folder.mkdir()
                references[case.science] = train_case(run_folder, None, case.science)
            return compare_layouts(train_case(case_folder, case, case.science), references[case.science])

        return print_table(list_cases(), COLUMNS, measure)


NAMES = ("experts", *COLUMNS, "terms", "load")


def measure_experts(texts: Sequence[str]) -> int:
    """Measure the cases whose names contain the texts, and print a table."""
    cases = [case for case in list_expert_cases() if all(part in case.id for part in texts)]
    with tempfile.TemporaryDirectory() as folder:
        references = OneDevice(Path(folder))
        return print_table(cases, NAMES, lambda case, path: measure_case(case, references.find_outcome(case), path))


if __name__ == "__main__":
    sys.exit(measure_experts(sys.argv[2:]) if sys.argv[1:2] == ["experts"] else measure_layouts())
