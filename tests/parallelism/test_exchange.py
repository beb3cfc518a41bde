"""Messages over a store: who gets what, what is left behind, and what becomes of ranks that leave or say nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from tests.support.processes import LIMIT
from tests.support.tiers import full
from titan.parallelism import exchange
from titan.parallelism.exchange import StoreExchange


@pytest.fixture(params=["tcp", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Makes connections to one store."""
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"), 3)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False)


def on_ranks(stores: Callable[[], Any], work: Callable[[StoreExchange], Any], seconds: float = LIMIT) -> list[Any]:
    """What `work` gives, or raises, on each of three ranks, which are threads."""
    found: list[Any] = [None] * 3

    def rank(number: int) -> None:
        exchange = StoreExchange(stores(), number, 3, timedelta(seconds=seconds))
        try:
            found[number] = work(exchange)
        except ConnectionError as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return found


@pytest.mark.parametrize("largest", [pytest.param(4, id="many-parts"), full(exchange.MAX_PART_BYTES, id="as-it-is")])
def test_a_large_message_is_split_and_arrives_whole(
    largest: int, stores: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives in its round, and none stays. torch's TCPStore drops a connection that sends 8 MiB at once."""
    monkeypatch.setattr(exchange, "MAX_PART_BYTES", largest)
    sizes = [3, 0, largest - 1, largest, largest + 1, 2 * largest, 2 * largest + 3]

    def make(number: int, sender: int, to: int = 3) -> bytes:
        return bytes([16 * number + 4 * sender + to]) * sizes[number]

    def work(exchange: StoreExchange) -> list[Any]:
        seen: list[Any] = []
        for number in range(len(sizes)):
            seen.append(exchange.gather(make(number, exchange.rank)))
            seen.append(exchange.broadcast(make(number, 0) if exchange.rank == 0 else b""))
            seen.append(exchange.scatter([make(number, 0, rank) for rank in range(3)] if exchange.rank == 0 else ()))
        exchange.drain()
        return seen

    for rank, seen in enumerate(on_ranks(stores, work)):
        for number in range(len(sizes)):
            gathered, all_get, own = seen[3 * number : 3 * number + 3]
            assert gathered == ([make(number, r) for r in range(3)] if rank == 0 else None)
            assert (all_get, own) == (make(number, 0), make(number, 0, rank))
    left = stores()
    if hasattr(left, "host"):  # a TCPStore: a file has keys of its own
        assert not [key for key in left.list_keys() if "titan/exchange" in key]


@pytest.mark.parametrize(("stores", "gone"), [("tcp", 0), ("tcp", 1), full("file", 1)], indirect=["stores"])
def test_a_rank_that_leaves_is_missed_at_once(gone: int, stores: Callable[[], Any]) -> None:
    def work(exchange: StoreExchange) -> Any:
        if exchange.rank == gone:
            return exchange.abort()
        exchange.gather(b"x")
        return exchange.broadcast() if gone == 0 else None

    found = on_ranks(stores, work, seconds=3600)
    waits = [0] if gone else [1, 2]
    assert [str(found[rank]) for rank in waits] == [f"rank {gone} has left"] * len(waits)


@pytest.mark.full
def test_a_rank_that_says_nothing_is_named_after_a_while_and_the_next_round_is_in_step(
    stores: Callable[[], Any],
) -> None:
    answered, late = threading.Event(), threading.Event()

    def work(exchange: StoreExchange) -> Any:
        if exchange.rank != 1:
            (late if exchange.rank else answered).wait(LIMIT)
        try:
            exchange.gather(b"first")
            answered.set()
        except ConnectionError as error:
            late.set()
            exchange.store.set_timeout(timedelta(seconds=LIMIT))  # what comes next does come
            missed = str(error).partition(" (")[0]
        else:
            missed = ""
        return missed, exchange.gather(b"second")

    missed, second = on_ranks(stores, work, seconds=4)[0]
    assert missed == "rank 2 sent no message" and second == [b"second"] * 3


@pytest.mark.full
def test_nothing_is_said_after_parting(stores: Callable[[], Any]) -> None:
    def work(exchange: StoreExchange) -> None:
        exchange.drain()
        exchange.store = None  # any request fails
        exchange.abort()

    assert on_ranks(stores, work) == [None] * 3
