"""The plan of a checkpoint: which rank writes which tensors. It is made at the first save and reused by later ones.

torch.distributed.checkpoint plans every save from scratch: each rank sends the list of its tensors to rank 0, receives
what to write, sends the position of each tensor in its file, and receives the metadata of the whole checkpoint, which
only rank 0 writes. Here its planner runs once, on disjoint parts, and unchanged messages are sent as None:

1. every rank: `propose` its tensors;
2. rank 0: `settle` which rank writes what, and send each rank its part;
3. every rank: `accept` its part, `write` it, and send the position of each tensor;
4. rank 0: `conclude` by writing the metadata, which it caches in serialised form.

After a failed save every rank forgets its plan, so that the ranks' plans can't differ. The messages go through
`titan.checkpoint.coordinator.Coordinator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from titan.checkpoint.writer import Writer

Proposal = list[WriteItem] | None
Part = bytes | None
"""One byte for each proposed item of a rank, 1 if the rank writes it; None: unchanged."""
Places = list[tuple[str, int, int]]
"""For each written item of a rank: the file, and the offset and length in bytes."""


Cut = tuple[str, DTensorSpec | torch.Size, torch.dtype, bool]
"""What determines a tensor's items: name, sharding, dtype, requires_grad."""


class Plans:
    """The plan of a run's saves, on one rank."""

    def __init__(self, rank: int) -> None:
        """Start without a plan; `rank` is this rank."""
        self.rank = rank
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.forget()

    def forget(self) -> None:
        """Forget the plan: the next save makes a new one."""
        self.cuts: list[Cut] | None = None
        self.held: list[WriteItem] = []
        self.mine: list[WriteItem] = []
        self.places: Places | None = None
        self.proposals: list[list[WriteItem]] = []
        self.plans: list[SavePlan] = []
        self.found: list[Places] = []
        self.metadata = Metadata({})
        self.content: tuple[bytes, str] | None = None

    def propose(self, state: Mapping[str, Tensor]) -> Proposal:
        """Return the items of this rank's state; None if unchanged since the last save."""
        self.planner.set_up_planner(dict(state), is_coordinator=self.rank == 0)
        cuts = [_cut(name, tensor) for name, tensor in state.items()]
        before, self.cuts = self.cuts, cuts
        if cuts == before:
            return None
        self.held = self.planner.create_local_plan().items
        return self.held

    def settle(self, proposals: Sequence[Proposal]) -> list[Part]:
        """On rank 0: return each rank's part, so that each item is written by exactly one of its ranks.

        Raises:
            ValueError: when the ranks' items don't make up whole tensors.
        """
        if self.proposals and all(proposal is None for proposal in proposals):
            return [None] * len(proposals)
        before = self.proposals or [[] for _ in proposals]
        self.proposals = [old if new is None else new for new, old in zip(proposals, before, strict=True)]
        parts = shared_out(self.proposals)
        mine = [_chosen(items, part) for items, part in zip(self.proposals, parts, strict=True)]
        self.plans, self.metadata = self.planner.create_global_plan([SavePlan(items) for items in mine])
        self.metadata.planner_data = {name: (name,) for name in self.metadata.state_dict_metadata}
        self.found, self.content = [], None
        return list(parts)

    def accept(self, part: Part) -> None:
        """Store what this rank writes."""
        if part is not None:
            self.mine = _chosen(self.held, part)
            self.places = None

    def write(self, writer: Writer) -> Places | None:
        """Write this rank's part of the proposed state; return the items' positions, None if unchanged."""
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
            writer.finish_as(self.content)


def _cut(name: str, tensor: Tensor) -> Cut:
    lies = tensor._spec if isinstance(tensor, DTensor) else tensor.shape
    return name, lies, tensor.dtype, tensor.requires_grad


def shared_out(held: Sequence[list[WriteItem]]) -> list[bytes]:
    """Assign each item to one of the ranks that have it: for each rank one byte per item, 1 if the rank writes it.

    The rank with the fewest bytes so far gets the item. Lists that are the same object, as those of replicas, are
    processed once; torch's planner processes each rank's list.
    """
    ranks: dict[int, list[int]] = {}
    for rank, items in enumerate(held):
        ranks.setdefault(id(items), []).append(rank)
    holders: dict[MetadataIndex, list[tuple[int, int]]] = {}
    for key, same in ranks.items():
        for position, item in enumerate(held[same[0]]):
            holders.setdefault(item.index, []).append((key, position))
    parts, load = [bytearray(len(items)) for items in held], [0] * len(held)
    for places in holders.values():
        rank, position = min(((r, at) for key, at in places for r in ranks[key]), key=lambda found: load[found[0]])
        load[rank] += held[rank][position].tensor_storage_size() or 1
        parts[rank][position] = 1
    return [bytes(part) for part in parts]


def _chosen(items: Sequence[WriteItem], part: bytes) -> list[WriteItem]:
    return [item for item, chosen in zip(items, part, strict=True) if chosen]


def _results(plan: SavePlan, places: Places) -> list[WriteResult]:
    """Return a rank's written items in the format of torch's writer."""
    pairs = zip(plan.items, places, strict=True)
    return [WriteResult(item.index, length, _StorageInfo(file, at, length)) for item, (file, at, length) in pairs]
