"""Memory of NVIDIA's and NeMo's published Llama 3 layouts on H100 of 80 GB: `python -m tests.measure.published_memory`.

Prints the table of docs/memory.md: live tensors of the fullest rank in closed form. With the word `trace` it traces the
fullest rank of each layout in bf16 instead, one to fifteen minutes each. The layouts are those of Megatron in
`titan/estimate/published.csv` and `unseen.csv`, each on its smallest number of GPUs.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tests.measure import fit_costs
from titan.estimate import memory
from titan.estimate.memory import Usage
from titan.estimate.rank_sizes import GIB
from titan.memory.schema import Memory
from titan.run.compose import compose_run
from titan.run.run import Run

COLUMNS = ("model", "precision", "tp", "pp", "vp", "cp")
"""What makes a layout, beside the number of data ranks."""


@dataclass(frozen=True)
class PublishedLayout:
    """A published layout as a run of titan.

    Attributes:
        row: of the table of published runs.
    """

    row: Mapping[str, str]

    @property
    def name(self) -> str:
        """Model, GPUs, precision and degrees."""
        names = {"tp": "tensor", "pp": "pipeline", "cp": "context"}
        degrees = [f"{names[key]} {self.row[key]}" for key in names if int(self.row[key] or 1) > 1]
        stages = int(self.row["vp"] or 1) * int(self.row["pp"] or 1)
        layout = ", ".join([*degrees, *([f"{stages} stages"] if stages > 1 else [])])
        model = self.row["model"].replace("llama3.1-", "").replace("llama3-", "").upper()
        return f"{model} on {self.row['n_gpus']}, {self.row['precision']}: {layout or 'FSDP'}"

    @property
    def id(self) -> str:
        """The name as one word."""
        return re.sub(r"[^0-9A-Za-z]+", "-", self.name)

    @cached_property
    def run(self) -> Run:
        """The run with `memory=none`; matmuls are not asynchronous, so that `parallelism.regather` can apply."""
        overrides = [text for text in fit_costs.build_overrides(self.row) if "async_tensor" not in text]
        if "Megatron FSDP" in self.row["notes"]:  # which shards what the distributed optimizer keeps whole
            overrides += ["parallelism.reshard=always", "parallelism.accumulate=sharded"]
        return compose_run(overrides, remote=True)

    def change(self, checkpointing: str) -> Run:
        """Return the run with other activation checkpointing."""
        return dataclasses.replace(self.run, memory=Memory(checkpointing=checkpointing))  # type: ignore[arg-type]


def list_layouts() -> list[PublishedLayout]:
    """Return the layouts, each on its smallest number of GPUs, by model and GPUs."""
    rows = [*fit_costs.read_runs(fit_costs.PUBLISHED), *fit_costs.read_runs(fit_costs.UNSEEN)]
    found: dict[tuple[str, ...], Mapping[str, str]] = {}
    for row in sorted(rows, key=lambda row: int(row["n_gpus"])):
        if row["gpu"] == "H100-80GB-700W" and not row["local_bs"]:
            key = (row["model"].replace("3.1", "3"), *(row[name] or "1" for name in COLUMNS[1:]))
            found.setdefault(key, row)
    return [PublishedLayout(row) for _, row in sorted(found.items(), key=lambda item: _order_layout(item[1]))]


def list_layouts_in_bf16() -> list[PublishedLayout]:
    """Return the layouts in bf16, once each; in 8 bits the same tensors are kept, and fewer bytes gathered."""
    layouts = [dataclasses.replace(each, row={**each.row, "precision": "bf16"}) for each in list_layouts()]
    return list({layout.name: layout for layout in layouts}.values())


def _order_layout(row: Mapping[str, str]) -> tuple[int, int, str, str]:
    return int(row["model"].rpartition("-")[2].rstrip("b")), int(row["n_gpus"]), row["pp"] or "1", row["precision"]


@dataclass(frozen=True)
class LayoutMemory:
    """Live tensors of a layout's fullest rank, in GiB.

    Attributes:
        layout: the published layout.
        none: in all with `memory=none`.
        gate: by category with `memory=gate`.
    """

    layout: PublishedLayout
    none: float
    gate: Mapping[str, float]

    @property
    def total(self) -> float:
        """Live tensors with `memory=gate`."""
        return sum(self.gate.values())


def measure_layout(layout: PublishedLayout) -> LayoutMemory:
    """Return the memory of a layout in closed form."""
    gate = {name: size / GIB for name, size in find_fullest(layout.change("gate")).parts.items()}
    return LayoutMemory(layout, find_fullest(layout.run).gib, gate)


def find_fullest(run: Run) -> Usage:
    """Return the usage of the rank that needs most."""
    return memory.estimate_peak(run, run.layout, run.microbatches)


# ---- tables ----

PARTS = ("activations", "gradients", "gathered", "logits")


def format_table(memories: list[LayoutMemory]) -> Iterator[str]:
    """Yield the lines of the table of live tensors."""
    yield f"| layout | `none` | `gate` | {' | '.join(PARTS)} | weights, optimizer |"
    yield "|" + " --- |" * (4 + len(PARTS))
    for each in memories:
        parts = [each.gate.get(name, 0.0) for name in PARTS]
        state = each.gate["weights"] + each.gate["optimizer"]
        cells = [each.none, each.total, *parts, state]
        yield f"| {each.layout.name} | {' | '.join(f'{round(gib, 1) + 0.0:.1f}' for gib in cells)} |"


def trace_layout(layout: PublishedLayout) -> str:
    """Return a line with the live tensors of the fullest rank, with `gate`: in closed form, and traced.

    Traces are not compiled, which matters where the rank has the head; so both closed forms are shown.
    """
    from titan.estimate.traced.memory import find_peak
    from titan.training.trace.rank import trace_rank

    run = layout.change("gate")
    peaks = memory.estimate_peaks(run, run.layout, run.microbatches)
    stage = max(range(len(peaks)), key=lambda index: peaks[index].bytes)
    not_compiled = dataclasses.replace(run, compile=dataclasses.replace(run.compile, scope="off"))
    eager = memory.estimate_peaks(not_compiled, run.layout, run.microbatches)[stage]
    peak = find_peak(trace_rank(not_compiled, stage * run.layout.devices // run.layout.pipeline, "cuda").events)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sorted(peak.parts.items()) if size >= GIB / 20)
    return f"| {layout.name} | {peaks[stage].gib:.1f} | {eager.gib:.1f} | {peak.bytes / GIB:.1f} | {parts} |"


def main(words: list[str]) -> int:
    """Print the table, or the traces of layouts in bf16 whose names have each of the words after `trace`."""
    if words[:1] == ["trace"]:
        print("| layout | compiled | not compiled | traced | parts |\n| --- | --- | --- | --- | --- |")
        for layout in list_layouts_in_bf16():
            if all(word in layout.name for word in words[1:]):
                print(trace_layout(layout), flush=True)
        return 0
    print("\n".join(format_table([measure_layout(layout) for layout in list_layouts()])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
