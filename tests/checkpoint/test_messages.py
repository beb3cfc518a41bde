"""How much the ranks send each other in a save, and that the thread that trains has no part in it."""

from __future__ import annotations

import json
import pickle
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.measure import save_messages
from tests.measure.in_memory import DictStore
from tests.support.ranks import run_ranks
from tests.support.runs import are_identical, compose_tiny_run, read_checkpoint, train_run
from tests.support.tiers import full
from titan.checkpoint import manifest, restore, save_planner
from titan.checkpoint.coordinator import CoordinationError, Coordinator, pack_message
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.save import CheckpointWriter
from titan.checkpoint.save_planner import CachingSavePlanner, Holdings, describe_items
from titan.checkpoint.state import Staging
from titan.parallelism.exchange import StoreExchange
from titan.training.trainer import Trainer

OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
ROUNDS = ["gather", "scatter", "gather", "broadcast", "broadcast"]


def counted(trainer: Trainer) -> dict[str, Any]:
    """What a rank sends from now on; for good, as this is a rank's process.

    Returns:
        `calls`: of torch's object collectives; `saves`: for each, kinds and bytes of its messages, and threads.
    """
    seen: dict[str, Any] = {"calls": [], "saves": [], "planned": []}
    manager = trainer.saving.manager
    assert manager is not None
    work = manager._run_save

    def saving(*args: Any) -> None:
        seen["saves"].append([])
        work(*args)

    def watch(owner: Any, name: str, note: Any) -> None:
        plain = getattr(owner, name)
        setattr(owner, name, lambda *args, **more: (note(args), plain(*args, **more))[1])

    manager._run_save = saving  # type: ignore[method-assign]
    for name in OBJECTS:
        watch(dist, name, lambda args, name=name: seen["calls"].append(name))
    for name in ("gather", "broadcast", "scatter"):

        def note(args: Any, name: str = name) -> None:
            if seen["saves"] and threading.current_thread().name.startswith("titan-checkpoint"):
                seen["saves"][-1].append((name, len(args[1]) if name == "gather" else 0))

        watch(StoreExchange, name, note)
    for owner, name in ((save_planner, "create_write_items"), (save_planner, "assign_boxes")):
        watch(owner, name, lambda args, name=name: seen["planned"].append((name, threading.current_thread().name)))
    return seen


@pytest.mark.full
@pytest.mark.parametrize("mode", [full("sync"), "async"])
def test_a_save_takes_two_rounds_and_is_planned_once(mode: str, tmp_path: Path) -> None:
    how = (f"checkpoint={mode}", "checkpoint.every=2", "training.steps=6", "checkpoint.keep=9")
    run = compose_tiny_run(tmp_path, *how, layout="fsdp2")
    seen = [rank.extra for rank in train_run(run, counted)]
    for rank, found in enumerate(seen):
        assert found["calls"] == []
        assert [[kind for kind, _ in save] for save in found["saves"]] == [ROUNDS] * 3
        first, *later = [[size for kind, size in save if kind == "gather"] for save in found["saves"]]
        assert all(size < 200 < first[0] for save in later for size in save), "what has changed is sent, and no more"
        planned = [name for name, _ in found["planned"]]
        assert planned == ["create_write_items", *(["assign_boxes"] if rank == 0 else [])]
        assert all(thread.startswith("titan-checkpoint") for _, thread in found["planned"])
    assert [f.name for f in manifest.list_complete(tmp_path)] == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize("first", [True, False])
def test_what_is_simulated_is_what_is_sent(first: bool) -> None:
    kinds = []
    for mine, answer in save_messages.make_rounds(4, first):
        kinds += ["gather"] * (mine is not None) + ["broadcast" if isinstance(answer, bytes) else "scatter"]
    assert kinds == ROUNDS


class Shell:
    """What runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("it-ran"),))


OTHER_TENSORS = Holdings(zlib.compress(json.dumps([["w", [4], "os", False, False]]).encode()), bytes(16), 1)
NO_RESULTS = [
    pytest.param(zlib.compress(pickle.dumps((Shell(), None))), "can't be read: ", id="pickle"),
    pytest.param(pickle.dumps((Shell(), None)), "can't be read: .*header", id="not-compressed"),
    pytest.param(zlib.compress(b'{"class": ["os", "system"], "fields": []}'), "names os.system", id="a-function"),
    pytest.param(pack_message(3), "is no result of a rank", id="other-value"),
    pytest.param(pack_message((1, 2)), "is no result of a rank", id="other-error"),
]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        *NO_RESULTS,
        pytest.param(pack_message((OTHER_TENSORS, None)), "'os' is no dtype", id="other-dtype"),
        pytest.param(
            pack_message((OTHER_TENSORS._replace(tensors=zlib.compress(pickle.dumps([Shell()]))), None)),
            "can't decode byte",
            id="pickled-tensors",
        ),
    ],
)
def test_a_message_to_rank_0_that_no_rank_sent_runs_nothing(
    message: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = DictStore()
    first, second = (Coordinator(rank, 2, StoreExchange(store, rank, 2)) for rank in range(2))
    assert second.exchange is not None
    second.exchange.gather(message)
    with pytest.raises(CoordinationError, match=sentence):
        first.gather(lambda: describe_items([]), CachingSavePlanner(0).create_global_plan)
    with pytest.raises(CoordinationError, match=sentence):  # rank 0 sends its error
        second.on_rank0(lambda: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("message", "sentence"), NO_RESULTS)
def test_a_message_that_rank_0_did_not_send_runs_nothing(
    message: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = DictStore()
    StoreExchange(store, 0, 2).broadcast(message)
    with pytest.raises(CoordinationError, match=sentence):
        Coordinator(1, 2, StoreExchange(store, 1, 2)).on_rank0(lambda: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [64, full(256)])
def test_messages_grow_with_the_ranks_and_no_faster(ranks: int) -> None:
    first, later = (save_messages.send_rounds(ranks, save_messages.make_rounds(ranks, new)) for new in (True, False))
    assert (first.operations, later.operations) == (5, 5)
    assert first.messages == later.messages <= 11 * ranks
    assert first.bytes <= 20_000 * ranks
    assert later.bytes <= 1_000 * ranks


@pytest.mark.full
def test_messages_beside_training_need_no_process_group(tmp_path: Path) -> None:
    def groups(trainer: Trainer) -> list[str]:
        return [dist.get_process_group_ranks(group).__repr__() for group in dist.distributed_c10d._world.pg_map]

    with_saves = train_run(compose_tiny_run(tmp_path / "a", layout="fsdp2"), groups)
    without = train_run(compose_tiny_run(tmp_path / "b", "checkpoint=off", layout="fsdp2"), groups)
    assert [rank.extra for rank in with_saves] == [rank.extra for rank in without]


@pytest.mark.full
def test_after_a_save_that_failed_all_plan_anew(tmp_path: Path) -> None:
    def broken(trainer: Trainer) -> dict[str, Any]:
        write = CheckpointWriter.write_data

        def fails(writer: CheckpointWriter, *args: Any) -> Any:
            if "step-4" in str(writer.path) and trainer.world.rank_info.rank == 1:
                raise OSError(28, "No space left on device")
            return write(writer, *args)

        CheckpointWriter.write_data = fails  # type: ignore[method-assign]  # in a rank's process
        return counted(trainer)

    how = ("checkpoint.every=2", "training.steps=6", "checkpoint.keep=9")
    first, second = train_run(compose_tiny_run(tmp_path / "run", *how, layout="fsdp2"), broken)
    for rank, found in enumerate((first.extra, second.extra)):
        names = [name for name, _ in found["planned"]]
        assert names == ["create_write_items", *(["assign_boxes"] if rank == 0 else [])] * 2
    assert [f.name for f in manifest.list_complete(tmp_path / "run")] == ["step-2", "step-6"]
    whole = compose_tiny_run(tmp_path / "whole", *how, layout="fsdp2")
    train_run(whole)
    assert are_identical(
        read_checkpoint(compose_tiny_run(tmp_path / "run", *how, layout="fsdp2"), 6), read_checkpoint(whole, 6)
    )


class TestPlans:
    @staticmethod
    def proposed(*names: str) -> Any:
        """What a rank that has whole tensors of these names proposes; of as many elements as the name's number says."""
        return CachingSavePlanner(0).create_local_plan({name: torch.zeros(int(name[1:])) for name in names})

    def test_only_who_has_something_else_is_asked_again(self) -> None:
        found = CachingSavePlanner(0)
        first, second, more = self.proposed("a8"), self.proposed("b8"), self.proposed("b8", "c8")
        assert found.create_global_plan([first, second]) == [b"\1", b"\1"]
        assert found.create_global_plan([first.compute_digest(), second.compute_digest()]) == [None, None]
        assert found.create_global_plan([first.compute_digest(), more]) == [b"\1", b"\1\1"]
        assert found.global_plan.assignment is not None
        assert sorted(info.name for info in found.global_plan.assignment.tensors) == ["a8", "b8", "c8"]

    def test_tensors_of_which_no_rank_has_a_part_are_no_plan(self) -> None:
        holdings = describe_items(save_messages.make_items(0))
        with pytest.raises(ValueError, match="don't make up the tensor"):
            CachingSavePlanner(0).create_global_plan([holdings, holdings])

    @pytest.mark.parametrize("change", [{"a": torch.zeros(3)}, {"b": torch.zeros(2)}, {"a": torch.zeros(2).double()}])
    def test_another_state_is_proposed_anew(self, change: dict[str, torch.Tensor]) -> None:
        found = CachingSavePlanner(0)
        first = found.create_local_plan({"a": torch.zeros(2)})
        assert isinstance(first, Holdings)
        assert found.create_local_plan({"a": torch.ones(2)}) == first.compute_digest()
        assert isinstance(found.create_local_plan(change), Holdings)
        found.forget_plan()
        assert found.resolver.state_dict == {}, "the memory of a state that was not saved is freed"
        assert isinstance(found.create_local_plan(change), Holdings)


def test_the_copies_dtensors_are_made_once_and_anew_where_the_state_lies_otherwise() -> None:
    def copied(rank: int, size: int) -> tuple[bool, bool, list[float]]:
        mesh = init_device_mesh("cpu", (1,))
        staging = Staging(torch.device("cpu"))
        states = [{"a": DTensor.from_local(torch.ones(2) * i, mesh, [cut])} for i, cut in enumerate(CUTS)]
        copies = []
        for state in states:
            copies.append(staging.start_copy(state)["a"])
            staging.wait_for_copies()
        first, second, third = copies
        staging.close()
        return first is second, second is third, third.to_local().tolist()  # type: ignore[attr-defined]

    assert run_ranks(copied, 1) == [(True, False, [2.0, 2.0])]


CUTS = [Shard(0), Shard(0), Replicate()]


@contextmanager
def looked_at() -> Iterator[list[str]]:
    """The files whose sizes are looked at."""
    names: list[str] = []
    stat = Path.stat

    def noted(path: Path, **how: Any) -> Any:
        names.append(path.name)
        return stat(path, **how)

    with patch.object(Path, "stat", noted):
        yield names


@pytest.mark.full
def test_a_rank_looks_at_its_share_of_the_files_and_rank_0_at_all(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path)
    train_run(run)
    (folder,) = manifest.list_complete(tmp_path)
    about = manifest.read(folder)
    assert about is not None
    for name in ("__1_0.distcp", "__2_0.distcp"):
        (folder / name).write_bytes(b"x")
    more = {name: manifest.checksum_file(folder / name) for name in ("__1_0.distcp", "__2_0.distcp")}
    manifest.write(folder, replace(about, files=about.files | more))
    seen = []
    for rank in range(4):
        coordinator = Coordinator(rank, 4, StoreExchange(DictStore(), rank, 4))
        with looked_at() as names:
            assert restore._check_rank_files(CheckpointReader(folder), coordinator, checksums=False) is None
        seen.append(sorted(names))
    assert seen == [sorted({*about.files, *more}), *[[n] for n in sorted({*about.files, *more})[1:]]]


def test_files_are_copied_by_those_that_wrote_them() -> None:
    names = [".metadata", "tokenizer.json", *(f"__{rank}_0.distcp" for rank in range(6))]
    files = dict.fromkeys(names, manifest.ManifestFile(1, "0"))
    shares = [sorted(manifest.select_rank_files(files, rank, 4)) for rank in range(4)]
    own = [["__0_0.distcp", "__4_0.distcp", ".metadata", "tokenizer.json"], ["__1_0.distcp", "__5_0.distcp"]]
    assert [sorted(share) for share in shares] == [*map(sorted, own), ["__2_0.distcp"], ["__3_0.distcp"]]
