"""A rank's items of a save are those of torch's planner, and their boxes are computed once for each sharding."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.process_groups import simulate_rank
from titan.checkpoint import metadata_file, reader, save_planner
from titan.checkpoint.save import CheckpointWriter
from titan.checkpoint.save_planner import CachingSavePlanner, GlobalPlan, Positions, WriteSummary, create_write_items

RANKS = 6
PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "strided": (_StridedShard(0, split_factor=2), Shard(0)),
    "two-dimensions": (Shard(0), Shard(1)),
    "replicated-over-tensor": (Shard(0), Replicate()),
    "replicated": (Replicate(), Replicate()),
}


@pytest.fixture(params=range(RANKS))
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with simulate_rank(request.param, RANKS):
        yield DeviceMesh("cpu", torch.arange(RANKS).view(3, 2), _init_backend=False)


def made(mesh: DeviceMesh, placements: tuple[Placement, Placement], dtype: torch.dtype = torch.float32) -> DTensor:
    """A tensor of 7 x 5, which no number of ranks divides."""
    size = torch.Size((7, 5))
    shape, _ = compute_local_shape_and_global_offset(size, mesh, placements)
    local = torch.zeros(shape, dtype=dtype)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=(5, 1))


def test_items_are_those_of_torch(mesh: DeviceMesh) -> None:
    state: dict[str, Tensor] = {name: made(mesh, placements) for name, placements in PLACEMENTS.items()}
    state |= {f"{name}.moment": made(mesh, placements, torch.bfloat16) for name, placements in PLACEMENTS.items()}
    state |= {"step": torch.zeros(()), "vector": torch.zeros(3), "wanted": torch.zeros(2, requires_grad=True)}
    assert create_write_items(state) == create_default_local_save_plan(state, is_coordinator=False).items


def test_tensors_of_a_mesh_without_this_rank_are_not_its() -> None:
    with simulate_rank(4, RANKS):
        others = DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False)
        tensor = DTensor.from_local(
            torch.zeros(0), others, [Shard(0), Shard(0)], run_check=False, shape=(8,), stride=(1,)
        )
        assert create_write_items({"a": tensor}) == []


def test_boxes_are_computed_once_for_each_sharding() -> None:
    with simulate_rank(0, RANKS):
        mesh = DeviceMesh("cpu", torch.arange(RANKS).view(3, 2), _init_backend=False)
        state = {f"{name}{n}": made(mesh, cut) for n in range(4) for name, cut in PLACEMENTS.items()}
        with mock.patch.object(
            save_planner, "compute_local_shape_and_global_offset", wraps=compute_local_shape_and_global_offset
        ) as computed:
            assert len(create_write_items(state)) == 4 * len(PLACEMENTS)
    assert computed.call_count == len(PLACEMENTS)


Box = tuple[str, Sequence[int], Sequence[int], Sequence[int]]
"""A tensor's name and size, and the offsets and sizes of a rank's part."""


def item(box: Box, dtype: torch.dtype = torch.float32) -> WriteItem:
    name, size, offsets, sizes = box
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(size))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def rows(name: str, size: Sequence[int], ranks: int) -> list[list[Box]]:
    """A tensor whose first dimension is split over ranks; the last ones may have nothing."""
    each, parts = -(-size[0] // ranks), []
    for rank in range(ranks):
        first, end = (min(size[0], each * number) for number in (rank, rank + 1))
        parts.append([(name, size, [first, *[0] * (len(size) - 1)], [end - first, *size[1:]])])
    return parts


def same(*box: Any, ranks: int) -> list[list[Box]]:
    return [[(box[0], box[1], [0] * len(box[1]), box[1])]] * ranks


def together(*tensors: list[list[Box]]) -> list[list[Box]]:
    return [[box for parts in of_rank for box in parts] for of_rank in zip(*tensors, strict=True)]


CASES = {
    "one-rank": together(rows("a", [4, 3], 1), same("step", [], ranks=1)),
    "uneven-and-empty": together(rows("a", [5, 3], 4), rows("b", [2], 4), same("step", [], ranks=4)),
    "replicas": together(rows("a", [8, 2], 2), same("norm", [7], ranks=2)) * 3,
    "dimensions": together(*(rows(f"t{n}", [4, 2, 3, 2, 2][:n], 2) for n in range(1, 6)), same("s", [], ranks=2)),
    "stages": [[box] for box in (("a", [2], [0], [2]), ("b", [3, 3], [0, 0], [3, 3]), ("c", [], [], []))],
    "both-dimensions": [[("a", [4, 4], [i, j], [2, 2])] for i in (0, 2) for j in (0, 2)],
    "no-elements": together(same("none", [0, 4], ranks=2), rows("a", [4], 2)),
    "a-rank-without-tensors": [*rows("a", [4], 2), []],
    "long": together(rows("x" * 300, [2**33, 2], 2), rows("é.b", [2**40], 2)),
}


def assigned(ranks: Sequence[Sequence[Box]]) -> tuple[save_planner.Assignment, list[list[WriteItem]]]:
    """The assignment of the ranks' boxes, and the items that each rank writes."""
    items = [[item(box) for box in boxes] for boxes in ranks]
    found = save_planner.assign_boxes([save_planner.describe_items(of_rank) for of_rank in items])
    pairs = [zip(of_rank, part, strict=True) for of_rank, part in zip(items, found.parts, strict=True)]
    return found, [[one for one, chosen in pair if chosen] for pair in pairs]


@pytest.mark.parametrize("ranks", CASES.values(), ids=CASES.keys())
def test_the_metadata_are_those_of_torchs_planner(ranks: Sequence[Sequence[Box]]) -> None:
    found, written = assigned(ranks)
    positions = [
        (rank, 2**33 * rank + 7 * at, at + 1) for rank, items in enumerate(written) for at in range(len(items))
    ]
    files = [f"__{rank}_0.distcp" for rank in range(len(ranks))]
    meta = StorageMeta(save_id="one")
    content = b"".join(metadata_file.encode_metadata(found, Positions(files, np.array(positions)), meta))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    _, expected = planner.create_global_plan([SavePlan(items) for items in written])
    places = [_StorageInfo(files[file], at, length) for file, at, length in positions]
    storage = {one.index: place for one, place in zip((i for items in written for i in items), places, strict=True)}
    for metadata in (pickle.loads(content), reader.parse_metadata(content)):
        for name, tensor in expected.state_dict_metadata.items():
            read = metadata.state_dict_metadata[name]
            assert (read.size, read.properties.dtype) == (tensor.size, tensor.properties.dtype)
            assert sorted(map(str, read.chunks)) == sorted(map(str, tensor.chunks))
        assert metadata.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
        assert metadata.storage_data == storage
        assert metadata.planner_data == {name: (name,) for name in expected.state_dict_metadata}
        for index in metadata.storage_data:
            assert metadata.state_dict_metadata[index.fqn].chunks[index.index].offsets == index.offset
    assert (pickle.loads(content).version, pickle.loads(content).storage_meta) == ("1.0.0", meta)


@pytest.mark.parametrize("ranks", CASES.values(), ids=CASES.keys())
def test_each_box_is_written_once(ranks: Sequence[Sequence[Box]]) -> None:
    indices = [one.index for items in assigned(ranks)[1] for one in items]
    assert len(indices) == len(set(indices))
    assert set(indices) == {item(box).index for boxes in ranks for box in boxes}


def test_replicas_write_about_the_same() -> None:
    sizes = [[64], [8, 4], [32], [16, 2], [5], [4], [3, 3], []]
    ranks = together(*(same(f"t{number}", size, ranks=3) for number, size in enumerate(sizes)))
    loads = [
        sum(one.tensor_storage_size() or 1 for one in items) for items in assigned([*ranks, *rows("a", [9], 1)])[1]
    ]
    assert max(loads[:3]) - min(loads[:3]) <= 64 * 4
    assert sum(loads) == 4 * (64 + 32 + 32 + 32 + 5 + 4 + 9 + 1 + 9)


def test_ranks_that_write_more_of_their_own_write_less_of_what_is_replicated() -> None:
    ranks = together(same("a", [8], ranks=2), same("b", [8], ranks=2))
    ranks[0] = [*ranks[0], ("own", [16], [0], [16])]
    assert [[one.index.fqn for one in items] for items in assigned(ranks)[1]] == [["own"], ["a", "b"]]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        pytest.param(rows("a", [4, 2], 2)[:1], "a don't make up", id="a-rank-is-missing"),
        pytest.param([[("a", [4], [0], [2])], [("a", [4], [1], [2])]], "a don't make up", id="a-gap-and-an-overlap"),
        pytest.param(
            [[("a", [4, 4], [0, 0], [2, 4])], [("a", [4, 4], [2, 0], [2, 2])], [("a", [4, 4], [1, 2], [2, 2])]],
            "a don't make up", id="as-many-elements",
        ),
        pytest.param([[("a", [4], [0], [4])], [("a", [4], [2], [2])]], "a don't make up", id="a-part-twice"),
        pytest.param([[("a", [4], [2], [4])]], "rank 0 has of a is outside", id="outside"),
        pytest.param([*rows("a", [4], 1), *rows("a", [6], 1)], r"a is \[6\] .* on rank 1, and \[4\]", id="other-size"),
        pytest.param([[("a", [2], [0], [2]), ("b", [3], [0], [2])]], "b don't make up the tensor$", id="one-of-two"),
    ],
)  # fmt: skip
def test_ranks_that_plan_differently_are_an_error(ranks: Sequence[Sequence[Box]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assigned(ranks)


def test_ranks_with_other_dtypes_are_an_error() -> None:
    items = [[item(("a", [2], [0], [2]), dtype)] for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(ValueError, match=r"a is .* torch.bfloat16 on rank 1, and .* torch.float32 on rank 0"):
        save_planner.assign_boxes([save_planner.describe_items(of_rank) for of_rank in items])


class Ranks:
    """The plans of simulated ranks that save one after the other."""

    def __init__(self, size: int) -> None:
        self.planners = [CachingSavePlanner(rank) for rank in range(size)]

    def save(self, states: Sequence[dict[str, torch.Tensor]], folder: Path, late: Callable[[], None] = bool) -> None:
        """Save, and call `late` between the plan and the writing."""
        writers = [CheckpointWriter(folder) for _ in self.planners]
        folder.mkdir()
        local_plans = [p.create_local_plan(state) for p, state in zip(self.planners, states, strict=True)]
        masks = self.planners[0].create_global_plan(local_plans)
        plans = [planner.finish_plan(mask) for planner, mask in zip(self.planners, masks, strict=True)]
        late()
        summaries = list(map(self.write, self.planners, writers, plans))
        writers[0].write_metadata(*self.planners[0].merge_summaries(summaries))

    @staticmethod
    def write(planner: CachingSavePlanner, writer: CheckpointWriter, plan: SavePlan) -> WriteSummary:
        future = writer.write_data(plan, planner.resolver)
        future.wait()
        return planner.finish_write(future.value())


def states(value: float, **more: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    common = {"norm": torch.full((3,), value), "step": torch.tensor(value)}
    return [common | {"a": torch.full((2, 2), value)} | more, common | {"b": torch.full((4,), value)}]


def read(folder: Path) -> dict[str, float]:
    found: dict[str, torch.Tensor] = {"norm": torch.zeros(3), "step": torch.zeros(()), "a": torch.zeros(2, 2)}
    found["b"] = torch.zeros(4)
    load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return {name: float(tensor.mean()) for name, tensor in found.items()}


def test_later_saves_use_the_plan_and_another_state_makes_a_new_one(tmp_path: Path) -> None:
    ranks = Ranks(2)
    for number in range(2):
        ranks.save(states(number + 1.0), tmp_path / f"{number}")
        assert read(tmp_path / f"{number}") == dict.fromkeys(("norm", "step", "a", "b"), number + 1.0)
    ranks.save(states(3.0, c=torch.ones(2)), tmp_path / "2")
    assert "c" in FileSystemReader(tmp_path / "2").read_metadata().state_dict_metadata
    assert read(tmp_path / "2") == dict.fromkeys(("norm", "step", "a", "b"), 3.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_did_not_forget_its_plan_fails_the_save(rank: int, tmp_path: Path) -> None:
    ranks = Ranks(2)
    ranks.save(states(1.0), tmp_path / "0")
    ranks.planners[0].global_plan = GlobalPlan()
    ranks.planners[rank].tensor_keys = None
    with pytest.raises(ValueError, match=f"rank {1 - rank} has another plan of the checkpoint than rank 0"):
        ranks.save(states(1.0), tmp_path / "1")


def test_a_rank_that_writes_something_else_fails_the_save(tmp_path: Path) -> None:
    ranks = Ranks(2)

    def other() -> None:
        ranks.planners[1].finish_plan(bytes(3))

    with pytest.raises(ValueError, match="rank 1 has written by another plan"):
        ranks.save(states(1.0), tmp_path / "0", other)
    assert not (tmp_path / "0" / ".metadata").exists()
