"""Plant published faults (`tests.support.layout_faults`) in shrunk runs; see `tests.measure.proof_fault_table`."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

from tests.support.composing import compose_test_run
from tests.support.layout_faults import LAYOUTS, MODELS, LayoutFault
from tests.support.runs import TINY
from titan import prove
from titan.cluster.devices import detect_machine
from titan.cluster.rank_info import RankInfo
from titan.errors import ConfigError, RunError
from titan.run.shrink import shrink_run
from titan.training.proof import ProofJob
from titan.training.proof import prove as prove_run

BASE = ("model.layers=4", "model.heads=4", "model.kv_heads=2", "training.clip_norm=0.5", "evaluation.every=0")
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
