"""Plant published faults (`tests.support.layout_faults`) in ranks, and see what `titan.replay against=` names."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from tests.support.composing import compose_test_run
from tests.support.layout_faults import FAULTS, LAYOUTS, MODELS, LayoutFault
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.runs import TINY
from titan.cluster.rank_info import RankInfo
from titan.dataset import corpora
from titan.run import identity
from titan.run.attempts import Attempt
from titan.run.lineage import prepare_data
from titan.training.replay.compare import compare_plans
from titan.training.replay.questions import Answers
from titan.training.replay.request import ExactType, ReplayEndedError, ReplayJob, ReplayPlan, Settings

STEP = 3
"""The step that is compared: it begins with moments that are not zero."""
BASE = ("model.layers=4", "model.heads=4", "model.kv_heads=2", "training.clip_norm=0.5", "training.steps=20",
        "schedule.warmup=10", "optimizer.lr=0.01", "optimizer.decay=matrices", "evaluation.every=0")  # fmt: skip
LIMIT = 240.0
"""Seconds after which ranks are killed."""


@dataclass(frozen=True)
class LayoutFaultOutcome:
    """What a comparison named.

    Attributes:
        name: of the fault, or of the clean pair.
        layout: that was compared with one device.
        expected: what names it rightly.
        named: kind, name and size of the first finding; empty where there was none.
        is_right: whether the name is expected.
        seconds: that it took.
    """

    name: str
    layout: str
    expected: str
    named: str
    is_right: bool
    seconds: float


class Bench:
    """Compares layouts with one device, whose replays are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references: dict[tuple[str, ...], ReplayPlan] = {}

    def plan(self, name: str, overrides: Sequence[str]) -> ReplayPlan:
        """Plan the step of a composition in a folder of that name."""
        run = compose_test_run([*TINY, *BASE, *overrides, f"hydra.run.dir={self.folder / name}"])
        mix = prepare_data(run)
        science = identity.collect_science(run, corpora.compute_data_digest(mix), None)
        ids = identity.compute_ids(run, science)
        return ReplayPlan(run, Attempt(1, "replay", ids, mix.folders, None, 0, 0, "start"), mix, start_ranks)

    def find_reference(self, overrides: Sequence[str]) -> ReplayPlan:
        """Return the plan on one device, which is run once."""
        key = tuple(overrides)
        if key not in self.references:
            self.references[key] = self.plan(f"one-{len(self.references)}", (*LAYOUTS["single"], *overrides))
        return self.references[key]

    def compare(
        self,
        overrides: Sequence[str],
        layout: Sequence[str],
        name: str,
        fault: LayoutFault | None = None,
        pin: bool = False,
        exact: ExactType = "fp32",
    ) -> Answers:
        """Compare a layout, with or without a fault, with one device."""
        first, second = self.find_reference(overrides), self.plan(name, (*overrides, *layout))
        settings = Settings(run="", step=STEP, pin="routing" if pin else None, exact=exact)

        def start(plan: ReplayPlan, job: ReplayJob) -> int:
            is_done = not job.repeats and any(Path(plan.run.directory).glob(f"replayed-{job.passes[-1][0]}-*"))
            return 0 if is_done else start_ranks(plan, job)

        second = replace(second, start=lambda plan, job: start_ranks(plan, job, fault))
        return compare_plans(replace(first, start=start), second, settings).answers


def start_ranks(plan: ReplayPlan, job: ReplayJob, fault: LayoutFault | None = None) -> int:
    """Run the ranks of a replay, forked from this process, with a fault."""
    index = None if fault is None else FAULTS.index(fault)
    Path(plan.run.directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ranks = plan.run.layout.devices
        codes = run_ranks(_work_rank, ranks, job, index, f"file://{folder}/meeting", timeout=LIMIT, joined=False)
    return max(codes)


def _work_rank(rank: int, size: int, job: ReplayJob, index: int | None, meeting: str) -> int:
    from titan.training.replay.worker import work

    with nullcontext() if index is None else FAULTS[index].plant():
        return work(job, RankInfo(rank, size, rank, meeting if size > 1 else ""))


def judge(
    bench: Bench,
    folder: str,
    name: str,
    layout: str,
    settings: tuple[Sequence[str], Sequence[str]],
    fault: LayoutFault | None = None,
    pin: bool = False,
) -> LayoutFaultOutcome:
    """Compare a layout with one device, and judge what is named: the fault, or without one nothing.

    Args:
        settings: of both, and of the layout.
    """
    start, is_right = time.monotonic(), False
    try:
        findings = bench.compare(*settings, folder, fault, pin).findings
    except (RankFailedError, ReplayEndedError) as error:
        named = f"failed: {str(error).strip().splitlines()[-1][:80]}"
    else:
        patterns = () if fault is None else fault.expected
        is_right = not findings if fault is None else any(fnmatch(f.name, p) for f in findings[:1] for p in patterns)
        named = "; ".join(f"{f.kind}: {f.name} ({f.relative:.0e})" for f in findings[: 1 if fault else None])
    expected = "nothing" if fault is None else ", ".join(fault.expected)
    return LayoutFaultOutcome(name, layout, expected, named, is_right, time.monotonic() - start)


def judge_fault(bench: Bench, fault: LayoutFault, layout: str) -> LayoutFaultOutcome:
    """Judge a fault over a layout."""
    settings = MODELS[fault.model], LAYOUTS[layout]
    return judge(bench, f"{FAULTS.index(fault)}-{layout}", fault.name, layout, settings, fault)


def judge_clean_pair(
    bench: Bench, number: int, model: str, layout: str, precision: str, compiled: bool, pin: bool
) -> LayoutFaultOutcome:
    """Judge a pair without a fault, in which nothing may be named."""
    name = name_pair((model, layout, precision, compiled, pin))
    other = (*LAYOUTS[layout], "compile=block" if compiled else "compile=off")
    settings = (*MODELS[model], *PRECISIONS[precision]), other
    return judge(bench, f"clean-{number}", name, layout, settings, pin=pin)


def list_clean_pairs() -> list[tuple[str, str, str, bool, bool]]:
    """Return model, layout, precision, whether it is compiled, and whether experts are pinned, of clean pairs."""
    dense = [name for name in LAYOUTS if not name.startswith("ep")]
    pairs = [("dense", layout, precision, False, False) for layout in dense for precision in ("fp32", "bf16", "float8")]
    pairs += [("tied", layout, "fp32", False, False) for layout in ("fsdp2", "tp2", "pp2", "fsdp2-pp2")]
    moe = ("ddp2", "fsdp2", "tp2", "cp2", "pp2", "ep2")
    pairs += [("moe", *case, False, pin) for *case, pin in itertools.product(moe, ("fp32", "bf16"), (False, True))]
    compiled = ("single", "fsdp2", "tp2", "cp2", "pp2")
    pairs += [("dense", layout, precision, True, False) for layout in compiled for precision in ("fp32", "bf16")]
    return pairs  # type: ignore[return-value]


def name_pair(pair: tuple[str, str, str, bool, bool]) -> str:
    """Return the name of a clean pair, without its layout."""
    model, _, precision, compiled, pin = pair
    return " ".join([model, precision, *["compiled"] * compiled, *["pinned"] * pin])


PRECISIONS = {
    "fp32": ("precision=fp32",),
    "bf16": ("precision=bf16",),
    "float8": ("precision=float8", "precision.compute=bf16", "precision.emulate=true"),
}
