"""Collectives and memory of a step under FSDP2 and under SimpleFSDP, as a table.

    python -m experiments.simple_fsdp.measure model=debug parallelism=fsdp cluster.devices=2
    python -m experiments.simple_fsdp.measure profile=runs/NAME

The first traces a step of one rank of both (arguments are overrides of the run), which needs no other ranks. Traces are
of uncompiled models; what a compiled step exchanges is counted in a run's profile by the second.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titan import api
from titan.cluster.forked_tasks import map_in_forks
from titan.console import output
from titan.errors import ConfigError, exit_code
from titan.estimate.traced.events import StepTrace
from titan.estimate.traced.memory import find_peak

CONF = Path(__file__).parent / "conf"
SIMPLE = (f"hydra.searchpath=[file://{CONF}]", "+sharding@parallelism.groups.all=simple_fsdp")
MIB = 2**20
PROFILED = {
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
}
"""Kinds of collectives by the names of their operations in a profile."""


class Exchanged(NamedTuple):
    """What a step exchanges, and the memory that it needs.

    Attributes:
        counts: number of collectives by kind.
        mib: their MiB by kind, of whole weights or gradients.
        peak: MiB of live tensors.
    """

    counts: Mapping[str, int]
    mib: Mapping[str, float]
    peak: float


def summarise_trace(trace: StepTrace) -> Exchanged:
    """Return what a traced step exchanges."""
    counts, mib = Counter[str](), Counter[str]()
    for event in trace.events:
        if event.kind == "collective":
            counts[event.name] += 1
            mib[event.name] += event.size / MIB  # type: ignore[assignment]
    return Exchanged(counts, mib, find_peak(trace.events).bytes / MIB)


def trace_step(overrides: Sequence[str]) -> Exchanged:
    """Return what the first rank of a run exchanges in a step; once per process."""
    from titan.training.trace.rank import build_rank_trace

    return summarise_trace(build_rank_trace(api.compose(*overrides), 0, full=True))


def count_profiled(directory: Path) -> Counter[str]:
    """Return the collectives of rank 0 in all steps of the latest profile of a run, by kind.

    Raises:
        ConfigError: for a directory without a profile.
    """
    traces = sorted(directory.glob("profile/step-*/rank-0.json.gz"))
    if not traces:
        raise ConfigError(f"profile={directory}: has no profile of rank 0; train with profile=once.")
    events: list[Any] = json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]
    names = (str(event.get("name", "")).removeprefix("c10d::") for event in events)
    return Counter(PROFILED[name] for name in names if name in PROFILED)


def format_table(columns: Mapping[str, Exchanged]) -> str:
    """Return the table in Markdown."""
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for kind in sorted({kind for column in columns.values() for kind in column.counts}):
        cells = (f"{column.counts.get(kind, 0)}, {column.mib.get(kind, 0):.2f} MiB" for column in columns.values())
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines.append(f"| peak of live tensors | {' | '.join(f'{c.peak:.2f} MiB' for c in columns.values())} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _show(words))


def _show(words: Sequence[str]) -> int:
    profiled = [word.removeprefix("profile=") for word in words if word.startswith("profile=")]
    if profiled:
        print(dict(count_profiled(Path(profiled[0]))))
        return 0
    traced = map_in_forks(trace_step, [(tuple(words),), ((*SIMPLE, *words),)], 1, 600)
    print(format_table(dict(zip(("FSDP2", "SimpleFSDP"), traced, strict=True))))
    return 0


if __name__ == "__main__":
    output.run(main)
