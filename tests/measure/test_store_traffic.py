"""The table of process groups in the documentation: its layouts are those of recipes, its store traffic is gloo's."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from tests.support.composing import compose_test_run
from tests.support.process_groups import LAYOUTS, compute_store_traffic
from tests.support.tiers import full

TIMEOUT = timedelta(seconds=300)


@pytest.mark.full
def test_the_layouts_of_the_table_are_those_of_recipes() -> None:
    for recipe, name in (("bench_405b_16384", "16,384"), ("bench_405b_16384_long", "16,384, long rows")):
        assert compose_test_run([f"recipe={recipe}"], remote=True).layout == LAYOUTS[name]


class Counting(dist.Store):
    """A store that counts what goes to and from it; ranks here are threads."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.messages, self.bytes = inner, 0, 0

    def _note(self, messages: int, size: int) -> None:
        self.messages, self.bytes = self.messages + messages, self.bytes + size

    def set(self, key: str, value: Any) -> None:
        self._note(1, len(key) + len(value))
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.inner.get(key)
        self._note(1, len(key) + len(value))
        return value

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._note(1, 0)
        self.inner.wait(keys, *timeout)


@pytest.mark.parametrize("size", [2, 4, full(8)])
def test_the_tables_store_traffic_is_gloos(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    inner = dist.HashStore()  # type: ignore[attr-defined]
    stores, groups = [Counting(inner) for _ in range(size)], [None] * size

    def join(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(dist.PrefixStore("g/", stores[rank]), rank, size, TIMEOUT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages, expected = compute_store_traffic(size)
    assert [store.messages for store in stores] == [messages] * size
    assert sum(store.bytes for store in stores) / size == pytest.approx(expected, rel=0.1)
