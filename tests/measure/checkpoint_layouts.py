"""What each layout saved, loaded by every other: `python -m tests.measure.checkpoint_layouts` prints both tables.

A row is the layout that saved, a column the one that loads. Each layout saves once. Each that loads is assembled once,
and loads one checkpoint after the other: the state must be what was saved to the bit, and one step from there what one
device makes of the same checkpoint.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks
from tests.support.runs import (
    Tensors,
    are_identical,
    begin_run,
    compose_tiny_run,
    compute_difference,
    gather_tensors,
    select_weights,
    train_run,
)
from titan.checkpoint import manifest
from titan.checkpoint.coordinator import Coordinator
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.restore import restore_train_state
from titan.checkpoint.state import train_state_dict
from titan.cluster.rank_info import RankInfo
from titan.dataset.loader import Batch
from titan.parallelism import mesh
from titan.run.attempts import Attempt
from titan.run.directory import lock_directory
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.signals import StopSignals
from titan.training.trainer import Trainer

PIPELINED = ("parallelism.pipeline=2", "parallelism.microbatches=4")
LAYOUTS = {
    "single": (),
    "ddp": ("parallelism.replicate=2",),
    "ddp of 3": ("parallelism.replicate=3",),
    "fsdp": ("parallelism.shard=2",),
    "fsdp of 3": ("parallelism.shard=3",),
    "hsdp": ("parallelism.replicate=2", "parallelism.shard=2"),
    "tp": ("parallelism.tensor=2",),
    "fsdp tp": ("parallelism.shard=2", "parallelism.tensor=2"),
    "cp": ("parallelism.context=2",),
    "fsdp cp": ("parallelism.shard=2", "parallelism.context=2", "parallelism.context_method=ring"),
    "pp": PIPELINED,
    "pp of 4": ("parallelism.pipeline=4", "parallelism.microbatches=4"),
    "ZBV": ("parallelism.schedule=ZBVZeroBubble", *PIPELINED),
    "3d": ("parallelism.schedule=Interleaved1F1B", "parallelism.shard=2", "parallelism.tensor=2", *PIPELINED),
}
"""Eight rows a batch, so that three ranks get unlike many; 64 rows of weights do not divide by three either."""
SHAPE = ("model.layers=4", "model.heads=4", "model.kv_heads=2")
KINDS = {
    "untied, SGD with momentum": ("optimizer=sgd", "optimizer.momentum=0.9"),
    "tied, AdamW": ("optimizer=adamw", "model.tied=true"),
}
STEPS = 3
EXACT = 1e-5
"""Law 3's bound in fp32."""


@dataclass(frozen=True)
class SavedState:
    """What a layout saved: the folder, and the whole state at that moment."""

    folder: Path
    state: Tensors


@dataclass
class LoadedState:
    """What a layout made of a checkpoint: the state, then one step's loss and norm and the weights after it."""

    state: Tensors
    loss: float
    norm: float
    weights: Tensors


@dataclass
class LayoutDeviation:
    """How far a layout is from what was saved, and after a step from one device.

    Attributes:
        exact: whether the state is what was saved, to the bit.
        loss, norm, weights: relative differences after one step.
    """

    exact: bool
    loss: float
    norm: float
    weights: float

    @property
    def worst(self) -> float:
        """The largest difference after a step."""
        return max(self.loss, self.norm, self.weights)


@dataclass
class LayoutTable:
    """The checkpoints of a kind, made when they are first asked for."""

    folder: Path
    kind: str
    saved: dict[str, SavedState] = field(default_factory=dict)
    expected: dict[str, LoadedState] = field(default_factory=dict)

    def save_layout(self, layout: str) -> SavedState:
        """What a layout saves after three steps."""
        if layout not in self.saved:
            run = self._compose_run(f"saved-{layout}", layout, f"training.steps={STEPS}")
            states = [result.last for result in train_run(run)]
            (folder,) = manifest.list_complete(Path(run.directory))
            self.saved[layout] = SavedState(folder, merge_states(states))
        return self.saved[layout]

    def load_layout(self, layout: str, rows: Sequence[str]) -> dict[str, LoadedState]:
        """What a layout makes of the checkpoints of others."""
        run = self._compose_run(
            f"loaded-{layout}",
            layout,
            f"training.steps={STEPS + 1}",
            "checkpoint=off",
            f"checkpoint.resume={self.save_layout('single').folder}",
        )
        folders = [self.save_layout(row).folder for row in rows]
        with lock_directory(Path(run.directory)):
            attempt = begin_run(run)
        assert isinstance(attempt, Attempt)
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/meeting"
            ranks = run_ranks(
                _load_checkpoints, run.layout.devices, run, attempt, meeting, folders, timeout=600, joined=False
            )
        return {row: _merge_ranks([rank[i] for rank in ranks]) for i, row in enumerate(rows)}

    def compute_column(self, layout: str, rows: Sequence[str]) -> dict[str, LayoutDeviation]:
        """A column of the table, against what one device makes of each checkpoint."""
        if missing := [row for row in rows if row not in self.expected]:
            self.expected |= self.load_layout("single", missing)
        loaded = self.load_layout(layout, rows) if layout != "single" else self.expected
        return {row: _compute_deviation(loaded[row], self.save_layout(row), self.expected[row]) for row in rows}

    def _compose_run(self, name: str, layout: str, *overrides: str) -> Run:
        directory = self.folder / name.replace(" ", "-")
        while directory.exists():
            directory = directory.with_name(f"{directory.name}+")
        return compose_tiny_run(directory, *SHAPE, *KINDS[self.kind], *LAYOUTS[layout], *overrides)


def merge_states(states: Iterable[Tensors]) -> Tensors:
    """Whole tensors of all ranks, each of which has some or all of them: the same ones."""
    out: Tensors = {}
    for state in states:
        common = {name: out[name] for name in state if name in out}
        if not are_identical({name: state[name] for name in common}, common):
            raise AssertionError("ranks differ")
        out |= state
    return out


def _merge_ranks(ranks: Sequence[LoadedState]) -> LoadedState:
    state, final_weights = merge_states(rank.state for rank in ranks), merge_states(rank.weights for rank in ranks)
    if len({(rank.loss, rank.norm) for rank in ranks}) > 1:
        raise AssertionError("ranks read different figures")
    return LoadedState(state, ranks[0].loss, ranks[0].norm, final_weights)


def _compute_deviation(loaded: LoadedState, saved: SavedState, expected: LoadedState) -> LayoutDeviation:
    return LayoutDeviation(
        exact=are_identical(loaded.state, saved.state),
        loss=abs(loaded.loss / expected.loss - 1),
        norm=abs(loaded.norm / expected.norm - 1),
        weights=compute_difference(loaded.weights, expected.weights),
    )


def _load_checkpoints(
    rank: int, size: int, run: Run, attempt: Attempt, meeting: str, folders: Sequence[Path]
) -> list[LoadedState]:
    """On one rank: each checkpoint in turn, and a step from it."""
    rank_info = RankInfo(rank, size, rank, meeting if size > 1 else "")
    world = mesh.connect_world(rank_info, run.layout, "cpu", run.cluster.timeout, connect_exchange=True)
    trainer = Trainer(run, attempt, world, build_train_step(run, world), StopSignals())
    with trainer.loader as loader:
        batch, trainer.loader = next(loader), None  # type: ignore[assignment]
        loaded = [_load_and_step(trainer, batch, folder, Coordinator(rank, size, world.exchange)) for folder in folders]
    world.barrier()  # before anyone leaves; one that fails leaves at once, after its error is told
    trainer.saving.close()
    world.close()
    return loaded


def _load_and_step(trainer: Trainer, batch: Batch, folder: Path, coordinator: Coordinator) -> LoadedState:
    repeated: Any = itertools.repeat(batch)
    trainer.loader, trainer.step = repeated, trainer.attempt.step
    restore_train_state(trainer.train_step, CheckpointReader(folder), coordinator)
    state = gather_tensors(train_state_dict(trainer.train_step))
    result = trainer._step().read(0, 0)
    final_weights = select_weights(gather_tensors(train_state_dict(trainer.train_step)))
    return LoadedState(state, result.loss, result.grad_norm, final_weights)


def format_table(title: str, columns: Mapping[str, Mapping[str, LayoutDeviation]]) -> str:
    """The table of a kind; a cell is the largest difference after a step, or says what is wrong."""
    head = f"| {title}: saved by | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}"
    lines = [f"| {row} | {' | '.join(_format_deviation(columns[c][row]) for c in columns)} |" for row in columns]
    return "\n".join([head, *lines])


def _format_deviation(cell: LayoutDeviation) -> str:
    return f"{cell.worst:.0e}" if cell.exact else "not the same"


@contextmanager
def silence_output() -> Iterator[None]:
    """Without what runs and their ranks write to the terminal."""
    sys.stdout.flush()
    saved_outputs, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stdout.flush()
        for number, copy in zip((1, 2), saved_outputs, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def main() -> int:
    """Measure every cell and print the tables; 1 when one is beyond the bound."""
    failed = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder, silence_output():
            table = LayoutTable(Path(folder), kind)
            columns = {layout: table.compute_column(layout, list(LAYOUTS)) for layout in LAYOUTS}
        print(format_table(kind, columns), end="\n\n", flush=True)
        cells = ((c, r, cell) for c, column in columns.items() for r, cell in column.items())
        failed += [f"{r} -> {c} ({kind})" for c, r, cell in cells if not (cell.exact and cell.worst <= EXACT)]
    moves = len(KINDS) * len(LAYOUTS) ** 2
    print(f"{moves} moves, {len(failed)} beyond the bound{': ' if failed else ''}{', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
