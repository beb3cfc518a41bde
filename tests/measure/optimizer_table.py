"""Optimizers of several packages on several layouts: `python -m tests.measure.optimizer_table [NAME ...]`.

A figure is the largest difference to one device, of the largest weight of a tensor; the column "class" is one device
against the class itself, with all parameters and without titan. The packages are installed beside titan
(docs/optimizers.md has the commands); one that is missing is a line that says so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.external_optimizers import (
    BOUND,
    DENSE,
    EXPERTS,
    LAYOUTS,
    Case,
    find_difference,
    measure_cases,
    step_class,
    step_layout,
)
from tests.support.runs import compose_tiny_run
from titan.optimizer.external.schema import External

CASES = (
    Case("torch.optim.AdamW", weight_decay=0.1),
    Case("torch.optim.Adam", {"amsgrad": True}, weight_decay=0.1),
    Case("torch.optim.SGD", {"momentum": 0.9}),
    Case("torch.optim.RMSprop"),
    Case("torch.optim.NAdam"),
    Case("torch.optim.ASGD"),
    Case("torch.optim.Adafactor", weight_decay=0.1),
    Case("torch.optim.Muon", parameters="matrices", weight_decay=0.1),
    Case("torch.optim.Rprop"),
    Case("torch.optim.LBFGS"),
    Case("torch.optim.SparseAdam"),
    Case("heavyball.AdamW", weight_decay=0.1),
    Case("heavyball.SOAP"),
    Case("heavyball.PSGDKron"),
    Case("heavyball.KLShampoo"),
    Case("heavyball.Muon", parameters="matrices"),
    Case("emerging_optimizers.orthogonalized_optimizers.Muon", parameters="matrices"),
    Case("emerging_optimizers.soap.soap.SOAP", parameters="matrices"),
    Case("schedulefree.AdamWScheduleFree"),
    Case("prodigyopt.Prodigy", lr=1.0),
)


def print_table(names: Sequence[str]) -> int:
    """Print a line for each optimizer; return 1 where a layout differs by more than `BOUND`."""
    cases = [case for case in CASES if not names or any(name in case.cls for name in names)]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        models = {"dense": DENSE, "experts": EXPERTS}
        one = {kind: compose_tiny_run(Path(folder), *settings) for kind, settings in models.items()}
        measured = {kind: measure_cases(cases, run.model) for kind, run in one.items()}
        usable = {kind: {n: s for n, s in found.items() if isinstance(s, External)} for kind, found in measured.items()}
        expected = {kind: step_layout(run, usable[kind]) for kind, run in one.items()}
        results = {}
        for layout, settings in LAYOUTS.items():
            kind, start = "experts" if layout == "ep" else "dense", time.monotonic()
            run = compose_tiny_run(Path(folder), *models[kind], *settings)
            results[layout] = step_layout(run, usable[kind])
            print(f"{layout}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        print(f"| optimizer | unit | {' | '.join(LAYOUTS)} | class |\n|{' --- |' * (len(LAYOUTS) + 3)}")
        for case in cases:
            settings_or_reason = measured["dense"][case.name]
            if isinstance(settings_or_reason, str):
                print(f"| {case.name} | rejected: {settings_or_reason} |")
                continue
            cells = []
            for layout in LAYOUTS:
                kind = "experts" if layout == "ep" else "dense"
                if case.name not in usable[kind]:
                    cells.append(f"rejected: {measured[kind][case.name]}")
                    continue
                cell = find_difference(results[layout][case.name], expected[kind][case.name].weights)
                worst = max(worst, float(cell) if cell[0].isdigit() else 1.0)
                cells.append(cell)
            reference = step_class(one["dense"], settings_or_reason)
            cells.append(find_difference(expected["dense"][case.name], reference))
            measured_facts = settings_or_reason.measured or {}
            unit = f"{settings_or_reason.chosen_split}, {measured_facts['seconds']:.0f} s"
            print(f"| {case.name} | {unit} | {' | '.join(cells)} |", flush=True)
    return int(worst > BOUND)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(print_table(sys.argv[1:]))
