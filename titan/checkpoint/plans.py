"""Which rank writes which tensors of a checkpoint: agreed at a run's first save, and kept for the later ones.

torch.distributed.checkpoint plans every save anew: each rank sends the list of what it holds to rank 0, gets back what
of that it is to write, sends where in its file each tensor lies, and gets the metadata of the whole checkpoint, which
only rank 0 writes. Here its planner is asked once, by these steps, whose messages a `Talk` carries:

1. every rank: `propose` what it holds; None where that is as at the last save;
2. rank 0: `settle` who writes what; None where nothing has changed;
3. every rank: `accept` its part, `write` it, and report where each tensor lies; None where that is as before;
4. rank 0: `conclude` with the metadata, which it keeps in the form in which they are written.

After a save that failed every rank forgets, so that no two ranks remember different plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from titan.checkpoint.writer import Writer

Proposal = list[WriteItem] | None
Parts = list[bytes]
"""For each rank one byte for each item that it proposed: 1 where it is to write it."""
Places = list[tuple[str, int, int]]
"""For each item that a rank has written: the file, and offset and length in it in bytes."""


class Plans:
    """The plan of a run's saves, from one rank."""

    def __init__(self, rank: int) -> None:
        """Know nothing yet; `rank` is this one's number."""
        self.rank = rank
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.forget()

    def forget(self) -> None:
        """Plan the next save anew."""
        self.held: list[WriteItem] | None = None
        self.mine: list[WriteItem] = []
        self.places: Places | None = None
        self.proposals: list[list[WriteItem]] = []
        self.plans: list[SavePlan] = []
        self.found: list[Places] = []
        self.metadata = Metadata({})
        self.content: bytes | None = None

    def propose(self, state: Mapping[str, Tensor]) -> Proposal:
        """What this rank holds of the state; None where it is what it held at the last save."""
        self.planner.set_up_planner(dict(state), is_coordinator=self.rank == 0)
        held, before = self.planner.create_local_plan().items, self.held
        self.held = held
        return None if held == before else held

    def settle(self, proposals: Sequence[Proposal]) -> Parts | None:
        """On rank 0: who writes what, each item by one of the ranks that hold it; None where that is as before.

        Raises:
            ValueError: when the parts that ranks hold don't make whole tensors.
        """
        if self.proposals and all(proposal is None for proposal in proposals):
            return None
        before = self.proposals or [[] for _ in proposals]
        self.proposals = [old if new is None else new for new, old in zip(proposals, before, strict=True)]
        plans, self.metadata = self.planner.create_global_plan([SavePlan(items) for items in self.proposals])
        self.metadata.planner_data = {name: (name,) for name in self.metadata.state_dict_metadata}
        self.plans, self.found, self.content = plans, [], None
        return [_chosen(items, plan) for items, plan in zip(self.proposals, plans, strict=True)]

    def accept(self, parts: Parts | None) -> None:
        """Take note of what this rank is to write."""
        if parts is not None:
            self.mine = [item for item, chosen in zip(self.held or (), parts[self.rank], strict=True) if chosen]
            self.places = None

    def write(self, writer: Writer) -> Places | None:
        """Write this rank's part of the state that was proposed; where it lies, None where that is as before."""
        plan = SavePlan(self.mine, storage_data=_StoragePrefix(f"__{self.rank}_"))
        writes = writer.write_data(writer.prepare_local_plan(plan), self.planner)
        writes.wait()
        at = {result.index: result.storage_data for result in writes.value()}
        places = [(s.relative_path, s.offset, s.length) for s in (at[item.index] for item in self.mine)]
        before, self.places = self.places, places
        self.planner.state_dict = {}  # the state is not kept
        return None if places == before else places

    def conclude(self, writer: Writer, places: Sequence[Places | None]) -> None:
        """On rank 0: write the metadata, once all ranks have written their parts."""
        if any(new is not None for new in places):
            before: Sequence[Places] = self.found or [[] for _ in places]
            self.found = [old if new is None else new for new, old in zip(places, before, strict=True)]
            self.content = None
        if self.content is None:
            writer.finish(self.metadata, [_results(p, f) for p, f in zip(self.plans, self.found, strict=True)])
            self.content = writer.metadata()
        else:
            writer.finish_with(self.content)


def _chosen(proposed: Sequence[WriteItem], plan: SavePlan) -> bytes:
    left = {item.index for item in plan.items}
    return bytes(item.index in left for item in proposed)


def _results(plan: SavePlan, places: Places) -> list[WriteResult]:
    """What a rank has written, as torch's writer wants it."""
    pairs = zip(plan.items, places, strict=True)
    return [WriteResult(item.index, length, _StorageInfo(file, at, length)) for item, (file, at, length) in pairs]
