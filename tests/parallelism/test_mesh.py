"""How ranks meet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import compose_tiny_run, train_run
from titan.cluster.rank_info import RankInfo
from titan.parallelism import mesh
from titan.parallelism.schema import Layout


@pytest.mark.parametrize("exchange", [False, True])
def test_a_group_beside_trainings_is_made_where_it_is_asked_for(exchange: bool, tmp_path: Path) -> None:
    def joined(rank: int, size: int) -> bool:
        place = RankInfo(rank, size, rank, f"file://{tmp_path}/meeting")
        world = mesh.connect_world(place, Layout(replicate=2), "cpu", 300, connect_exchange=exchange)
        world.close()
        return world.exchange is not None

    assert run_ranks(joined, 2, joined=False) == [exchange, exchange]


def test_no_rank_goes_on_before_all_have_connected(tmp_path: Path) -> None:
    """It could leave, and break connections that others still make."""
    connected = tmp_path / "connected"

    def joined(rank: int, size: int) -> bool:
        build_world = mesh.build_world

        def late(*arguments: Any) -> mesh.World:
            world = build_world(*arguments)
            if rank == 1:
                time.sleep(0.5)  # long enough for rank 0 to go on
                connected.touch()
            return world

        mesh.build_world = late
        place = RankInfo(rank, size, rank, f"file://{tmp_path}/meeting")
        world = mesh.connect_world(place, Layout(replicate=2), "cpu", 300)
        before = connected.exists()
        world.close()
        return before

    assert run_ranks(joined, 2, joined=False) == [True, True]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "exchange"), [("off", False), ("sync", True)])
def test_a_run_asks_for_it_where_it_saves_or_loads(mode: str, exchange: bool, tmp_path: Path) -> None:
    save, off = compose_tiny_run(tmp_path / "run", layout="ddp2"), [f"checkpoint={mode}", "training.steps=4"]
    train_run(save)
    fork = [f"checkpoint.resume={tmp_path}/run", *off]
    for name, more, expected in (("new", off, exchange), ("fork", fork, True)):
        seen = train_run(
            compose_tiny_run(tmp_path / name, *more, layout="ddp2"), lambda trainer: trainer.world.exchange is not None
        )
        assert [rank.extra for rank in seen] == [expected] * 2
