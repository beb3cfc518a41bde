"""What all ranks of a large run tell each other in one save: `python -m tests.measure.save_messages`.

The messages of one rank are made by the code that saves, for the tensors of a Llama 8B under FSDP with replicas, and
then sent by as many simulated ranks over a store that counts. They are compared with a save by the collectives of
torch.distributed.checkpoint and eight gathers to all over a gloo group, whose messages follow from gloo's algorithms:
rings for all_gather, one message for each rank but one for gather, scatter and broadcast.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from titan.checkpoint.coordinator import pack_message
from titan.checkpoint.manifest import ManifestFile
from titan.checkpoint.save_planner import RankPositions, WriteSummary, describe_items
from titan.parallelism.exchange import StoreExchange

RANKS = (64, 1024, 16384)
SHARD = 64
"""Ranks between which each tensor is cut; the others hold copies."""
TENSORS = [
    *(f"layers.{i}.{name}.weight" for i in range(32) for name in (
        "attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.w1", "ffn.w2", "ffn.w3", "norm1", "norm2")
    ),
    "tok_embeddings.weight", "norm.weight", "head.weight",
]  # fmt: skip
KEYS = ["model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"]
NUMBER = 8
"""Bytes of a size that torch's object collectives send before each payload."""


@dataclass(frozen=True)
class MessageCost:
    """What a save takes: operations of all ranks together, messages, bytes of all messages, bytes through rank 0."""

    operations: int
    messages: int
    bytes: int
    bytes_of_rank_0: int

    def __add__(self, other: MessageCost) -> MessageCost:
        return MessageCost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class CountingStore:
    """A store that counts requests and the bytes that they move."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.requests = self.bytes = 0

    def clone(self) -> CountingStore:
        return self

    def set_timeout(self, patience: Any) -> None:
        """No request."""

    def set(self, key: str, value: bytes) -> None:
        self.content[key] = value
        self._count(key, value)

    def get(self, key: str) -> bytes:
        self._count(key, self.content[key])
        return self.content[key]

    def delete_key(self, key: str) -> bool:
        self._count(key, b"")
        return self.content.pop(key, None) is not None

    def _count(self, key: str, value: bytes) -> None:
        self.requests, self.bytes = self.requests + 1, self.bytes + len(key) + len(value)


Round = tuple[bytes | None, bytes | list[bytes]]
"""What each rank but the first gives rank 0, None where they give nothing; what that one then gives to all, or each."""


def make_items(rank: int) -> list[WriteItem]:
    """What a rank holds."""
    out = []
    for name in (key.format(tensor) for tensor in TENSORS for key in KEYS):
        offset, size = torch.Size([rank % SHARD * 64, 0]), torch.Size([64, 4096])
        chunk = ChunkStorageMetadata(offset, size)
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([64 * SHARD, 4096]))
        out.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
    return out


def make_rounds(ranks: int, first: bool) -> list[Round]:
    """The messages of a save: of a rank's that has its equal share of the tensors."""
    rank_items, replicas = make_items(ranks - 1), max(1, ranks // SHARD)
    holdings = describe_items(rank_items)
    draw = random.Random(0)
    selection = (set(draw.sample(range(len(rank_items)), max(1, len(rank_items) // replicas))) for _ in range(ranks))
    parts = [bytes(at in some for at in range(len(rank_items))) for some in selection]
    own_items = [item for item, selection in zip(rank_items, parts[-1], strict=True) if selection]
    rows = np.array([(0, 1048576 * i, 1049408) for i, _ in enumerate(own_items)])
    positions = RankPositions((f"__{ranks - 1}_0.distcp",), rows.tobytes())
    written = WriteSummary(positions if first else None, holdings.compute_digest())
    files = {f"__{ranks - 1}_0.distcp": ManifestFile(2**30, "0123abcd")}
    return [
        (
            pack_message((holdings if first else holdings.compute_digest(), None)),
            [pack_message((part if first else None, None)) for part in parts],
        ),
        (pack_message(((written, files), None)), pack_message((("tokenizer.json", 2**40), None))),
        (None, pack_message(None)),
    ]


def send_rounds(ranks: int, all_rounds: Sequence[Round]) -> MessageCost:
    """Send a save's messages between simulated ranks, each by its own `StoreExchange`."""
    store, at_rank_0, operations = CountingStore(), 0, 0
    exchanges = [StoreExchange(store, rank, ranks) for rank in range(ranks)]
    for payload, reply in all_rounds:
        if payload is not None:
            for exchange in exchanges[1:]:
                exchange.gather(payload)
            at_rank_0 += sum(map(len, exchanges[0].gather(payload) or ()))
            operations += 1
        for exchange in exchanges:
            exchange.broadcast(reply) if isinstance(reply, bytes) else exchange.scatter(reply)
        given_out = len(reply) * (ranks - 1) if isinstance(reply, bytes) else sum(map(len, reply))
        at_rank_0, operations = at_rank_0 + given_out, operations + 1
    assert len(store.content) <= len(all_rounds), "messages that were read are deleted"
    return MessageCost(operations, store.requests, store.bytes, at_rank_0)


def estimate_all_gather(ranks: int, payload: int) -> MessageCost:
    """`all_gather_object`: two rings."""
    messages = 2 * ranks * (ranks - 1)
    return MessageCost(2, messages, messages // 2 * (NUMBER + payload), 2 * (ranks - 1) * (NUMBER + payload))


def estimate_gather(ranks: int, payload: int) -> MessageCost:
    """`gather_object`: a ring of sizes, then each rank's payload to rank 0."""
    ring = ranks * (ranks - 1)
    total = (ranks - 1) * payload
    return MessageCost(2, ring + ranks - 1, ring * NUMBER + total, 2 * (ranks - 1) * NUMBER + total)


def estimate_broadcast(ranks: int, payload: int, operations: int) -> MessageCost:
    """`broadcast_object_list` (2 operations) and `scatter_object_list` (3); a broadcast is a tree."""
    total = (ranks - 1) * (payload + (operations - 1) * NUMBER)
    from_rank_0 = total if operations == 3 else ranks.bit_length() * (payload + NUMBER)
    return MessageCost(operations, operations * (ranks - 1), total, from_rank_0)


def estimate_collectives(ranks: int) -> MessageCost:
    """A save by collectives of objects over a gloo group of all ranks."""
    rank_items = make_items(ranks - 1)
    share = rank_items[: max(1, len(rank_items) // max(1, ranks // SHARD))]
    plan = len(pickle.dumps(SavePlan(rank_items, planner_data={i.index.fqn: (i.index.fqn,) for i in rank_items})))
    central = len(pickle.dumps(SavePlan(share, storage_data=_StoragePrefix(f"__{ranks}_"))))
    info = [_StorageInfo(f"__{ranks}_0.distcp", 1048576 * i, 1049408) for i in range(len(share))]
    results = [WriteResult(item.index, 1049408, at) for item, at in zip(share, info, strict=True)]
    files = {f"__{ranks - 1}_0.distcp": ManifestFile(2**30, "0123abcd")}
    small = len(pickle.dumps((None, None)))
    costs = [estimate_all_gather(ranks, small)] * 7 + [estimate_all_gather(ranks, len(pickle.dumps(files)))]
    costs += [
        estimate_gather(ranks, plan),
        estimate_broadcast(ranks, central, 3),
        estimate_gather(ranks, len(pickle.dumps(results))),
    ]
    costs += [estimate_broadcast(ranks, _count_metadata_bytes(), 2)]
    total = costs[0]
    for cost in costs[1:]:
        total += cost
    return total


@cache
def _count_metadata_bytes() -> int:
    """The metadata of the whole checkpoint, each part once: copies are not written."""
    plans, metadata = create_default_global_save_plan([SavePlan(make_items(rank)) for rank in range(SHARD)])
    info = {
        item.index: _StorageInfo(f"__{i}_0.distcp", 1048576, 1049408) for i, p in enumerate(plans) for item in p.items
    }
    metadata.storage_data = info
    return len(pickle.dumps(metadata))


def main() -> None:
    """Print two tables."""
    print("| ranks | connections and reads of addresses for a gloo group | connections to the store |")
    print("|---|---|---|")
    for ranks in RANKS:
        print(f"| {ranks:,} | {ranks * (ranks - 1) // 2:,} + {ranks * (ranks - 1):,} | {ranks:,} |")
    print("\n| ranks | a save | operations | messages | bytes | of them through rank 0 |")
    print("|---|---|---|---|---|---|")
    for ranks in RANKS:
        costs = {"collectives, any": estimate_collectives(ranks)}
        costs |= {f"exchange, {n}": send_rounds(ranks, make_rounds(ranks, n == "first")) for n in ("first", "later")}
        for name, cost in costs.items():
            mb = f"{cost.bytes / 1e6:,.1f} MB | {cost.bytes_of_rank_0 / 1e6:,.1f} MB"
            print(f"| {ranks:,} | {name} | {cost.operations} | {cost.messages:,} | {mb} |")


if __name__ == "__main__":
    main()
