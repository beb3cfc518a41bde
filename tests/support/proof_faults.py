"""Plant published faults (`tests.support.layout_faults`) in shrunk runs.

`python -m tests.support.proof_faults [TEXT...]` proves each fault whose name holds one of the texts, or all, over each
of its layouts, and prints the first check that fails. It fails where fewer than 90 % of the faults are found.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.support.composing import compose_test_run
from tests.support.layout_faults import FAULTS, LAYOUTS, MODELS, LayoutFault
from tests.support.runs import TINY
from titan import prove
from titan.cluster.devices import detect_machine
from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError, RunError
from titan.run.shrink import shrink_run
from titan.training.proof import ProofJob
from titan.training.proof import prove as prove_run

BASE = ("model.layers=4", "model.heads=4", "model.kv_heads=2", "training.clip_norm=0.5", "evaluation.every=0")
NEEDED = 0.9
"""The share of faults below which the table fails."""
FAULTY = ("fp32", "precision")
"""The trainings that have the fault: those of the layout."""


def find_failure(fault: LayoutFault, layout: str) -> str:
    """Return the first check that a fault fails over a layout; empty where it passes all."""
    with tempfile.TemporaryDirectory() as folder:
        run = compose_test_run([*TINY, *BASE, *MODELS[fault.model], *LAYOUTS[layout], f"hydra.run.dir={folder}/target"])
        shrunk = shrink_run(run, detect_machine("cpu"), folder)
        try:
            checks, _ = prove_run(
                shrunk.run, Path(folder) / "proof", lambda job: run_ranks(job, fault), lambda text: None
            )
        except (RunError, ConfigError) as error:
            return f"a rank failed: {str(error).strip().splitlines()[-1][:60]}"
    failed = [check for check in checks if not check.passed]
    return f"{failed[0].name}: {failed[0].where} ({failed[0].worst:.0e})" if failed else ""


def run_ranks(job: ProofJob, fault: LayoutFault) -> None:
    """Train a job on forked ranks, which have the fault where they are the layout's."""

    def work(rank_info: RankInfo) -> int:
        from titan.training.proof import work as train

        with fault.plant() if job.run.name in FAULTY else nullcontext():
            return train(job, rank_info)

    prove.fork(job, work)


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
